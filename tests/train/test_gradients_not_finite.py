"""A gradient that is not finite: no rank takes the step, and fp16's loss scale follows."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.elastic.nodes import NodeFailures
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.requests import StopFlag
from hpc_train.train.step import LARGEST, SMALLEST, LossScale
from tests.checkpoint.tensors import read_tensors
from tests.train.runs import frozen, run_attempt


def poison(steps: Container[int], spec: WorkerSpec, stop: StopFlag) -> None:
    """The loss of rank 1 is NaN, and that of no other rank."""
    from hpc_train.parallel.pipeline.engine import PipelineEngine
    from hpc_train.parallel.replica_engine import ReplicaEngine

    for engine in (PipelineEngine, ReplicaEngine):
        compute = engine.train_step

        def poisoned(self, step, batch, loss_scale=None, compute=compute):  # type: ignore[no-untyped-def]
            if spec.rank == 1 and step in steps:
                loss_scale = torch.tensor(float("nan"))
            return compute(self, step, batch, loss_scale)

        engine.train_step = poisoned  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["+strategy=dp"], id="dp"),
        pytest.param(["+strategy=zero2", "optim=sgd"], id="zero2"),
        pytest.param(["+strategy=pp"], id="pp"),
        pytest.param(["+strategy=tp"], id="tp"),
        pytest.param(["+strategy=dp", "optim.in_backward=true", "optim.clip_norm=0", "strategy.bucket_cap_mb=0.001"],
                     id="in-backward"),
    ],
)  # fmt: skip
@pytest.mark.long_form(8, cases=["zero2", "pp", "tp", "in-backward"])
def test_all_ranks_skip_the_step(tmp_path: Path, overrides: list[str]) -> None:
    run = frozen(tmp_path / "run", *overrides, "checkpoint.every=1", "checkpoint.keep=9", "train.steps=5")
    assert run_attempt(run, 2, partial(poison, {2})) == [0, 0]
    states = [read_tensors(run.checkpoints / f"step-{step:08d}") for step in (2, 3, 4)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]), "step 2 changed something"
    moved = [name for name in states[0] if not torch.equal(states[1][name], states[2][name])]
    assert len(moved) == len(states[0]), "step 3 did not change everything"
    assert [line["grad_norm"] is None for line in run.read_metrics()] == [False, False, True, False, False]
    assert [event["step"] for event in run.read_events() if event["event"] == "step_skipped"] == [3]
    [replayed] = [event for event in run.read_events() if event["event"] == "replayed"]
    verdict = "unknown" if "optim.in_backward=true" in overrides else "data or optimization"
    assert (replayed["step"], replayed["reason"], replayed["node"]) == (3, verdict, None)


def err_once(spec: WorkerSpec, stop: StopFlag) -> None:
    """Rank 1 computes NaN in the first pass of the third step."""
    from hpc_train.parallel.replica_engine import ReplicaEngine

    compute = ReplicaEngine.train_step
    passes: list[int] = []

    def erring(self, step, batch, loss_scale=None):  # type: ignore[no-untyped-def]
        passes.append(step)
        if spec.rank != 1 or passes.count(2) != 1 or step != 2:
            return compute(self, step, batch, loss_scale)
        nan = torch.tensor(float("nan"))
        result = compute(self, step, batch, nan)
        return replace(result, loss_sum=nan)

    ReplicaEngine.train_step = erring  # type: ignore[method-assign]


def test_a_replay_shows_that_a_rank_has_erred(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "train.steps=5", "train.nonfinite_limit=1", "checkpoint.every=1")
    assert run_attempt(run, 2, err_once) == [0, 0]
    events = run.read_events()
    [replayed] = [event for event in events if event["event"] == "replayed"]
    assert (replayed["step"], replayed["reason"], replayed["ranks"]) == (3, "hardware", [1])
    assert f"differs on rank 1 of {replayed['node']}, so the hardware erred" in replayed["message"]
    assert replayed["message"] in (run.logs / "rank-0-000.log").read_text()
    [rolled_back] = [event for event in events if event["event"] == "rolled_back"]
    assert rolled_back["to_step"] == 2 and "so the hardware erred" in rolled_back["reason"]
    [failure] = NodeFailures(run, 3600.0).recent()
    assert (failure["node"], failure["class"]) == (replayed["node"], "wrong numbers")


def test_a_run_that_only_skips_ends_with_an_error(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "train.nonfinite_limit=3")
    with pytest.raises(AssertionError, match=r"Diverged: no gradient was finite in the last 3 steps"):
        run_attempt(run, 2, partial(poison, range(100)))


# the feed-forward products of the second step overflow, on every CPU
TOO_FAST = ("optim=sgd", "optim.lr=1e17", "optim.warmup_steps=0", "optim.clip_norm=0", "optim.schedule=constant")


@pytest.mark.parametrize("strategy", ["dp", "pp"])
@pytest.mark.long_form(7)  # test_divergence.py has the decision
def test_a_run_whose_loss_is_not_finite_at_its_end_has_failed(tmp_path: Path, strategy: str) -> None:
    """It does not reach ``train.nonfinite_limit``. What it saves is from before it diverged, so a resume fails too."""
    run = frozen(tmp_path / "run", f"+strategy={strategy}", *TOO_FAST, "train.steps=8", "checkpoint.every=1")
    for _ in range(2):
        with pytest.raises(AssertionError) as failed:
            run_attempt(run, 2)
        said = re.search(
            r"Diverged: the run has diverged: the loss of its last step, 8, is not finite; .*", str(failed.value)
        )
        assert said is not None, failed.value
        lines = run.read_metrics()
        finite = max(line["step"] for line in lines if line["loss"] is not None and line["grad_norm"] is not None)
        assert said[0].endswith(f"the last logged step with a finite loss and gradient is step {finite}")
        assert lines[-1]["step"] == 8 and lines[-1]["loss"] is None
        newest = max(path.name for path in run.checkpoints.iterdir())
        assert newest <= f"step-{finite + 1:08d}", "the state that diverged is not saved"
        assert "result" not in run.record()


def validation_is_nan(spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.train import evaluation

    evaluate = evaluation.evaluate

    def not_finite(*arguments: Any, **named: Any) -> Any:
        return replace(evaluate(*arguments, **named), loss=float("nan"))

    evaluation.evaluate = not_finite


@pytest.mark.long_form(8)  # tests/train/test_divergence.py has the decision
def test_a_validation_loss_that_is_not_finite_fails_the_run_and_keeps_its_weights(tmp_path: Path) -> None:
    """The training was sound as far as its own loss tells. The run stays failed when it is started again."""
    run = frozen(tmp_path / "run", "+strategy=dp", "train.steps=4")
    for prepare in (validation_is_nan, None):
        with pytest.raises(AssertionError, match="Diverged: the validation loss after the last step, 4, is not finite"):
            run_attempt(run, 2, prepare)
        assert [path.name for path in run.checkpoints.glob("step-*")] == ["step-00000004"]
        assert "result" not in run.record()
    frozen(run.path, "+strategy=dp", "train.steps=6")
    assert run_attempt(run, 2) == [0, 0]


def with_large_scale(spec: WorkerSpec, stop: StopFlag) -> None:
    """Lets the loss scale begin so high that the first steps overflow, and grow soon."""
    LossScale.__init__.__defaults__ = (2.0**24, 3)  # type: ignore[attr-defined]


def with_large_scale_and_no_last_step(spec: WorkerSpec, stop: StopFlag) -> None:
    """Also writes the scales of each rank to a file."""
    with_large_scale(spec, stop)
    poison({11}, spec, stop)
    update = LossScale.update

    def recorded(self: LossScale, finite: torch.Tensor) -> None:
        update(self, finite)
        with Path(spec.run_dir, f"scales-{spec.rank}").open("a") as file:
            file.write(f"{self.value.item()}\n")

    LossScale.update = recorded  # type: ignore[method-assign]


@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero2", "zero3", "pp"])
@pytest.mark.long_form(8, cases=["dp", "zero1", "zero3", "pp"])  # zero2 covers the decision
def test_fp16_halves_its_scale_until_gradients_are_finite_and_grows_again(tmp_path: Path, strategy: str) -> None:
    """On all ranks alike. One skipped step at the end does not fail the run."""
    saved = ["checkpoint.every=1", "checkpoint.keep=2"]
    run = frozen(tmp_path / "run", f"+strategy={strategy}", "precision=fp16", "train.steps=12", *saved)
    assert run_attempt(run, 2, with_large_scale_and_no_last_step) == [0, 0]
    first, second = ((run.path / f"scales-{rank}").read_text().splitlines() for rank in range(2))
    assert len(first) == 12 and first == second
    before, after = (read_tensors(run.checkpoints / f"step-{step:08d}") for step in (11, 12))
    assert all(torch.equal(before[name], after[name]) for name in before), "rank 1 alone overflows in the last step"
    lines = run.read_metrics()
    scales = [line["loss_scale"] for line in lines]
    assert lines[0]["grad_norm"] is None
    assert scales[0] == 2.0**23
    assert any(later == 2 * earlier for earlier, later in pairwise(scales))
    assert lines[-2]["loss"] < lines[0]["loss"]
    assert lines[-1]["grad_norm"] is None
    assert run.record()["result"]["steps"] == 12
    log = (run.logs / "rank-0-000.log").read_text()
    assert not re.search("were skipped", log), "looking for its scale is fp16's daily work, not a warning"


def test_the_scale_stays_in_its_bounds() -> None:
    scale = LossScale(torch.device("cpu"), first=2.0, growth_every=1)
    for _ in range(40):
        scale.update(torch.tensor(False))
    assert scale.value.item() == SMALLEST
    for _ in range(60):
        scale.update(torch.tensor(True))
    assert scale.value.item() == LARGEST


def test_the_scale_grows_after_finite_steps_in_a_row_and_survives_a_checkpoint() -> None:
    scale = LossScale(torch.device("cpu"), first=8.0, growth_every=3)
    seen = []
    for finite in (True, True, False, True, True):
        scale.update(torch.tensor(finite))
        seen.append(scale.value.item())
    assert seen == [8.0, 8.0, 4.0, 4.0, 4.0]
    other = LossScale(torch.device("cpu"), first=1.0, growth_every=3)
    other.load_state(scale.state())
    other.update(torch.tensor(True))
    assert other.value.item() == 8.0
