"""Trains replicas that exchange their weights every ``strategy.local_steps`` steps only, for slow links between them.

Each replica takes its steps with its own optimizer state, on its part of each global batch. Its weights start from the
*anchors*, which are equal on all replicas. An outer step averages the differences anchor - weight over the replicas,
treats the mean as the gradient of the anchors, updates them by SGD with Nesterov momentum, and sets the weights to the
anchors. This is DiLoCo (Douillard et al. 2023, arXiv:2311.08105). It sends 4 bytes for each fp32 parameter of a rank,
where synchronous training sends as many in each step.

A checkpoint contains the anchors under the names of the model, the optimizer state of the first replica under the names
of the optimizer, and the rest under ``replica.RANK.NAME`` and ``outer.NAME``. So it is also a checkpoint of synchronous
training, of an evaluation and of another number of replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from hpc_train.checkpoint.state import LOCAL, OUTER
from hpc_train.config.schema import StrategyConfig
from hpc_train.config.values import bucket_mb
from hpc_train.parallel.collectives import broadcast_tensors, gather_plain
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.local_replicas import sum_over_replicas
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision.masters import local_part, round_to_weights, saved_value
from hpc_train.train.optimizers.optimizer import Optimizer


class OuterSteps:
    """Takes the outer steps of this rank's parameters and buffers.

    Buffers of floating-point numbers, such as running statistics, are averaged in an outer step. Others stay as they
    are.

    Args:
        optimizer: the optimizer of the steps between outer steps.

    Attributes:
        synchronized: whether the weights of all replicas are the anchors.
    """

    def __init__(self, strategy: StrategyConfig, mesh: Mesh, engine: Engine, optimizer: Optimizer) -> None:
        assert strategy.local_steps is not None
        self._every = strategy.local_steps
        self._lr = strategy.outer_lr
        self._momentum = strategy.outer_momentum
        self._mesh = mesh
        self._engine = engine
        self._optimizer = optimizer
        self._trained = {
            name: saved_value(parameter)
            for name, parameter in engine.named_parameters().items()
            if parameter.requires_grad
        }
        self._anchors = {name: value.clone() for name, value in self._trained.items()}
        self._momenta = {name: torch.zeros_like(value) for name, value in self._trained.items()}
        self._buffer_anchors = {name: buffer.clone() for name, buffer in engine.named_buffers().items()}
        self._bucket_mb = bucket_mb(strategy, "cpu")
        self._taken = 0  # outer steps in this attempt
        self.synchronized = True

    @torch.no_grad()
    def begin(self) -> None:
        """Gives all replicas the initial values of the first. Collective."""
        if self._mesh.layout.replicas > 1:
            values = [local_part(value) for value in (*self._trained.values(), *self._engine.named_buffers().values())]
            broadcast_tensors(values, 0, self._mesh.group("replicas"), torch.device("cpu"))
        for weight, anchor in self._pairs():
            anchor.copy_(weight)
        self._changed()

    @torch.no_grad()
    def after(self, step: int, last: bool) -> None:
        """Takes an outer step if one is due after ``step`` steps, or if the run ends there. Collective.

        Raises:
            ReplicaLost: nothing has changed, and the outer step is due.
        """
        self.synchronized = False
        if step % self._every and not last:
            return
        replicas = self._mesh.layout.replicas
        gradients = {name: anchor - self._trained[name] for name, anchor in self._anchors.items()}
        buffers = {
            name: buffer.clone() for name, buffer in self._engine.named_buffers().items() if buffer.is_floating_point()
        }
        sum_over_replicas(map(local_part, (*gradients.values(), *buffers.values())), self._mesh, self._bucket_mb)
        for name, anchor in self._anchors.items():
            gradient = gradients[name].div_(replicas)
            momentum = self._momenta[name].mul_(self._momentum).add_(gradient)
            anchor.sub_(gradient.add_(momentum, alpha=self._momentum), alpha=self._lr)  # as torch.optim.SGD does
            self._trained[name].copy_(anchor)
        for name, buffer in self._engine.named_buffers().items():
            if name in buffers:
                buffer.copy_(buffers[name].div_(replicas))
            self._buffer_anchors[name].copy_(buffer)
        self._taken += 1
        self.synchronized = True
        self._changed()

    @torch.no_grad()
    def go_on(self, mesh: Mesh, step: int, last: bool) -> None:
        """Continues after ``step`` steps with the replicas of ``mesh``, after others were lost. Collective.

        If some replicas have taken an outer step that others have not, these continue from its anchors.
        """
        self._mesh = mesh
        ranks: list[tuple[int, bool]] = gather_plain((self._taken, self.synchronized), mesh.control)
        most = max(taken for taken, _ in ranks)
        if any(taken < most for taken, _ in ranks):
            source = [taken for taken, _ in ranks].index(most) // mesh.layout.replica.world_size
            values = [local_part(value) for value in self._shared().values()]
            broadcast_tensors(values, source, mesh.group("replicas"), torch.device("cpu"))
        if self._taken < most:
            self._taken = most
            for weight, anchor in self._pairs():
                weight.copy_(anchor)
            self._changed()
        self.synchronized = all(synchronized for taken, synchronized in ranks if taken == most)
        if not self.synchronized:
            self.after(step, last)

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Exchanges weights and anchors inside the block, so that all replicas have equal weights there."""
        if self.synchronized:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        self._optimizer.prepare()
        for weight, anchor in self._pairs():
            value = weight.clone()
            weight.copy_(anchor)
            anchor.copy_(value)
        self._changed()

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the value of each parameter and buffer of this replica, and its anchor."""
        for name, weight in self._trained.items():
            yield weight, self._anchors[name]
        for name, buffer in self._engine.named_buffers().items():
            yield buffer, self._buffer_anchors[name]

    def _changed(self) -> None:
        round_to_weights(self._engine.named_parameters().values())
        self._optimizer.loaded()

    # The state in checkpoints

    def _shared(self) -> dict[str, Tensor]:
        """Returns the state that is equal on all replicas."""
        state = {f"model.{name}": anchor for name, anchor in self._anchors.items()}
        state |= {f"model.{name}": anchor for name, anchor in self._buffer_anchors.items()}
        return state | {f"{OUTER}{name}.momentum": momentum for name, momentum in self._momenta.items()}

    def _local_name(self, name: str) -> str:
        return f"{LOCAL}{self._mesh.replica_rank}.{name}"

    def saved(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors that this rank saves for its ``state``: by their names in a checkpoint."""
        shared = self._shared()
        saved = {}
        for name, tensor in state.items():
            if name not in shared and (self._mesh.replica_rank == 0 or not name.startswith("optim.")):
                saved[name] = tensor
            elif name not in shared or not self.synchronized:
                saved[self._local_name(name)] = tensor
        return saved | shared

    def targets(self, state: Mapping[str, Tensor], stored: Collection[str]) -> dict[str, Tensor]:
        """Returns the tensors into which a checkpoint with the names ``stored`` is loaded instead of ``state``. Call
        ``loaded`` after the load.

        A replica that the checkpoint does not have starts from the anchors, with the optimizer state of the first
        replica.
        """
        shared = {name: tensor for name, tensor in self._shared().items() if name in stored}
        targets = {}
        for name, tensor in state.items():
            local_name = self._local_name(name)
            if local_name in stored:
                targets[local_name] = tensor
            elif name not in shared:
                targets[name] = tensor
        for momentum in self._momenta.values():
            momentum.zero_()
        return targets | shared

    @torch.no_grad()
    def loaded(self, stored: Collection[str]) -> None:
        """Sets the weights that the loaded checkpoint does not have for this replica to the anchors."""
        self.synchronized = not any(name.startswith(LOCAL) and ".model." in name for name in stored)
        for name, weight in self._trained.items():
            if self._local_name(f"model.{name}") not in stored:
                weight.copy_(self._anchors[name])
        for name, buffer in self._engine.named_buffers().items():
            if self._local_name(f"model.{name}") not in stored:
                buffer.copy_(self._buffer_anchors[name])
