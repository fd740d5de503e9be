"""Applies context parallelism, which splits the sequence of every sample over the ``cp`` ranks.

Each rank computes all layers for its tokens. The ranks hold the same parameters and different tokens, so their
gradients are summed over ``dp_cp`` like those of replicas. There are two ways to compute attention:

- The ranks exchange heads around attention, as DeepSpeed Ulysses does (Jacobs et al. 2023, arXiv:2309.14509). Before
  attention an all-to-all turns the tokens of all heads into whole sequences of 1/cp of the heads, and after it another
  one turns the result back. Attention therefore sees whole sequences: causal masks, documents, windows and kernels stay
  as they are, and all ranks have equally much to compute.
- Keys and values travel around a ring of the ranks (``parallel/ring.py``).

With both, consecutive ranks exchange heads, and attention of the sequences that they hold together is that of a ring
whose ranks are apart (Fang and Zhao 2024, arXiv:2405.07719).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as functional_collectives

from hpc_train.config.extensions import load_family
from hpc_train.data.dataset import Batch
from hpc_train.errors import UserError
from hpc_train.models.attention import Attention
from hpc_train.models.model import Model
from hpc_train.parallel.mesh import Mesh, all_gather_tensor
from hpc_train.parallel.ring import Ring

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def apply_context_parallel(model: Model, mesh: Mesh) -> None:
    """Lets the attention of ``model`` (whole or a stage) cover the tokens of the ``cp`` ranks of ``mesh``, in place.

    Raises:
        UserError: the model does not support it.
    """
    if model.family is None or load_family(model.family).context_heads is None:
        raise UserError(
            f"{type(model).__name__} has no attention that context-parallel ranks can share",
            where="strategy.cp",
            fix="strategy.cp=1, or use a model whose family supports it, such as gpt",
        )
    layout = mesh.layout
    has_both = 1 < layout.ring < layout.cp
    for module in model.modules():
        if isinstance(module, Attention):
            if layout.ring < layout.cp:
                module.exchange = HeadExchange(mesh.group("heads" if has_both else "cp"))
            if layout.ring > 1:
                module.ring = Ring(mesh.group("ring" if has_both else "cp"))
    model.token_shares = mesh.token_shares


class HeadExchange:
    """Computes attention on whole sequences, for some of the heads.

    Args:
        group: the ranks that hold the shards of a sequence, in the order of the tokens.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)

    def __call__(self, attend: Attend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns ``attend`` of the whole sequence, for this rank's tokens and all heads. Collective, differentiable.

        Args:
            attend: takes ``[micro, seq, heads / cp, head_dim]`` and returns the shape of its first argument.
            query: ``[micro, seq / cp, heads, head_dim]``.
            key, value: the same with fewer heads, if queries are grouped. If these are fewer than the ranks, each is
                sent to several ranks.
        """
        parts = []
        for heads in (query, key, value):
            times = max(
                1, self._ranks // heads.shape[2]
            )  # each rank needs a head; equal heads are next to their queries
            repeated = heads.repeat_interleave(times, dim=2) if times > 1 else heads
            parts.append(repeated.unflatten(2, (self._ranks, -1)).movedim(2, 0))  # [receiver, micro, seq, heads, dim]
        widths = [part.shape[3] for part in parts]
        received = _AllToAll.apply(torch.cat(parts, dim=3), self._group)  # [sender, micro, seq / cp, heads, head_dim]
        mixed = attend(*received.movedim(0, 1).flatten(1, 2).split(widths, dim=2))
        sent = mixed.unflatten(1, (self._ranks, -1)).movedim(1, 0)
        returned: Tensor = _AllToAll.apply(sent, self._group)
        return returned.movedim(0, 2).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """Sends block ``r`` of dim 0 to rank ``r``. The gradient of a block returns to its sender in the same way."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(blocks, group)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradient, ctx.group), None


def _exchanged(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    # activation checkpointing can keep the result, and torch 2.11 compiles wrong gradients if the result is given
    exchanged = functional_collectives.all_to_all_single(blocks.contiguous(), None, None, group)
    received: Tensor = functional_collectives.wait_tensor(exchanged)
    return received


def own_tokens(batch: Batch, model: Model, mesh: Mesh) -> Batch:
    """Returns this rank's tokens of ``batch``, inputs and targets.

    The context stays whole, since attention covers whole sequences, and gets that of all targets.

    Raises:
        UserError: the sequence cannot be split into equal shards, or has a mask that a ring does not support.
    """
    ranks = mesh.layout.cp
    if ranks == 1:
        return batch
    tokens = batch.inputs.shape[1]
    parts = model.token_shares.unit * model.sequence_shards
    if tokens % parts:
        split = f" of {model.sequence_shards} tensor-parallel ranks each" if model.sequence_shards > 1 else ""
        raise UserError(
            f"{tokens} tokens cannot be split over {ranks} context-parallel ranks{split}",
            where="data, strategy.cp",
            fix=f"sequences of a multiple of {parts} tokens, by data.sequence_length or by padding in your dataset",
        )
    if mesh.layout.ring > 1 and "attention_mask" in batch.context:
        raise UserError(
            "the data has an attention_mask, but a ring of context-parallel ranks masks only documents and windows",
            where="data, strategy.context",
            fix="document_ids in the place of the mask, or strategy.context=ulysses",
        )
    inputs, targets = (model.token_shares.of_rank(full, 1).contiguous() for full in (batch.inputs, batch.targets))
    context = {**batch.context, **model.batch_context(batch.targets)}
    return replace(batch, inputs=inputs, targets=targets, context=context)


def whole_sequence(outputs: Tensor, mesh: Mesh) -> Tensor:
    """Returns ``[micro, seq, ...]`` from the shares ``[micro, seq / cp, ...]`` of all ``cp`` ranks, without gradients.

    Collective over these ranks.
    """
    ranks = mesh.layout.cp
    if ranks == 1:
        return outputs
    shards = outputs.new_empty(ranks * len(outputs), *outputs.shape[1:])
    all_gather_tensor(shards, outputs.contiguous(), group=mesh.group("cp"))
    return mesh.token_shares.joined(shards.chunk(ranks), 1)
