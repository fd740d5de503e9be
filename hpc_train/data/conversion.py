"""What ``prepare`` needs to convert data into a directory: one process at a time builds there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.run.file_lock import STALE_S, Lock, LockHeld, LockOwner, acquire, heartbeats
from hpc_train.run.files import make_directory, patiently


@dataclass(frozen=True)
class Builder:
    """Represents the process that may build in ``out``.

    Attributes:
        number: differs from that of each earlier builder, which names of temporary files with it therefore exclude.
    """

    out: Path
    lock: Lock

    @property
    def number(self) -> int:
        return self.lock.number

    def check(self) -> None:
        """Raises UserError if another process builds in ``out`` now, because this one was suspended for long."""
        if not self.lock.is_newest():
            raise UserError(
                f"another process has begun to prepare {self.out}, because this one did not run for more than "
                f"{STALE_S:.0f} s",
                where="--out",
                fix="wait for the other process",
            )


@contextmanager
def sole_builder(out: Path) -> Iterator[Builder]:
    """Creates ``out`` and lets no other process, on any machine, build there inside the ``with`` block.

    Raises:
        UserError: another process builds in ``out``, or ``out`` cannot be written.
    """
    make_directory(out, "--out")
    try:
        lock = acquire(out / ".locks", LockOwner.of_this_process())
    except LockHeld as error:
        raise UserError(
            f"{error.lock.owner() or 'another process'} is preparing {out}",
            where="--out",
            fix="wait for it, or stop it (one that was killed on another machine counts as running for "
            f"{STALE_S:.0f} s)",
        ) from None
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror}", where="--out", fix="--out with a directory of your own"
        ) from error
    builder = Builder(out, lock)
    try:
        with heartbeats(lock):
            yield builder
    except OSError:
        builder.check()  # the other process removes the unfinished files of this one
        raise
    finally:
        patiently(lock.release)
