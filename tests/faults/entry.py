"""A worker that fails as it is told (``tests.faults.plan``): ``hpc_train.train.worker:train`` with faults in its steps.

The product knows nothing of it. Each fault strikes once per run.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from hpc_train.run.exits import Exit
from hpc_train.run.stop import StopFlag
from hpc_train.run.worker_spec import WorkerSpec
from hpc_train.train import worker
from hpc_train.train.step import TrainStep
from tests.faults.plan import RECOVERY, Fault, happened, read_plan

SLOW_S = 0.1


def _kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, number)
    time.sleep(1)  # until it arrives


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


def _kill_store() -> None:
    """It is the one child of the warm parent that is no worker."""
    children = psutil.Process(os.getppid()).children()
    store = next(child for child in children if "LISTEN" in _states(child))
    _kill(store.pid)


def _states(process: psutil.Process) -> set[str]:
    return {connection.status for connection in process.net_connections()}


def _kill_loader() -> None:
    """The step goes on; a later one misses its data."""
    process = multiprocessing.active_children()[0]
    os.kill(process.pid or 0, signal.SIGKILL)


def _too_much_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, hard))
    torch.empty(1 << 42, dtype=torch.uint8)


def _read_what_never_comes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/pipe")
        Path(folder, "pipe").read_bytes()


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: _kill(os.getpid()),
    "store": _kill_store,
    "segfault": _segfault,
    "abort": os.abort,
    "bus": _bus_error,
    "memory": _too_much_memory,
    "exit": lambda: os._exit(0),
    "warm_parent": lambda: _kill(os.getppid()),
    "loader": _kill_loader,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "gil": _hold_the_gil,
    "storage": _read_what_never_comes,
    "collective": dist.barrier,  # that no other rank enters
}


def train(spec: WorkerSpec, stop: StopFlag, listen_fd: int | None) -> Exit:
    with Path(spec.run_dir, "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    own = [(number, fault) for number, fault in enumerate(read_plan()) if fault.rank == spec.rank]
    if spec.attempt > 0:
        _strike(spec, RECOVERY, own)
    take = TrainStep.__call__

    def faulty(self, index, batch):  # type: ignore[no-untyped-def]
        _strike(spec, index, own)
        return take(self, index, batch)

    TrainStep.__call__ = faulty  # type: ignore[method-assign]
    return worker.train(spec, stop, listen_fd)


def _strike(spec: WorkerSpec, step: int, faults: list[tuple[int, Fault]]) -> None:
    for number, fault in faults:
        due = fault.step == step and all(happened(spec.run_dir, earlier).exists() for earlier in range(number))
        if fault.kind == "slow":
            time.sleep(SLOW_S)
        elif due and not (mark := happened(spec.run_dir, number)).exists():
            mark.write_text(str(time.time()))
            FAULTS[fault.kind]()
