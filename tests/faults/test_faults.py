"""Injects each kind of fault into runs on one machine. Each run must end like the undisturbed run and report
every fault.

The short form injects a few kinds into one run. The long form (``HPC_TRAIN_LONG=1``) runs a soak of 200 faults of all
kinds and 20 trials of each kind (200 of ``kill``). It prints its measurements, and resumes after an interruption
(``tests/checkpoint/progress.py``).
"""

from __future__ import annotations

import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from hpc_train.elastic.rendezvous import candidate_ports
from tests.checkpoint.progress import IN_LONG_FORM, LONG, Progress
from tests.faults.measured import trials
from tests.faults.plan import CRASHES, ENDS, HANGS, IN_SURROUNDINGS, KINDS, PASSING, SPECIAL, Fault, draw
from tests.faults.surroundings import Surroundings, surroundings
from tests.faults.trial import (
    Trial,
    assert_nothing_left,
    assert_survived,
    finish,
    freeze,
    run_with_faults,
    start,
    undisturbed,
)
from tests.run.outage import detachable

STEPS = 12
EVERY = "checkpoint.every=4"
SHORT = ("kill", "warm_parent", "storage_in_save", "request", "nan")
COMMON = [
    EVERY,
    "batch.loader_workers=1",
    "elastic.stop_grace_s=6",
    "train.nonfinite_limit=1",
    "train.spike_mads=1000",
    "train.max_rollbacks=1000",
]

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


@IN_LONG_FORM  # the decision and the agent have tests of it
def test_three_attempts_without_a_step_are_enough(tmp_path: Path) -> None:
    plan = [Fault("kill", 1, 0)] * 4
    trial = run_with_faults(tmp_path / "run", STEPS, plan, EVERY)
    assert trial.code == 93, trial.error
    assert trial.reported == [("killed", 1)] * 3
    assert len(trial.events("stopped_retrying")) == 1
    assert_nothing_left(trial.run)


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


@IN_LONG_FORM  # the agent's tests have each class of GPU error
def test_a_run_survives_errors_of_its_gpus(tmp_path: Path, around: Surroundings) -> None:
    """The run has only one node, so it restarts there."""
    assert_survives(tmp_path / "run", [Fault("device", 1, 6), Fault("kernel", 0, 10)], around)


def test_a_slow_rank_is_named_and_a_live_run_shows_its_stacks(tmp_path: Path) -> None:
    run = freeze(tmp_path / "run", 100_000, "telemetry.log_every=100")
    agent = start(run, [Fault("slow", 1, 0)])
    until(lambda: any(event["event"] == "straggler" for event in run.read_events()))
    asked = [sys.executable, "-m", "hpc_train", "stacks", str(run.path), "--wait", "120"]
    shown = subprocess.run(asked, capture_output=True, text=True, check=False)
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


def test_faults_of_all_kinds_drawn_at_random(tmp_path: Path, around: Surroundings) -> None:
    """The first port that each attempt would use is taken."""
    kinds = [*CRASHES, *HANGS, *ENDS, *PASSING, *around.kinds] if LONG else SHORT
    runs, faults = (20, 10) if LONG else (1, len(SHORT))
    progress = Progress.of("soak")
    for seed in map(int, progress.open(range(runs))):
        plan = draw(seed, faults, kinds, first_step=7, spacing=4)
        assert_survives(tmp_path / f"run-{seed}", plan, around)
        progress.passed(seed)


def assert_survives(path: Path, plan: Sequence[Fault], around: Surroundings, *overrides: str) -> Trial:
    steps = max(fault.step for fault in plan) + 9  # the last fault may occur in a recovery
    whole = undisturbed(path.with_name(f"{path.name}-undisturbed"), steps, *COMMON, *overrides, plan=plan)
    with ports_taken(path, attempts=4 * len(plan)):
        trial = run_with_faults(path, steps, plan, *COMMON, *overrides, around=around)
    assert_survived(trial, whole)
    assert_hangs_are_reported(trial)
    return trial


def assert_hangs_are_reported(trial: Trial) -> None:
    """Checks that each hang was reported with its rank, its phase, and the stacks of all ranks."""
    expected = [fault for fault in trial.plan if fault.kind in HANGS]
    hangs = trial.events("hang_detected")
    reported = [(hang["rank"], hang["phase"]) for hang in hangs]
    assert reported == [(one.rank, "checkpoint" if one.kind == "storage_in_save" else "step") for one in expected]
    for hang in hangs:
        stacks = Path(hang["stacks"]).read_text()
        assert "--- rank 0 on" in stacks
        assert "trainer.py" in stacks


@contextmanager
def ports_taken(run: Path, attempts: int) -> Iterator[None]:
    """Listens on the first port of each of the first ``attempts`` attempts of ``run``."""
    with ExitStack() as listening:
        for attempt in range(attempts):
            with suppress(OSError):  # two attempts of the same port
                listening.enter_context(socket.create_server(("127.0.0.1", next(candidate_ports(f"{run}:{attempt}")))))
        yield


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
