"""Applies expert parallelism, which divides the experts of each layer over the ``ep`` ranks.

The ranks are consecutive ranks of a pipeline stage. Each routes its own tokens: of other samples, or under context and
tensor parallelism other tokens of the same sequences. An all-to-all brings the rows of the chosen experts to the ranks
that hold these, and another one returns the results (Lepikhin et al. 2020, arXiv:2006.16668). A rank sends each other
rank as many rows as its routers have chosen, so the exchange drops no token; rows without an effect, such as those
above a capacity, are not sent. The number of rows is exchanged first, and the host waits for it.

The rows of an expert are in the order of the ranks and of their tokens, and the results return to the places that they
have without expert parallelism. Thus the numbers are those of one process, apart from the order of some sums.

The parameters of the experts become DTensors that are sharded over ``ep``. Their gradients cover the tokens of these
ranks and are summed over the ranks that hold the same experts (``Mesh.gradient_group``). If ``ep`` is 1,
tensor-parallel ranks hold replicas of the router and of all experts, whose gradients they sum like those of norms.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Shard, distribute_tensor

from hpc_train.models.moe import Experts, MixtureOfExperts, SelectedRows, SequenceShards, sort_by_expert
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision.masters import local_part

_FUNCTIONAL = torch.ops._c10d_functional


def apply_expert_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Leaves each rank its experts of ``model`` (whole or a stage), and lets routers count the choices of whole
    sequences, in place; call it after tensor parallelism and before anything wraps the model."""
    layout = mesh.layout
    axes = [axis for axis, ranks in (("tp", layout.tp), ("cp", layout.cp)) if ranks > 1]
    groups = tuple(mesh.group(axis) for axis in axes)
    rank = mesh.cp_rank * layout.tp + mesh.tp_rank
    shards = SequenceShards(groups, layout.cp * layout.tp, rank, mesh.token_shares)
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            if groups:
                module.router.shards = shards
            if mesh.expert_mesh is not None:
                module.exchange = TokenExchange(mesh.group("ep"))
                for name, parameter in module.experts.named_parameters():
                    whole = local_part(parameter.detach())
                    shard = distribute_tensor(whole, mesh.expert_mesh["ep"], [Shard(0)], src_data_rank=None)
                    setattr(module.experts, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


class TokenExchange:
    """Computes rows on the ranks that hold their experts.

    Args:
        group: the ranks that divide the experts, in the order of the experts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, experts: Experts, rows: Tensor, ends: Tensor) -> Tensor:
        """Returns the results for ``rows``, which ``finish`` waits for. Collective, differentiable.

        Args:
            experts: the experts of this rank.
            rows: ``[rows, dim]``, of which expert ``e`` of all ranks has those up to ``ends[e]``. Later ones stay here.
        """
        ranks = self._group.size()
        counts = ends.diff(prepend=ends.new_zeros(1)).view(ranks, -1)
        arriving = counts.clone()  # [sender, expert of this rank]
        dist.all_to_all_single(arriving, counts, group=self._group)
        sent, received = torch.stack((counts.sum(1), arriving.sum(1))).tolist()
        # one name, so that only one of these tensors exists at a time
        rows = self.finish(_Sent.apply(rows[: sum(sent)], sent, received, self._group))
        numbers = torch.arange(arriving.shape[1], device=rows.device).repeat(ranks)
        chosen = numbers.repeat_interleave(arriving.flatten(), output_size=sum(received))
        order, inverse, local_ends = sort_by_expert(chosen, arriving.shape[1])
        rows = SelectedRows.apply(rows, order, inverse, 1)
        rows = experts(rows, local_ends)
        rows = SelectedRows.apply(rows, inverse, order, 1)
        results: Tensor = _Sent.apply(rows, received, sent, self._group)
        return results

    def finish(self, results: Tensor) -> Tensor:
        """Waits for the results of ``start``."""
        arrived: Tensor = _Arrived.apply(results)
        return arrived


class _Sent(torch.autograd.Function):
    """Starts to send ``sent[r]`` rows to each rank ``r``, and to receive ``received[r]`` rows from it.

    The gradients of the rows return in the same way.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits = sent, received
        ctx.group = group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.splits
        returned: Tensor = _FUNCTIONAL.wait_tensor(_exchanged(gradient, received, sent, ctx.group))
        return returned, None, None, None


class _Arrived(torch.autograd.Function):
    """Waits for rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        arrived: Tensor = _FUNCTIONAL.wait_tensor(rows)
        return arrived.view_as(arrived)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Returns the rows that arrive, which ``wait_tensor`` waits for. Activation checkpointing can keep them."""
    arriving: Tensor = _FUNCTIONAL.all_to_all_single(rows.contiguous(), received, sent, group.group_name)
    return arriving
