"""Continues the one run of a tracker where the last job or ``sync`` has stopped sending.

The run directory remembers for each tracker up to which step it has the metrics: ``tracking/wandb.json`` and so on. A
lock lets one process send at a time. A tracker that cannot replace values gets each step once: if training goes back to
a checkpoint, the steps that it does again are not sent again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.file_lock import STALE_S, Lock, LockHeld, LockOwner, acquire
from hpc_train.run.files import patiently, write_json
from hpc_train.run.rows import is_position
from hpc_train.telemetry.sinks.backend import Backend, Line

POLL_S = 1.0


@dataclass(frozen=True)
class Position:
    """Tells what a tracker has of a run.

    Attributes:
        where: the server and project.
        step: the last step that was sent; 0 before the first.
        texts: the number of texts that were sent.
        run: the tracker's id of the run, if it chooses the ids.
    """

    where: str
    step: int = 0
    texts: int = 0
    run: str | None = None

    @classmethod
    def read(cls, run: RunDirectory, name: str, where: str) -> Position:
        """Returns the position at ``where``; that of another server or project does not count."""
        path = _file(run, name)
        found: Any = run.json(path) if path.exists() else None
        if not is_position(found) or found["where"] != where:
            return cls(where)
        return cls(where, found["step"], found["texts"], found.get("run"))

    def write(self, run: RunDirectory, name: str) -> None:
        path = _file(run, name)
        path.parent.mkdir(exist_ok=True)
        write_json(path, asdict(self))


def _file(run: RunDirectory, name: str) -> Path:
    return run.path / "tracking" / f"{name}.json"


class Tracker(Backend):
    """A backend that continues where the run has stopped sending.

    Args:
        live: whether it serves the job that trains. It then waits for another process that sends the metrics of this
            run: the last job may have been killed on another machine, which shows only after ``STALE_S``.

    Attributes:
        replaces: whether the tracker can replace the values of steps that are done again.
        acknowledges: whether lines have arrived when ``send`` returns, else when ``disconnect`` returns.
    """

    replaces: ClassVar[bool] = False
    acknowledges: ClassVar[bool] = True

    def __init__(self, run: RunDirectory, live: bool = False) -> None:
        self.directory = run
        self.is_live = live
        self._lock: Lock | None = None
        self.position = Position("")

    @property
    def where(self) -> str:
        """Returns the server and project; another one gets all lines."""
        raise NotImplementedError

    def connect(self, position: Position) -> Position:
        """Continues or creates the run of the tracker.

        Returns:
            What the tracker has, which may be more than the run directory remembers.
        """
        raise NotImplementedError

    def send(self, lines: Sequence[Line]) -> None:
        """Sends lines whose steps increase."""
        raise NotImplementedError

    def text(self, step: int, name: str, text: str) -> None:
        """Sends text of a hook."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """Ends the connection after the last line."""

    def open(self) -> bool:
        self._lock = self._acquired()
        self.position = self.connect(Position.read(self.directory, self.name, self.where))
        return True

    def write(self, lines: Sequence[Line]) -> None:
        fresh: list[Line] = []
        for line in lines:
            last = fresh[-1]["step"] if fresh else self.position.step
            if line["step"] > last:
                fresh.append(line)
            elif self.replaces:
                self._pass_on(fresh)
                fresh = [line]
        self._pass_on(fresh)

    def write_texts(self, texts: Sequence[Line]) -> None:
        self._check_turn()
        for text in texts:
            self.text(text["step"], text["name"], text["text"])
        self._advance(texts=self.position.texts + len(texts))

    def finish(self) -> None:
        self.disconnect()
        self.position.write(self.directory, self.name)
        self.abandon()

    def abandon(self) -> None:
        """Lets another process send."""
        if self._lock is not None:
            patiently(self._lock.release)
            self._lock = None

    def _pass_on(self, lines: Sequence[Line]) -> None:
        if lines:
            self._check_turn()
            self.send(lines)
            self._advance(step=lines[-1]["step"])

    def _advance(self, **reached: int) -> None:
        self.position = replace(self.position, **reached)  # type: ignore[arg-type]
        if self.acknowledges:
            self.position.write(self.directory, self.name)

    def _check_turn(self) -> None:
        if self._lock is not None:
            if not self._lock.is_newest():
                raise RuntimeError("another process has begun to send the metrics of this run")
            self._lock.beat()

    def _acquired(self) -> Lock:
        """Acquires the lock.

        Raises:
            UserError: another process holds it.
        """
        until = time.monotonic() + (STALE_S + 30.0 if self.is_live else 0.0)
        while True:
            try:
                folder = self.directory.path / ".locks" / f"tracking-{self.name}"
                return acquire(folder, LockOwner.of_this_process())
            except LockHeld as held:
                if time.monotonic() > until:
                    raise UserError(
                        f"{held.lock.owner()} already sends the metrics of {self.directory.path} to {self.label}",
                        where="sync",
                        fix="wait until it has ended",
                    ) from None
            time.sleep(POLL_S)
