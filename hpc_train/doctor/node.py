"""All that one node can tell of itself, as a value that goes to the node which compares them.

Versions, told without importing anything.

What the node lets a process have: shared memory, locked memory, open files, ports.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.config.compose import config_directory
from hpc_train.config.schema import Config
from hpc_train.doctor.disk import check_root, probe
from hpc_train.doctor.finding import ERROR, OK, WARNING, Finding
from hpc_train.doctor.network import check_gpus, check_ports
from hpc_train.elastic.rendezvous import candidate_ports
from hpc_train.fabric.facts import SHARED_MEMORY, UNLIMITED, NodeFacts, NodeLimits
from hpc_train.run.processes import can_listen
from hpc_train.units import GIB, format_bytes


@dataclass(frozen=True)
class NodeReport:
    """``places``: what must be the same everywhere; ``skew``: the file server's clock minus the node's, in seconds."""

    facts: NodeFacts
    findings: tuple[Finding, ...]
    places: tuple[tuple[str, str], ...]
    skew: float | None

    @property
    def name(self) -> str:
        return self.facts.node or "?"

    def to_json(self) -> dict[str, Any]:
        return {
            "facts": self.facts.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
            "places": dict(self.places),
            "skew": self.skew,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> NodeReport:
        return cls(
            NodeFacts.from_json(value["facts"]),
            tuple(Finding(**finding) for finding in value["findings"]),
            tuple(value["places"].items()),
            value["skew"],
        )


def examine(facts: NodeFacts, config: Config) -> NodeReport:
    """What this node says of itself."""
    root = Path(config.run.root)
    findings = (
        *check_gpus(facts, config.cluster.gpus_per_node),
        *check_ports(facts),
        *check_software(facts),
        *check_limits(facts, len(facts.visible) or config.cluster.cpu_workers),
        *check_root(root),
    )
    places = {
        "python": f"{platform.python_version()} at {sys.executable}",
        "the config files": str(config_directory()),
        "run.root": str(root),
    }
    return NodeReport(facts, findings, tuple(places.items()), _skew(root))


def _skew(root: Path) -> float | None:
    try:
        return probe(root)[1]
    except OSError:
        return None


def check_software(facts: NodeFacts) -> Iterator[Finding]:
    versions = dict(facts.versions)
    told = ", ".join(f"{name} {text}" for name, text in versions.items())
    yield Finding("versions", OK, f"python {platform.python_version()}, {told}")
    if "torch" not in versions:
        yield Finding("versions", ERROR, "torch is not installed for this interpreter", "pip install torch")
        return
    if facts.gpus and versions["torch"].endswith("+cpu"):
        fix = "torch for CUDA: https://pytorch.org/get-started"
        yield Finding("versions", ERROR, f"torch {versions['torch']} is built without CUDA, and there are GPUs", fix)
    elif facts.gpus and "nccl" not in versions:
        fix = "doctor --nccl VERSION judges for a version; torch.cuda.nccl.version() shows it"
        yield Finding("versions", WARNING, "NCCL comes with no wheel here: its version is not known", fix)


PER_RANK = GIB  # bytes: loaders hand batches over in it, NCCL and gloo their buffers
FEWEST_PER_RANK = 1 << 24  # with less the first batch of pictures ends a loader with a bus error
FILES_PER_RANK = 1024  # sockets to the other ranks, files of the data
SAMPLE = 20


def check_limits(facts: NodeFacts, ranks: int) -> Iterator[Finding]:
    yield check_shared_memory(ranks)
    yield check_locked_memory(facts.limits, bool(facts.nics))
    yield check_open_files(facts.limits, ranks)
    yield check_free_ports()


def check_shared_memory(ranks: int, directory: Path = SHARED_MEMORY) -> Finding:
    """1 GiB for each rank is enough for loaders and NCCL."""
    fix = (
        "a container: --shm-size, or bind the host's /dev/shm; a node: ask the site; batch.loader_workers=0 needs less"
    )
    try:
        found = os.statvfs(directory)
    except OSError as error:
        return Finding("shared memory", ERROR, f"{directory}: {error.strerror}", fix)
    free, wanted = found.f_bavail * found.f_frsize, ranks * PER_RANK
    if not os.access(directory, os.W_OK):
        return Finding("shared memory", ERROR, f"{directory} cannot be written", fix)
    if free >= wanted:
        return Finding("shared memory", OK, f"{format_bytes(free)} free in {directory}")
    level = ERROR if free < ranks * FEWEST_PER_RANK else WARNING
    return Finding(
        "shared memory",
        level,
        f"{format_bytes(free)} free in {directory}, {ranks} ranks want {format_bytes(PER_RANK)} each",
        fix,
    )


def check_locked_memory(limits: NodeLimits, rdma: bool) -> Finding:
    """RDMA cards read from memory that is locked."""
    if limits.locked_memory is None:
        return _unknown("locked memory", "-l")
    text = limits.locking
    if text is None:
        return Finding("locked memory", OK, "unlimited")
    if not rdma:
        return Finding("locked memory", OK, f"{text}; no RDMA card that would need more")
    fix = "LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf (the site)"
    return Finding("locked memory", ERROR, f"{text}: RDMA cards cannot register their buffers", fix)


def check_open_files(limits: NodeLimits, ranks: int) -> Finding:
    """Of one process; the agent holds some for each rank of its node."""
    files, most = limits.open_files, limits.most_open_files or 0
    if files is None:
        return _unknown("open files", "-n")
    if files == UNLIMITED or files >= FILES_PER_RANK:
        return Finding("open files", OK, f"{'unlimited' if files == UNLIMITED else files} per process")
    fix = f"cluster.setup=['ulimit -n {most if most > files else FILES_PER_RANK * ranks}']"
    return Finding("open files", WARNING, f"{files} per process", fix)


def _unknown(subject: str, option: str) -> Finding:
    return Finding(subject, WARNING, "the limit is not known: /proc/self/limits", f"ulimit {option} shows it")


def check_free_ports() -> Finding:
    """Of those on which ranks meet."""
    free = sum(can_listen(port) for port, _ in zip(candidate_ports("doctor"), range(SAMPLE), strict=False))
    if free > SAMPLE // 2:
        return Finding("ports", OK, f"{free} of {SAMPLE} that were tried are free")
    if free:
        return Finding(
            "ports", WARNING, f"{free} of {SAMPLE} that were tried are free", "look for what listens: ss -ltn"
        )
    return Finding("ports", ERROR, "no port can be listened on", "a firewall or a sandbox on the node: ask the site")
