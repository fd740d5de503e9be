"""The engine of ``train.reproducible=any_world_size``: weights that are the same bits on any number of ranks.

Replicas that compute logical micro-batches: their number and size do not depend on how many ranks share them, each
draws its random numbers from (seed, step, micro-batch), and their gradients are summed over a fixed tree
(``tree_reduction.py``), the sum of losses with them. Every rank then holds the whole gradient, so norm, clipping and
update are those of one process. The bits still depend on what computes: processor, torch, threads per rank.

It costs a copy of the gradients per level of the tree that a rank sums, small micro-batches, and a reduction that
waits for the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import Config
from hpc_train.data.batch import Batch, StepBatch
from hpc_train.models.model import Model
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel import batch_statistics, own_count
from hpc_train.parallel.engine import StepResult
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.random_streams import seed_micro_batch
from hpc_train.parallel.replica_engine import ReplicaEngine
from hpc_train.parallel.tree_reduction import TreeReduction, tree_sum


class ReproducibleEngine(ReplicaEngine):
    """An ``Engine`` (see there) with the same bits on any number of ranks.

    Raises:
        ConfigError: the samples of a batch influence each other in this model.
    """

    def __init__(self, config: Config, mesh: Mesh, model: Model | WrappedModel) -> None:
        if batch_statistics.has_batch_statistics(model):
            raise ConfigError(
                "the model normalises by batch statistics, which are kept in the order of the ranks",
                where="train.reproducible, model",
                mend="train.reproducible=null, or a model without BatchNorm",
            )
        super().__init__(config, mesh, model)
        self._seed = config.train.seed
        self._own = mesh.layout.logical_of(mesh.dp_rank)
        self._reduction = TreeReduction(mesh)

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        """See ``Engine.train_step``. The result is whole on the first rank; the others hold zeros."""
        scale = 1.0 / max(1, batch.target_count)

        def leaf(node: range) -> Tensor | None:
            if len(node) > 1:
                return None
            seed_micro_batch(self._seed, step, node.start, self._mesh.device)
            micro = batch.micro_batches[node.start - self._own.start]
            return self._gradient(micro, scale, loss_scale)

        whole = self._reduction.reduce([tree_sum(n, leaf) for n in self._reduction.nodes])
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        *pieces, loss_sum, own = whole.split([*sizes, 1, int(self._own_count)])
        for parameter, piece in zip(self._parameters.values(), pieces, strict=True):
            parameter.grad = piece.view_as(parameter) if parameter.requires_grad else None
        first = self._mesh.rank == 0
        count = own.view(()) * first if self._own_count else torch.tensor(batch.target_count * first)
        if self._own_count:
            own_count.divide_(self._parameters.values(), self._mesh, count, batch.target_count)
        return StepResult(loss_sum.view(()) * first, count)

    def _gradient(self, micro: Batch, scale: float, loss_scale: Tensor | None) -> Tensor:
        """The gradient of one micro-batch and its sum of losses, flat; and its count, where the loss has its own."""
        for parameter in self._parameters.values():
            parameter.grad = None
        loss_sum, count, *_ = self._forward(self._model, micro)
        loss = loss_sum * scale
        (loss if loss_scale is None else loss * loss_scale).backward()
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters.values()
        ]
        sums = [loss_sum, count] if self._own_count else [loss_sum]
        dtype = gradients[0].dtype
        flat = [*(gradient.reshape(-1) for gradient in gradients), *(each.detach().to(dtype).view(1) for each in sums)]
        return torch.cat(flat)
