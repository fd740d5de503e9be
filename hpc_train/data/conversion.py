"""Lets one process at a time build a directory for ``prepare``, with worker processes that report their progress."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from hpc_train.errors import UserError
from hpc_train.run.file_lock import STALE_S, Lock, LockHeld, LockOwner, acquire, heartbeats
from hpc_train.run.files import make_directory, patiently
from hpc_train.run.processes import die_with_parent

POLL_S = 1.0  # seconds between two reports of the progress
Job = TypeVar("Job")
Report = Callable[[int, int], None]  # takes the bytes and the items (inputs, images) that are done


@dataclass(frozen=True)
class Progress:
    """Holds the bytes of input that have been read, and the items (inputs or images) that are done."""

    bytes: int
    items: int


@dataclass(frozen=True)
class Builder:
    """Represents the process that may build in ``out``. ``number`` differs from that of each earlier builder, so
    temporary files with the number in their names never collide."""

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
    """Creates ``out`` and lets no other process, on any machine, build there inside the ``with`` block; raises
    UserError if another process builds in ``out``, or ``out`` cannot be written."""
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
            f"{out} cannot be written: {error.strerror}", where="--out", fix="--out with a directory that you may write"
        ) from error
    builder = Builder(out, lock)
    try:
        with heartbeats(lock):
            yield builder
    except OSError:
        builder.check()  # the other process removes the unfinished files of this one
        raise
    finally:
        with suppress(OSError):  # e.g. a full disk; the lock ends with this process
            patiently(lock.release)


_counts: Any = None  # in a worker: bytes and items of each job, in memory that it shares with the parent


def run_jobs(
    function: Callable[[Job, Report], None], jobs: Sequence[Job], workers: int, on_progress: Callable[[Progress], None]
) -> None:
    """Calls ``function`` for each job in ``workers`` processes.

    Args:
        function: a module-level function, which is called with a job and a function that reports its progress.
        on_progress: called with the sum over all jobs about every ``POLL_S`` and at the end.

    Raises:
        UserError: a process was killed.
        Exception: the first exception that a job raised; the other processes are killed.
    """
    if not jobs:
        return
    workers = min(workers, len(jobs))
    context = get_context("spawn")
    others = set(active_children())
    counts: Any = context.RawArray("q", 2 * len(jobs))
    pool = ProcessPoolExecutor(workers, context, _init_process, (os.getpid(), workers, counts))
    finished: SimpleQueue[Future[None]] = SimpleQueue()
    try:
        for number, job in enumerate(jobs):
            pool.submit(_run, function, job, number).add_done_callback(finished.put)
        left = len(jobs)
        reported = time.monotonic()
        while left:
            with suppress(Empty):
                finished.get(timeout=POLL_S).result()
                left -= 1
            if not left or time.monotonic() - reported >= POLL_S:
                on_progress(Progress(sum(counts[::2]), sum(counts[1::2])))
                reported = time.monotonic()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed (out of memory?)", where="--workers", fix="use fewer --workers"
        ) from error
    finally:
        for process in set(active_children()) - others:  # they would continue after an error or Ctrl-C
            process.kill()
        pool.shutdown()


def _init_process(parent: int, workers: int, counts: Any) -> None:
    global _counts  # noqa: PLW0603 (shared memory reaches a worker only here)
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C stops it silently; the parent reports it
    if workers > 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # otherwise there are workers x cores threads
    _counts = counts


def _run(function: Callable[[Job, Report], None], job: Job, number: int) -> None:
    def report(done: int, items: int) -> None:
        _counts[2 * number] = done
        _counts[2 * number + 1] = items

    function(job, report)
