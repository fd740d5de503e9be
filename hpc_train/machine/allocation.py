"""Reads the allocation of this process: the nodes of its job, or this machine, and the workers per node.

hpc_train needs one process per node, which starts a worker for each GPU. ``expand`` parses Slurm's short form of node
names: ``n[1-3,07],login`` means n1, n2, n3, n07 and login.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import psutil

from hpc_train.config.roles import components_of
from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.config.values import runs_per_node
from hpc_train.errors import UserError
from hpc_train.machine.gpus import gpus_to_use
from hpc_train.run.exits import Exit
from hpc_train.schedulers.current import current_job
from hpc_train.schedulers.environment import EnvironmentJob

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Allocation:
    """Describes the position of this process among the nodes of its job.

    Attributes:
        job_id: the scheduler's job id; None outside of a job.
        launch_id: an id that is equal on all nodes of one start of a job, and different at the next start.
        address: the address at which other nodes reach this node; loopback if the job has a single node.
        listen_address: the address on which this node listens for the others; "" for all interfaces.
        node_names: the names of all nodes, by node number.
        component_sizes: the numbers of nodes of the components of a heterogeneous job, in order; empty for another job.
    """

    nodes: int
    node_rank: int
    node_name: str
    job_id: str | None
    launch_id: str
    address: str
    node_names: tuple[str, ...] = ()
    listen_address: str = ""
    component_sizes: tuple[int, ...] = ()


def current_allocation(environment: Mapping[str, str] = os.environ) -> Allocation:
    """Reads the job of this process: that of the variables ``HPC_TRAIN_*``, or its Slurm step. Another process has a
    single node.

    Raises UserError if a variable is wrong.
    """
    job = current_job(environment)
    if isinstance(job, EnvironmentJob):
        name = job.node_name
        names = job.node_names
        launch_id = f"{job.job_id}.{job.launch}.{job.restart}"
        if len(names) == 1:
            return Allocation(1, 0, name, job.job_id, launch_id, LOOPBACK, names, LOOPBACK)
        address = name
        if job.node_rank == 0:
            address = job.address
        return Allocation(len(names), job.node_rank, name, job.job_id, launch_id, address, names)
    if "SLURM_STEP_NUM_NODES" not in environment or "SLURM_NODEID" not in environment:
        name = socket.gethostname()
        job_id = environment.get("SLURM_JOB_ID") or environment.get("SUBMITIT_LOCAL_JOB_ID")
        return Allocation(1, 0, name, job_id, f"{name}.{os.getpid()}", LOOPBACK, (name,), LOOPBACK)
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    # several slurmd of a test cluster share one host name; Slurm's node name is unique
    name = environment.get("SLURMD_NODENAME", socket.gethostname())
    job_id = environment["SLURM_JOB_ID"]
    parts = (job_id, environment.get("SLURM_STEP_ID", "0"), environment.get("SLURM_RESTART_COUNT", "0"))
    names = tuple(expand(environment.get("SLURM_STEP_NODELIST", name)))
    groups = range(int(environment.get("SLURM_HET_SIZE", "0")))
    names_of_groups = [expand(environment[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"]) for group in groups]
    sizes = tuple(map(len, names_of_groups))
    if sum(sizes) == nodes:  # the step runs on all components; Slurm sorts the names of its nodes, but not the numbers
        names = tuple(itertools.chain(*names_of_groups))
    else:
        sizes = ()
    return Allocation(
        nodes=nodes,
        node_rank=int(environment["SLURM_NODEID"]),
        node_name=name,
        job_id=job_id,
        launch_id=".".join(parts),
        address=LOOPBACK if nodes == 1 else name,
        node_names=names,
        listen_address=LOOPBACK if nodes == 1 else "",
        component_sizes=sizes,
    )


HOST = "{host}"


def meeting_at(allocation: Allocation, interface: str | None) -> Allocation:
    """Returns ``allocation`` with the address that ``cluster.interface`` selects. A single node stays on loopback.
    ``interface`` is an interface of this node, or a host name in which ``{host}`` stands for the node's name up to the
    first dot. Raises UserError if this node has no such interface with an IPv4 address, or the host name does not
    resolve."""
    if interface is None or allocation.nodes == 1:
        return allocation
    if HOST in interface:
        name = interface.replace(HOST, allocation.node_name.partition(".")[0])
        try:
            socket.gethostbyname(name)
        except OSError as error:
            raise UserError(
                f"cluster.interface: the host name {name} does not resolve: {error.strerror or error}",
                where="cluster.interface",
                fix="cluster.interface=null, or another pattern such as {host}-ib0; `getent hosts NAME` tests a name",
            ) from None
        return replace(allocation, address=name)
    addresses = {
        name: candidate.address
        for name, candidates in psutil.net_if_addrs().items()
        for candidate in candidates
        if candidate.family is socket.AF_INET and not candidate.address.startswith("127.")
    }
    if interface not in addresses:
        available = list(addresses)
        raise UserError(
            f"cluster.interface={interface}: {allocation.node_name} has no such interface with an IPv4 address, only "
            f"{', '.join(available) or 'loopback'}",
            where="cluster.interface",
            fix=f"cluster.interface={available[0] if available else 'null'}, or a pattern for host names such as "
            f"{HOST}-ib0",
        )
    return replace(allocation, address=addresses[interface])


def listening_at(allocation: Allocation, is_chosen: bool) -> tuple[Allocation, str | None]:
    """Returns ``allocation`` with the address to which other nodes connect and on which this node listens.

    If the address may be wrong, the node listens on all interfaces, and the second value is the reason. ``is_chosen``
    states whether ``cluster.interface`` selects the address. Otherwise it must be the address from which this node
    sends to other nodes, because on a host with several networks, the host name may belong to another address."""
    if allocation.nodes == 1:
        return allocation, None
    address, doubt = _local_address(allocation.address)
    if doubt is None and (not is_chosen or address.startswith(_LOOPBACK_NET)):
        doubt = _doubt_about(address, [name for name in allocation.node_names if name != allocation.node_name])
    if doubt:
        return allocation, doubt
    return replace(allocation, address=address, listen_address=address), None


_LOOPBACK_NET = "127."  # some systems map the name of the host itself to 127.0.1.1


def _local_address(name: str) -> tuple[str, str | None]:
    """Returns the IPv4 address of ``name``, and the reason why this node cannot listen on it, or None."""
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError as error:
        return "", f"{name} does not resolve on this node: {error.strerror or error}"
    if len(addresses) > 1:
        return "", f"{name} has the addresses {', '.join(addresses)}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((addresses[0], 0))
        except OSError:
            return "", f"{name} resolves to {addresses[0]}, which no interface of this node has"
    return addresses[0], None


def _doubt_about(address: str, others: Sequence[str]) -> str | None:
    """Returns the reason why ``others`` may not reach this node at ``address``, or None. Checks only two of them, since
    each check is a query of the name service.
    """
    for other in {*others[:1], *others[-1:]}:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((other, _ANY_PORT))
            except OSError as error:
                return f"there is no route to {other}: {error.strerror or error}"
            source = probe.getsockname()[0]
        if source != address:
            return f"its name belongs to {address}, but it sends to {other} from {source}"
    return None


_ANY_PORT = 9  # no data is sent; the kernel only looks up the route


def workers_of_run(config: Config, visible: int | None = None) -> tuple[int, int]:
    """Returns the numbers of GPUs and workers of a node as ``workers_per_node``; one worker with ``run.per=node``."""
    gpus, workers = workers_per_node(config.cluster, visible)
    return gpus, 1 if runs_per_node(config) else workers


def workers_per_node(cluster: ClusterConfig, visible: int | None = None) -> tuple[int, int]:
    """Returns the numbers of GPUs and workers of a node: one worker per GPU, or ``cpu_workers`` without GPUs.
    ``visible`` is the number of GPUs of the node, if the job will run on another machine. Raises UserError if more GPUs
    are requested than the node has, and UnusableGpus if the job runs on this machine, but this process cannot use its
    GPUs."""
    requested = cluster.gpus_per_node
    if requested == 0:
        return 0, cluster.cpu_workers
    if requested != "auto" and (not isinstance(requested, int) or requested < 0):
        raise UserError(
            f"cluster.gpus_per_node must be auto or a number >= 0, got {requested!r}",
            where="cluster.gpus_per_node",
            fix="set cluster.gpus_per_node=auto, or the number of GPUs per node",
        )
    available = gpus_to_use(requested) if visible is None else visible
    if not isinstance(requested, int):
        if available:
            return available, available
        return 0, cluster.cpu_workers
    if requested > available:
        raise UserError(
            f"{requested} GPUs per node are requested, but {f'{available} are' if available else 'none is'} visible "
            "here",
            where="cluster.gpus_per_node",
            fix=f"set cluster.gpus_per_node={available} or auto (0 trains on the CPU), or check CUDA_VISIBLE_DEVICES",
        )
    return requested, requested


_ITEM = re.compile(r"(?:[^,\[]+|\[[^\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")


def expand(text: str) -> list[str]:
    """Returns the node names in order, like ``scontrol show hostnames``, which is not available in a container."""
    names = []
    for item in _ITEM.findall(text):
        parts = []
        for ranges, plain in _PART.findall(item):
            numbers = [] if ranges else [plain]
            for part in ranges.split(",") if ranges else ():
                first, _, last = part.partition("-")
                numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
            parts.append(numbers)
        names += ["".join(pieces) for pieces in itertools.product(*parts)]
    return names


SILENCE_S = 1.0  # the first task prints its error before srun kills it because another task has failed


def refuse_misplaced(environment: Mapping[str, str] = os.environ) -> None:
    """Ends this process if it is one of several on its node, started by srun or torchrun; the first one reports the
    error.

    Raises:
        UserError: in the first process.
        SystemExit: in the others.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if tasks > nodes:
        error = UserError(
            f"this step has {tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}, but hpc_train needs one task per "
            "node and starts the workers itself",
            where="srun, --ntasks",
            fix=f"use srun --ntasks={nodes} --ntasks-per-node=1",
        )
        _refuse(error, is_first=environment.get("SLURM_PROCID", "0") == "0")
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    if by_torchrun or {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= set(environment):
        error = UserError(
            "torchrun or a similar launcher started this process as a rank, but hpc_train starts its ranks itself",
            where="RANK, LOCAL_RANK and WORLD_SIZE in the environment",
            fix="run python -m hpc_train … without torchrun, on several nodes through sbatch or -m. If the variables "
            "are left over from another program: unset RANK LOCAL_RANK WORLD_SIZE TORCHELASTIC_RUN_ID",
        )
        # without torchrun's variable, RANK may be left over, so that no process has rank 0
        _refuse(error, is_first=not by_torchrun or environment.get("RANK", "0") == "0")


def refuse_several_nodes(environment: Mapping[str, str] = os.environ) -> None:
    """Ends this process if it is one of several nodes of a step that got a config, since every node would compose a
    separate run. Raises as ``refuse_misplaced``.
    """
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if nodes > 1:
        error = UserError(
            f"each of the {nodes} nodes of this step would compose a separate run",
            where="srun",
            fix='run RUN=$(python -m hpc_train freeze OVERRIDES) and then srun python -m hpc_train agent "$RUN"',
        )
        _refuse(error, is_first=environment.get("SLURM_PROCID", "0") == "0")


def _refuse(error: UserError, is_first: bool) -> NoReturn:
    if is_first:
        raise error
    time.sleep(SILENCE_S)
    raise SystemExit(Exit.REFUSED)


def refuse_components(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Raises UserError in a heterogeneous job, unless each of its components has roles (``run.roles``): other runs use
    the nodes of the first component only.
    """
    count = int(environment.get("SLURM_HET_SIZE", "1"))
    components = components_of(config)
    if count in (1, len(components)):
        return
    what = f"the job is a heterogeneous job of {count} components, but a run uses only the nodes of the first"
    if config.run.roles:
        what = f"the job is a heterogeneous job of {count} components, but the roles need {max(1, len(components))}"
    raise UserError(
        what,
        where="SLURM_HET_SIZE in the environment",
        fix="submit a job of one component, without `#SBATCH hetjob` and `:`. Roles need another component if their "
        "partition, constraint, cpus or mem differ. To train on the first component while the others do something "
        "else: unset SLURM_HET_SIZE",
    )
