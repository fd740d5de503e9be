"""Trackers get each step once over attempts, rollbacks and processes; the table on disk is that of the newest steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.metrics import MetricsLog
from hpc_train.telemetry.sinks.replay import Replay
from hpc_train.telemetry.sinks.tensorboard import TensorBoard
from hpc_train.telemetry.sinks.tracker import Line, Position, Session, Tracker
from tests.telemetry.test_wandb import logged


class Remote(Tracker):
    """Remembers the steps and the texts that it was sent; fails at the step ``fails_at``."""

    name = "remote"
    label = "Remote"
    where = "here"  # type: ignore[assignment]

    def __init__(self, run: RunDirectory, fails_at: int | None = None) -> None:
        super().__init__(run)
        self.sent: list[int | str] = []
        self._fails_at = fails_at

    def connect(self, position: Position) -> Position:
        return position

    def text(self, step: int, name: str, text: str) -> None:
        self.sent.append(text)

    def send(self, lines: Sequence[Line]) -> None:
        for line in lines:
            if line["step"] == self._fails_at:
                raise ConnectionError("refused")
            self.sent.append(line["step"])


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def follow(run: RunDirectory, backend: Tracker, *parts: tuple[int, Sequence[int]]) -> None:
    """Follows a run to which attempts append lines in parts, as the tracking process does."""
    replay = Replay(run, backend)
    for attempt, steps in parts:
        log = MetricsLog(run, attempt)
        for step in steps:
            log.write({"step": step, "time": 1e9 + step, "attempt": attempt, "loss": 10.0 * attempt + step})
        replay.send_new()
    replay.finish()


def test_jobs_continue_where_the_last_one_stopped_sending(run: RunDirectory) -> None:
    first, second, third = Remote(run), Remote(run), Remote(run)
    follow(run, first, (0, [1, 2, 3]), (0, [2, 3, 4]), (1, [4, 5]))  # 2 to 4 are done again
    assert first.sent == [1, 2, 3, 4, 5], "one process for all attempts of a job"
    logged(run, 2, [6, 7])  # not tracked
    follow(run, second, (3, [5, 6, 7, 8]))
    assert second.sent == [6, 7, 8]
    failing = Remote(run, fails_at=10)
    with pytest.raises(ConnectionError, match="refused"):
        follow(run, failing, (4, [9]), (4, [10]))
    follow(run, third, (5, [10, 11]))
    assert third.sent == [10, 11], "what could not be sent is sent later, and the lock is free"


def test_texts_are_sent_once_and_after_the_line_of_their_step(run: RunDirectory) -> None:
    log, backend = MetricsLog(run, 0), Remote(run)
    replay = Replay(run, backend)
    log.text(2, "samples", "early")
    replay.send_new()
    assert backend.sent == [], "a tracker takes the newest step that it has got for that of the last line"
    log.write({"step": 2, "time": 0.0, "attempt": 0})
    replay.send_new()
    log.text(2, "samples", "late")
    replay.send_new()
    replay.finish()
    assert backend.sent == [2, "early", "late"]
    log.text(3, "samples", "next")
    log.write({"step": 3, "time": 0.0, "attempt": 0})
    replay = Replay(run, later := Remote(run))
    replay.send_new()
    replay.finish()
    assert later.sent == [3, "next"]


def test_two_processes_do_not_send_at_once(run: RunDirectory) -> None:
    logged(run, 0, [1])
    first, second = Remote(run), Remote(run)
    assert first.open()
    with pytest.raises(UserError, match="already sends the metrics of"):
        Replay(run, second).send_new()
    first.finish()
    Replay(run, second).send_new()
    assert second.sent == [1]


def test_a_follower_sends_each_line_once_and_new_places_get_all(run: RunDirectory) -> None:
    backend = Remote(run)
    replay = Replay(run, backend)
    replay.send_new()
    assert backend.sent == []
    logged(run, 0, [1, 2, 3])
    replay.send_new()
    logged(run, 1, [2, 3, 4])
    replay.send_new()
    replay.finish()
    assert (backend.sent, replay.sent, replay.last) == ([1, 2, 3, 4], 4, 4)
    assert Position.read(run, "remote", "here").step == 4
    assert Position.read(run, "remote", "elsewhere").step == 0


def test_tensorboard_hides_steps_that_are_done_again(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow(run, TensorBoard(Session(Config(), run)), (0, [1, 2, 3, 4]))
    MetricsLog(run, 0).text(4, "samples", "some text")
    follow(run, TensorBoard(Session(Config(), run)), (1, [5, 6]), (1, [5, 6]))
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in events.Tensors("samples")] == [4]
