"""What the node lets a process have: shared memory, locked memory, open files, ports."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from hpc_train.checkpoint.space import amount
from hpc_train.cluster.fabric.facts import NodeFacts
from hpc_train.elastic.rendezvous import candidate_ports
from hpc_train.launch.doctor.finding import ERROR, OK, WARNING, Finding
from hpc_train.run.ports import can_listen

SHARED_MEMORY = Path("/dev/shm")
PER_RANK = 10**9  # bytes: loaders hand batches over in it, NCCL and gloo their buffers
FEWEST_PER_RANK = 1 << 24  # with less the first batch of pictures ends a loader with a bus error
FILES_PER_RANK = 1024  # sockets to the other ranks, files of the data
SAMPLE = 20


def check_limits(facts: NodeFacts, ranks: int) -> Iterator[Finding]:
    yield check_shared_memory(ranks)
    yield check_locked_memory(bool(facts.nics))
    yield check_open_files(ranks)
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


def check_locked_memory(rdma: bool) -> Finding:
    """RDMA cards read from memory that is locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", OK, "unlimited")
    text = f"at most {amount(soft)} may be locked (ulimit -l)"
    if not rdma:
        return Finding("locked memory", OK, f"{text}; no RDMA card that would need more")
    mend = "LimitMEMLOCK=infinity for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf (the site)"
    return Finding("locked memory", ERROR, f"{text}: RDMA cards cannot register their buffers", mend)


def check_open_files(ranks: int) -> Finding:
    """Of one process; the agent holds some for each rank of its node."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= FILES_PER_RANK:
        return Finding("open files", OK, f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} per process")
    mend = f"cluster.setup=['ulimit -n {hard if hard > soft else FILES_PER_RANK * ranks}']"
    return Finding("open files", WARNING, f"{soft} per process", mend)


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
