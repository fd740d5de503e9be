"""The GPUs and cores of this machine, shared among the jobs of all sweeps and users without a daemon.

Each GPU and each core is a lock file in one directory that all users share. A job holds the locks of what it uses as
long as its process lives: the kernel drops them with the process, however it ends. Jobs queue at a gate, so a large job
is not starved by small ones.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.gpus import visible_devices

POLL_S = 0.2


@dataclass(frozen=True)
class Share:
    """What one job takes of this machine: so many GPUs, or so many cores.

    ``sweep`` is the directory of the jobs submitted together, of which ``at_once`` may run at the same time.
    """

    gpus: int
    cores: int
    sweep: str
    at_once: int


def shared_directory() -> Path:
    """The directory of the lock files, the same for all users of this machine."""
    path = Path(tempfile.gettempdir()) / "hpc_train-slots"
    if not path.exists():
        path.mkdir(exist_ok=True)
        path.chmod(0o1777)
    return path


@contextmanager
def reserve(share: Share, waiting_is_over: Callable[[], bool], machine: Path | None = None) -> Iterator[None]:
    """Holds a job's share inside the ``with`` block; what it holds is all that the process sees of the machine.

    Waits until the share is free, or until ``waiting_is_over`` says that the caller has lost interest (nothing is held
    then).
    """
    machine = machine or shared_directory()
    turns = [f"turn-{number}" for number in range(share.at_once)]
    folder = Path(share.sweep) / ".slots"
    folder.mkdir(exist_ok=True)
    with take(folder, turns, 1, waiting_is_over):
        if share.gpus:
            devices = visible_devices()
            with take(machine, [f"gpu-{device}" for device in devices], share.gpus, waiting_is_over) as held:
                if held:
                    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(name.removeprefix("gpu-") for name in held)
                yield
        else:
            cores = [f"core-{core}" for core in sorted(os.sched_getaffinity(0))]
            with take(machine, cores, share.cores, waiting_is_over) as held:
                if held:
                    os.sched_setaffinity(0, {int(name.removeprefix("core-")) for name in held})
                yield


@contextmanager
def take(folder: Path, names: Sequence[str], count: int, waiting_is_over: Callable[[], bool]) -> Iterator[list[str]]:
    """Holds ``count`` of the locks ``names`` in ``folder``; none when waiting was over before they were free."""
    locks: dict[str, int] = {}
    try:
        gate = _wait_for_gate(folder, names, waiting_is_over)
        try:
            while len(locks) < count and not waiting_is_over():
                for name in names:
                    if name not in locks and len(locks) < count and (lock := _try_lock(folder / name)) is not None:
                        locks[name] = lock
                if len(locks) < count:
                    time.sleep(POLL_S)
        finally:
            if gate is not None:
                os.close(gate)
        yield list(locks) if len(locks) == count else []
    finally:
        for lock in locks.values():
            os.close(lock)


def _wait_for_gate(folder: Path, names: Sequence[str], waiting_is_over: Callable[[], bool]) -> int | None:
    """One gate per kind of lock: who waits for GPUs does not hold up who waits for cores."""
    path = folder / f"gate-{names[0].partition('-')[0]}"
    while not waiting_is_over():
        if (gate := _try_lock(path)) is not None:
            return gate
        time.sleep(POLL_S)
    return None


def _try_lock(path: Path) -> int | None:
    try:
        # without O_CREAT first: in a shared directory kernels refuse it for a file that another user has made
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
