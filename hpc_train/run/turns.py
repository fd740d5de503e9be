"""Exclusive use of something in a directory that machines share, by files alone.

``flock`` does not reach across machines everywhere: NFS without lockd, Lustre with ``localflock``. Here each use is a
numbered turn: the file ``00000007`` is made with O_EXCL and says who took the seventh; a second line says that it was
given back. The highest number counts. Who finds its holder dead takes the next one, so of several who find so only one
succeeds, and a holder that was only asleep can see that it has been passed over.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.run.files import patiently
from hpc_train.run.holder import STALE_S, Holder

_DONE = b"\ndone\n"
_REMEMBERED = 8  # old turns that stay, for a process that still sees an old list of them
_POLL_S = 0.01


class Taken(Exception):
    """Another process has the turn."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(f"taken by {turn.holder() or 'an unknown process'}")
        self.turn = turn


@dataclass(frozen=True)
class Turn:
    """Turn ``number`` of those in ``folder``."""

    folder: Path
    number: int

    @property
    def path(self) -> Path:
        return self.folder / f"{self.number:08d}"

    def holder(self) -> Holder | None:
        """Who took it; None while that is not written yet."""
        try:
            return Holder(**json.loads(self._read().removesuffix(_DONE)))
        except (OSError, ValueError, TypeError):
            return None

    def is_newest(self) -> bool:
        """Whether nobody has taken a later one."""
        found = newest(self.folder)
        return found is None or found.number <= self.number

    def is_held(self, seen_by: Holder, ask_slurm: bool = True) -> bool:
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


def newest(folder: Path) -> Turn | None:
    """The turn that counts; None before the first."""
    numbers = _numbers(folder)
    return Turn(folder, max(numbers)) if numbers else None


def passed_over(folder: Path, holder: Holder) -> Turn | None:
    """The turn of another process that ``holder`` has to respect: one that is held, or later than its own."""
    found = newest(folder)
    if found is None or found.holder() == holder:
        return None
    own = any(Turn(folder, number).holder() == holder for number in _numbers(folder))
    return found if own or found.is_held(holder, ask_slurm=False) else None


def take(folder: Path, holder: Holder, ask_slurm: bool = True) -> Turn:
    """Takes the next turn.

    Raises:
        Taken: the one before is not given back, and its holder may be alive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        before = newest(folder)
        if before is not None and before.is_held(holder, ask_slurm):
            raise Taken(before)
        turn = Turn(folder, 1 if before is None else before.number + 1)
        if not _create(turn, holder):
            continue
        if turn.is_newest():
            _forget(folder, turn.number - _REMEMBERED)
            return turn
        turn.path.unlink(missing_ok=True)  # it was made from an old list


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits for its turn, and has it inside the ``with`` block; shortly, for there are no signs of life."""
    holder = Holder.of_this_process()
    while True:
        try:
            turn = take(folder, holder, ask_slurm=False)
            break
        except Taken:
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        patiently(turn.give_back)  # else nobody has a turn until this process ends


def _create(turn: Turn, holder: Holder) -> bool:
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
            Turn(folder, number).path.unlink(missing_ok=True)


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
