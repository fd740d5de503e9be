"""Metrics files, TensorBoard, and how readers join attempts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.metrics import MetricsLog
from hpc_train.telemetry.sinks import tensorboard
from hpc_train.telemetry.sinks.background import BackgroundSink
from hpc_train.telemetry.sinks.tensorboard import TensorBoard
from tests.run.outage import detachable
from tests.train.runs import frozen, run_attempt


class Remembering:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def text(self, step: int, name: str, text: str) -> None:
        """Text is not remembered."""

    def end(self) -> None:
        self.lines.append({"step": "end"})

    def close(self) -> None:
        self.lines.append({"step": "closed"})


def test_lines_are_json_without_nan_and_reach_every_sink(tmp_path: Path) -> None:
    sink = Remembering()
    log = MetricsLog(RunDirectory(tmp_path), 3, [sink])
    log.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "val_accuracy": None, "lr": 0.1})
    text = (tmp_path / "metrics" / "attempt-003.jsonl").read_text()
    expected = {"step": 1, "loss": None, "grad_norm": None, "lr": 0.1}
    assert json.loads(text, parse_constant=pytest.fail) == expected
    assert sink.lines == [expected]


def test_the_later_attempt_counts_where_two_overlap(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for attempt, steps in ((0, range(1, 6)), (1, range(3, 5)), (10, range(4, 7))):
        log = MetricsLog(run, attempt)
        for step in steps:
            log.write({"step": step, "attempt": attempt})
    found = [(line["step"], line["attempt"]) for line in run.read_metrics()]
    assert found == [(1, 0), (2, 0), (3, 1), (4, 10), (5, 10), (6, 10)]


def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=single", "telemetry.tensorboard=true", "train.steps=2")
    assert run_attempt(run, 1) == [0]
    assert [path.stat().st_size > 0 for path in (run.path / "tensorboard").iterdir()] == [True]


def test_tensorboard_that_is_missing_is_a_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="package tensorboard, which is not installed"):
        TensorBoard(RunDirectory(tmp_path), 0)


def test_metrics_that_cannot_be_written_are_written_later(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    outage = detachable(run.metrics)
    sink = Remembering()
    log = MetricsLog(run, 0, [sink])
    with outage():
        log.write({"step": 1, "attempt": 0})
        log.write({"step": 2, "attempt": 0})
    log.write({"step": 3, "attempt": 0})
    log.close()
    assert [line["step"] for line in sink.lines] == [1, 2, 3, "end", "closed"]
    assert [line["step"] for line in run.read_all_metrics()] == [1, 2, 3]


def test_tensorboard_on_a_full_disk_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TensorBoard(RunDirectory(tmp_path), 0)
    backend.open()
    thread = backend._writer.file_writer.event_writer._async_writer._worker
    thread.exception = OSError(28, "No space left on device")  # as of a failed write in this thread
    monkeypatch.setattr(backend, "open", lambda: True)
    log = BackgroundSink(backend, RunDirectory(tmp_path))
    for step in (1, 2):
        log.log({"step": step, "time": 0.0, "loss": 1.0})
    log.close()
    said = capsys.readouterr().out
    assert said.count("TensorBoard: OSError: [Errno 28] No space left on device; continuing without it") == 1
