"""What this process was given: the nodes of its Slurm step, or this one machine; and the workers of a node.

Slurm's short form of node names: ``n[1-3,07],login`` are n1, n2, n3, n07 and login.

One process per node is the rule: it starts a worker per GPU itself. Who starts one per GPU is told so, once.

The order of nodes that keeps neighbours in rank under one switch.

Global rank counts tp fastest, then dp, then pp. A node holds consecutive ranks, so tp stays inside it. With the nodes
of a switch one after the other, the ranks of a data-parallel group are as near to each other as they can be, and what
crosses switches is the boundaries of pipeline stages, which carry the least.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_train.cluster.gpus import gpus_to_use
from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.plan.layout import Layout
from hpc_train.run.exits import Exit

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Allocation:
    """Where this process stands among the nodes of its job.

    Attributes:
        job_id: of the scheduler; None without one.
        launch_id: the same for all nodes of one start of a job, different at the next start.
        address: where the other nodes reach this one; loopback where there is only one.
        node_names: of all nodes, in the order of their numbers.
    """

    nodes: int
    node_rank: int
    node_name: str
    job_id: str | None
    launch_id: str
    address: str
    node_names: tuple[str, ...] = ()


def current_allocation(environment: Mapping[str, str] = os.environ) -> Allocation:
    """Reads the Slurm step that this process is a task of; any other process has one node, its own."""
    if "SLURM_STEP_NUM_NODES" not in environment or "SLURM_NODEID" not in environment:
        return _one_node(environment)
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    # several slurmd of a test cluster share one host name: Slurm's own name tells the nodes apart
    name = environment.get("SLURMD_NODENAME", socket.gethostname())
    job_id = environment["SLURM_JOB_ID"]
    parts = (job_id, environment.get("SLURM_STEP_ID", "0"), environment.get("SLURM_RESTART_COUNT", "0"))
    return Allocation(
        nodes=nodes,
        node_rank=int(environment["SLURM_NODEID"]),
        node_name=name,
        job_id=job_id,
        launch_id=".".join(parts),
        address=LOOPBACK if nodes == 1 else name,
        node_names=tuple(expand(environment.get("SLURM_STEP_NODELIST", name))),
    )


def _one_node(environment: Mapping[str, str]) -> Allocation:
    name = socket.gethostname()
    job_id = environment.get("SLURM_JOB_ID") or environment.get("SUBMITIT_LOCAL_JOB_ID")
    return Allocation(1, 0, name, job_id, f"{name}.{os.getpid()}", LOOPBACK, (name,))


def workers_per_node(cluster: ClusterConfig, visible: int | None = None) -> tuple[int, int]:
    """GPUs and workers of a node: one worker per GPU, ``cpu_workers`` of them where there is no GPU.

    ``visible`` stands for the GPUs of the node where it is not this machine that will run the job.

    Raises:
        UserError: more GPUs are asked for than are there. On this machine also ``UnusableGpus``: this process cannot
            use those that are there.
    """
    asked = cluster.gpus_per_node
    if asked == 0:
        return 0, cluster.cpu_workers
    if asked != "auto" and (not isinstance(asked, int) or asked < 0):
        raise UserError(f"gpus_per_node is {asked!r}", where="cluster.gpus_per_node", fix="a number >= 0, or auto")
    there = gpus_to_use(asked) if visible is None else visible
    if not isinstance(asked, int):
        return (there, there) if there else (0, cluster.cpu_workers)
    if asked > there:
        raise UserError(
            f"{asked} GPUs per node are asked for, {there} are visible here",
            where="cluster.gpus_per_node",
            fix=f"cluster.gpus_per_node={there} (0 trains on the CPU), or auto; CUDA_VISIBLE_DEVICES hides GPUs too",
        )
    return asked, asked


_ITEM = re.compile(r"(?:[^,\[]+|\[[^\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")


def expand(text: str) -> list[str]:
    """The names, in their order; as ``scontrol show hostnames`` has them, which is not there in a container."""
    return [name for item in _ITEM.findall(text) for name in _names(item)]


def _names(item: str) -> list[str]:
    parts = [_numbers(inside) if inside else [plain] for inside, plain in _PART.findall(item)]
    return ["".join(pieces) for pieces in itertools.product(*parts)]


def _numbers(ranges: str) -> list[str]:
    found = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return found


SILENCE_S = 1.0  # the first task is to have spoken before srun ends it for the failure of another


@dataclass(frozen=True)
class Misplaced:
    """What is wrong, and whether this process is the one to say so."""

    error: UserError
    first: bool


def misplaced(environment: Mapping[str, str] = os.environ) -> Misplaced | None:
    """Whether this process is one of several of its node, started by srun or by torchrun."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if tasks > nodes:
        error = UserError(
            f"this step has {tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}, and hpc_train starts the workers "
            "of a node itself",
            where="srun, --ntasks",
            fix=f"one task per node: srun --ntasks={nodes} --ntasks-per-node=1",
        )
        return Misplaced(error, environment.get("SLURM_PROCID", "0") == "0")
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= set(environment):
        error = UserError(
            "torchrun or the like has started this process as one rank, and hpc_train starts its ranks itself",
            where="RANK, LOCAL_RANK and WORLD_SIZE in the environment",
            fix="python -m hpc_train … without torchrun; on several nodes through sbatch or -m. Where these variables "
            "are left from something else: unset RANK LOCAL_RANK WORLD_SIZE TORCHELASTIC_RUN_ID",
        )
        return Misplaced(error, environment.get("RANK", "0") == "0")
    return None


def refuse_misplaced(environment: Mapping[str, str] = os.environ) -> None:
    """Ends this process where it is one of several of its node; one of them says why.

    Raises:
        UserError: in the first of them.
        SystemExit: in the others.
    """
    found = misplaced(environment)
    if found is not None:
        _refuse(found)


def refuse_several_nodes(environment: Mapping[str, str] = os.environ) -> None:
    """The same where a step of several nodes was given a config: it is composed once, and not by each of them.

    Raises:
        UserError: in the first of them.
        SystemExit: in the others.
    """
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if nodes > 1:
        error = UserError(
            f"each of the {nodes} nodes of this step would compose a run of its own",
            where="srun",
            fix='RUN=$(python -m hpc_train freeze OVERRIDES) and then srun python -m hpc_train agent "$RUN"',
        )
        _refuse(Misplaced(error, environment.get("SLURM_PROCID", "0") == "0"))


def _refuse(found: Misplaced) -> None:
    if found.first:
        raise found.error
    time.sleep(SILENCE_S)
    raise SystemExit(Exit.REFUSED)


def switch_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """This node's place in Slurm's tree, ``spine.rack1.n1``; None where the site describes no switches."""
    address = environment.get("SLURM_TOPOLOGY_ADDR", "")
    return address if "." in address else None


def node_order(addresses: Sequence[str]) -> tuple[int, ...]:
    """Indices of ``addresses`` in the order of rank: nodes of a switch together, at every level of the tree.

    The first stays first, and its switches come before others: it is where the ranks meet.
    """
    home = addresses[0].split(".")

    def place(index: int) -> list[tuple[bool, list[tuple[int, str]]]]:
        names = addresses[index].split(".")
        return [(name != own, _natural(name)) for name, own in zip(names, home, strict=False)]

    return tuple(sorted(range(len(addresses)), key=place))


def mapping(layout: Layout, nodes: Sequence[str], workers_per_node: int) -> list[str]:
    """For each node of ``nodes``, which are in the order of rank: its ranks and their places in the layout."""
    lines = []
    for position, node in enumerate(nodes):
        ranks = range(position * workers_per_node, min((position + 1) * workers_per_node, layout.world_size))
        if not ranks:
            continue
        places = {
            "pp": {rank // (layout.dp * layout.tp) for rank in ranks},
            "dp": {rank // layout.tp % layout.dp for rank in ranks},
            "tp": {rank % layout.tp for rank in ranks},
        }
        split = ", ".join(f"{axis} {_span(values)}" for axis, values in places.items())
        lines.append(f"{node}: ranks {_span(set(ranks))}: {split}")
    return lines


def _span(values: set[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _natural(name: str) -> list[tuple[int, str]]:
    """n9 before n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
