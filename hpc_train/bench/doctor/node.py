"""Makes the report of one node: versions, process limits, devices, disk, GPUs, NICs and the network between nodes.

The report is a value that is sent to the node that compares all reports.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.bench.doctor.disk import check_root, probe
from hpc_train.config.compose import config_directory
from hpc_train.config.schema import Config
from hpc_train.elastic.rendezvous.addresses import candidate_ports
from hpc_train.errors import UserError
from hpc_train.machine.gpus import gpus_to_use
from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.machine.health.gpu_health import judge_processes
from hpc_train.machine.health.health_check import NodeHealth
from hpc_train.machine.network.decision import FabricDecision
from hpc_train.machine.network.discovery import NONE
from hpc_train.machine.network.facts import SHARED_MEMORY, UNLIMITED, NodeFacts, NodeLimits
from hpc_train.machine.network.libfabric import FABRICS, NO_GPU_DIRECT, find_plugin, on_amd
from hpc_train.machine.network.nccl_settings import merged, warnings
from hpc_train.machine.network.rails import beyond_gpu_direct, judge_ports, match, port_warnings, rate_gbps
from hpc_train.run.processes import can_listen
from hpc_train.units import GIB, format_bytes


def check_gpus(facts: NodeFacts, requested: int | str) -> Iterator[Finding]:
    """Checks whether GPUs are visible and of one model."""
    models = sorted({gpu.model or "an unknown model" for gpu in facts.gpus})
    if not facts.gpus:
        is_requested = isinstance(requested, int) and requested > 0
        text = "no GPU; training runs on the CPU"
        if is_requested:
            text = f"cluster.gpus_per_node={requested}, but no GPU is found"
        fix = "check from a compute node with `doctor --submit`, or request GPUs with salloc --gpus-per-node=1"
        yield Finding("GPUs", ERROR if is_requested else OK, text, fix if is_requested else "")
        return
    text = f"{len(facts.gpus)} x {', '.join(models)}, {len(facts.visible)} visible"
    if not facts.visible:
        amd = "ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or " if facts.gpus[0].amd else ""
        yield Finding(
            "GPUs", WARNING, text, f"{amd}CUDA_VISIBLE_DEVICES hides the GPUs: unset it, or request GPUs from Slurm"
        )
    elif len(models) > 1:
        yield Finding(
            "GPUs",
            WARNING,
            f"{text}: the slowest sets the pace",
            "select one model with cluster.constraint or cluster.gpu_type",
        )
    else:
        yield Finding("GPUs", OK, text)


def check_ports(facts: NodeFacts) -> Iterator[Finding]:
    """Reports which ports carry training traffic, which are excluded, and what is wrong with them."""
    for verdict in judge_ports(facts):
        rate = "" if verdict.port.rate_gbps is None else f" {verdict.port.rate_gbps:g} Gb/s"
        use = {True: "used", False: "excluded", None: "unknown"}[verdict.usable]
        name = f"{verdict.nic}:{verdict.port.number}{rate} {verdict.port.link_layer or ''}".rstrip()
        yield Finding("network", OK, f"{name}: {use}, {verdict.reason}")
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
            return Finding("network", OK, f"{text}; measure NCCL_NET_GDR_LEVEL=PHB or SYS")
        return Finding("network", OK, f"NICs read GPU memory (GPUDirect RDMA) with {by}")
    text = "NICs cannot read GPU memory (no GPUDirect RDMA): traffic is staged in host memory, up to 3 times slower"
    fix = "ask the site to load nvidia_peermem, or NVIDIA's open kernel modules on Linux 5.12 or newer (DMA-BUF)"
    return Finding("network", WARNING, text, NO_GPU_DIRECT if on_amd([facts]) else fix)


def check_environment(
    facts: NodeFacts, decision: FabricDecision, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Reports problems with variables that are already set, and what the decision on the variables lacks."""
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
            "findings": [finding.to_json() for finding in self.findings],
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
    """Reports the interface that leads to the ``first`` node of the job, None for a job of one node."""
    if first is None:
        return
    if facts.route is None:
        fix = "ask the site for a name of the node that compute nodes can resolve"
        yield Finding("route", ERROR, f"no route leads to {first}, where the ranks meet", fix)
        return
    by_name = facts.automatic or "none"
    text = f"{facts.route} leads to {first}, where the ranks meet; the host name belongs to {by_name}"
    yield Finding("route", OK, text)


def _gpus_of_job(facts: NodeFacts, requested: int | str, first: str | None) -> list[Finding]:
    """In a job, an agent's refusal replaces the other findings; on a single node the check of the job reports it."""
    refused = [*check_usable(requested)] if "SLURM_JOB_ID" in os.environ else []
    if refused:
        if first is not None:
            return refused
        return []
    return [*check_gpus(facts, requested)]


def check_usable(requested: int | str) -> Iterator[Finding]:
    """Reports GPUs that an agent on this node could not use, for which it would refuse to train."""
    try:
        gpus_to_use(requested)
    except UserError as error:
        yield Finding("GPUs", ERROR, error.what, error.fix)


def examine(facts: NodeFacts, config: Config, health: NodeHealth, first: str | None = None) -> NodeReport:
    """Examines this node. ``first`` is the first node of a job on several nodes."""
    root = Path(config.run.root)
    findings = (
        *_gpus_of_job(facts, config.cluster.gpus_per_node, first),
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
    if health.ports:  # two partitions cannot connect, and a smaller MTU makes connections hang
        keys = sorted({f"{port.keys[0]:#06x}" for port in health.ports if port.keys})
        must_match["the partition key of InfiniBand"] = ", ".join(keys) or "none"
        must_match["the MTU of RoCE"] = (
            ", ".join(sorted({str(port.mtu) for port in health.ports if port.mtu})) or "none"
        )
    return NodeReport(facts, findings, tuple(must_match.items()), _skew(root))


def _skew(root: Path) -> float | None:
    try:
        return probe(root)[1]
    except OSError:
        return None


def check_software(facts: NodeFacts) -> Iterator[Finding]:
    versions = dict(facts.versions)
    listed = ", ".join(f"{name} {text}" for name, text in versions.items())
    yield Finding("versions", OK, f"python {platform.python_version()}, {listed}")
    if "torch" not in versions:
        yield Finding("versions", ERROR, "torch is not installed for this interpreter", "pip install torch")
        return
    amd = any(gpu.amd for gpu in facts.gpus)
    if facts.gpus and (versions["torch"].endswith("+cpu") or (amd and "+cu" in versions["torch"])):
        platform_name = "ROCm" if amd else "CUDA"
        fix = f"install torch with {platform_name}: https://pytorch.org/get-started"
        text = (
            f"torch {versions['torch']} is built without {platform_name}, but the node has {'AMD ' if amd else ''}GPUs"
        )
        yield Finding("versions", ERROR, text, fix)
    elif facts.gpus and not amd and "nccl" not in versions:  # torch with ROCm contains RCCL
        fix = "pass the version with `doctor --nccl VERSION`; torch.cuda.nccl.version() shows it"
        yield Finding("versions", WARNING, "the version of NCCL is unknown because no wheel provides it", fix)


PER_RANK = GIB  # bytes of shared memory for batches of loaders and for buffers of NCCL and gloo
FEWEST_PER_RANK = 1 << 24  # with less, a loader gets a bus error on the first batch of images
FILES_PER_RANK = 1024  # sockets to other ranks and data files
SAMPLE = 20


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
        return _unknown("locked memory", "-l")
    text = limits.locking
    if text is None:
        return Finding("locked memory", OK, "unlimited")
    if not rdma:
        return Finding("locked memory", OK, f"{text}; no RDMA NIC needs more")
    fix = "ask the site to set LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
    return Finding("locked memory", ERROR, f"{text}: RDMA NICs cannot register their buffers", fix)


def check_open_files(limits: NodeLimits, ranks: int) -> Finding:
    """Checks the limit of open files per process; the agent holds some for each rank of its node."""
    files = limits.open_files
    most = limits.most_open_files or 0
    if files is None:
        return _unknown("open files", "-n")
    if files == UNLIMITED or files >= FILES_PER_RANK:
        return Finding("open files", OK, f"{'unlimited' if files == UNLIMITED else files} per process")
    fix = f"set cluster.setup=['ulimit -n {most if most > files else FILES_PER_RANK * ranks}']"
    return Finding("open files", WARNING, f"{files} per process", fix)


def _unknown(subject: str, option: str) -> Finding:
    return Finding(
        subject, WARNING, "the limit is unknown: cannot read /proc/self/limits", f"check it with `ulimit {option}`"
    )


def check_free_ports() -> Finding:
    """Checks that ports for the rendezvous are free."""
    free = sum(can_listen(port) for port, _ in zip(candidate_ports("doctor"), range(SAMPLE), strict=False))
    if free > SAMPLE // 2:
        return Finding("ports", OK, f"{free} of {SAMPLE} tested ports are free")
    if free:
        return Finding(
            "ports", WARNING, f"{free} of {SAMPLE} tested ports are free", "list listening sockets with `ss -ltn`"
        )
    return Finding("ports", ERROR, "cannot listen on any port", "ask the site about a firewall or sandbox on the node")
