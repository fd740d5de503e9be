"""Implements each kind of fault as a function that a worker calls during its training."""

from __future__ import annotations

import ctypes
import errno
import mmap
import multiprocessing
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from hpc_train.checkpoint import disk
from hpc_train.run.requests import StopFlag
from tests.faults.plan import MARK
from tests.faults.surroundings import leave_little_memory

SHARED_MEMORY = Path("/dev/shm")
PIECE = 64 << 20
MOST_PIECES = 128


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, number)
    time.sleep(10)  # until the signal arrives


def segfault() -> None:
    ctypes.string_at(0)


def hold_the_gil() -> None:
    """Blocks in a C function that holds the interpreter's lock and never returns; a signal does not interrupt it."""
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def bus_error() -> None:
    """Accesses memory that is mapped from a truncated file, which fails in the same way as a full /dev/shm."""
    descriptor = os.memfd_create("short")
    os.ftruncate(descriptor, 2 * mmap.PAGESIZE)
    memory = mmap.mmap(descriptor, 2 * mmap.PAGESIZE)
    os.ftruncate(descriptor, 0)
    memory[mmap.PAGESIZE] = 1


def kill_store() -> None:
    """Kills the store, the only child of the warm parent that is not a worker."""
    children = psutil.Process(os.getppid()).children()
    store = next(child for child in children if "LISTEN" in _states(child))
    kill(store.pid)


def _states(process: psutil.Process) -> set[str]:
    return {connection.status for connection in process.net_connections()}


def kill_loader() -> None:
    """Kills a loader process: the current step completes, but a later one lacks its data."""
    process = multiprocessing.active_children()[0]
    os.kill(process.pid or 0, signal.SIGKILL)


def too_much_memory() -> None:
    """Allocates more memory than the limit of the process, which raises an exception."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, hard))
    torch.empty(1 << 42, dtype=torch.uint8)


def more_than_the_group_may_have() -> None:
    """Allocates more memory than the limit of the group; the kernel kills the process without a message."""
    leave_little_memory()
    taken = [bytearray(os.urandom(1)) * PIECE for _ in range(MOST_PIECES)]
    raise AssertionError(f"the memory group allows at least {len(taken) * PIECE} bytes")


def fill_shared_memory() -> None:
    """Fills /dev/shm, including all space that is freed from now on, and returns when it is full."""
    full = threading.Event()
    threading.Thread(target=_fill, args=(SHARED_MEMORY / "ballast", full), daemon=True).start()
    full.wait()


def _fill(ballast: Path, full: threading.Event) -> None:
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(mmap.PAGESIZE if file.tell() > PIECE // 4 else PIECE // 4))
            except OSError as error:
                assert error.errno == errno.ENOSPC
                full.set()
                time.sleep(0.001)


READ_ONLY = """
for folder in events metrics logs attempts; do mount -t tmpfs -o ro none "$0/$folder"; done
kill -KILL "$1"
sleep 12
for folder in events metrics logs attempts; do umount --lazy "$0/$folder"; done
"""


def kill_while_logs_are_read_only() -> None:
    """Kills the process while nothing but checkpoints can be written to the run directory, for twelve seconds."""
    run = os.environ[MARK]
    nowhere = subprocess.DEVNULL
    subprocess.Popen(["sh", "-c", READ_ONLY, run, str(os.getpid())], stdout=nowhere, stderr=nowhere)
    time.sleep(10)  # until the signal arrives


def gpu_error(message: str, code: int) -> None:
    error = torch.AcceleratorError(
        f"CUDA error: {message}\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    )
    error.error_code = code  # type: ignore[attr-defined]
    raise error


def read_what_never_comes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/pipe")
        Path(folder, "pipe").read_bytes()


def hang_in_the_next_save() -> None:
    disk.sync = lambda descriptor: read_what_never_comes()


def full_disk_in_the_next_save() -> None:
    write = disk.write

    def full(file: object, data: memoryview) -> None:
        disk.write = write
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.write = full  # type: ignore[assignment]


def agent() -> int:
    """Returns the pid of the agent. A warm parent that the server of the tests has forked is no child of it."""
    parent = psutil.Process(os.getppid()).parent()
    if parent is not None and _is_agent(parent.cmdline()):
        return parent.pid
    return next(one.pid for one in psutil.process_iter(["cmdline"]) if _is_agent(one.info["cmdline"] or []))


def _is_agent(command: Sequence[str]) -> bool:
    return os.environ[MARK] in command and any("tests.faults.agent" in part for part in command)


def ask_to_stop(stop: StopFlag) -> None:
    """Asks the run to stop and waits until the request has arrived, so that the next fault comes after it."""
    os.kill(agent(), signal.SIGTERM)
    while not stop.requested:
        time.sleep(0.01)


def ask_to_stop_and_hang(stop: StopFlag) -> None:
    ask_to_stop(stop)
    hang_in_the_next_save()


def put_all_to_sleep() -> None:
    node = psutil.Process(agent())
    for process in [node, *node.children(recursive=True)]:
        if process.pid != os.getpid():
            process.suspend()
    os.kill(os.getpid(), signal.SIGSTOP)


INJECTIONS: dict[str, Callable[[StopFlag], None]] = {
    "kill": lambda stop: kill(os.getpid()),
    "store": lambda stop: kill_store(),
    "segfault": lambda stop: segfault(),
    "abort": lambda stop: os.abort(),
    "bus": lambda stop: bus_error(),
    "memory": lambda stop: too_much_memory(),
    "memory_limit": lambda stop: more_than_the_group_may_have(),
    "shared_memory": lambda stop: fill_shared_memory(),
    "read_only": lambda stop: kill_while_logs_are_read_only(),
    "exit": lambda stop: os._exit(0),
    "warm_parent": lambda stop: kill(os.getppid()),
    "agent": lambda stop: kill(agent()),
    "loader": lambda stop: kill_loader(),
    "stop": lambda stop: os.kill(os.getpid(), signal.SIGSTOP),
    "gil": lambda stop: hold_the_gil(),
    "storage": lambda stop: read_what_never_comes(),
    "storage_in_save": lambda stop: hang_in_the_next_save(),
    "collective": lambda stop: dist.barrier(),  # no other rank enters it
    "asleep": lambda stop: put_all_to_sleep(),
    "device": lambda stop: gpu_error("uncorrectable ECC error encountered", 214),
    "kernel": lambda stop: gpu_error("an illegal memory access was encountered", 700),
    "disk": lambda stop: full_disk_in_the_next_save(),
    "request": ask_to_stop,
    "grace": ask_to_stop_and_hang,
}
