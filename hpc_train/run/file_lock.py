"""Implements a lock on a directory that machines share, with files alone.

``flock`` does not reach across machines everywhere (NFS without lockd, Lustre with ``localflock``). Each acquisition
creates a numbered file such as ``00000007`` with O_EXCL; it names the owner, and a second line marks the release. The
highest number is the current lock. A process that finds the owner dead creates the next number, so only one of several
succeeds, and an owner that was merely suspended notices that its lock was superseded. The lock of a short block
(``exclusive``) leaves nothing behind: its files are removed, so that its numbers begin again.

On the same machine the process table shows whether an owner is alive. On another machine Slurm decides if it knows that
the job has ended; otherwise an owner counts as dead after ``STALE_S`` without a heartbeat. It may only be
suspended, so everything it changes must be fenced.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpc_train.opening import DamagedFile, open_file, read_file
from hpc_train.run.files import patiently
from hpc_train.run.processes import boot_id, started
from hpc_train.schedulers.current import KubernetesJob, current_job
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.jobs import SlurmJob

LOCKS = ".locks"  # a folder with the folders of several locks
BEAT_S = 15.0
STALE_S = 180.0  # well above the attribute cache time of network file systems (60 s) plus some missed heartbeats
_DONE = b"\ndone\n"
_OLD_LOCKS = 8  # old files to keep, for a process that still sees a stale directory listing
_POLL_S = 0.01


class LockHeld(Exception):
    """Raised when another process holds the lock."""

    def __init__(self, lock: Lock) -> None:
        super().__init__(f"the lock is held by {lock.owner() or 'an unknown process'}")
        self.lock = lock


@dataclass(frozen=True)
class Lock:
    """Represents acquisition ``number`` of the lock in ``folder``."""

    folder: Path
    number: int

    @property
    def path(self) -> Path:
        return self.folder / f"{self.number:08d}"

    def owner(self) -> LockOwner | None:
        """Returns the owner; None while it is not written yet."""
        try:
            return LockOwner(**json.loads(self._read().removesuffix(_DONE)))
        except (OSError, ValueError, TypeError):
            return None

    def is_newest(self) -> bool:
        """Returns whether no later acquisition exists."""
        return max(_lock_numbers(self.folder), default=0) <= self.number

    def is_held(self, seen_by: LockOwner, ask_slurm: bool = True) -> bool:
        """Returns whether the lock is not released and its owner may be alive."""
        try:
            if self._read().endswith(_DONE):
                return False
        except FileNotFoundError:
            return False
        owner = self.owner()
        if owner is None:
            return self.silent_s() < STALE_S
        return owner.may_be_alive(seen_by, self.silent_s, ask_slurm)

    def beat(self) -> None:
        """Sends a heartbeat; the file server's clock stamps it."""
        os.utime(self.path)

    def silent_s(self) -> float:
        """Returns the seconds since the owner's last heartbeat, measured on the file server's clock."""
        with suppress(FileNotFoundError, DamagedFile), open_file(self.path, self.folder) as file:
            return _server_time(self.folder) - os.fstat(file.fileno()).st_mtime
        return 0.0

    def release(self) -> None:
        """Marks the file as released.

        The file is not renamed, because an NFS client may not see that for a minute; the contents it opens are up to
        date.
        """
        with suppress(FileNotFoundError), self.path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(_DONE)

    def give_back(self) -> None:
        """Removes the lock file if it is the only one, and else releases it: a superseded owner looks for its file."""
        if _lock_numbers(self.folder) == [self.number]:
            self.path.unlink(missing_ok=True)
        else:
            self.release()

    def _read(self) -> bytes:
        return read_file(self.path, self.folder)


def newest_lock(folder: Path) -> Lock | None:
    """Returns the current lock of ``folder``; None before the first acquisition."""
    numbers = _lock_numbers(folder)
    return Lock(folder, max(numbers)) if numbers else None


def superseded(folder: Path, owner: LockOwner) -> Lock | None:
    """Returns the lock that ``owner`` must respect: one held by another process, or one newer than its own; None
    without one.
    """
    newest = newest_lock(folder)
    if newest is None or newest.owner() == owner:
        return None
    was_owner = any(Lock(folder, number).owner() == owner for number in _lock_numbers(folder))
    return newest if was_owner or newest.is_held(owner, ask_slurm=False) else None


def acquire(folder: Path, owner: LockOwner, ask_slurm: bool = True) -> Lock:
    """Acquires the lock of ``folder`` without waiting.

    Raises:
        LockHeld: the previous owner has not released the lock and may be alive.
    """
    while True:
        for path in (folder.parent, folder):
            if path is folder or path.name == LOCKS:  # a deleted run directory is not created again
                with suppress(FileExistsError):
                    path.mkdir()
        lock = Lock(folder, 1)
        before = newest_lock(folder)
        if before is not None:
            if before.is_held(owner, ask_slurm):
                raise LockHeld(before)
            lock = Lock(folder, before.number + 1)
        if not _create(lock, owner):
            continue
        numbers = _lock_numbers(folder)
        if numbers and max(numbers) == lock.number:  # the file may be gone: a holder removes all numbers up to its own
            for number in numbers:
                # since numbers begin again, a stale directory listing may have led to a higher one than the holder's,
                # and the number of the lock before may be another process's by now
                other = Lock(folder, number)
                if number < lock.number and other.is_held(owner, ask_slurm):
                    lock.path.unlink(missing_ok=True)
                    raise LockHeld(other)
                if number <= lock.number - _OLD_LOCKS:
                    Lock(folder, number).path.unlink(missing_ok=True)
            return lock
        lock.path.unlink(missing_ok=True)  # the directory listing was stale


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Waits for the lock and holds it inside the ``with`` block, which must be short because no heartbeats are sent."""
    owner = LockOwner.of_this_process()
    while True:
        try:
            lock = acquire(folder, owner, ask_slurm=False)
            break
        except LockHeld:
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        patiently(lambda: _remove(lock, owner))  # otherwise the lock stays held until this process ends


def _remove(lock: Lock, owner: LockOwner) -> None:
    """Releases a lock by removing its files and its folder, unless another process has superseded it."""
    if lock.owner() != owner:
        return
    for number in sorted(_lock_numbers(lock.folder)):
        if number <= lock.number:
            Lock(lock.folder, number).path.unlink(missing_ok=True)
    with suppress(OSError):  # another process waits for the lock, or the run has other locks
        lock.folder.rmdir()
        if lock.folder.parent.name == LOCKS:
            lock.folder.parent.rmdir()


@contextmanager
def heartbeats(lock: Lock, on_loss: Callable[[], None] = lambda: None, beat_s: float = BEAT_S) -> Iterator[None]:
    """Sends heartbeats of ``lock`` from another thread inside the ``with`` block.

    Args:
        on_loss: called once, in that thread, when another process has taken the lock over.
        beat_s: seconds between heartbeats.
    """
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(beat_s):
            with suppress(OSError):  # the file server is unreachable; a later heartbeat may reach it
                lock.beat()
                if not lock.is_newest():
                    on_loss()
                    return

    threading.Thread(target=beat, name="heartbeats", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _create(lock: Lock, owner: LockOwner) -> bool:
    """Creates the lock file; returns False if another process was first, or has just removed the folder."""
    try:
        descriptor = os.open(lock.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except (FileExistsError, FileNotFoundError):
        return False
    try:
        os.write(descriptor, json.dumps(asdict(owner)).encode())
    except BaseException:
        lock.path.unlink(missing_ok=True)  # the disk may be full
        raise
    finally:
        os.close(descriptor)
    return True


def _lock_numbers(folder: Path) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(path.name) for path in folder.iterdir() if re.fullmatch(r"\d{8}", path.name)]
    return []


def _server_time(folder: Path) -> float:
    """Returns the time of the clock that stamps files in ``folder``, or this machine's time if it is not writable."""
    probe = folder / f"clock.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink(missing_ok=True)
    except OSError:
        return time.time()
    return now


@dataclass(frozen=True)
class LockOwner:
    """Identifies a process that holds a lock, with its machine and job.

    Attributes:
        machine: boot id and process namespace; process ids are comparable where both are equal.
        started: see ``processes.started``.
        restart: how often the job was requeued; the job id stays the same.
        scheduler: the scheduler of the job if it is not Slurm; only Slurm is asked about the job.
    """

    host: str
    machine: str
    pid: int
    started: str | None
    job_id: str | None = None
    restart: int = 0
    cluster: str | None = None
    scheduler: str | None = None

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> LockOwner:
        owner = cls(
            host=socket.gethostname(),
            machine=f"{boot_id()}:{Path('/proc/self/ns/pid').readlink()}",
            pid=os.getpid(),
            started=started(os.getpid()),
        )
        job = current_job(environment)
        if not job.job_id:
            return owner
        owner = replace(owner, job_id=job.name, restart=job.restart)
        if not isinstance(job, SlurmJob):
            return replace(owner, scheduler=job.scheduler)
        return replace(owner, cluster=environment.get("SLURM_CLUSTER_NAME"))

    def __str__(self) -> str:
        process = f"process {self.pid} on {self.host}"
        return process if self.job_id is None else f"{process}, {self.scheduler or 'Slurm'} job {self.job_id}"

    def may_be_alive(self, seen_by: LockOwner, silent_s: Callable[[], float], ask_slurm: bool = True) -> bool:
        """Returns whether the owner may be alive, judged by the process ``seen_by``.

        Args:
            silent_s: returns the seconds since the owner's last heartbeat.
            ask_slurm: allows one call of ``squeue`` if nothing else decides.
        """
        other_cluster = None not in (self.cluster, seen_by.cluster) and self.cluster != seen_by.cluster
        other_cluster = other_cluster or self.scheduler != seen_by.scheduler
        same_job = self.job_id is not None and self.job_id == seen_by.job_id and not other_cluster
        if same_job and seen_by.restart > self.restart:  # requeued since; its process may still exist on a frozen node
            return False
        if self.machine == seen_by.machine:
            return self.started == started(self.pid)
        if same_job and self.host == seen_by.host and self.scheduler == KubernetesJob.scheduler:
            return False  # a pod is replaced after its processes have ended
        is_slurm = self.scheduler is None and self.job_id is not None
        if ask_slurm and is_slurm and not other_cluster and self.job_id != seen_by.job_id:
            state = client.job_state(str(self.job_id))
            if state is not None and not state.may_execute:
                return state.holds_nodes  # a suspended process gives no sign of life
        return silent_s() < STALE_S
