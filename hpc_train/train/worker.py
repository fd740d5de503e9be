"""Runs the worker of one rank: it joins the process group, builds the trainer from the frozen config, and trains."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Collection
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint  # noqa: F401  a slow import, which forked workers inherit from the warm parent

from hpc_train.checkpoint.agreement import lowest
from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.restoring import OpenCheckpoint, RestoredState
from hpc_train.checkpoint.run_store import RunStore
from hpc_train.config.schema import Config
from hpc_train.config.values import DEBUG_STEPS, parse_profile
from hpc_train.data.build import build_dataset
from hpc_train.data.dali import decoded_by_dali, would_gain_by_dali
from hpc_train.data.dataset import Dataset
from hpc_train.data.feed import NOTHING, TrainFeed, loader_workers
from hpc_train.data.images import DecodedImages
from hpc_train.data.sampler import Skipped
from hpc_train.data.stream import States
from hpc_train.errors import UserError
from hpc_train.layout.resolve import for_nodes, long_warmup
from hpc_train.layout.techniques import check_compiler_device
from hpc_train.models.wrapped import parts_in_evaluation
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.collectives import broadcast_plain
from hpc_train.parallel.compile import kept_artifacts
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.local_replicas import LostReplicas
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.pipeline.balance import plan_split
from hpc_train.preflight.run import nccl_log, preflight
from hpc_train.run.agent_worker import Heartbeat, Phase, SharedBlock, WorkerSpec
from hpc_train.run.code import check_imports
from hpc_train.run.directory import RunDirectory, rank_writer
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit, ReplicaLost
from hpc_train.run.files import patiently
from hpc_train.run.freeze import config_hash, load
from hpc_train.run.requests import StopFlag
from hpc_train.train.data_progress import Length, data_changes, restored_positions, run_length, skipped_data
from hpc_train.train.debug import DebuggedEngine, join_names
from hpc_train.train.evaluation import build_evaluation
from hpc_train.train.guard import CheckedWrites, check_user_code, is_user_code
from hpc_train.train.hold import Holds
from hpc_train.train.hooks import HookContext, Hooks
from hpc_train.train.optimizers.learning_rate import describe_rates
from hpc_train.train.optimizers.optimizer import Optimizer, check_groups
from hpc_train.train.optimizers.outer import OuterSteps
from hpc_train.train.processes import answer_requests, join, leave
from hpc_train.train.report import Report, open_report
from hpc_train.train.saving import LastSave, save_schedule
from hpc_train.train.step import TrainStep
from hpc_train.train.trainer import Trainer
from hpc_train.train.verify import Verification
from hpc_train.train.watch.measures import Measures, make_meter
from hpc_train.train.watch.memory import explained
from hpc_train.train.watch.pipeline_watch import PipelineWatch
from hpc_train.train.watch.profiler import Profiler
from hpc_train.train.watch.replica_balance import ReplicaBalance
from hpc_train.train.watch.suggestions import AdviceWatch, SuggestedSetting
from hpc_train.train.watch.utilization import FORMULA, describe_utilization, precision_notes


def train(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Trains as rank ``spec.rank`` of one attempt.

    Args:
        stop: set by a signal; all ranks then stop together, after a checkpoint.

    Raises:
        UserError: the config does not fit the model, the data or the checkpoint.
    """
    run = RunDirectory(Path(spec.run_dir))
    with closing(EventLog.open(run, rank_writer(spec.rank), spec.attempt, spec.rank)) as events:
        config = for_nodes(frozen_config(spec, run), spec.nodes)
        heartbeat = Heartbeat.of(spec.heartbeat)
        answer_requests(spec)
        with nccl_log(spec, config, run) as log:
            mesh = join(spec, config)
            preflight(spec, config, run, mesh, events, log)
            if mesh.rank == 0:  # before the build, which may take minutes
                notes = [*mesh.layout.notes, *precision_notes(config.precision, mesh.device)]
                print("\n  note: ".join([f"layout: {mesh.layout} on {mesh.device.type}", *notes]))
            with explained(config, mesh):
                trainer = _build(config, run, mesh, events, stop, spec, heartbeat)
                check_imports(run)  # by now, the user's model and data have been imported
                trainer, code = _run(trainer, spec)
            heartbeat.enter(Phase.STOPPING, trainer.step)
            leave(trainer.mesh)

            def give_up() -> bool:
                heartbeat.enter(Phase.STOPPING, trainer.step)  # removing checkpoints may take long
                return stop.requested or code is not Exit.DONE

            trainer.checkpoints.close(give_up)
            trainer.report.close()
            return code


def _run(trainer: Trainer, spec: WorkerSpec) -> tuple[Trainer, Exit]:
    """Trains, and continues without replicas that are lost (``strategy.local_steps``). Returns the last trainer."""
    lost = LostReplicas(None if spec.heartbeat is None else SharedBlock(spec.heartbeat), trainer.mesh)
    while True:
        try:
            try:
                return trainer, trainer.run()
            finally:
                trainer.feed.close()
        except ReplicaLost as failure:
            if not trainer.can_go_on:
                raise
            trainer.heartbeat.enter(Phase.STARTING, trainer.step)
            mesh = lost.mesh_without(trainer.mesh, failure)
            trainer = trainer.go_on(mesh)
            if mesh.rank == 0:
                print(f"{mesh.layout.replicas} replicas go on after step {trainer.step}")


def frozen_config(spec: WorkerSpec, run: RunDirectory) -> Config:
    """Returns the frozen config: the copy that the agent has passed on, since reading the file takes 0.1 s, or else the
    file."""
    if spec.config is not None:
        return cast(Config, pickle.loads(spec.config))
    try:
        return load(run)
    except UserError:
        if patiently(run.config.exists):
            raise
        raise OSError(errno.ESTALE, f"{run.config} is gone", str(run.config)) from None


def _build(
    config: Config,
    run: RunDirectory,
    mesh: Mesh,
    events: EventLog,
    stop: StopFlag,
    spec: WorkerSpec,
    heartbeat: Heartbeat,
) -> Trainer:
    training = _training_data(config, mesh)
    evaluation = build_evaluation(config, mesh, spec.ranks_on_cores)
    hooks = Hooks(config.hooks)

    artifacts = kept_artifacts(config, mesh, run.compiled)
    if artifacts is not None:
        artifacts.load()
    store = RunStore(run, config, events, mesh.control)
    checkpoint = store.newest()
    engine = _build_engine(config, mesh, store, checkpoint, training)
    check_groups(config.optim, engine, mesh)
    optimizer = Optimizer(config.optim, engine.named_parameters(), config.strategy.offload == "optimizer")

    outer = None if config.strategy.local_steps is None else OuterSteps(config.strategy, mesh, engine, optimizer)

    def open_checkpoints(mesh: Mesh) -> CheckpointManager:
        store = RunStore(run, config, events, mesh.control)
        with mesh.connections.recorded():  # those of the group for saves in the background
            return CheckpointManager(store, engine, optimizer, mesh, spec.local_world_size, outer=outer)

    checkpoints = open_checkpoints(mesh)
    restored = checkpoints.load(checkpoint)
    start = 0
    skipped = NOTHING
    states: States = {}
    if restored is not None:
        start = restored.step
        skipped = skipped_data(restored)
        states = restored_positions(restored)
    _check_agreement(
        mesh,
        {
            "config": patiently(lambda: config_hash(run)),
            "step": start,
            "data": training.identity,
            "dali": decoded_by_dali(training, mesh.device) is not None,
        },
    )

    balance = ReplicaBalance(mesh.layout, moves=mesh.layout.dp > 1 and config.batch.balance)

    def open_feed(step: int, skipped: Skipped, states: States) -> TrainFeed:
        return TrainFeed(
            training,
            config.batch,
            mesh.layout,
            mesh.dp_rank,
            config.train.seed,
            mesh.device,
            step,
            spec.ranks_on_cores,
            skipped,
            states,
            balance.counts if balance.moves else (),
        )

    feed = open_feed(start, skipped, states)
    length = run_length(config, feed)
    trained = length
    if config.train.debug:
        trained = replace(length, total_steps=min(length.total_steps, start + DEBUG_STEPS))
    evaluation = evaluation.limited(config.train, trained.samples(trained.total_steps))
    report = open_report(run, mesh, events, length.total_steps)
    report.advice = _advice_watch(config, mesh, spec, training)
    report.evaluated = evaluation.extent()
    check_user_code(config, run, mesh, engine, training, evaluation, report)
    trainer = Trainer(
        config=config,
        mesh=mesh,
        engine=engine,
        take_step=TrainStep(
            config,
            mesh,
            engine,
            optimizer,
            length.total_steps,
            _verification(config, mesh, engine, optimizer, report, heartbeat),
            outer,
        ),
        feed=feed,
        evaluation=evaluation,
        checkpoints=checkpoints,
        stop=stop,
        length=trained,
        meter=make_meter(config, mesh, training),
        measures=Measures(config, mesh, first_of_node=spec.local_rank == 0),
        balance=balance,
        profiler=Profiler(parse_profile(config.telemetry.profile), run, mesh, events),
        report=report,
        schedule=save_schedule(config, run, mesh),
        heartbeat=heartbeat,
        last_save=LastSave(mesh, heartbeat, stop, report, config.checkpoint.wait_for_room_s, spec.stop_grace_s),
        open_feed=open_feed,
        open_checkpoints=open_checkpoints,
        hooks=hooks,
        holds=Holds(run, spec, stop, heartbeat, events),
        artifacts=artifacts,
    )
    hooks.context = HookContext(
        start, length.total_steps, {}, engine, optimizer, mesh, config, run, hooks.request_end, report.text
    )
    if spec.nodes > 1:
        trainer.measures.watch_nodes(events)  # the agent watches the ranks of a single node
    if restored is not None:
        for message in data_changes(restored, feed):
            report.warning(start, message)
        trainer.resume(restored)
    if mesh.rank == 0:
        _log_settings(config, run, events, length, restored, training, mesh)
        meter = trainer.meter
        if meter.flops is not None and meter.peak is not None:
            events.record(run, utilization=describe_utilization(meter.flops, meter.peak, "data sheet"))
            print(f"{FORMULA}; peak {meter.peak.flops:.4g} FLOP/s according to the data sheet")
    return trainer


def _training_data(config: Config, mesh: Mesh) -> Dataset:
    """Opens the training data and prints notices about it."""
    training = build_dataset(config.data, "train", config.train.seed, config.precision.name)
    if training.notice and mesh.rank == 0:
        print(f"data: {training.notice}")
    if training.shared_file and config.batch.loader_workers == "auto" and mesh.rank == 0:
        print(
            f"data: items are read in the training process, because the constructor of the dataset opens "
            f"{training.shared_file}, and loader processes would share its file position; open the file at the first "
            "read in each process (docs/howto/data.md)"
        )
    return training


def _check_agreement(mesh: Mesh, facts: dict[str, Any]) -> None:
    """Raises RuntimeError if ranks would train differently, for example because a node sees an old copy of a file."""
    first = broadcast_plain(facts, mesh.control)
    different = lowest(None if facts == first else f"rank {mesh.rank}: {facts}", mesh.control)
    if different is not None:
        raise RuntimeError(f"the ranks see different inputs. rank 0: {first}; {different}")


def _build_engine(
    config: Config, mesh: Mesh, store: RunStore, checkpoint: OpenCheckpoint | None, training: Dataset
) -> Engine:
    """Builds the engine with the choices of earlier attempts, and wraps it for balance reports, debugging and checks.

    Parameters that will be loaded from ``checkpoint`` are neither drawn nor read from pretrained files.
    """
    check_compiler_device(config, int(mesh.device.type == "cuda"))
    plan = plan_split(config, mesh, training, store.run)
    restored: Collection[str] = ()
    if checkpoint is not None and config.optim._target_ is None:  # a user's optimizer may read the initial values
        restored = checkpoint.parameters
    engine = build_engine(config, mesh, plan.layers if plan is not None else None, restored)
    if mesh.layout.pp > 1:
        if plan is not None and mesh.rank == 0:
            print(plan.describe())
            store.events.write("pipeline_split", **plan.as_json())
        engine = PipelineWatch(engine, mesh, plan, store.events)
    if config.train.debug:
        engine = DebuggedEngine(engine, mesh.rank, mesh.layout.tp == mesh.layout.ep == 1)
    names = [name for part in engine.parts for name in parts_in_evaluation(part)]
    if names and mesh.rank == 0:
        print(f"modules that stay in evaluation mode, which their constructor has set: {join_names(names)}")
    if is_user_code(config, engine):
        engine = CheckedWrites(engine, mesh.replica)
    return engine


def _verification(
    config: Config, mesh: Mesh, engine: Engine, optimizer: Optimizer, report: Report, heartbeat: Heartbeat
) -> Verification | None:
    if config.optim.in_backward or config.train.verify.every is None:
        return None
    beat = partial(heartbeat.enter, Phase.STEP)
    may_write = is_user_code(config, engine)
    return Verification(config, mesh, engine, optimizer, report.corruption, report.warning, beat, may_write)


def _advice_watch(config: Config, mesh: Mesh, spec: WorkerSpec, dataset: Dataset) -> AdviceWatch | None:
    """Returns the watch for advice; None if ranks share CPU cores, since they then wait for each other with any
    config."""
    if mesh.device.type == "cpu" and (os.cpu_count() or 1) < spec.local_world_size:
        return None
    cores = max(1, len(os.sched_getaffinity(0)) // spec.ranks_on_cores)
    workers = loader_workers(config.batch, dataset, spec.ranks_on_cores)
    setting = SuggestedSetting(
        config=config,
        layout=mesh.layout,
        nodes=spec.nodes,
        workers_per_node=spec.local_world_size,
        loader_workers=workers,
        cores=cores,
        in_job="SLURM_JOB_ID" in os.environ,
        would_gain_by_dali=would_gain_by_dali(dataset, mesh.device),
    )
    return AdviceWatch(setting)


def _log_settings(
    config: Config,
    run: RunDirectory,
    events: EventLog,
    length: Length,
    restored: RestoredState | None,
    training: Dataset,
    mesh: Mesh,
) -> None:
    """Prints the decoder of images, the learning rate, the number of steps, and the checkpoint from which the run
    resumes."""
    if isinstance(training, DecodedImages):
        decoder = "Pillow in the loader processes"
        if decoded_by_dali(training, mesh.device) is not None:
            decoder = f"DALI in the process of each rank, on {mesh.device.type}"
        events.record(run, image_decoder=decoder)
        print(f"images are decoded by {decoder}")
    size = config.batch.global_size
    events.record(run, total_steps=length.total_steps, steps_per_epoch=length.steps_per_epoch)
    print(f"learning rate: {describe_rates(config.optim, size)}")
    if config.train.steps is None:
        for notice in long_warmup(config.optim, length.total_steps):
            print(f"note: {notice}")
    print(f"steps: {length.total_steps}, {length.steps_per_epoch} per epoch, {size} samples each")
    if restored is None:
        return
    print(f"resumed from {restored.path} at step {restored.step}")
    if not restored.with_optimizer:
        print("the checkpoint has no state for this optimizer, so the optimizer starts without state")
    if restored.drops_residuals:
        print(
            "the residuals of strategy.compression in the checkpoint (parts of gradients that were not sent yet) are "
            "dropped, because this run sends full gradients"
        )
    events.write("resumed", step=restored.step, path=str(restored.path), with_optimizer=restored.with_optimizer)
