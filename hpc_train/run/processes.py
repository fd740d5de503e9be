"""Process utilities: identity and liveness of processes, parent-death signals, file descriptor limits and free ports.

A process is identified by its host, process id, start time and boot id, because process ids are reused.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError


def process(pid: int) -> dict[str, Any]:
    """Returns the fields that identify the process ``pid`` of this host for as long as it lives."""
    return {"host": socket.gethostname(), "pid": pid, "pid_started": started(pid)}


def this_process() -> dict[str, Any]:
    """Returns the identity of the calling process."""
    return process(os.getpid())


def is_alive(claim: dict[str, Any]) -> bool:
    """Returns whether the process that made a submission or claim is alive on this host."""
    pid = claim.get("pid")
    if pid is None or claim.get("host") != socket.gethostname():
        return False
    start = started(pid)
    return start is not None and start == claim.get("pid_started")


def started(pid: int) -> str | None:
    """Returns the boot id and the start time in clock ticks since boot; None if the process is gone or a zombie."""
    try:
        fields = _stat(Path(f"/proc/{pid}/stat"))
        if fields[0] != "Z":
            return f"{boot_id()}:{fields[19]}"
    except OSError:
        pass
    return None


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_state(pid: int) -> str:
    """Returns the kernel's state letter (R running, S sleeping, D waiting for storage, T stopped, Z ended); "" if it is
    gone.
    """
    try:
        return _stat(Path(f"/proc/{pid}/stat"))[0]
    except OSError:
        return ""


def _stat(path: Path) -> list[str]:
    """Returns the fields after the program name in a ``stat`` file of the kernel; the first one is the state.

    Raises:
        OSError: the process or thread is gone.
    """
    return path.read_text().rpartition(")")[2].split()


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Returns the processor time that a process and its children have used; 0 if it is gone."""
    try:
        fields = _stat(Path(f"/proc/{pid}/stat"))
    except OSError:
        return 0.0
    ticks = sum(map(int, fields[11:15]))  # in user and kernel mode, of itself and of ended children
    return ticks / _TICKS_PER_S + sum(map(cpu_seconds, _children(pid)))


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):  # of each thread
        with suppress(OSError):
            children += map(int, path.read_text().split())
    return children


def process_tree(pid: int) -> list[int]:
    """Returns ``pid`` and the processes that descend from it, parents first."""
    return [pid, *(process for child in _children(pid) for process in process_tree(child))]


def command_line(pid: int) -> str:
    """Returns the program and the arguments of a process; empty if it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()


def threads_in_kernel(pid: int) -> list[str]:
    """Returns a line for each thread of a process: its id, name and state, and, if the kernel shows them to this user,
    the kernel function that it waits in and the number of its system call (syscall(2)).
    """
    lines = []
    for thread in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        files = {}
        for name in ("comm", "wchan", "syscall"):
            with suppress(OSError):
                files[name] = (thread / name).read_text(errors="replace").strip()
        line = f"thread {thread.name} {files.get('comm', '')}: state {process_state(int(thread.name)) or '-'}"
        if files.get("wchan", "0") != "0":
            line += f", in {files['wchan']}"
        number = files.get("syscall", "").partition(" ")[0]
        if number.isdecimal():
            line += f", system call {number}"
        lines.append(line)
    return lines


def stopped_child(pid: int) -> int | None:
    """Returns a child process that is stopped by a signal; None without one."""
    return next((child for child in _children(pid) if process_state(child) == "T"), None)


@dataclass(frozen=True)
class Activity:
    """Describes the threads of a process and its children.

    Attributes:
        ready: whether one of them runs or waits for a processor.
        cpu_s: the processor time of all of them, in seconds.
    """

    ready: bool
    cpu_s: float


def activity(pid: int) -> Activity:
    """Returns the current activity of a process and its children."""
    ready = False
    ticks = 0
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            fields = _stat(path)
            ready |= fields[0] == "R"
            ticks += int(fields[11]) + int(fields[12])
    children = [activity(child) for child in _children(pid)]
    cpu_s = ticks / _TICKS_PER_S + sum(child.cpu_s for child in children)
    return Activity(ready or any(child.ready for child in children), cpu_s)


def is_reading_or_writing(pid: int) -> bool:
    """Returns whether a thread of a process waits for storage: state D, or a read through FUSE, which is in state S."""
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        if process_state(int(thread.name)) == "D":
            return True
        with suppress(OSError):  # not readable for others, or the thread has ended
            if (thread / "wchan").read_text() == _FUSE:
                return True
    return False


_FUSE = "request_wait_answer"  # the function of the kernel in which a process waits for a FUSE file system

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_PTRACER = 0x59616D61  # likewise


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends. A forked child calls this first.

    The kernel takes the *thread* that forked as the parent, so fork from a thread that lives as long as its process.

    Args:
        parent: process id of the parent, read before the fork; the child exits if that process died before this call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent:
        os._exit(1)


def allow_inspection(inspector: int) -> None:
    """Lets ``inspector`` and its child processes read the memory of this process, where Yama restricts that to its
    ancestors (``kernel.yama.ptrace_scope=1``). It has no effect on a kernel without Yama.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, inspector, 0, 0, 0)


FEWEST_DESCRIPTORS = 64  # an agent with the rendezvous server and two workers has about 40 files open
ENOUGH_DESCRIPTORS = 65536
MAX_DESCRIPTORS = 1 << 20  # the kernel's default (fs.nr_open); some programs iterate over all descriptors


def raise_descriptor_limit() -> None:
    """Raises the soft limit of open files (``ulimit -n``) to the hard limit; child processes inherit it.

    The soft limit is usually 1024, for programs that call select(). gloo alone needs several sockets per rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):  # keep the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def out_of_descriptors(error: BaseException) -> UserError | None:
    """Returns the message for the error that this process may open no more files; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    if error.errno == errno.ENFILE:
        return UserError("this machine cannot open more files", where="fs.file-max of the kernel", fix="ask the site")
    return _few_descriptors(*resource.getrlimit(resource.RLIMIT_NOFILE))


NO_THREAD = "can't start new thread"  # the message of Python's RuntimeError


def out_of_resources(error: BaseException) -> UserError | None:
    """Returns the message for the error that this process may open no more files, or start no more threads or
    processes; None for any other error.
    """
    no_process = isinstance(error, BlockingIOError) and error.filename is None  # EAGAIN of fork
    if not no_process and not (isinstance(error, RuntimeError) and NO_THREAD in str(error)):
        return out_of_descriptors(error)
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        for limit in resource.getrlimit(resource.RLIMIT_NPROC)
    )
    return UserError(
        "the system starts no more threads or processes of this user",
        where=f"the limit of processes and threads (ulimit -Su: {soft}, ulimit -Hu: {hard}), or that of a container",
        fix=f"{PROCESS_LIMIT_FIX}; or end some of your other processes",
    )


PROCESS_LIMIT_FIX = (
    "`ulimit -u unlimited` before the start, in a job in cluster.setup, and for a container a larger --pids-limit; if "
    "this is refused, ask the site for a higher hard limit: LimitNPROC of slurmd, PropagateResourceLimitsExcept=NPROC, "
    "or limits.conf"
)


def refuse_few_descriptors() -> None:
    """Raises UserError if this process may open too few files to start workers, however few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FEWEST_DESCRIPTORS:
        raise _few_descriptors(soft, hard)


def _few_descriptors(soft: int, hard: int) -> UserError:
    return UserError(
        f"a process may open {soft} files at a time, which is too few",
        where=f"the limit of open files (ulimit -Sn: {soft}, ulimit -Hn: {hard})",
        fix=f"`ulimit -n {ENOUGH_DESCRIPTORS}` before the start, in a job in cluster.setup; if this is refused, ask "
        "the site for a higher hard limit: LimitNOFILE of slurmd, PropagateResourceLimitsExcept=NOFILE, or limits.conf",
    )


_PEER = struct.Struct("3i")  # struct ucred of unix(7): process id, user id, group id


def is_peer_of_same_user(connection: socket.socket) -> bool:
    """Returns whether the process at the other end of a Unix socket belongs to the user of this process."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    user: int = _PEER.unpack(credentials)[1]
    return user == os.geteuid()


def can_listen(port: int) -> bool:
    """Returns whether a TCP port of this host is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


@contextmanager
def without_collector() -> Iterator[None]:
    """Disables the garbage collector inside the ``with`` block, since it would visit all new objects repeatedly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
