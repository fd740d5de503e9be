"""When a run saves: by steps, by the clock, or as often as pays."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from hpc_train.checkpoint.failures import PRIOR_PER_GPU_HOUR, best_interval
from hpc_train.checkpoint.manifest import NAME as MANIFEST
from hpc_train.config.evaluation import BestMetric
from hpc_train.config.values import SaveEvery, parse_save_every
from hpc_train.errors import UserError
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import append_line
from hpc_train.run.requests import StopFlag
from hpc_train.train import saving
from hpc_train.train.evaluation import Evaluation
from hpc_train.train.saving import FIRST_S, LAST_S, BestSoFar, SaveSchedule, failure_rate
from tests.train.runs import frozen, run_attempt


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_every_may_be() -> None:
    assert parse_save_every("500") == SaveEvery(steps=500)
    assert parse_save_every("30m") == SaveEvery(seconds=1800)
    assert parse_save_every("1.5h") == SaveEvery(seconds=5400)
    assert parse_save_every("auto") == SaveEvery(auto=True)
    assert parse_save_every("0") == SaveEvery()
    for text in ("", "-5", "5 m", "often", "0m", "1e3"):
        with pytest.raises(UserError, match=r"checkpoint\.every is"):
            parse_save_every(text)


def test_steps_are_counted_and_the_clock_is_silent() -> None:
    schedule = SaveSchedule(SaveEvery(steps=4), 8, True, clock=Clock())
    assert [step for step in range(1, 10) if schedule.falls_on(step)] == [4, 8]
    assert not schedule.ask()


def test_the_clock_asks_once_until_a_save() -> None:
    clock = Clock()
    schedule = SaveSchedule(SaveEvery(seconds=60), 8, True, clock=clock)
    reported = []
    for clock.now in (100, 159, 160, 161, 300):
        reported.append(schedule.ask())
    assert reported == [False, False, True, False, False]
    schedule.saved(1.0, None)
    clock.now = 359
    assert not schedule.ask()
    clock.now = 360
    assert schedule.ask()
    assert not SaveSchedule(SaveEvery(seconds=60), 8, False, clock=clock).ask()  # another rank's clock does not count


def test_the_step_before_the_last_is_saved_if_much_would_be_lost() -> None:
    clock = Clock()
    for every in (SaveEvery(auto=True), SaveEvery()):
        schedule = SaveSchedule(every, 8, True, clock=clock)
        clock.now += LAST_S - 1
        assert not schedule.ask(before_evaluation=True)
        clock.now += 1
        assert not schedule.ask() and schedule.ask(before_evaluation=True)
        schedule.saved(1.0, None)
        assert not schedule.ask(before_evaluation=True)


def save_before_the_end(spec: WorkerSpec, stop: StopFlag) -> None:
    saving.LAST_S = 0.0


def fail_to_evaluate(spec: WorkerSpec, stop: StopFlag) -> None:
    def run(*_: object) -> None:
        raise ZeroDivisionError("a metric of the user's")

    saving.LAST_S = 0.0
    Evaluation.run = run  # type: ignore[method-assign, assignment]


def saved_steps(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir() if path.name.startswith("step"))


def test_an_error_in_the_last_evaluation_does_not_lose_the_training(tmp_path: Path) -> None:
    """The last checkpoint has the metrics of the last evaluation."""
    run = frozen(tmp_path / "run", "+strategy=single", "train.steps=3", "data.validation_samples=8")
    with pytest.raises(AssertionError, match="a metric of the user's"):
        run_attempt(run, 1, fail_to_evaluate)
    assert saved_steps(run) == ["step-00000002"]
    assert run_attempt(run, 1, save_before_the_end) == [0]
    assert saved_steps(run) == ["step-00000002", "step-00000003"]
    manifest = json.loads((run.checkpoints / "step-00000003" / MANIFEST).read_text())
    assert manifest["metrics"]["val_loss"] == pytest.approx(run.read_metrics()[-1]["val_loss"])


@pytest.mark.long_form(6)  # test_the_step_before_the_last_is_saved_if_much_would_be_lost
def test_an_evaluation_that_succeeded_needs_no_save_before_the_last_one(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "train.steps=4", "train.eval_every=1")
    assert run_attempt(run, 2, save_before_the_end) == [0, 0]
    assert saved_steps(run) == ["step-00000004"]


def test_auto_follows_what_a_save_costs(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    schedule = SaveSchedule(SaveEvery(auto=True), 1024, True, clock=clock)
    clock.now += FIRST_S
    assert schedule.ask()
    schedule.saved(10.0, 10.0)
    assert "saving every 27 minutes, for 10 s per save and 2.7e-05 failures per GPU-hour" in capsys.readouterr().out
    clock.now += best_interval(10.0, 10.0, PRIOR_PER_GPU_HOUR, 1024) - 1
    assert not schedule.ask()
    clock.now += 1
    assert schedule.ask()


def test_the_interval_is_youngs_and_never_shorter_than_a_save() -> None:
    assert best_interval(2.0, 2.0, 1.0, 1) == pytest.approx(math.sqrt(2 * 2 * (3600 + 120)))
    assert best_interval(0.01, 500.0, 1.0, 1) == 500


def test_failures_that_this_run_has_seen_count_and_the_users_mistakes_do_not(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    assert failure_rate(run) == PRIOR_PER_GPU_HOUR
    for attempt, kind in enumerate(("killed", "user_error", "communication")):
        EventLog.open(run, "agent-a", attempt).write("worker_failed", **{"class": kind})
        for step in (0, 1):
            line = {"step": 2 * attempt + step, "time": 1800.0 * step, "attempt": attempt, "world_size": 4}
            append_line(run.metrics_file(attempt), line)
    assert failure_rate(run) == pytest.approx(2 / 6)


@pytest.mark.long_form(5)  # test_the_clock_asks_once_until_a_save
def test_all_ranks_save_at_the_step_that_the_first_ones_clock_says(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "checkpoint.every=0.001s", "train.steps=4", "checkpoint.keep=9")
    assert run_attempt(run, 2) == [0, 0]
    steps = [event["step"] for event in run.read_events() if event["event"] == "checkpoint_saved"]
    assert steps[-1] == 4
    assert len(steps) >= 3


def test_the_best_one_and_every_second_one_stay(tmp_path: Path) -> None:
    more = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_best=val_loss", "checkpoint.keep_every=4")
    run = frozen(tmp_path / "run", "+strategy=single", "train.eval_every=1", "train.steps=6", *more)
    assert run_attempt(run, 1) == [0]
    losses = {line["step"]: line["val_loss"] for line in run.read_metrics()}
    best = min(losses, key=lambda step: (losses[step], -step))
    kept = {int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*")}
    assert kept == {best, 4, 6}


def test_the_best_value_is_forgotten_with_another_metric_or_mode() -> None:
    accuracy, loss = BestMetric("val_accuracy", highest=True), BestMetric("val_loss", highest=False)
    before = BestSoFar(accuracy)
    assert before.improves({"val_accuracy": 0.1})
    for other in (loss, BestMetric("val_accuracy", highest=False), None):
        best = BestSoFar(other)
        best.load_state(before.state())
        assert best.value is None
    best = BestSoFar(loss)
    best.load_state(0.1)  # of an earlier version, which does not tell the metric
    assert best.improves({"val_loss": 3.0}) and not best.improves({"val_loss": 3.5})
    again = BestSoFar(accuracy)
    again.load_state(before.state())
    assert not again.improves({"val_accuracy": 0.1})
    again.load_state(None)
    assert again.value is None


@pytest.mark.long_form(6)
def test_a_stop_request_that_leaves_no_time_for_a_step_is_announced_once(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "train.steps=4", "elastic.stop_grace_s=0.001")
    assert run_attempt(run, 2) == [0, 0]
    (warning,) = [event for event in run.read_events() if event["event"] == "warning"]
    assert warning["step"] == 2 and "elastic.stop_grace_s, which is 0.001 s" in warning["message"]
    roomy = frozen(tmp_path / "roomy", "+strategy=dp", "train.steps=4")
    assert run_attempt(roomy, 2) == [0, 0]
    assert not [event for event in roomy.read_events() if event["event"] == "warning"]


def wait_in_the_first_step(spec: WorkerSpec, stop: StopFlag) -> None:
    """As if it compiled."""
    from hpc_train.train.step import TrainStep

    take = TrainStep.__call__

    def first(self, index, batch):  # type: ignore[no-untyped-def]
        TrainStep.__call__ = take  # type: ignore[method-assign]
        time.sleep(4)
        return take(self, index, batch)

    TrainStep.__call__ = first  # type: ignore[method-assign]


@pytest.mark.long_form(6)
def test_the_first_step_of_an_attempt_is_no_slow_step(tmp_path: Path) -> None:
    options = "+strategy=single", "elastic.stop_grace_s=4"
    run = frozen(tmp_path / "run", *options, "train.steps=2")
    assert run_attempt(run, 1) == [0]
    frozen(run.path, *options, "train.steps=4")
    assert run_attempt(run, 1, wait_in_the_first_step) == [0]
    assert max(line["step_s"] for line in run.read_metrics()) > 3, "longer than what a stop request leaves"
    assert not [event for event in run.read_events() if "stop request" in event.get("message", "")]
