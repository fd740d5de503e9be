"""Exclusive use of something in a directory that machines share, by files alone.

``flock`` does not reach across machines everywhere: NFS without lockd, Lustre with ``localflock``. Here each use is a
numbered turn: the file ``00000007`` is made with O_EXCL and says who took the seventh; a second line says that it was
given back. The highest number counts. Who finds its holder dead takes the next one, so of several who find so only one
succeeds, and a holder that was only asleep can see that it has been passed over.

The process that holds something in a shared directory, and whether it is still alive, seen from any machine.

On its own machine the process table tells. From another one, Slurm tells where it knows the job to be over; else a
holder that has been silent for ``STALE_S`` counts as dead. It may only be asleep, so whatever it changes is fenced.
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
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.run.files import patiently
from hpc_train.run.processes import boot_id, started
from hpc_train.slurm import client

_DONE = b"\ndone\n"
_REMEMBERED = 8  # old turns that stay, for a process that still sees an old list of them
_POLL_S = 0.01


class LockTaken(Exception):
    """Another process has the turn."""

    def __init__(self, turn: Lock) -> None:
        super().__init__(f"taken by {turn.holder() or 'an unknown process'}")
        self.turn = turn


@dataclass(frozen=True)
class Lock:
    """Turn ``number`` of those in ``folder``."""

    folder: Path
    number: int

    @property
    def path(self) -> Path:
        return self.folder / f"{self.number:08d}"

    def holder(self) -> LockOwner | None:
        """Who took it; None while that is not written yet."""
        try:
            return LockOwner(**json.loads(self._read().removesuffix(_DONE)))
        except (OSError, ValueError, TypeError):
            return None

    def is_newest(self) -> bool:
        """Whether nobody has taken a later one."""
        found = newest_lock(self.folder)
        return found is None or found.number <= self.number

    def is_held(self, seen_by: LockOwner, ask_slurm: bool = True) -> bool:
        """Whether its holder has not given it back and may be alive."""
        try:
            if self._read().endswith(_DONE):
                return False
        except FileNotFoundError:
            return False
        holder = self.holder()
        return self.silent_s() < STALE_S if holder is None else holder.may_live(seen_by, self.silent_s, ask_slurm)

    def beat(self) -> None:
        """A sign of life, stamped by the clock of the file server."""
        os.utime(self.path)

    def silent_s(self) -> float:
        """Seconds since its holder's last sign of life, on the clock of the file server."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            return _server_time(self.folder) - os.fstat(file.fileno()).st_mtime
        return 0.0

    def give_back(self) -> None:
        """Not by another name: a client of NFS may go on not seeing that for a minute; what it opens is up to date."""
        with suppress(FileNotFoundError), self.path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(_DONE)

    def _read(self) -> bytes:
        return self.path.read_bytes()


def newest_lock(folder: Path) -> Lock | None:
    """The turn that counts; None before the first."""
    numbers = _numbers(folder)
    return Lock(folder, max(numbers)) if numbers else None


def superseded(folder: Path, holder: LockOwner) -> Lock | None:
    """The turn of another process that ``holder`` has to respect: one that is held, or later than its own."""
    found = newest_lock(folder)
    if found is None or found.holder() == holder:
        return None
    own = any(Lock(folder, number).holder() == holder for number in _numbers(folder))
    return found if own or found.is_held(holder, ask_slurm=False) else None


def acquire(folder: Path, holder: LockOwner, ask_slurm: bool = True) -> Lock:
    """Takes the next turn.

    Raises:
        Taken: the one before is not given back, and its holder may be alive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        before = newest_lock(folder)
        if before is not None and before.is_held(holder, ask_slurm):
            raise LockTaken(before)
        turn = Lock(folder, 1 if before is None else before.number + 1)
        if not _create(turn, holder):
            continue
        if turn.is_newest():
            _forget(folder, turn.number - _REMEMBERED)
            return turn
        turn.path.unlink(missing_ok=True)  # it was made from an old list


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Waits for its turn, and has it inside the ``with`` block; shortly, for there are no signs of life."""
    holder = LockOwner.of_this_process()
    while True:
        try:
            turn = acquire(folder, holder, ask_slurm=False)
            break
        except LockTaken:
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        patiently(turn.give_back)  # else nobody has a turn until this process ends


def _create(turn: Lock, holder: LockOwner) -> bool:
    """False where another process was first."""
    try:
        descriptor = os.open(turn.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, json.dumps(asdict(holder)).encode())
    except BaseException:
        turn.path.unlink(missing_ok=True)  # on a full disk
        raise
    finally:
        os.close(descriptor)
    return True


def _numbers(folder: Path) -> list[int]:
    with suppress(FileNotFoundError):
        return [int(path.name) for path in folder.iterdir() if re.fullmatch(r"\d{8}", path.name)]
    return []


def _forget(folder: Path, last: int) -> None:
    for number in _numbers(folder):
        if number <= last:
            Lock(folder, number).path.unlink(missing_ok=True)


def _server_time(folder: Path) -> float:
    """Now, by the clock that stamps files in ``folder``; this machine's where it may not write there."""
    probe = folder / f"clock.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}"
    try:
        probe.touch()
        found = probe.stat().st_mtime
        probe.unlink(missing_ok=True)
    except OSError:
        return time.time()
    return found


BEAT_S = 15.0
STALE_S = 180.0  # well past the attribute caches of network file systems (60 s) and some lost beats


@dataclass(frozen=True)
class LockOwner:
    """A process, where it runs and for which job.

    Attributes:
        machine: boot id and process namespace: equal where process ids mean the same.
        started: see ``processes.started``.
        restart: how often Slurm had requeued the job, which keeps its id.
    """

    host: str
    machine: str
    pid: int
    started: str | None
    job_id: str | None = None
    restart: int = 0
    cluster: str | None = None

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> LockOwner:
        return cls(
            host=socket.gethostname(),
            machine=f"{boot_id()}:{Path('/proc/self/ns/pid').readlink()}",
            pid=os.getpid(),
            started=started(os.getpid()),
            job_id=environment.get("SLURM_JOB_ID"),
            restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
            cluster=environment.get("SLURM_CLUSTER_NAME"),
        )

    def __str__(self) -> str:
        job = "" if self.job_id is None else f", Slurm job {self.job_id}"
        return f"process {self.pid} on {self.host}{job}"

    def may_live(self, seen_by: LockOwner, silent_s: Callable[[], float], ask_slurm: bool = True) -> bool:
        """Whether it may be alive, as far as the process ``seen_by`` can tell.

        Args:
            silent_s: seconds since its last sign of life.
            ask_slurm: may call ``squeue`` once, where nothing else tells.
        """
        if self.machine == seen_by.machine:
            return self.started == started(self.pid)
        known = self._known_to_slurm(seen_by) if ask_slurm and self.job_id is not None else None
        return silent_s() < STALE_S if known is None else known

    def _known_to_slurm(self, seen_by: LockOwner) -> bool | None:
        """Whether its start of the job goes on; None where that is not known."""
        if None not in (self.cluster, seen_by.cluster) and self.cluster != seen_by.cluster:
            return None
        if self.job_id == seen_by.job_id:
            return False if seen_by.restart > self.restart else None
        assert self.job_id is not None
        state = client.job_state(self.job_id)
        if state is None or state.may_execute:
            return None
        return state.holds_nodes  # a suspended process gives no sign of life
