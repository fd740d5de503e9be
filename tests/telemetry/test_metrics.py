"""Metrics files, TensorBoard, and how readers join attempts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.metrics import MetricsLog
from hpc_train.telemetry.sinks import tensorboard
from hpc_train.telemetry.sinks.tensorboard import TensorBoard
from hpc_train.telemetry.sinks.tracker import Session
from tests.run.outage import detachable


def test_lines_and_texts_are_json_without_nan(tmp_path: Path) -> None:
    log = MetricsLog(RunDirectory(tmp_path), 3)
    log.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "val_accuracy": None, "lr": 0.1})
    text = (tmp_path / "metrics" / "attempt-003.jsonl").read_text()
    expected = {"step": 1, "loss": None, "grad_norm": None, "lr": 0.1}
    assert json.loads(text, parse_constant=pytest.fail) == expected
    log.text(1, "samples", "one\ntwo")
    text = json.loads((tmp_path / "texts" / "attempt-003.jsonl").read_text())
    assert (text["step"], text["attempt"], text["name"], text["text"]) == (1, 3, "samples", "one\ntwo")


def test_the_later_attempt_counts_where_two_overlap(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for attempt, steps in ((0, range(1, 6)), (1, range(3, 5)), (10, range(4, 7))):
        log = MetricsLog(run, attempt)
        for step in steps:
            log.write({"step": step, "attempt": attempt})
    found = [(line["step"], line["attempt"]) for line in run.read_metrics()]
    assert found == [(1, 0), (2, 0), (3, 1), (4, 10), (5, 10), (6, 10)]


def test_tensorboard_that_is_missing_is_a_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="package tensorboard, which is not installed"):
        TensorBoard(Session(Config(), RunDirectory(tmp_path)))


def test_metrics_that_cannot_be_written_are_written_later(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    outage = detachable(run.metrics)
    log = MetricsLog(run, 0)
    with outage():
        log.write({"step": 1, "attempt": 0})
        log.write({"step": 2, "attempt": 0})
    log.write({"step": 3, "attempt": 0})
    log.close()
    assert [line["step"] for line in run.read_all_metrics()] == [1, 2, 3]
