"""What the node lets a process have: shared memory, locked memory, open files, ports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hpc_train.checkpoint.space import amount
from hpc_train.cluster.fabric.facts import NodeFacts
from hpc_train.cluster.fabric.limits import SHARED_MEMORY, UNLIMITED, Limits
from hpc_train.elastic.rendezvous import candidate_ports
from hpc_train.launch.doctor.finding import ERROR, OK, WARNING, Finding
from hpc_train.run.ports import can_listen

PER_RANK = 10**9  # bytes: loaders hand batches over in it, NCCL and gloo their buffers
FEWEST_PER_RANK = 1 << 24  # with less the first batch of pictures ends a loader with a bus error
FILES_PER_RANK = 1024  # sockets to the other ranks, files of the data
SAMPLE = 20


def check_limits(facts: NodeFacts, ranks: int) -> Iterator[Finding]:
    yield check_shared_memory(ranks)
    yield check_locked_memory(facts.limits, bool(facts.nics))
    yield check_open_files(facts.limits, ranks)
    yield check_ports()


def check_shared_memory(ranks: int, directory: Path = SHARED_MEMORY) -> Finding:
    """1 GB for each rank is enough for loaders and NCCL."""
    mend = (
        "a container: --shm-size, or bind the host's /dev/shm; a node: ask the site; batch.loader_workers=0 needs less"
    )
    try:
        found = os.statvfs(directory)
    except OSError as error:
        return Finding("shared memory", ERROR, f"{directory}: {error.strerror}", mend)
    free, wanted = found.f_bavail * found.f_frsize, ranks * PER_RANK
    if not os.access(directory, os.W_OK):
        return Finding("shared memory", ERROR, f"{directory} cannot be written", mend)
    if free >= wanted:
        return Finding("shared memory", OK, f"{amount(free)} free in {directory}")
    level = ERROR if free < ranks * FEWEST_PER_RANK else WARNING
    return Finding("shared memory", level, f"{amount(free)} free in {directory}, {ranks} ranks want 1 GB each", mend)


def check_locked_memory(limits: Limits, rdma: bool) -> Finding:
    """RDMA cards read from memory that is locked."""
    if limits.locked_memory is None:
        return _unknown("locked memory", "-l")
    text = limits.locking
    if text is None:
        return Finding("locked memory", OK, "unlimited")
    if not rdma:
        return Finding("locked memory", OK, f"{text}; no RDMA card that would need more")
    mend = "LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf (the site)"
    return Finding("locked memory", ERROR, f"{text}: RDMA cards cannot register their buffers", mend)


def check_open_files(limits: Limits, ranks: int) -> Finding:
    """Of one process; the agent holds some for each rank of its node."""
    files, most = limits.open_files, limits.most_open_files or 0
    if files is None:
        return _unknown("open files", "-n")
    if files == UNLIMITED or files >= FILES_PER_RANK:
        return Finding("open files", OK, f"{'unlimited' if files == UNLIMITED else files} per process")
    mend = f"cluster.setup=['ulimit -n {most if most > files else FILES_PER_RANK * ranks}']"
    return Finding("open files", WARNING, f"{files} per process", mend)


def _unknown(subject: str, option: str) -> Finding:
    return Finding(subject, WARNING, "the limit is not known: /proc/self/limits", f"ulimit {option} shows it")


def check_ports() -> Finding:
    """Of those on which ranks meet."""
    free = sum(can_listen(port) for port, _ in zip(candidate_ports("doctor"), range(SAMPLE), strict=False))
    if free > SAMPLE // 2:
        return Finding("ports", OK, f"{free} of {SAMPLE} that were tried are free")
    if free:
        return Finding(
            "ports", WARNING, f"{free} of {SAMPLE} that were tried are free", "look for what listens: ss -ltn"
        )
    return Finding("ports", ERROR, "no port can be listened on", "a firewall or a sandbox on the node: ask the site")
