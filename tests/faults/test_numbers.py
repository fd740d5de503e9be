"""Faults of the numbers, and what a change of the world size may do to them: nothing."""

from __future__ import annotations

import os
import signal
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import RESPONSES, Action, Diverged, Failure, classify
from hpc_train.run.requests import StopFlag
from tests.checkpoint.tensors import assert_same_bits
from tests.train.runs import frozen, run_attempt

REPRODUCIBLE = ["+strategy=dp", "train.reproducible=any_world_size", "train.steps=8", "checkpoint.every=2"]


def in_step(step: int, kill: bool, spec: WorkerSpec, stop: StopFlag) -> None:
    """The last rank is killed in ``step``, or asked to stop."""
    from hpc_train.train.step import TrainStep

    take = TrainStep.__call__

    def faulty_step(self, index, batch):  # type: ignore[no-untyped-def]
        if index == step and spec.rank == spec.layout.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL) if kill else stop.request("test")
        return take(self, index, batch)

    TrainStep.__call__ = faulty_step  # type: ignore[method-assign]


@pytest.mark.long_form(20)  # tests/train/test_resume.py and tests/parallel/test_reproducible.py
def test_kills_a_stop_and_4_1_3_4_ranks_leave_no_bit_changed(tmp_path: Path) -> None:
    whole = frozen(tmp_path / "whole", *REPRODUCIBLE)
    assert run_attempt(whole, 2) == [0, 0]
    run = frozen(tmp_path / "run", *REPRODUCIBLE)
    for ranks, step, kill in ((4, 3, True), (1, 5, True), (3, 4, False)):
        inject = partial(in_step, step, kill)
        if kill:
            with pytest.raises(AssertionError, match="died without a word"):
                run_attempt(run, ranks, inject)
        else:
            assert run_attempt(run, ranks, inject) == [75] * ranks
    assert run_attempt(run, 4) == [0] * 4
    resumed = [event["step"] for event in run.read_events() if event["event"] == "resumed"]
    assert resumed == [2, 4, 5], "a stop in the first step of an attempt ends it after this step"
    assert run.record()["result"]["weights_sha256"] == whole.record()["result"]["weights_sha256"]
    assert_same_bits(run.checkpoints / "step-00000008", whole.checkpoints / "step-00000008")
    losses = [(line["step"], line["loss"], line["grad_norm"]) for line in run.read_metrics()]
    assert losses == [(line["step"], line["loss"], line["grad_norm"]) for line in whole.read_metrics()]


def in_exchange(call: int, spec: WorkerSpec, stop: StopFlag) -> None:
    """The last rank is killed in its ``call``-th all-to-all of tokens, in which the other ranks wait for it."""
    from hpc_train.parallel import experts

    exchange, calls = experts._exchanged, count(1)

    def faulty_exchange(rows, sent, received, group):  # type: ignore[no-untyped-def]
        if next(calls) == call and spec.rank == spec.layout.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(rows, sent, received, group)

    experts._exchanged = faulty_exchange


@pytest.mark.long_form(40)  # test_layout_matrix.py: a checkpoint of divided experts; tests of the agent: other kills
def test_kills_in_the_exchange_of_tokens_leave_no_bit_changed(tmp_path: Path) -> None:
    divided = ["+strategy=zero1", "strategy.ep=2", "model.moe.experts=4", "model.moe.bias_rate=0.01"]
    divided += ["model.n_layers=2", "train.steps=8", "checkpoint.every=2"]
    whole = frozen(tmp_path / "whole", *divided)
    assert run_attempt(whole, 4) == [0] * 4
    run = frozen(tmp_path / "run", *divided)
    in_step = 2 * 4  # two layers, each with two exchanges forward and two backward
    for call in (4 * in_step + 2, 2 * in_step + 5):  # in the forward pass, and in a backward pass after a restart
        with pytest.raises(AssertionError, match="died without a word"):
            run_attempt(run, 4, partial(in_exchange, call))
    assert run_attempt(run, 4) == [0] * 4
    assert [event["step"] for event in run.read_events() if event["event"] == "resumed"] == [4, 6]
    assert_same_bits(run.checkpoints / "step-00000008", whole.checkpoints / "step-00000008")


def poison(kind: str, batches: range, spec: WorkerSpec, stop: StopFlag) -> None:
    """The global batches at these positions of the data hold one bad sample, in whichever step they are taken.

    ``nan``: no gradient of the rank that reads it is finite. ``spike``: the loss of the batch is 100 times as high.
    """
    import torch

    from hpc_train.data.build import SyntheticDataset
    from hpc_train.data.sampler import Order
    from hpc_train.parallel.engine import StepResult
    from hpc_train.parallel.pipeline.engine import PipelineEngine
    from hpc_train.parallel.replica_engine import ReplicaEngine
    from hpc_train.train import trainer

    trainer.LEAST = 4
    order = Order(SAMPLES, 8, drop_last=True, seed=0)
    bad = {int(order.slots(position, 6, 7)[0]) for position in batches if position < order.steps_per_epoch}
    read = SyntheticDataset.sample

    def marked(self, index, epoch):  # type: ignore[no-untyped-def]
        sample = read(self, index, epoch)
        if index in bad:
            sample.inputs[:] = 31
        return sample

    SyntheticDataset.sample = marked  # type: ignore[method-assign]
    for engine in (PipelineEngine, ReplicaEngine):
        compute = engine.train_step

        def poisoned(self, step, batch, loss_scale=None, compute=compute):  # type: ignore[no-untyped-def]
            hit = any(bool((micro.inputs == 31).all(dim=1).any()) for micro in batch.micro_batches)
            result = compute(self, step, batch, torch.tensor(float("nan")) if hit and kind == "nan" else loss_scale)
            return StepResult(result.loss_sum * 100, result.target_count) if hit and kind == "spike" else result

        engine.train_step = poisoned  # type: ignore[method-assign]


def poison_and_stop(kind: str, batches: range, step: int, spec: WorkerSpec, stop: StopFlag) -> None:
    poison(kind, batches, spec, stop)
    in_step(step, False, spec, stop)


def pass_over(windows: list[tuple[int, int]], spec: WorkerSpec, stop: StopFlag) -> None:
    from tests.faults import entry

    entry.pass_over(windows)


SAMPLES = 512  # 64 steps of an epoch
GOES_BACK = [f"data.samples={SAMPLES}", "train.nonfinite_limit=3", "train.spike_mads=20", "train.steps=16"]


def rollbacks(run: RunDirectory) -> list[tuple[int, int, list[list[int]]]]:
    events = [event for event in run.read_events() if event["event"] == "rolled_back"]
    return [(event["step"], event["to_step"], event["skipped_windows"]) for event in events]


@pytest.mark.long_form(30)  # tests/train/test_divergence.py
def test_gradients_that_stay_nan_take_the_run_back_past_the_samples(tmp_path: Path) -> None:
    """And a resume, which knows of the samples from the checkpoint only, takes the same order, saved in the background
    or not; and all end as a run that has never seen these samples."""
    cases = [
        ("whole", partial(poison, "nan", range(5, 8)), 0, "false"),
        ("stopped", partial(poison_and_stop, "nan", range(5, 8), 11), 75, "true"),
    ]
    runs = []
    for name, prepare, ends, background in cases:
        saves = ["checkpoint.every=2", f"checkpoint.asynchronous={background}"]
        run = frozen(tmp_path / name, "+strategy=dp", *GOES_BACK, *saves)
        assert run_attempt(run, 2, prepare) == [ends] * 2
        runs.append(run)
    past = frozen(tmp_path / "past", "+strategy=dp", *GOES_BACK, "checkpoint.every=0")
    assert run_attempt(past, 2, partial(pass_over, [(5, 8)])) == [0, 0]
    assert run_attempt(runs[-1], 2, partial(poison, "nan", range(5, 8))) == [0, 0]
    for run in runs:
        assert rollbacks(run) == [(8, 4, [[5, 8]])]
        events = run.read_events()
        assert [event["step"] for event in events if event["event"] == "step_skipped"] == [6, 7, 8]
        assert [event["step"] for event in events if event["event"] == "checkpoint_set_aside"] == [6]
        lines = run.read_metrics()
        assert [line["step"] for line in lines] == list(range(1, 17))
        assert None not in [line["grad_norm"] for line in lines]
        assert_same_bits(run.checkpoints / "step-00000016", past.checkpoints / "step-00000016")


@pytest.mark.parametrize(
    ("kind", "batches", "steps"), [("nan", range(5, 8), (8, 4)), ("spike", range(10, 13), (13, 8))]
)
@pytest.mark.long_form(20)  # tests/train/test_divergence.py
def test_a_pipeline_goes_back_too(tmp_path: Path, kind: str, batches: range, steps: tuple[int, int]) -> None:
    run = frozen(tmp_path / "run", "+strategy=pp", *GOES_BACK, "checkpoint.every=4")
    assert run_attempt(run, 2, partial(poison, kind, batches)) == [0, 0]
    assert rollbacks(run) == [(*steps, [[batches.start, batches.stop]])]
    past = frozen(tmp_path / "past", "+strategy=pp", *GOES_BACK, "checkpoint.every=0")
    assert run_attempt(past, 2, partial(pass_over, [(batches.start, batches.stop)])) == [0, 0]
    assert_same_bits(run.checkpoints / "step-00000016", past.checkpoints / "step-00000016")
    assert max(line["loss"] for line in run.read_metrics()) < 10


@pytest.mark.long_form(8)  # tests/train/test_divergence.py and test_gradients_not_finite.py
def test_a_run_that_diverges_again_and_again_fails(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=zero3", *GOES_BACK, "checkpoint.every=2", "train.max_rollbacks=2")
    with pytest.raises(AssertionError, match=r"Diverged: no gradient was finite.*\(after 2 rollbacks"):
        run_attempt(run, 2, partial(poison, "nan", range(5, SAMPLES)))
    assert rollbacks(run) == [(8, 4, [[5, 8]]), (8, 5, [[5, 8], [8, 11]])], "the save that was due came after step 5"
    assert classify(Diverged("")) is Failure.NAN
    assert RESPONSES[Failure.NAN].action is Action.FAIL


def test_a_jump_before_the_first_checkpoint_is_told(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", *GOES_BACK, "train.steps=14", "checkpoint.every=0")
    assert run_attempt(run, 1, partial(poison, "spike", range(10, 13))) == [0]
    [warning] = [event for event in run.read_events() if event["event"] == "warning"]
    assert warning["step"] == 13 and "cannot be replayed, because the weights have changed since" in warning["message"]


def err_until_the_replay(spec: WorkerSpec, stop: StopFlag) -> None:
    """The losses of the steps 11 to 13 are high until the run has gone back."""
    from hpc_train.parallel.replica_engine import ReplicaEngine
    from hpc_train.train.report import Report

    right = ReplicaEngine.train_step
    poison("spike", range(10, 13), spec, stop)
    report = Report.rolled_back

    def repair(self, *arguments):  # type: ignore[no-untyped-def]
        ReplicaEngine.train_step = right  # type: ignore[method-assign]
        report(self, *arguments)

    Report.rolled_back = repair  # type: ignore[method-assign]


@pytest.mark.parametrize("cause", ["hardware", "data or optimization"])
@pytest.mark.long_form(9, cases=["data or optimization"])
def test_the_steps_of_a_jump_are_replayed_from_a_checkpoint(tmp_path: Path, cause: str) -> None:
    """Of verified runs. The samples are skipped only if the jump repeats."""
    run = frozen(tmp_path / "run", "+strategy=dp", *GOES_BACK, "checkpoint.every=4", "train.verify.every=4")
    prepare = err_until_the_replay if cause == "hardware" else partial(poison, "spike", range(10, 13))
    assert run_attempt(run, 1, prepare) == [0]
    expected = [(13, 8, [])] if cause == "hardware" else [(13, 8, []), (13, 8, [[10, 13]])]
    assert rollbacks(run) == expected
    [replayed] = [event for event in run.read_events() if event["event"] == "replayed"]
    assert (replayed["step"], replayed["reason"], replayed["node"]) == (13, cause, None)
    assert replayed["message"] in (run.logs / "rank-0-000.log").read_text()
    lines = run.read_metrics()
    assert [line["step"] for line in lines] == list(range(1, 17))
    assert max(line["loss"] for line in lines) < 10
