"""One live attempt per run: the agent of node 0 holds the run's lease as long as it works on it.

The lease is a turn (see ``turns``), with a sign of life every few seconds. An agent that was asleep long enough to be
passed over learns of it and may claim no attempt any more; what its workers still do is fenced by the number of their
attempt (``CheckpointStore.guard``).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpc_train.config.errors import ConfigError
from hpc_train.run.directory import RunDirectory, lease_folder
from hpc_train.run.files import patiently
from hpc_train.run.holder import BEAT_S, STALE_S, Holder
from hpc_train.run.turns import Taken, Turn, newest, take

_POLL_S = 5.0


def is_live(run: RunDirectory) -> bool:
    """Whether an agent is at work on this run at this moment, or may be, as far as this machine can tell."""
    found = newest(lease_folder(run.path))
    return found is not None and found.is_held(Holder.of_this_process())


@contextmanager
def hold(
    run: RunDirectory,
    *,
    holder: Holder | None = None,
    on_loss: Callable[[], None] = lambda: None,
    give_up: Callable[[], bool] = lambda: False,
    beat_s: float = BEAT_S,
) -> Iterator[Turn]:
    """Holds the run's lease inside the ``with`` block.

    A holder elsewhere that has missed some signs of life is waited for, until it gives one or counts as dead.

    Args:
        holder: this process, unless a test says otherwise.
        on_loss: called once, in another thread, when another process has taken the lease over.
        give_up: ends the wait.
        beat_s: seconds between signs of life.

    Raises:
        ConfigError: another process holds it.
    """
    turn = _take(run, holder or Holder.of_this_process(), give_up)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(turn, ended, on_loss, beat_s), name="lease", daemon=True).start()
    try:
        yield turn
    finally:
        ended.set()
        try:
            patiently(turn.give_back)
        except OSError as error:
            print(f"the run's lease cannot be given back, others wait until it has expired: {error}", file=sys.stderr)


def _take(run: RunDirectory, holder: Holder, give_up: Callable[[], bool]) -> Turn:
    told = False
    while True:
        try:
            return take(lease_folder(run.path), holder)
        except Taken as error:
            silent = error.turn.silent_s()
            if not 3 * BEAT_S < silent < STALE_S or give_up() or _is_here(error.turn, holder):
                raise _live(run.path, str(error.turn.holder() or "a process")) from None
            if not told:
                left = STALE_S - silent
                print(f"{error.turn.holder()} is silent for {silent:.0f} s; waiting {left:.0f} s at most", flush=True)
            told = True
        time.sleep(_POLL_S)


def _is_here(turn: Turn, holder: Holder) -> bool:
    other = turn.holder()
    return other is not None and other.machine == holder.machine


def _beat(turn: Turn, ended: threading.Event, on_loss: Callable[[], None], beat_s: float) -> None:
    while not ended.wait(beat_s):
        with suppress(OSError):  # a file server that is away; the next one may reach it
            turn.beat()
            if not turn.is_newest():
                on_loss()
                return


def _live(path: Path, who: str) -> ConfigError:
    return ConfigError(
        f"the run in {path} is live: {who} is at work",
        where="run.name",
        mend="wait for it, stop it, or take another run.name",
    )
