"""Runs the user's function (``run.entry``) as the worker of one rank, in place of the trainer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch.distributed.checkpoint  # noqa: F401  a slow import, which forked workers inherit from the warm parent

from hpc_train.checkpoint.failures import PRIOR_PER_GPU_HOUR
from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.config.import_path import locate
from hpc_train.config.schema import Config
from hpc_train.config.values import parse_save_every
from hpc_train.layout.user_code import own_code_notes
from hpc_train.parallel.engine import seed_step
from hpc_train.parallel.mesh import Mesh
from hpc_train.preflight.run import nccl_log, preflight
from hpc_train.run.agent_worker import Heartbeat, Phase, WorkerSpec
from hpc_train.run.code import check_imports
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.requests import StopFlag
from hpc_train.train.custom_loop.context import Context
from hpc_train.train.custom_loop.state import LoopState
from hpc_train.train.processes import answer_requests, join, leave
from hpc_train.train.report import open_report
from hpc_train.train.saving import SaveSchedule, failure_rate
from hpc_train.train.worker import frozen_config


def train(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Calls the function of ``run.entry`` with a ``Context``, as rank ``spec.rank`` of one attempt.

    Raises:
        UserError: the function cannot be imported.
        Exception: that of the function.
    """
    run = RunDirectory(Path(spec.run_dir))
    with closing(EventLog.open(run, f"rank-{spec.rank:04d}", spec.attempt, spec.rank)) as events:
        config = frozen_config(spec, run)
        heartbeat = Heartbeat.of(spec.heartbeat)
        answer_requests(spec)
        with nccl_log(spec, config, run) as log:
            mesh = join(spec, config)
            preflight(spec, config, run, mesh, events, log)
            return _call(spec, stop, run, config, mesh, events, heartbeat)


def _call(
    spec: WorkerSpec,
    stop: StopFlag,
    run: RunDirectory,
    config: Config,
    mesh: Mesh,
    events: EventLog,
    heartbeat: Heartbeat,
) -> Exit:
    assert config.run.entry is not None, "the agent has chosen this worker"
    function = locate(config.run.entry, "run.entry")
    check_imports(run)
    context = _context(spec, stop, run, config, mesh, events, heartbeat)
    if mesh.rank == 0:
        for line in (f"layout: {mesh.layout} on {mesh.device.type}", *own_code_notes(config)):
            print(line)
    function(context)
    stopped = context._finish()
    heartbeat.enter(Phase.STOPPING, context.step)
    leave(mesh)

    def give_up() -> bool:
        heartbeat.enter(Phase.STOPPING, context.step)  # removing checkpoints may take long
        return stop.requested or stopped

    context._checkpoints.close(give_up)
    context._report.close()
    return Exit.STOPPED if stopped else Exit.DONE


def _context(
    spec: WorkerSpec,
    stop: StopFlag,
    run: RunDirectory,
    config: Config,
    mesh: Mesh,
    events: EventLog,
    heartbeat: Heartbeat,
) -> Context:
    state = LoopState()
    every = parse_save_every(config.checkpoint.every)
    rate = failure_rate(run) if mesh.rank == 0 and every.auto else PRIOR_PER_GPU_HOUR
    seed_step(config.train.seed, 0, mesh)
    return Context(
        config=config,
        args=config.run.args,
        device=mesh.device,
        mesh=mesh.device_mesh,
        rank=mesh.rank,
        world_size=mesh.layout.world_size,
        local_rank=spec.local_rank,
        local_world_size=spec.local_world_size,
        node_rank=spec.node_rank,
        attempt=spec.attempt,
        seed=config.train.seed,
        directory=run.path,
        _mesh=mesh,
        _spec=spec,
        _stop=stop,
        _heartbeat=heartbeat,
        _report=open_report(run, mesh, events, 0),
        _schedule=SaveSchedule(every, mesh.layout.world_size, mesh.rank == 0, rate),
        _checkpoints=CheckpointManager(run, state, state, mesh, config, events, spec.local_world_size),
        _state=state,
    )
