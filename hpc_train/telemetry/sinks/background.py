"""Makes a sink of a backend: a thread with a bounded queue, so that a tracker that hangs, refuses or is slow never
delays a step. After an error it gives up with one message.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import groupby
from typing import Any

from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.sinks.sink import Backend, Line

QUEUED_LINES = 10_000
BATCH = 500  # most lines of one ``Backend.write``


@dataclass(frozen=True)
class _Text:
    step: int
    name: str
    text: str


class BackgroundSink:
    """Calls a backend in a separate thread; a ``Sink``.

    The backend is opened when there is a first line. The import and the start of a client may take more than a second
    of processor time, which would otherwise delay the first step of every attempt.

    Args:
        tell: called with the message for the user if it gives up.

    Attributes:
        problem: why the metrics were not sent to the end; None if they were.
    """

    def __init__(self, backend: Backend, run: RunDirectory, tell: Callable[[str], object] = print) -> None:
        self._backend = backend
        self._metrics = run.metrics
        self._later = f"; send them later with: python -m hpc_train sync {run.path} --to {backend.name}"
        self._tell = tell
        self.problem: str | None = None
        self._inactive = False
        self._queue: queue.Queue[Line | _Text | None] = queue.Queue(QUEUED_LINES)  # None is the end
        self._ended: bool | None = None  # whether the queue had room for the end; None before ``end``
        self._thread = threading.Thread(target=self._work, name=backend.name, daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._backend.name

    def log(self, line: Line) -> None:
        self._put(line)

    def text(self, step: int, name: str, text: str) -> None:
        self._put(_Text(step, name, text))

    def end(self) -> None:
        if self._ended is None:
            try:
                self._queue.put_nowait(None)
                self._ended = True
            except queue.Full:
                self._ended = False

    def close(self) -> None:
        self.end()
        limit = self._backend.finish_s if self._ended else 0.0
        self._thread.join(limit)
        if self._thread.is_alive():
            self._give_up(f"it did not finish in {limit:g} s")

    def outcome(self) -> dict[str, Any]:
        """Returns what ``run.json`` records about the backend."""
        return self._backend.outcome() | ({} if self.problem is None else {"problem": self.problem})

    def _put(self, item: Line | _Text) -> None:
        if self._inactive:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._give_up(f"{QUEUED_LINES} lines are waiting to be sent")

    def _work(self) -> None:
        try:
            items = self._waiting()
            if not self._backend.open():
                self._inactive = True
                return
            while items[-1] is not None:
                self._pass_on(items)
                items = self._waiting()
            self._pass_on(items)
            self._backend.finish()
        except BaseException as error:  # errors of clients derive from several bases, SystemExit among them
            self._give_up(f"{type(error).__name__}: {error}")
            with suppress(Exception):
                self._backend.abandon()

    def _waiting(self) -> list[Line | _Text | None]:
        """Waits for an item and returns it with those that wait behind it; the end is always the last one."""
        items = [self._queue.get()]
        while len(items) < BATCH and items[-1] is not None:
            try:
                items.append(self._queue.get_nowait())
            except queue.Empty:
                break
        return items

    def _pass_on(self, items: Sequence[Line | _Text | None]) -> None:
        """Passes lines together and texts one by one to the backend, in their order."""
        for kind, group in groupby(items, type):
            if kind is dict:
                self._backend.write([item for item in group if isinstance(item, dict)])
            elif kind is _Text:
                for item in group:
                    self._backend.text(*astuple(item))  # type: ignore[arg-type]

    def _give_up(self, reason: str) -> None:
        if not self._inactive:
            self._inactive = True
            self.problem = reason
            label = self._backend.label
            self._tell(f"{label}: {reason}; continuing without it, the metrics are in {self._metrics}{self._later}")
