"""Builds a training of one rank from a frozen run, as the worker does, so that a test can take single steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.run_store import RunStore
from hpc_train.checkpoint.state import training_state
from hpc_train.config.schema import Config
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import StepBatch
from hpc_train.data.feed import TrainFeed
from hpc_train.layout.resolve import resolve_layout
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.freeze import load
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.optimizers.outer import OuterSteps
from hpc_train.train.step import Control, TrainStep
from tests.parallel.oracle import kept_mesh


@dataclass(frozen=True)
class Training:
    """Holds the parts of a training of one rank. Every method is collective."""

    config: Config
    mesh: Mesh
    engine: Engine
    optimizer: Optimizer
    manager: CheckpointManager
    outer: OuterSteps | None = None

    @classmethod
    def of(cls, run: RunDirectory, config: Config, mesh: Mesh, restored: Collection[str] = ()) -> Training:
        run.create()
        engine = build_engine(config, mesh, restored=restored)
        optimizer = Optimizer(config.optim, engine.named_parameters(), config.strategy.offload == "optimizer")
        events = EventLog.open(run, f"rank-{mesh.rank}", 0, mesh.rank)
        ranks = mesh.layout.world_size
        store = RunStore(run, config, events, mesh.control)
        outer = None if config.strategy.local_steps is None else OuterSteps(config.strategy, mesh, engine, optimizer)
        manager = CheckpointManager(store, engine, optimizer, mesh, ranks, outer=outer)
        return cls(config, mesh, engine, optimizer, manager, outer)

    @classmethod
    def resumed(cls, run: RunDirectory, config: Config, mesh: Mesh) -> Training:
        """Resumes from the newest checkpoint. Parameters are NaN until it is loaded."""
        checkpoint = RunStore(run, config, EventLog.open(run, f"rank-{mesh.rank}", 0, mesh.rank), mesh.control).newest()
        assert checkpoint is not None
        torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
        training = cls.of(run, config, mesh, checkpoint.parameters)
        torch.use_deterministic_algorithms(False)
        training.manager.load(checkpoint)
        return training

    def steps(self, start: int, end: int) -> list[float]:
        """Takes the steps from ``start`` to ``end - 1`` and returns the loss of each."""
        config, mesh = self.config, self.mesh
        seed, total = config.train.seed, config.train.steps
        data = build_dataset(config.data, "train", seed)
        assert total is not None
        feed = TrainFeed(data, config.batch, mesh.layout, mesh.dp_rank, seed, mesh.device, start)
        take_step = TrainStep(config, mesh, self.engine, self.optimizer, total, outer=self.outer)
        control = Control(mesh)
        losses = []
        for step in range(start, end):
            batch = next(feed)
            control.post(False, batch.local_count)
            target_count = control.read().target_counts[mesh.replica_rank]
            outcome = take_step(step, StepBatch(batch.micro_batches, target_count))
            losses.append(self.engine.reduce(outcome.result).loss)
        return losses

    def state(self) -> Mapping[str, Tensor]:
        """Returns the state that a checkpoint of this rank would contain, with the local shards of sharded tensors."""
        return training_state(self.engine, self.optimizer)


def join_again(config: Config, rank: int, world_size: int) -> Mesh:
    """Returns the mesh of the layout of ``config``, see ``kept_mesh``. Collective."""
    return kept_mesh(resolve_layout(config, 1, world_size), rank)


def make_manager(rank: int, world_size: int, path: str) -> CheckpointManager:
    """Returns the checkpoint manager of a frozen run. Collective."""
    run = RunDirectory(Path(path))
    config = load(run)
    return Training.of(run, config, join_again(config, rank, world_size)).manager
