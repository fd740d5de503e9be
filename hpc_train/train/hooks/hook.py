"""Defines what a hook may do, and what it gets to know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.checkpoint.state import OptimizerState
from hpc_train.config.schema import Config
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.directory import RunDirectory


@dataclass(frozen=True)
class HookContext:
    """Holds what a hook gets to know at an event. It is the same on every rank except for ``mesh`` and the tensors.

    Attributes:
        step: the number of completed optimizer steps.
        total_steps: the number of steps of the run.
        metrics: the newest line of metrics, empty before the first; its key ``step`` tells the step. Times and rates
            are those of this rank, and all other numbers the same on every rank.
        engine: runs the model; ``parts`` are the modules that this rank holds.
        optimizer: the optimizer; ``named_state()`` maps parameter names to their state.
        mesh: ``rank``, ``device``, ``layout`` and the process groups of this rank.
        config: the config of the run.
        run: the run directory.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, Any]
    engine: Engine
    optimizer: OptimizerState
    mesh: Mesh
    config: Config
    run: RunDirectory
    request_end: Callable[[str], None]
    show_text: Callable[[int, str, str], None]

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Returns global name -> parameter of this rank: a whole tensor, or a ``DTensor`` with the rank's shard."""
        return self.engine.named_parameters()

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.layout.world_size

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    def stop(self, reason: str) -> None:
        """Asks to end the run as done, after a checkpoint. One rank is enough.

        A request in ``evaluation`` ends the run at that step. One in ``step`` ends it up to two steps later, since the
        ranks agree on it while they compute; the last step is evaluated.
        """
        self.request_end(reason)

    def log_text(self, name: str, text: str) -> None:
        """Adds text to the log and to trackers, such as W&B. Only the call on rank 0 counts."""
        if self.rank == 0:
            self.show_text(self.step, name, text)


class Hook:
    """A hook with methods that do nothing. Any object with some of these methods is a hook.

    All ranks call the same methods at the same steps, so they may communicate. An error ends the attempt like one of
    the model.
    """

    def start(self, context: HookContext) -> None:
        """Runs at the start of each attempt and after a rollback, when the weights are loaded."""

    def step(self, context: HookContext) -> None:
        """Runs after each optimizer step."""

    def evaluation(self, context: HookContext) -> None:
        """Runs after each evaluation, with its values in ``context.metrics`` and within ``evaluating``."""

    @contextmanager
    def evaluating(self, context: HookContext) -> Iterator[None]:
        """Encloses each evaluation, so that it may run with other weights."""
        yield

    def checkpoint(self, context: HookContext) -> None:
        """Runs before each save, once per step."""

    def end(self, context: HookContext) -> None:
        """Runs when the run is done, after its last save; not when the run stops on request and will continue."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the state to save: JSON values, equal on all ranks, and tensors.

        A tensor is a ``DTensor``, which each rank saves its shard of, or equal on all ranks that have its key. The
        names, shapes and dtypes of tensors must not depend on the layout.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved state, after ``start``. The tensors are those of ``state_dict``, with loaded values.

        It is not called for a hook that the checkpoint does not contain, nor in a fork.
        """


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a hook's state."""
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}
