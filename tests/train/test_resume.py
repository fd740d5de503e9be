"""A run that was interrupted is bit for bit the run that was not, dropout and all, under every strategy."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

from hpc_train.parallel.mesh import Mesh
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.requests import StopFlag
from tests.checkpoint.tensors import assert_same_bits
from tests.train.runs import frozen, run_attempt

TIMES = (
    "time", "attempt", "step_s", "tokens_per_s", "samples_per_s", "data_wait_share", "peak_memory_bytes", "save_s",
    "eval_s", "comm_share", "bubble_share", "host_share", "compute_imbalance", "arrival_skew_s", "memory_imbalance",
    "gpu_util", "net_tx_bytes", "net_rx_bytes", "rdma_tx_bytes", "rdma_rx_bytes",
)  # fmt: skip


def losses_and_norms(run: RunDirectory) -> list[dict[str, object]]:
    """The metrics without what no two runs share."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in run.read_metrics()]


CASES = [
    pytest.param(1, ["+strategy=single", "batch.micro_size=3"], id="single"),
    pytest.param(2, ["+strategy=dp", "batch.micro_size=2"], id="dp"),
    pytest.param(3, ["+strategy=dp", "batch.micro_size=2"], id="dp-of-three"),
    pytest.param(2, ["+strategy=dp", "strategy.data_parallel=allreduce", "optim=sgd"], id="reduce-sgd"),
    pytest.param(2, ["+strategy=zero1", "batch.micro_size=2"], id="zero1"),
    pytest.param(2, ["+strategy=zero2", "precision=fp16", "batch.global_size=7"], id="zero2-uneven-fp16"),
    pytest.param(2, ["+strategy=zero3", "precision=bf16", "train.activation_checkpointing=full"], id="zero3-bf16"),
    pytest.param(4, ["+strategy=hsdp", "strategy.shard=2"], id="hsdp"),
    pytest.param(2, ["+strategy=pp", "model.tied_embeddings=true"], id="pp"),
    pytest.param(2, ["+strategy=model_parallel"], id="model_parallel"),
    pytest.param(2, ["+strategy=tp"], id="tp"),
    pytest.param(2, ["+strategy=dp", "strategy.bucket_cap_mb=0.001", "optim.in_backward=true", "optim.clip_norm=0"],
                 id="in-backward"),
    pytest.param(4, ["+strategy=hybrid"], id="hybrid"),
    pytest.param(2, ["+strategy=dp", "strategy.compression=topk", "strategy.compression_share=0.1", "optim=sgd",
                     "optim.momentum=0.9"], id="topk"),
    pytest.param(4, ["+strategy=hybrid", "strategy.compression=powersgd", "strategy.compression_rank=2",
                     "model.tied_embeddings=true"], id="hybrid-powersgd"),
    pytest.param(4, ["+strategy=hybrid", "strategy.data_parallel=zero2", "precision=fp16"], id="hybrid-zero2-fp16"),
]  # fmt: skip


@pytest.mark.parametrize(("workers", "overrides"), CASES)
@pytest.mark.long_form(12)  # the third step of a stop request below; tests/checkpoint has the state of each layout
def test_six_steps_are_three_and_three(tmp_path: Path, workers: int, overrides: list[str]) -> None:
    overrides = [*overrides, "model.n_layers=2", "train.steps=6", "checkpoint.every=3", "train.eval_every=3"]
    whole = frozen(tmp_path / "whole", *overrides)
    assert run_attempt(whole, workers) == [0] * workers
    half = frozen(tmp_path / "half", *overrides)
    shutil.copytree(whole.checkpoints / "step-00000003", half.checkpoints / "step-00000003")
    assert run_attempt(half, workers) == [0] * workers
    events = {event["event"]: event for event in half.read_events()}
    assert events["resumed"]["step"] == 3
    assert events["first_step"]["step"] == 4 and events["first_step"]["seconds"] > 0
    assert "the first step took" in (half.logs / "rank-0-000.log").read_text()
    assert_same_bits(whole.checkpoints / "step-00000006", half.checkpoints / "step-00000006")
    assert losses_and_norms(half) == losses_and_norms(whole)[3:]


@pytest.mark.parametrize("later", [True, False])
@pytest.mark.long_form(8)  # tests/parallel/test_gradient_norm.py
def test_a_run_may_begin_or_end_updates_inside_the_backward(tmp_path: Path, later: bool) -> None:
    """The checkpoints and the numbers are the same."""
    overrides = ["+strategy=dp", "strategy.data_parallel=allreduce", "optim.clip_norm=0", "model.n_layers=2"]
    overrides += ["train.steps=6", "checkpoint.every=3", "model.tied_embeddings=true"]
    whole = frozen(tmp_path / "run", *overrides, f"optim.in_backward={str(not later).lower()}")
    assert run_attempt(whole, 2) == [0, 0]
    half = RunDirectory(tmp_path / "half")
    shutil.copytree(whole.path, half.path)
    shutil.rmtree(half.checkpoints / "step-00000006")
    frozen(half.path, *overrides, f"optim.in_backward={str(later).lower()}")
    assert run_attempt(half, 2) == [0, 0]
    assert_same_bits(whole.checkpoints / "step-00000006", half.checkpoints / "step-00000006")
    assert [event["step"] for event in half.read_events() if event["event"] == "resumed"] == [3]
    assert losses_and_norms(half) == losses_and_norms(whole)


def stop_at_start(spec: WorkerSpec, stop: StopFlag) -> None:
    if spec.rank == 1:
        stop.request("test")


def stop_in(step: int, spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.train.step import TrainStep

    take = TrainStep.__call__

    def requested(self, index, batch):  # type: ignore[no-untyped-def]
        if index == step and spec.rank == 1:
            stop.request("test")
        return take(self, index, batch)

    TrainStep.__call__ = requested  # type: ignore[method-assign]


def stop_in_a_slow_step_three(spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.train import step

    step.SLOW_S = 0.0
    stop_in(3, spec, stop)


def stop_in_rounds(spec: WorkerSpec, stop: StopFlag) -> None:
    """The ranks agree as those of large worlds do."""
    from hpc_train.train import step

    step.RING_RANKS = 1
    stop_in_a_slow_step_three(spec, stop)


def stop_in_an_evaluation(spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.train import evaluation

    evaluate = evaluation.evaluate

    def requested(*args):  # type: ignore[no-untyped-def]
        stop.request("test")
        return evaluate(*args)

    evaluation.evaluate = requested  # type: ignore[assignment]


def stop_in_a_save(spec: WorkerSpec, stop: StopFlag) -> None:
    """Twice, and on one rank only."""
    from hpc_train.checkpoint import disk

    sync = disk.sync

    def requested(descriptor: int) -> None:
        if spec.rank == 1:
            stop.request("test")
            stop.request("again")
        sync(descriptor)

    disk.sync = requested


def stop_at_the_end(spec: WorkerSpec, stop: StopFlag) -> None:
    """After the last message of the ranks to each other."""
    from hpc_train.train import worker

    leave = worker.leave

    def requested(mesh: Mesh) -> None:
        stop.request("test")
        leave(mesh)

    worker.leave = requested  # type: ignore[assignment]


@pytest.mark.long_form(8)  # a finished run goes on below
def test_a_run_that_was_killed_before_its_result_gets_it(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "train.reproducible=any_world_size", "train.eval_every=5")
    assert run_attempt(run, 2) == [0, 0]
    result = run.record()["result"]
    run.update_record(result={})
    assert run_attempt(run, 2) == [0, 0]
    of_an_attempt = {key: result.pop(key) for key in ("attempt", "seconds", "tokens_per_s")}
    assert run.record()["result"] == result | {"attempt": of_an_attempt["attempt"] + 1}
    assert {"loss", "val_loss", "weights_sha256"} <= result.keys()


STAGES = ("+strategy=pp", "model.n_layers=2")  # of one layer each


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    run = frozen(tmp_path_factory.mktemp("runs") / "whole", *STAGES)
    assert run_attempt(run, 2) == [0, 0]
    return run


@pytest.mark.parametrize(
    ("prepare", "code", "saved_at"),
    [
        pytest.param(stop_at_start, Exit.STOPPED, 0, id="start"),
        # it takes less than SLOW_S, but nobody knows that before its end
        pytest.param(partial(stop_in, 0), Exit.STOPPED, 1, id="first"),
        pytest.param(partial(stop_in, 3), Exit.STOPPED, 5, id="third"),
        pytest.param(stop_in_a_slow_step_three, Exit.STOPPED, 4, id="slow"),
        pytest.param(stop_in_rounds, Exit.STOPPED, 4, id="rounds"),
        pytest.param(partial(stop_in, 9), Exit.DONE, 10, id="last"),
    ],
)
@pytest.mark.long_form(10, cases=["start", "first", "slow", "rounds", "last"])  # test_step.py has the rounds
def test_a_stop_request_loses_no_step(
    tmp_path: Path, uninterrupted: RunDirectory, prepare: object, code: Exit, saved_at: int
) -> None:
    """All ranks stop at one step although only one was asked, and going on ends where the uninterrupted run does."""
    run = frozen(tmp_path / "run", *STAGES)
    assert run_attempt(run, 2, prepare) == [code, code]  # type: ignore[arg-type]
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step-{saved_at:08d}"]
    assert [line["step"] for line in run.read_metrics()] == list(range(1, saved_at + 1))
    assert run_attempt(run, 2) == [0, 0]
    assert_same_bits(run.checkpoints / "step-00000010", uninterrupted.checkpoints / "step-00000010")
    assert losses_and_norms(run) == losses_and_norms(uninterrupted)


@pytest.mark.parametrize(
    ("prepare", "code", "stopped_at"),
    [
        (stop_in_an_evaluation, Exit.STOPPED, 5),
        (stop_in_a_save, Exit.STOPPED, 5),
        (stop_at_the_end, Exit.DONE, 10),
    ],
)
@pytest.mark.long_form(10)  # a stop request in a step above
def test_a_stop_request_beside_the_steps(
    tmp_path: Path, uninterrupted: RunDirectory, prepare: object, code: Exit, stopped_at: int
) -> None:
    """What is saved is whole, an evaluation is cut short; one step more is taken where its message was under way."""
    run = frozen(tmp_path / "run", *STAGES, "checkpoint.every=4", "train.eval_every=4")
    assert run_attempt(run, 2, prepare) == [code, code]  # type: ignore[arg-type]
    assert [line["step"] for line in run.read_metrics()] == list(range(1, stopped_at + 1))
    assert run_attempt(run, 2) == [0, 0]
    assert_same_bits(run.checkpoints / "step-00000010", uninterrupted.checkpoints / "step-00000010")
    evaluated = [line["step"] for line in run.read_metrics() if "val_loss" in line]
    assert evaluated == ([8, 10] if prepare is stop_in_an_evaluation else [4, 8, 10])


@pytest.mark.long_form(8)  # tests/train/test_hooks.py goes on under another layout
def test_a_finished_run_goes_on_with_more_steps_and_another_layout(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=single", "train.steps=3", "optim.schedule=constant")
    assert run_attempt(run, 1) == [0]
    frozen(run.path, "+strategy=zero2", "train.steps=6", "optim.schedule=constant")
    assert run_attempt(run, 2) == [0, 0]
    assert [(line["step"], line["world_size"]) for line in run.read_metrics()][2:4] == [(3, 1), (4, 2)]
    assert run.record()["result"]["steps"] == 6
