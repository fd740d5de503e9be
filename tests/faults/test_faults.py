"""Injects each kind of fault into runs on one machine. Each run must end like the undisturbed run and report
every fault.

The short form injects two kinds into one run. The long form (``HPC_TRAIN_LONG=1``) runs a soak of 1,000 faults of
all kinds (``soak.py``) and 20 trials of each kind (200 of ``kill``). It prints its measurements, and resumes after an
interruption (``tests/checkpoint/progress.py``).
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoint.progress import IN_LONG_FORM, LONG, Progress
from tests.checkpoint.tensors import assert_same_bits
from tests.doors.command import hpc_train
from tests.faults.measured import trials
from tests.faults.plan import IN_SURROUNDINGS, KINDS, SPECIAL, Fault
from tests.faults.soak import Record, soak, upper_bound
from tests.faults.surroundings import Surroundings, surroundings
from tests.faults.trial import (
    assert_survives,
    finish,
    freeze,
    run_with_faults,
    start,
    undisturbed,
)
from tests.run.outage import detachable
from tests.warm_parents import with_server

STEPS = 12
pytestmark = pytest.mark.timeout(6 * 3600 if LONG else 900)


@pytest.fixture(scope="module")
def around() -> Iterator[Surroundings]:
    with surroundings() as made:
        yield made


def until(found: Callable[[], object], seconds: float = 240) -> None:
    limit = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < limit
        time.sleep(0.2)


@IN_LONG_FORM  # the soak has requests, and other tests a full disk
def test_a_preemption_while_the_event_log_cannot_be_written_saves_a_checkpoint(tmp_path: Path) -> None:
    run = freeze(tmp_path / "run", 100_000)
    outage = detachable(run.events)
    agent = start(run)
    until(run.read_metrics)
    with outage():
        agent.send_signal(signal.SIGUSR2)
        until(lambda: list(run.checkpoints.glob("step-*")) or agent.poll() is not None)
    trial = finish(run, agent)
    assert trial.code == 75, trial.error
    step = run.read_metrics()[-1]["step"]
    assert [path.name for path in run.checkpoints.glob("step-*")] == [f"step-{step:08d}"]
    reported = [event["event"] for event in trial.events("stop_requested", "checkpoint_saved")]
    assert reported == ["stop_requested", "checkpoint_saved"]


@pytest.mark.long_form(18)
def test_a_slow_rank_is_named_and_a_live_run_shows_its_stacks(tmp_path: Path) -> None:
    run = freeze(tmp_path / "run", 100_000, "telemetry.log_every=100")
    agent = start(run, [Fault("slow", 1, 0)], Surroundings(variables=with_server(os.environ)))
    until(lambda: any(event["event"] == "straggler" for event in run.read_events()))
    shown = hpc_train("stacks", str(run.path), "--wait", "120", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for rank in (0, 1):
        assert f"--- rank {rank} on" in shown.stdout
    assert "trainer.py" in shown.stdout
    agent.send_signal(signal.SIGTERM)
    trial = finish(run, agent)
    assert trial.code == 75, trial.error
    [straggler] = trial.events("straggler")
    assert straggler["rank"] == 1
    assert trial.events("worker_failed", "restarted") == []


def test_the_bound_of_the_soak_is_that_of_clopper_and_pearson() -> None:
    assert upper_bound(0, 1000) == pytest.approx(1 - 0.05 ** (1 / 1000))
    assert upper_bound(2, 20) == pytest.approx(0.2826, abs=1e-4)  # one-sided, from tables of the binomial distribution


def test_a_killed_rank_and_a_hang(tmp_path: Path) -> None:
    """The first port that each attempt would use is taken."""
    plan = [Fault("kill", 1, 6), Fault("collective", 0, 9)]
    assert_survives(tmp_path / "run", plan, Surroundings(variables=with_server(os.environ)))


@pytest.mark.long_form(70)  # the short form covers what is found (test_corruption.py) and what retention keeps
def test_a_run_with_a_wrong_weight_continues_from_the_newest_proved_checkpoint(tmp_path: Path) -> None:
    verified = ("train.verify.every=1", "checkpoint.every=2", "checkpoint.keep=1")
    whole = undisturbed(tmp_path / "undisturbed", STEPS, *verified)
    trial = run_with_faults(tmp_path / "run", STEPS, [Fault("weight", 1, 9)], *verified)
    assert trial.codes == [0], trial.error
    assert trial.reported[0][0] == "corruption"
    [found] = trial.events("corruption")
    assert (found["reason"], found["step"], found["ranks"], found["final"]) == (
        "weights and optimizer state", 9, [0, 1], True,
    )  # fmt: skip
    [resumed] = trial.events("resumed")
    assert resumed["step"] <= found["first"]
    last = f"step-{STEPS:08d}"
    assert_same_bits(trial.run.checkpoints / last, whole.checkpoints / last)


@IN_LONG_FORM  # the case before
def test_faults_of_all_kinds_drawn_at_random(tmp_path: Path, around: Surroundings) -> None:
    progress = Progress.of("soak")
    assert progress.file is not None
    record = Record(progress.file.with_suffix(".jsonl"))
    soak(tmp_path, record, around)
    print(f"\n{record.table()}")
    assert [run.failure for run in record.runs() if run.failure is not None] == []


@pytest.mark.skipif(not LONG, reason="20 trials of each kind: HPC_TRAIN_LONG=1")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SPECIAL])
def test_twenty_trials(tmp_path: Path, around: Surroundings, kind: str) -> None:
    """Injects 200 kills, and 20 faults of each other kind, ten in each run."""
    if kind in IN_SURROUNDINGS and kind not in around.kinds:
        pytest.skip("only root can make its surroundings")
    progress, recoveries = Progress.of(f"twenty-{kind}"), list[float]()
    for number in progress.open(range(trials(20 if kind == "kill" else 2))):
        plan = [Fault(kind, 1, 7 + 4 * place) for place in range(10)]
        recoveries += assert_survives(tmp_path / f"run-{number}", plan, around).recoveries()
        progress.passed(number)
    print_recovery_times(kind, recoveries)


def print_recovery_times(kind: str, seconds: list[float]) -> None:
    if not seconds:  # it stops nothing
        return
    ordered = sorted(seconds)
    last = ordered[int(0.95 * (len(ordered) - 1))]
    words = f"first step after {statistics.median(ordered):.2f} s (median), {last:.2f} (p95)"
    print(f"{kind}: {len(ordered)} trials, {words}")
