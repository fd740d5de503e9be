"""The fault matrix of one machine: whatever strikes, the run ends as if nothing had, and says what it was.

The short form strikes one run with all crashes and one with all hangs; the long one (``HPC_TRAIN_LONG=1``) has 20
trials of each kind, 200 kills, and a soak of 200 faults drawn at random. It prints what it measured.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.faults.plan import CLASSES, CRASHES, HANGS, RECOVERY, Fault, draw
from tests.faults.trial import assert_nothing_left, assert_survived, finish, freeze, start, struck, undisturbed

LONG = os.environ.get("HPC_TRAIN_LONG") == "1"
STEPS = 44
EVERY = "checkpoint.every=4"
LOADER = "batch.loader_workers=1"

pytestmark = pytest.mark.timeout(6 * 3600 if LONG else 900)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return undisturbed(tmp_path_factory.mktemp("reference") / "run", STEPS, EVERY)


def spaced(kinds: Sequence[str], spacing: int) -> list[Fault]:
    return [Fault(kind, 0 if kind == "store" else 1, 3 + spacing * place) for place, kind in enumerate(kinds)]


def until(found: Callable[[], object], seconds: float = 240) -> None:
    limit = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < limit
        time.sleep(0.2)


def test_every_kind_of_crash_in_one_run(tmp_path: Path, reference: RunDirectory) -> None:
    plan = [*spaced(list(CRASHES), spacing=4), Fault("kill", 0, RECOVERY)]
    assert_survived(struck(tmp_path / "run", STEPS, plan, EVERY, LOADER), reference)


def test_every_kind_of_hang_in_one_run(tmp_path: Path, reference: RunDirectory) -> None:
    plan = spaced(list(HANGS), spacing=10)
    trial = struck(tmp_path / "run", STEPS, plan, EVERY)
    assert_survived(trial, reference)
    hangs = trial.events("hang_detected")
    assert [(hang["rank"], hang["step"], hang["phase"]) for hang in hangs] == [(1, one.step, "step") for one in plan]
    for hang in hangs:
        stacks = Path(hang["stacks"]).read_text()
        assert "--- rank 0 on" in stacks
        assert "trainer.py" in stacks


def test_three_attempts_without_a_step_are_enough(tmp_path: Path) -> None:
    plan = [Fault("kill", 1, 0)] * 4
    trial = struck(tmp_path / "run", STEPS, plan, EVERY)
    assert trial.code == 93, trial.error
    assert trial.told == [("killed", 1)] * 3
    assert len(trial.events("gave_up")) == 1
    assert_nothing_left(trial.run)


def test_out_of_memory_is_told_and_not_tried_again(tmp_path: Path) -> None:
    trial = struck(tmp_path / "run", STEPS, [Fault("memory", 1, 3)], EVERY)
    assert trial.code == 1
    assert trial.told == [("out_of_memory", 1)]
    assert "batch.micro_size" in trial.error
    assert_nothing_left(trial.run)


def test_a_run_whose_agent_is_killed_goes_on_when_it_is_started_again(tmp_path: Path, reference: RunDirectory) -> None:
    run = freeze(tmp_path / "run", STEPS, EVERY)
    agent = start(run)
    until(lambda: list(run.checkpoints.glob("step-*")))
    agent.kill()
    agent.wait()
    assert_nothing_left(run)
    assert_survived(finish(run, start(run)), reference)


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


def test_faults_drawn_at_random(tmp_path: Path) -> None:
    """The soak."""
    runs, faults = (20, 10) if LONG else (1, 8)
    kinds = [kind for kind in CLASSES if LONG or kind not in HANGS]
    steps = 4 * faults + 8
    whole = undisturbed(tmp_path / "undisturbed", steps, EVERY)
    for seed in range(runs):
        plan = draw(seed, faults, kinds, first_step=3, spacing=4)
        assert_survived(struck(tmp_path / f"run-{seed}", steps, plan, EVERY, LOADER), whole)


@pytest.mark.skipif(not LONG, reason="20 trials of each kind: HPC_TRAIN_LONG=1")
@pytest.mark.parametrize("kind", CLASSES)
def test_twenty_trials(tmp_path: Path, kind: str) -> None:
    """200 kills, 20 of each other kind: ten in a run."""
    steps, recoveries = 4 * 10 + 8, []
    whole = undisturbed(tmp_path / "undisturbed", steps, EVERY)
    for number in range(20 if kind == "kill" else 2):
        trial = struck(tmp_path / f"run-{number}", steps, spaced([kind] * 10, 4), EVERY, LOADER, timeout=900)
        assert_survived(trial, whole)
        recoveries += trial.recoveries()
    tell(kind, recoveries)


def tell(kind: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    last = ordered[int(0.95 * (len(ordered) - 1))]
    print(
        f"{kind}: {len(ordered)} trials, first step after {statistics.median(ordered):.2f} s (median), {last:.2f} (p95)"
    )
