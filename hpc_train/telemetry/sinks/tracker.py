"""Continues the one run of a tracker where the last job or ``sync`` has stopped sending.

The run directory records for each tracker the newest step that it has: ``tracking/wandb.json`` and so on. A
lock lets one process send at a time. A tracker that cannot replace values gets each step once: if training goes back to
a checkpoint, the repeated steps are not sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hpc_train.config.schema import Config
from hpc_train.config.secrets import without_secrets
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.file_lock import STALE_S, Lock, LockHeld, LockOwner, acquire
from hpc_train.run.files import patiently, write_json
from hpc_train.run.rows import is_position

POLL_S = 1.0
HEAD = ("step", "time", "attempt")  # keys that identify a line and are not plotted
Line = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """Holds the position up to which a tracker has a run.

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
        """Returns the position at ``where``; a position on another server or in another project does not count."""
        path = _file(run, name)
        record: Any = run.json(path) if path.exists() else None
        if not is_position(record) or record["where"] != where:
            return cls(where)
        return cls(where, record["step"], record["texts"], record.get("run"))

    def write(self, run: RunDirectory, name: str) -> None:
        path = _file(run, name)
        path.parent.mkdir(exist_ok=True)
        write_json(path, asdict(self))


def _file(run: RunDirectory, name: str) -> Path:
    return run.path / "tracking" / f"{name}.json"


class Tracker:
    """Base class of the client of a tracker, which continues where the run has stopped sending.

    One thread makes all calls, and each of them may block or raise any exception.

    Args:
        live: whether it serves the job that trains. It then waits for another process that sends the metrics of this
            run: the last job may have been killed on another machine, which shows only after ``STALE_S``.

    Attributes:
        name: the key of the tracker in ``telemetry`` and in ``run.json``.
        label: the name of the tracker in messages.
        replaces: whether the tracker can replace the values of repeated steps.
        acknowledges: whether lines have arrived when ``send`` returns, rather than when ``disconnect`` returns.
    """

    name: ClassVar[str]
    label: ClassVar[str]
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
            The position of the tracker, which may be beyond the position that the run directory records.
        """
        raise NotImplementedError

    def send(self, lines: Sequence[Line]) -> None:
        """Sends lines whose steps increase."""
        raise NotImplementedError

    def text(self, step: int, name: str, text: str) -> None:
        raise NotImplementedError

    def disconnect(self) -> None:
        """Ends the connection after the last line."""

    def outcome(self) -> dict[str, Any]:
        """Returns the facts that ``run.json`` records about the tracker, such as the URL of the run."""
        return {}

    def open(self) -> bool:
        """Connects when there is a first line. Returns whether the tracker accepts lines. Raises UserError if another
        process sends the metrics of this run."""
        until = time.monotonic() + (STALE_S + 30.0) * self.is_live
        while self._lock is None:
            try:
                folder = self.directory.path / ".locks" / f"tracking-{self.name}"
                self._lock = acquire(folder, LockOwner.of_this_process())
            except LockHeld as held:
                if time.monotonic() > until:
                    raise UserError(
                        f"{held.lock.owner()} already sends the metrics of {self.directory.path} to {self.label}",
                        where="sync",
                        fix="wait until it has ended",
                    ) from None
                time.sleep(POLL_S)
        self.position = self.connect(Position.read(self.directory, self.name, self.where))
        return True

    def write(self, lines: Sequence[Line]) -> None:
        """Sends the ``lines`` that the tracker does not have yet."""
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
        """Sends the buffered lines and disconnects. It is not called after an error."""
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


@dataclass(frozen=True)
class Identity:
    """Identifies a run on a tracker.

    Attributes:
        run_id: the id of the run, the same for all attempts.
        group: the name of the sweep.
        directory: the directory for files about the run, which is the run directory unless another user owns it.
        config: the config without secrets, and the code version.
    """

    run_id: str
    name: str
    group: str | None
    directory: Path
    config: dict[str, Any]

    @classmethod
    def of(cls, config: Config, run: RunDirectory, directory: Path | None = None) -> Identity:
        record = run.record()
        about = {"code": record.get("code"), "versions": record.get("versions"), "run_directory": str(run.path)}
        return cls(
            run_id=record.get("run_id") or run.path.name,
            name=name_of(run),
            group=run.path.parent.name if _in_sweep(run) else None,
            directory=directory or run.path,
            config=without_secrets(config) | about,
        )


@dataclass(frozen=True)
class Session:
    """Describes to a tracker which run is sent.

    Attributes:
        notify: called with each message for the user.
        first_attempt: the first attempt of the job that trains; None for ``sync``.
        checkpoint: returns the directory of a checkpoint to upload at the end, if there is one.
        output: the directory for files about the run; None is the run directory.
    """

    config: Config
    run: RunDirectory
    notify: Callable[[str], object] = print
    first_attempt: int | None = None
    checkpoint: Callable[[], Path | None] = lambda: None
    output: Path | None = None

    @property
    def live(self) -> bool:
        return self.first_attempt is not None

    @property
    def identity(self) -> Identity:
        return Identity.of(self.config, self.run, self.output)


def name_of(run: RunDirectory) -> str:
    """Returns the name of a run, with the name of its sweep."""
    if _in_sweep(run):
        return f"{run.path.parent.name}/{run.path.name}"
    return run.path.name


def _in_sweep(run: RunDirectory) -> bool:
    return (run.path.parent / "multirun.yaml").exists()
