"""Lines of metrics that are completed one step late, as on GPUs, are those that are written at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.requests import StopFlag
from hpc_train.train.report import Readback
from hpc_train.train.watch.step_clock import DeviceStopwatch
from tests.checkpoint.tensors import assert_same_bits
from tests.faults.test_numbers import GOES_BACK, poison, poison_and_stop, rollbacks
from tests.train.runs import frozen, run_attempt
from tests.train.test_gradients_not_finite import with_large_scale

COMPARED = ("step", "epoch", "loss", "lr", "grad_norm", "samples", "tokens", "loss_scale", "val_loss", "val_accuracy")
TOLD = ("rolled_back", "step_skipped", "checkpoint_saved", "checkpoint_set_aside", "training_stopped", "warning")


def late(prepare: Any, spec: WorkerSpec, stop: StopFlag) -> None:
    """Lines are completed late on the CPU, too; a rank waits for the device only to save and to complete a line."""
    from hpc_train.train import trainer
    from hpc_train.train.step import TrainStep

    trainer.logs_late = lambda device: True
    asked = TrainStep.skipped_in_a_row

    def in_a_row(self: TrainStep) -> int:
        with Path(spec.run_dir, "asked").open("a") as file:
            file.write("x")
        return asked.fget(self)  # type: ignore[attr-defined, no-any-return]

    TrainStep.skipped_in_a_row = property(in_a_row)  # type: ignore[method-assign, assignment]
    if prepare is not None:
        prepare(spec, stop)


def content(run: RunDirectory) -> list[Any]:
    lines = [({key: line.get(key) for key in COMPARED}, sorted(line)) for line in run.read_metrics()]
    events = [(event["event"], event.get("step")) for event in run.read_events() if event["event"] in TOLD]
    result = run.record().get("result", {})
    return [lines, sorted(events, key=str), [result.get(key) for key in ("steps", "loss", "val_loss", "tokens")]]


def run_late(path: Path, ends: int, prepare: Any, *overrides: str) -> RunDirectory:
    run = frozen(path, "+strategy=single", *overrides)
    assert run_attempt(run, 1, partial(late, prepare)) == [ends]
    return run


def both(tmp_path: Path, prepare: Any, *overrides: str) -> RunDirectory:
    """Returns a run with late lines, which has left what one without has left."""
    expected = frozen(tmp_path / "at_once", "+strategy=single", *overrides)
    assert run_attempt(expected, 1, prepare) == [0]
    run = run_late(tmp_path / "late", 0, prepare, *overrides)
    assert content(run) == content(expected)
    last = max(path.name for path in expected.checkpoints.iterdir())
    assert_same_bits(run.checkpoints / last, expected.checkpoints / last)
    return run


@pytest.mark.long_form(10)  # test_an_error_loses_no_line in the short form
def test_the_metrics_of_a_run_are_the_same(tmp_path: Path) -> None:
    """Also while fp16 overflows in its first steps, and where the last step falls on no multiple of 3."""
    chosen = ["precision=fp16", "train.steps=8", "train.eval_every=4"]
    run = both(tmp_path, with_large_scale, *chosen, "telemetry.log_every=3", "checkpoint.every=5")
    saves = sum(event["event"] == "checkpoint_saved" for event in run.read_events())
    assert 0 < saves <= (run.path / "asked").stat().st_size <= 2 * saves + 2, "every step waits for the device"


@pytest.mark.long_form(8)
def test_a_rollback_skips_the_same_data(tmp_path: Path) -> None:
    run = both(tmp_path, partial(poison, "nan", range(5, 8)), *GOES_BACK, "checkpoint.every=2")
    assert rollbacks(run) == [(8, 4, [[5, 8]])]


@pytest.mark.long_form(4)  # tests/faults/test_numbers.py rolls back without late lines
def test_a_stop_that_is_agreed_on_before_the_line_of_a_step_that_diverges(tmp_path: Path) -> None:
    prepare = partial(poison_and_stop, "nan", range(5, 8), 6)
    run = run_late(tmp_path / "run", 75, prepare, *GOES_BACK, "checkpoint.every=2")
    assert rollbacks(run) == [(8, 4, [[5, 8]])]
    assert [line["step"] for line in run.read_metrics()] == list(range(1, 9))
    assert [event["step"] for event in run.read_events() if event["event"] == "training_stopped"] == [4]


@pytest.mark.long_form(4)
def test_a_jump_without_a_checkpoint_loses_no_step(tmp_path: Path) -> None:
    run = run_late(tmp_path / "run", 0, partial(poison, "spike", range(10, 13)), *GOES_BACK, "checkpoint.every=0")
    assert [event["step"] for event in run.read_events() if event["event"] == "warning"] == [13]
    lines = run.read_metrics()
    assert [(line["step"], line["samples"]) for line in lines] == [(step, 8 * step) for step in range(1, 17)]


def fails_in_step_six(spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.train.step import TrainStep

    take = TrainStep.__call__

    def failing(self: TrainStep, step: int, batch: Any) -> Any:
        if step == 6:
            raise RuntimeError("the sixth step fails")
        return take(self, step, batch)

    TrainStep.__call__ = failing  # type: ignore[method-assign]


def test_an_error_loses_no_line(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=single")
    with pytest.raises(AssertionError, match="the sixth step fails"):
        run_attempt(run, 1, partial(late, fails_in_step_six))
    assert [line["step"] for line in run.read_metrics()] == list(range(1, 7))


class FakeEvent:
    """An event of a device that finishes all work when the host waits for it."""

    def __init__(self, **_: Any) -> None:
        self.done = False

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, _: FakeEvent) -> float:
        return 1000.0


def test_the_host_waits_for_a_gpu_only_when_it_reads() -> None:
    value = torch.tensor(float("nan"))
    empty, copies = torch.empty, []
    copy = torch.Tensor.copy_

    def pinned(*size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return empty(*size, dtype=dtype)

    def noted(self: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copies.append(non_blocking)
        return copy(self, other)

    with (
        mock.patch.object(torch.cuda, "Event", FakeEvent),
        mock.patch.object(torch, "empty", pinned),
        mock.patch.object(torch.Tensor, "copy_", noted),
    ):
        readback = Readback({"loss": torch.tensor(2.5), "norm": value}, torch.device("cuda", 0))
    assert copies == [True] and not readback.ready
    value.fill_(1.0)  # the next step
    found = readback.read()
    assert readback.ready and found["loss"] == 2.5 and found["norm"] != found["norm"]


def test_the_clock_of_a_gpu_waits_only_for_the_steps_before_the_cut() -> None:
    with mock.patch.object(torch.cuda, "Event", FakeEvent):
        watch = DeviceStopwatch()
        watch.end(watch.begin())
        watch.cut()
        before = watch._closed.open[-1][1]
        watch.end(watch.begin())
        after = watch._current.open[-1][1]
        for _, end in (*watch._closed.open, *watch._current.open):
            assert not end.query()
        watch.collect()
        assert watch.take() == 1.0
        assert before.query() and not after.query()
        after.done = True
        watch.cut()
        assert watch.take() == 1.0
