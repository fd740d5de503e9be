"""Runs the worker of ``bench batch`` that measures gradient norms for the noise scale, with any strategy.

Each estimate takes the gradient norms of some global batches and of their union, as the engine computes them. A
training step on the union follows, so the estimates cover the first steps of a training.
"""

from __future__ import annotations

from pathlib import Path

from hpc_train.bench.request import NoiseRequest, write_progress, write_result
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import StepBatch
from hpc_train.data.feed import TrainFeed
from hpc_train.parallel.balance import plan_split
from hpc_train.parallel.build import build_engine
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag
from hpc_train.train.optimizer import Optimizer
from hpc_train.train.processes import join, leave
from hpc_train.train.step import Control, TrainStep


def measure(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Runs what ``bench-request.json`` asks for; rank 0 writes the squared norms to ``bench-result.json``."""
    run = RunDirectory(Path(spec.run_dir))
    config, request = load(run), NoiseRequest.read(run)
    mesh = join(spec, config)
    dataset = build_dataset(config.data, "train", config.train.seed)
    plan = plan_split(config, mesh, dataset)
    engine = build_engine(config, mesh, None if plan is None else plan.layers)
    optimizer = Optimizer(config.optim, engine.named_parameters(), config.strategy.offload == "optimizer")
    take_step = TrainStep(config, mesh, engine, optimizer, request.estimates)
    feed = TrainFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, config.train.seed, mesh.device, 0)
    control = Control(mesh)
    stopped = False

    def next_batch() -> StepBatch:
        nonlocal stopped
        local = next(feed)
        control.post(stop.requested, local.local_count)
        agreement = control.read()
        stopped = stopped or agreement.stop
        return StepBatch(local.micro_batches, agreement.target_count)

    def squared_norm(step: int, batch: StepBatch) -> float:
        scale = None if take_step.loss_scale is None else take_step.loss_scale.value
        engine.train_step(step, batch, scale)
        return float(engine.clip_grad_norm_(0.0, scale)) ** 2

    small, big = [], []
    for step in range(request.estimates):
        if mesh.rank == 0:
            write_progress(run, step, request.estimates)
        batches = [next_batch() for _ in range(request.times)]
        if stopped:
            break
        small += [squared_norm(step, batch) for batch in batches]
        union = tuple(micro for batch in batches for micro in batch.micro_batches)
        outcome = take_step(step, StepBatch(union, sum(batch.target_count for batch in batches)))
        big.append(float(outcome.grad_norm) ** 2)
    feed.close()
    if not stopped and mesh.rank == 0:
        sizes = {"small_size": config.batch.global_size, "big_size": config.batch.global_size * request.times}
        write_result(run, {"small": small, "big": big, **sizes})
    leave(mesh)
    return Exit.STOPPED if stopped else Exit.DONE
