"""A worker that fails as it is told: ``hpc_train.train.worker:train`` with a fault in one of its steps.

The fault is ``FAULT=name:rank:step``; it comes once per run. The product knows nothing of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_train.run.exits import Exit
from hpc_train.run.stop import StopFlag
from hpc_train.run.worker_spec import WorkerSpec
from hpc_train.train import worker
from hpc_train.train.step import TrainStep

FOR_EVER = 10_000


def _kill_self(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _segfault() -> None:
    ctypes.string_at(0)


def _hold_the_gil() -> None:
    """A C function that never returns, called without giving up the interpreter's lock; a signal does not wake it."""
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def _bus_error() -> None:
    """Memory mapped from a file that has become shorter, as when /dev/shm is full."""
    descriptor = os.memfd_create("short")
    os.ftruncate(descriptor, 2 * mmap.PAGESIZE)
    memory = mmap.mmap(descriptor, 2 * mmap.PAGESIZE)
    os.ftruncate(descriptor, 0)
    memory[mmap.PAGESIZE] = 1


def _too_much_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    torch.empty(1 << 40)


def _full_disk() -> None:
    raise OSError(28, "No space left on device")


FAULTS: dict[str, Callable[[], None]] = {
    "kill": _kill_self(signal.SIGKILL),
    "segfault": _segfault,
    "abort": os.abort,
    "bus": _bus_error,
    "exit": lambda: os._exit(0),
    "stop": _kill_self(signal.SIGSTOP),
    "gil": _hold_the_gil,
    "sleep": lambda: time.sleep(FOR_EVER),
    "memory": _too_much_memory,
    "disk": _full_disk,
    "collective": dist.barrier,  # that no other rank enters
}


def train(spec: WorkerSpec, stop: StopFlag, listen_fd: int | None) -> Exit:
    torch.manual_seed(0)
    name, rank, step = os.environ["FAULT"].split(":")
    if spec.rank == int(rank):
        _arm(name, int(step), Path(spec.run_dir) / "fault-happened")
    return worker.train(spec, stop, listen_fd)


def _arm(name: str, step: int, happened: Path) -> None:
    take = TrainStep.__call__

    def faulty(self, index, batch):  # type: ignore[no-untyped-def]
        if name == "slow":
            time.sleep(0.05)
        elif index == step and not happened.exists():
            happened.touch()
            FAULTS[name]()
        return take(self, index, batch)

    TrainStep.__call__ = faulty  # type: ignore[method-assign]
