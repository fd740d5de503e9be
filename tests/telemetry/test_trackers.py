"""Trackers get each step once over attempts, rollbacks and processes; the table on disk is that of the newest steps."""

from __future__ import annotations

import csv
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.metrics import MetricsLog
from hpc_train.telemetry.sinks.background import BackgroundSink
from hpc_train.telemetry.sinks.csv import Csv
from hpc_train.telemetry.sinks.replay import Replay
from hpc_train.telemetry.sinks.sink import Backend, Line
from hpc_train.telemetry.sinks.tensorboard import TensorBoard
from hpc_train.telemetry.sinks.tracker import Position, Tracker
from tests.telemetry.test_wandb import logged


class Remote(Tracker):
    """Remembers what it was sent; fails at the step ``fails_at``."""

    name = "remote"
    label = "Remote"
    where = "here"  # type: ignore[assignment]

    def __init__(self, run: RunDirectory, first_step: int = 0, fails_at: int | None = None) -> None:
        super().__init__(run, first_step, patience_s=0.0)
        self.sent: list[int] = []
        self._fails_at = fails_at

    def connect(self, position: Position) -> Position | None:
        return position

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


def live(run: RunDirectory, attempt: int, backend: Backend, steps: Sequence[int]) -> BackgroundSink:
    """Logs steps of an attempt with a sink, in the foreground as far as the thread of the sink allows."""
    sink = BackgroundSink(backend, run)
    log = MetricsLog(run, attempt, [sink])
    for step in steps:
        log.write({"step": step, "time": 1e9 + step, "attempt": attempt, "loss": 10.0 * attempt + step})
    log.close()
    return sink


def test_attempts_continue_where_the_last_one_stopped_sending(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = Remote(run, 0), Remote(run, 3, fails_at=6), Remote(run, 4)
    live(run, 0, first, [1, 2, 3, 2, 3, 4])  # 2 and 3 are done again after a rollback
    assert first.sent == [1, 2, 3, 4]
    live(run, 1, second, [4, 5])
    assert second.sent == [5]
    logged(run, 2, [6, 7])  # not tracked
    live(run, 3, third, [5, 6, 7, 8])
    assert third.sent == [6, 7, 8]
    failing = Remote(run, 8, fails_at=9)
    live(run, 4, failing, [9, 10])
    assert "Remote: ConnectionError: refused" in capsys.readouterr().out
    replay = Replay(run, last := Remote(run))
    replay.send_new()
    replay.finish()
    assert last.sent == [9, 10], "what a sink could not send is sent later, and its lock is free"
    untracked = Remote(run, 10)
    logged(run, 5, [11, 12])
    live(run, 6, untracked, [13])
    assert untracked.sent == [13], "up to its first step, which is 10, nothing was missing"


def test_what_was_not_sent_before_an_attempt_is_sent_first(run: RunDirectory) -> None:
    logged(run, 0, [1, 2, 3, 4])
    backend = Remote(run, 3)
    live(run, 1, backend, [4, 5])
    assert backend.sent == [1, 2, 3, 4, 5]


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


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_table_has_a_row_per_step_and_columns_may_be_added(run: RunDirectory) -> None:
    live(run, 0, Csv(run, 0), [1, 2, 3, 4, 5])
    live(run, 1, Csv(run, 3), [4, 3, 4])  # goes back once more
    found = rows(run.path / "metrics.csv")
    assert [(row["step"], row["attempt"]) for row in found] == [("1", "0"), ("2", "0"), ("3", "1"), ("4", "1")]
    assert found[-1]["loss"] == "14.0"
    backend = Csv(run, 4)
    sink = BackgroundSink(backend, run)
    log = MetricsLog(run, 2, [sink])
    log.write({"step": 5, "time": 0.0, "attempt": 2, "val_loss": 1.5})
    log.write({"step": 6, "time": 0.0, "attempt": 2, "loss": 6.0})
    log.close()
    found = rows(run.path / "metrics.csv")
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "5", "6"]
    assert [row["val_loss"] for row in found] == ["", "", "", "", "1.5", ""]


def test_a_table_is_made_of_any_run(run: RunDirectory) -> None:
    logged(run, 0, [1, 2, 3])
    logged(run, 1, [3, 4])
    replay = Replay(run, Csv(run))
    replay.send_new()
    replay.finish()
    assert [row["step"] for row in rows(run.path / "metrics.csv")] == ["1", "2", "3", "4"]


def test_tensorboard_hides_steps_that_are_done_again(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    live(run, 0, TensorBoard(run, 0), [1, 2, 3, 4])
    live(run, 1, TensorBoard(run, 4), [5, 6, 5, 6])
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_a_sink_that_is_slow_gets_waiting_lines_together(run: RunDirectory) -> None:
    batches: list[int] = []

    begins = threading.Event()

    class Slow(Backend):
        name, label = "slow", "Slow"

        def open(self) -> bool:
            return begins.wait(60)

        def write(self, lines: Sequence[Line]) -> None:
            batches.append(len(lines))

        def text(self, step: int, name: str, text: str) -> None:
            batches.append(-step)

    sink = BackgroundSink(Slow(), run)
    for step in (1, 2):
        sink.log({"step": step})
    sink.text(2, "samples", "text")
    sink.log({"step": 3})
    begins.set()
    sink.close()
    # the first wait returns what is there at that moment
    assert [sum(count for count in batches[: batches.index(-2)]), -2, *batches[batches.index(-2) + 1 :]] == [2, -2, 1]
