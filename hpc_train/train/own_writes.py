"""Refuses a model whose forward pass gives replicas different states, after the first pass and before the first update.

A buffer or parameter that the forward pass changes is a function of the samples of its rank (a codebook, a queue, rows
of an embedding with ``max_norm``) or not (a counter, a momentum teacher). Only in the latter case the ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.data.dataset import StepBatch
from hpc_train.errors import UserError
from hpc_train.models.model import canonical_name
from hpc_train.parallel.engine import Engine, StepResult, WrappedEngine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.writes import checksum
from hpc_train.train.debug import join_names

SAME = 1e-5  # the difference of equal values, relative to the largest element of a tensor


class CheckedWrites(WrappedEngine):
    """Wraps ``engine`` and compares the state of its replicas after the first training step of the attempt.

    ``train_step`` raises UserError on all ranks if the forward pass has changed buffers or parameters, and they differ
    between replicas.
    """

    def __init__(self, engine: Engine, mesh: Mesh) -> None:
        super().__init__(engine)
        self._group = mesh.group("dp_cp")
        self._device = mesh.device
        self._kind = mesh.layout.data_parallel
        self._pending = mesh.layout.dp_cp > 1

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        if not self._pending:
            return self._engine.train_step(step, batch, loss_scale)
        self._pending = False
        before = {name: tensor.detach().clone() for name, tensor in self._buffers()}
        sums = {name: checksum(tensor) for name, tensor in self._replicated_parameters()}
        result = self._engine.train_step(step, batch, loss_scale)
        buffers = dict(self._buffers())
        changed = [name not in buffers or not _same(before[name], buffers[name]) for name in before]
        differing = self._differing([buffers.get(name) for name in before], changed)
        if any(differing):
            raise self._refused_buffers([name for name, differs in zip(before, differing, strict=True) if differs])
        parameters = dict(self._replicated_parameters())
        changed = [checksum(parameters[name]) != value for name, value in sums.items()]
        differing = self._differing([*parameters.values()], changed)
        if any(differing):
            raise self._refused_parameters([name for name, differs in zip(sums, differing, strict=True) if differs])
        return result

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            for name, buffer in part.named_buffers():
                yield canonical_name(name), buffer

    def _replicated_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters that every replica holds whole and only the forward pass may change in a step."""
        if self.updates is None:
            for name, parameter in self.named_parameters().items():
                if not isinstance(parameter, DTensor):
                    yield name, parameter.detach()

    @torch.no_grad()
    def _differing(self, tensors: list[Tensor | None], changed: list[bool]) -> list[bool]:
        """Returns for each of ``tensors``, of which some have ``changed`` on this rank, whether replicas differ in it.
        Collective."""
        sizes = [0 if tensor is None else tensor.numel() for tensor in tensors]
        facts = torch.tensor([changed, sizes, [-size for size in sizes]], dtype=torch.int64, device=self._device)
        dist.all_reduce(facts, dist.ReduceOp.MAX, group=self._group)
        anywhere, most, least = facts.tolist()
        found = []
        for tensor, has_changed, largest, smallest in zip(tensors, anywhere, most, least, strict=True):
            differs = largest != -smallest
            if has_changed and not differs and tensor is not None and largest > 0:
                differs = self._differs(tensor)
            found.append(bool(has_changed and differs))
        return found

    def _differs(self, tensor: Tensor) -> bool:
        values = tensor.detach().to(self._device, torch.float64).reshape(-1)
        bounds = torch.stack((values, -values))
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._group)
        largest, smallest = bounds[0], -bounds[1]
        scale = torch.maximum(largest.abs(), smallest.abs()).max()
        return bool((largest - smallest).max() > SAME * scale)

    def _refused_buffers(self, names: list[str]) -> UserError:
        return UserError(
            f"the forward pass changes the buffers {join_names(names)}, and each of the {self._ranks} ranks gives them "
            "other values, from its own samples: only those of one rank would be saved, and the results depend on the "
            "number of ranks",
            where="train.buffers=refuse, model",
            fix="train.buffers=rank0 gives all ranks the values of rank 0 after each step, as DDP does; "
            "train.buffers=mean averages them. strategy=single computes with all samples",
        )

    def _refused_parameters(self, names: list[str]) -> UserError:
        return UserError(
            f"the forward pass writes to the parameters {join_names(names)}, and each of the {self._ranks} ranks "
            "writes other values, from its own samples, so that the replicas come apart",
            where=f"strategy.data_parallel={self._kind}, model",
            fix="strategy=single, or write values that do not depend on the samples, such as a function of other "
            "parameters",
        )

    @property
    def _ranks(self) -> int:
        return dist.get_world_size(self._group)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
