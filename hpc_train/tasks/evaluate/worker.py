"""Runs the workers of ``evaluate``: each loads its part of the weights, and together they read the validation data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_train.bench.request import write_result
from hpc_train.checkpoint.restoring import load_weights
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.config.evaluation import MAIN
from hpc_train.config.schema import Config
from hpc_train.models.hf.lora import check_base
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.pipeline.balance import plan_split
from hpc_train.run.agent_worker import Heartbeat, Phase, WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag
from hpc_train.tasks.evaluate.request import EvaluationRequest
from hpc_train.train.evaluation import Evaluation, build_evaluation
from hpc_train.train.guard import check_evaluation_padding
from hpc_train.train.processes import answer_requests, join, leave
from hpc_train.train.step import Control


def evaluate_checkpoint(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Evaluates the checkpoint that the request names as rank ``spec.rank``; rank 0 writes the result.

    Raises:
        UserError: the config does not fit the data, or the checkpoint is damaged, does not fit the model or
            has no weights of the hook.
    """
    run = RunDirectory(Path(spec.run_dir))
    config, request = load(run), EvaluationRequest.read(run)
    heartbeat = Heartbeat.of(spec.heartbeat)
    answer_requests(spec)
    mesh = join(spec, config)
    evaluation = build_evaluation(config, mesh, spec.ranks_on_cores)
    plan = plan_split(config, mesh, evaluation.feeds[MAIN].dataset)
    engine = build_engine(config, mesh, None if plan is None else plan.layers)
    path = Path(request.checkpoint)
    manifest = load_weights(engine, mesh, Checkpoint(request.step, path), request.weights)
    check_base(config.model, manifest.extra, str(path))
    check_evaluation_padding(config, mesh, engine, evaluation)
    began = time.monotonic()
    with heartbeat.during(Phase.EVALUATION, manifest.step):
        metrics = evaluation.run(engine, Control(mesh), stop)
    if metrics is not None and mesh.rank == 0:
        write_result(run, _result(metrics, evaluation, config, mesh, time.monotonic() - began))
    leave(mesh)
    return Exit.STOPPED if metrics is None else Exit.DONE


def _result(
    metrics: Mapping[str, float | None], evaluation: Evaluation, config: Config, mesh: Mesh, seconds: float
) -> dict[str, Any]:
    return {
        "metrics": {name: value for name, value in metrics.items() if value is not None},
        "samples": {name or "validation": len(feed.dataset) for name, feed in evaluation.feeds.items()},
        "data": config.data.kind,
        "precision": config.precision.name,
        "layout": str(mesh.layout),
        "device": mesh.device.type,
        "seconds": seconds,
    }
