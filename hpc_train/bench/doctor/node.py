"""Makes the report of one node: versions, process limits, devices, the file system of ``run.root``, GPUs and NICs.

The report is a value that is sent to the node that compares all reports.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.conf_files import config_directory
from hpc_train.config.schema import Config
from hpc_train.elastic.rendezvous.addresses import candidate_ports
from hpc_train.errors import UserError
from hpc_train.launch.storage import check_shared
from hpc_train.machine.gpus import gpus_to_use
from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.machine.health.gpu_health import judge_processes
from hpc_train.machine.health.health_check import NodeHealth
from hpc_train.machine.network.decision import FabricDecision
from hpc_train.machine.network.discovery import NONE
from hpc_train.machine.network.facts import SHARED_MEMORY, UNLIMITED, NodeFacts, NodeLimits
from hpc_train.machine.network.libfabric import FABRICS, NO_GPU_DIRECT, find_plugin, on_amd
from hpc_train.machine.network.nccl_settings import merged, too_old_driver, warnings
from hpc_train.machine.network.rails import beyond_gpu_direct, judge_ports, match, port_warnings, rate_gbps
from hpc_train.machine.storage import file_system_of, room_in
from hpc_train.machine.sysfs import read_text
from hpc_train.run.processes import can_listen
from hpc_train.units import GIB, format_bytes

SLOW_S = 1.0  # time to write a small file to disk
SKEW_S = 0.1  # between the clocks of a node and of the file server
BAD_SKEW_S = 1.0
MIN_FREE_BYTES = 10**9
PER_RANK = GIB  # bytes of shared memory for batches of loaders and for buffers of NCCL and gloo
FEWEST_PER_RANK = 1 << 24  # with less, a loader gets a bus error on the first batch of images
FILES_PER_RANK = 1024  # sockets to other ranks and data files
SAMPLE = 20
UNREADABLE = "the limit is unknown: cannot read /proc/self/limits"


NEWER_CUDA = Path("/usr/local/cuda/compat")  # of an image: the package with which an older driver runs a newer CUDA
NUMA_BALANCING = Path("/proc/sys/kernel/numa_balancing")


def check_gpus(facts: NodeFacts, requested: int | str, numa_balancing: Path = NUMA_BALANCING) -> Iterator[Finding]:
    """Checks whether GPUs are visible and of one model, and the setting of the kernel that AMD's guide names."""
    models = sorted({gpu.model or "an unknown model" for gpu in facts.gpus})
    if not facts.gpus:
        if requested in ("auto", 0):
            yield Finding("GPUs", OK, "no GPU; training runs on the CPU")
        else:
            text = f"cluster.gpus_per_node={requested}, but no GPU is found"
            fix = "check from a compute node with `doctor --submit`, or request GPUs with salloc --gpus-per-node=1"
            yield Finding("GPUs", ERROR, text, fix)
        return
    text = f"{len(facts.gpus)} x {', '.join(models)}, {len(facts.visible)} visible"
    if not facts.visible:
        variables = "CUDA_VISIBLE_DEVICES"
        if facts.gpus[0].amd:
            variables = "ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES"
        yield Finding("GPUs", WARNING, text, f"{variables} hides the GPUs: unset it, or request GPUs from Slurm")
    elif len(models) > 1:
        fix = "select one model with cluster.constraint or cluster.gpu_type"
        yield Finding("GPUs", WARNING, f"{text}: the slowest sets the pace", fix)
    else:
        yield Finding("GPUs", OK, text)
    if on_amd([facts]) and read_text(numa_balancing).strip() not in ("", "0"):
        # rocm.docs.amd.com, "Prerequisite system validation before training"
        text = "the kernel moves memory between NUMA nodes (numa_balancing), which slows down jobs on AMD's GPUs"
        yield Finding("GPUs", WARNING, text, "ask the site to set /proc/sys/kernel/numa_balancing to 0")


def check_ports(facts: NodeFacts) -> Iterator[Finding]:
    """Reports which ports carry training traffic, which are excluded, and what is wrong with them."""
    for verdict in judge_ports(facts):
        port = verdict.port
        parts = [f"{verdict.nic}:{port.number}"]
        if port.rate_gbps is not None:
            parts.append(f"{port.rate_gbps:g} Gb/s")
        if port.link_layer:
            parts.append(port.link_layer)
        use = {True: "used", False: "excluded", None: "unknown"}[verdict.usable]
        yield Finding("network", OK, f"{' '.join(parts)}: {use}, {verdict.reason}")
    for warning in port_warnings(facts):
        yield Finding("network", WARNING, warning, "ask the site; until then set cluster.exclude to avoid the node")
    unmatched = [matched for matched in match(facts) if matched.nic is None]
    if facts.nics and unmatched:
        names = ", ".join(matched.gpu for matched in unmatched)
        tool = "rocm-smi --showtopo" if on_amd([facts]) else "nvidia-smi topo -m"
        fix = f"see `{tool}`; set NCCL_TOPO_FILE if the PCI tree is hidden"
        yield Finding("network", WARNING, f"no NIC is matched to {names}: {unmatched[0].reason}", fix)
    if (total := rate_gbps(facts)) is not None:
        yield Finding("network", OK, f"{total:g} Gb/s between nodes in each direction")
    if facts.gpus and facts.nics and facts.gpu_direct is not None:
        yield _gpu_direct(facts, facts.gpu_direct)


def _gpu_direct(facts: NodeFacts, by: str) -> Finding:
    if by != NONE:
        if far := beyond_gpu_direct(facts):
            names = ", ".join(f"{matched.gpu} ({matched.path_type})" for matched in far)
            text = f"NCCL does not use GPUDirect RDMA for {names}, although {by} is loaded: the NICs are too far"
            if on_amd([facts]):  # an explicit level makes jobs hang, see network/libfabric.py
                return Finding("network", OK, text)
            return Finding("network", OK, f"{text}; measure NCCL_NET_GDR_LEVEL=PHB or SYS")
        return Finding("network", OK, f"NICs read GPU memory (GPUDirect RDMA) with {by}")
    text = "NICs cannot read GPU memory (no GPUDirect RDMA): traffic is staged in host memory, up to 3 times slower"
    fix = "ask the site to load nvidia_peermem, or NVIDIA's open kernel modules on Linux 5.12 or newer (DMA-BUF)"
    return Finding("network", WARNING, text, NO_GPU_DIRECT if on_amd([facts]) else fix)


def check_environment(
    facts: NodeFacts, decision: FabricDecision, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Reports problems with variables that are already set, and what is missing to choose the other variables."""
    for wrong in warnings(merged({facts.node or "here": facts.settings})[0]):
        yield Finding("environment", WARNING, wrong, "unset it, or use the name that NCCL reads today")
    for note in decision.unknown:
        yield Finding(
            "environment", WARNING, f"unknown: {note}", "ask the site, or select a profile with cluster/fabric=NAME"
        )
    tcp = environment.get("NCCL_NET", "").lower() == "socket"
    if decision.fabric in FABRICS and not tcp and not find_plugin(environment):
        text = f"the NCCL plugin for {decision.fabric} is missing, so NCCL refuses to start"
        fix = "load the site's module of aws-ofi-nccl (on AWS the EFA installer has it) in cluster.setup"
        yield Finding("environment", ERROR, text, fix)


@dataclass(frozen=True)
class NodeReport:
    """Holds the report of one node. ``must_match`` must be equal on all nodes; ``skew`` is the file server's
    clock minus the node's, in seconds.
    """

    facts: NodeFacts
    findings: tuple[Finding, ...]
    must_match: tuple[tuple[str, str], ...]
    skew: float | None

    @property
    def name(self) -> str:
        return self.facts.node or "?"

    def to_json(self) -> dict[str, Any]:
        return {
            "facts": self.facts.to_json(),
            "findings": [asdict(finding) for finding in self.findings],
            "must_match": dict(self.must_match),
            "skew": self.skew,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeReport:
        return cls(
            NodeFacts.from_json(value["facts"]),
            tuple(Finding(**finding) for finding in value["findings"]),
            tuple(value["must_match"].items()),
            value["skew"],
        )


def check_route(facts: NodeFacts, first: str | None) -> Iterator[Finding]:
    """Reports the interface that leads to the ``first`` node of the job; returns None for a job of one node."""
    if first is None:
        return
    if facts.route is None:
        fix = "ask the site for a name of the node that compute nodes can resolve"
        yield Finding("route", ERROR, f"no route leads to {first}, where the ranks meet", fix)
        return
    by_name = facts.automatic or "none"
    text = f"{facts.route} leads to {first}, where the ranks meet; the host name belongs to {by_name}"
    yield Finding("route", OK, text)


def check_gpus_of_job(facts: NodeFacts, requested: int | str, first: str | None) -> list[Finding]:
    """Checks the GPUs. In a job, an agent's refusal to train replaces the other findings; on a single node the check of
    the job reports it.
    """
    if "SLURM_JOB_ID" in os.environ:
        try:
            gpus_to_use(requested)
        except UserError as error:
            return [Finding("GPUs", ERROR, error.what, error.fix)] if first is not None else []
    return [*check_gpus(facts, requested)]


def examine(facts: NodeFacts, config: Config, health: NodeHealth, first: str | None = None) -> NodeReport:
    """Examines this node. ``first`` is the first node of a job on several nodes."""
    root = Path(config.run.root)
    findings = (
        *check_gpus_of_job(facts, config.cluster.gpus_per_node, first),
        *health.findings,
        *judge_processes(health.gpus, frozenset()),
        *check_ports(facts),
        *check_route(facts, first),
        *check_software(facts),
        *check_limits(facts, len(facts.visible) or config.cluster.cpu_workers),
        *check_root(root),
    )
    must_match = {
        "python": f"{platform.python_version()} at {sys.executable}",
        "the config files": str(config_directory()),
        "run.root": str(root),
    }
    if health.ports:  # nodes in two partitions cannot connect, and a smaller MTU makes connections hang
        keys = sorted({f"{port.keys[0]:#06x}" for port in health.ports if port.keys})
        must_match["the partition key of InfiniBand"] = ", ".join(keys) or "none"
        sizes = sorted({str(port.mtu) for port in health.ports if port.mtu})
        must_match["the MTU of RoCE"] = ", ".join(sizes) or "none"
    skew = None
    with suppress(OSError):
        _, skew = probe(root)
    return NodeReport(facts, findings, tuple(must_match.items()), skew)


def check_software(facts: NodeFacts) -> Iterator[Finding]:
    versions = dict(facts.versions)
    listed = ", ".join(f"{name} {text}" for name, text in versions.items())
    yield Finding("versions", OK, f"python {platform.python_version()}, {listed}")
    if "torch" not in versions:
        yield Finding("versions", ERROR, "torch is not installed for this interpreter", "pip install torch")
        return
    amd = any(gpu.amd for gpu in facts.gpus)
    if facts.gpus and (versions["torch"].endswith("+cpu") or (amd and "+cu" in versions["torch"])):
        platform_name = "CUDA"
        devices = "GPUs"
        if amd:
            platform_name = "ROCm"
            devices = "AMD GPUs"
        fix = f"install torch with {platform_name}: https://pytorch.org/get-started"
        text = f"torch {versions['torch']} is built without {platform_name}, but the node has {devices}"
        yield Finding("versions", ERROR, text, fix)
    elif facts.gpus and not amd and "nccl" not in versions:  # torch with ROCm contains RCCL
        fix = "pass the version with `doctor --nccl VERSION`; torch.cuda.nccl.version() shows it"
        yield Finding("versions", WARNING, "the version of NCCL is unknown because no wheel provides it", fix)
    if facts.gpus and {"driver", "cuda_of_torch"} <= {*versions} and not NEWER_CUDA.is_dir():
        refusal = too_old_driver(versions["driver"], versions["cuda_of_torch"])
        if refusal is not None:
            yield Finding("versions", ERROR, refusal.what, refusal.fix)


def check_limits(facts: NodeFacts, ranks: int) -> Iterator[Finding]:
    yield check_shared_memory(ranks)
    yield check_locked_memory(facts.limits, bool(facts.nics))
    yield check_open_files(facts.limits, ranks)
    yield check_free_ports()


def check_shared_memory(ranks: int, directory: Path = SHARED_MEMORY) -> Finding:
    """Checks that /dev/shm has 1 GiB per rank, which is enough for loaders and NCCL."""
    fix = (
        "in a container use --shm-size or bind the host's /dev/shm; on a node ask the site; batch.loader_workers=0 "
        "needs less"
    )
    try:
        status = os.statvfs(directory)
    except OSError as error:
        return Finding("shared memory", ERROR, f"{directory}: {error.strerror}", fix)
    free = status.f_bavail * status.f_frsize
    needed = ranks * PER_RANK
    if not os.access(directory, os.W_OK):
        return Finding("shared memory", ERROR, f"{directory} is not writable", fix)
    if free >= needed:
        return Finding("shared memory", OK, f"{format_bytes(free)} free in {directory}")
    level = ERROR if free < ranks * FEWEST_PER_RANK else WARNING
    return Finding(
        "shared memory",
        level,
        f"{format_bytes(free)} free in {directory}, but {ranks} ranks need {format_bytes(PER_RANK)} each",
        fix,
    )


def check_locked_memory(limits: NodeLimits, rdma: bool) -> Finding:
    """Checks the limit of locked memory, from which RDMA NICs read."""
    if limits.locked_memory is None:
        return Finding("locked memory", WARNING, UNREADABLE, "check it with `ulimit -l`")
    text = limits.locking
    if text is None:
        return Finding("locked memory", OK, "unlimited")
    if not rdma:
        return Finding("locked memory", OK, f"{text}; no RDMA NIC needs more")
    fix = "ask the site to set LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    return Finding("locked memory", ERROR, f"{text}: RDMA NICs cannot register their buffers", fix)


def check_open_files(limits: NodeLimits, ranks: int) -> Finding:
    """Checks the limit of open files per process; the agent opens several for each rank of its node."""
    files = limits.open_files
    if files is None:
        return Finding("open files", WARNING, UNREADABLE, "check it with `ulimit -n`")
    if files == UNLIMITED:
        return Finding("open files", OK, "unlimited per process")
    if files >= FILES_PER_RANK:
        return Finding("open files", OK, f"{files} per process")
    needed = FILES_PER_RANK * ranks
    if limits.most_open_files is not None and limits.most_open_files > files:
        needed = limits.most_open_files
    return Finding("open files", WARNING, f"{files} per process", f"set cluster.setup=['ulimit -n {needed}']")


def check_free_ports() -> Finding:
    free = sum(can_listen(port) for port, _ in zip(candidate_ports("doctor"), range(SAMPLE), strict=False))
    text = f"{free} of {SAMPLE} tested ports are free"
    if free > SAMPLE // 2:
        return Finding("ports", OK, text)
    if free:
        return Finding("ports", WARNING, text, "list listening sockets with `ss -ltn`")
    return Finding("ports", ERROR, "cannot listen on any port", "ask the site about a firewall or sandbox on the node")


def check_root(root: Path) -> Iterator[Finding]:
    """Checks what any node can check about ``run.root``: free space, latency and the clock of the file server."""
    yield check_room(root)
    try:
        written, skew = probe(root)
    except OSError as error:
        fix = "set another run.root"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "remove files that are no longer needed, or set another run.root"
        yield Finding("run directory", ERROR, f"cannot use {root}: {error.strerror}", fix)
        return
    system = file_system_of(root)
    kind = "unknown" if system is None else system.kind
    if written > SLOW_S:
        fix = "the file system is busy: checkpoint.asynchronous=true hides it, another run.root may be faster"
        yield Finding("run directory", WARNING, f"writing a small file took {written:.1f} s ({kind})", fix)
    else:
        yield Finding(
            "run directory", OK, f"{root} ({kind}): a small file is written to disk in {1000 * written:.0f} ms"
        )
    if system is None or not system.of_one_host:  # otherwise, this node's own clock
        yield check_skew(skew)


def check_skew(skew: float) -> Finding:
    """Checks the clock skew: ``skew`` is the number of seconds by which this node's clock is behind the file
    server's.
    """
    if abs(skew) < SKEW_S:
        return Finding("clock", OK, "this node's clock agrees with the file server's")
    side = "behind" if skew > 0 else "ahead of"
    text = f"this node's clock is {abs(skew):.2f} s {side} the file server's"
    fix = "ask the site to run chrony or ntpd on the node and on the server"
    return Finding("clock", ERROR if abs(skew) > BAD_SKEW_S else WARNING, text, fix)


def probe(root: Path) -> tuple[float, float]:
    """Performs what leases and checkpoints need (exclusive creation, fsync, rename) on a temporary file in ``root``.
    Raises OSError if one of the operations failed.

    Returns:
        The seconds it took, and the seconds by which the file server's clock is ahead of this node's.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root / f".doctor-{secrets.token_hex(4)}"
    try:
        began = time.monotonic()
        clock = time.time()
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, b"x" * 4096)
            os.fsync(descriptor)
            stamp = os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
        renamed = path.with_suffix(".renamed")
        path.rename(renamed)
        renamed.unlink()
        took = time.monotonic() - began
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    # the stamp lies outside the interval in which it was made, allowing for the kernel's tick resolution
    skew = min(0.0, stamp - clock + 0.02)
    if stamp > clock + took:
        skew = stamp - clock - took
    return took, skew


def check_room(root: Path) -> Finding:
    try:
        rooms = room_in(root)
    except OSError as error:
        return Finding("space", ERROR, f"{root}: {error.strerror}", "set another run.root")
    least = min(rooms, key=lambda room: room.free)
    text = f"{format_bytes(least.free)} free below {root} ({least.whose})"
    if any(room.inodes == 0 for room in rooms):
        return Finding("space", ERROR, f"no inodes are left below {root}", "remove files that are no longer needed")
    if least.free < MIN_FREE_BYTES:
        return Finding("space", ERROR, text, "remove files that are no longer needed, or set another run.root")
    return Finding("space", OK, text)


def check_sharing(root: Path) -> Finding:
    """Checks whether the nodes of a Slurm job can access ``root``, as seen from this machine."""
    try:
        notes = check_shared(root)
    except UserError as error:
        return Finding("shared file system", ERROR, error.what, error.fix)
    if notes:
        fix = "run `doctor --submit`, which checks from the nodes"
        return Finding("shared file system", WARNING, notes[0].removeprefix("note: "), fix)
    return Finding("shared file system", OK, f"{root}: no problem found")
