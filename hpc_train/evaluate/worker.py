"""Runs the workers of ``evaluate``: each loads its part of the weights, and together they read the validation data."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpc_train.bench.request import write_result
from hpc_train.checkpoint.restoring import load_weights
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.config.schema import Config
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import Dataset
from hpc_train.data.feed import EvalFeed
from hpc_train.evaluate.request import EvaluationRequest
from hpc_train.parallel.balance import plan_split
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import StepNumbers
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.agent_worker import Heartbeat, Phase, WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag
from hpc_train.train.evaluation import evaluate
from hpc_train.train.processes import answer_requests, join, leave
from hpc_train.train.step import Control


def evaluate_checkpoint(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Evaluates the checkpoint that the request names as rank ``spec.rank``; rank 0 writes the result.

    Raises:
        UserError: the config does not fit the data, or the checkpoint is damaged or does not fit the model.
    """
    run = RunDirectory(Path(spec.run_dir))
    config, request = load(run), EvaluationRequest.read(run)
    heartbeat = Heartbeat.of(spec.heartbeat)
    answer_requests(spec)
    mesh = join(spec, config)
    dataset = build_dataset(config.data, "validation", config.train.seed)
    plan = plan_split(config, mesh, dataset)
    engine = build_engine(config, mesh, None if plan is None else plan.layers)
    path = Path(request.checkpoint)
    manifest = load_weights(engine, mesh, Checkpoint(request.step, path))
    feed = EvalFeed(dataset, config.batch, mesh.layout, mesh.dp_rank, mesh.device, spec.local_world_size)
    began = time.monotonic()
    with heartbeat.during(Phase.EVALUATION, manifest.step):
        numbers = evaluate(engine, feed, Control(mesh), stop)
    if numbers is not None and mesh.rank == 0:
        write_result(run, _result(numbers, dataset, config, mesh, time.monotonic() - began))
    leave(mesh)
    return Exit.STOPPED if numbers is None else Exit.DONE


def _result(numbers: StepNumbers, dataset: Dataset, config: Config, mesh: Mesh, seconds: float) -> dict[str, Any]:
    accuracy = {} if numbers.accuracy is None else {"val_accuracy": numbers.accuracy}
    return {
        "metrics": {"val_loss": numbers.loss, **accuracy},
        "samples": len(dataset),
        "targets": numbers.target_count,
        "data": config.data.kind,
        "precision": config.precision.name,
        "layout": str(mesh.layout),
        "device": mesh.device.type,
        "seconds": seconds,
    }
