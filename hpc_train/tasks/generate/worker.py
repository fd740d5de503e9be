"""Runs the workers of ``generate``: each loads its part of the weights, and together they generate the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hpc_train.bench.request import write_progress, write_result
from hpc_train.checkpoint.restoring import load_weights
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.models.hf.lora import check_base
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.agent_worker import Heartbeat, Phase, WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag
from hpc_train.tasks.generate.request import GenerationRequest
from hpc_train.train.decoding.loop import Decoder
from hpc_train.train.processes import answer_requests, join, leave
from hpc_train.train.step import Control

_SHOW_EVERY_S = 0.5  # how often the progress is written


def generate_tokens(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Generates what the request asks for as rank ``spec.rank``; rank 0 writes the result.

    Raises:
        UserError: the checkpoint is damaged, does not fit the model or has no weights of the hook, or the outputs of
            the model are not logits.
    """
    run = RunDirectory(Path(spec.run_dir))
    config, request = load(run), GenerationRequest.read(run)
    heartbeat = Heartbeat.of(spec.heartbeat)
    answer_requests(spec)
    mesh = join(spec, config)
    engine = build_engine(config, mesh)
    manifest = load_weights(engine, mesh, Checkpoint(request.step, Path(request.checkpoint)), request.weights)
    check_base(config.model, manifest.extra, request.checkpoint)
    began = time.monotonic()
    proceed = _proceed(run, mesh, heartbeat, request, stop)
    found = Decoder(engine, mesh).run(request.prompts, request.max_tokens, request.sampling, request.ends, proceed)
    if found is not None and mesh.rank == 0:
        write_result(
            run,
            {
                "tokens": found,
                "precision": config.precision.name,
                "layout": str(mesh.layout),
                "device": mesh.device.type,
                "seconds": time.monotonic() - began,
            },
        )
    leave(mesh)
    return Exit.STOPPED if found is None else Exit.DONE


def _proceed(
    run: RunDirectory, mesh: Mesh, heartbeat: Heartbeat, request: GenerationRequest, stop: StopFlag
) -> Callable[[int], bool]:
    """Returns the function that is called after each token: it beats, writes the progress and agrees on a stop."""
    control = Control(mesh)
    shown = 0.0

    def proceed(done: int) -> bool:
        nonlocal shown
        heartbeat.enter(Phase.EVALUATION, request.step)
        if mesh.rank == 0 and time.monotonic() - shown > _SHOW_EVERY_S:
            shown = time.monotonic()
            write_progress(run, done - 1, request.max_tokens)
        control.post(stop.requested, 0)
        return not control.read().stop

    heartbeat.enter(Phase.EVALUATION, request.step)
    return proceed
