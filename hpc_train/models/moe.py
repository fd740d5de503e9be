"""Implements the feed-forward branch of a mixture of experts: a router sends each token to ``top_k`` of many experts.

The choices of the tokens are sorted by expert, so that each product of all experts is one grouped product and no token
is dropped for lack of space (Gale et al. 2022, arXiv:2211.15841). A choice without an effect, such as one above the
capacity of its expert, has the weight 0 and no gradient. It is computed nevertheless, so that the number of rows does
not depend on values, except under expert parallelism, where this number does so in any case.

What depends on several tokens is defined per sequence: the capacity of an expert and the balance loss. A choice loses
its place only to choices of earlier tokens, so a token does not depend on later ones. The results therefore depend
neither on the other sequences of a micro-batch nor on the split of a batch. Ranks that hold parts of the same sequences
exchange the number of choices of each expert (``SequenceShards``). Tokens behind the last target of a sequence
are padding: they have no effect on the loss, count in no statistic, and the experts add nothing to them.

The auxiliary losses of a router are sums over the sequences, each weighted by its number of targets. Thus their sum is
divided by the same count as the cross-entropy. A router adds their gradient in its own backward pass and sums their
values and the number of choices of each expert in buffers; ``Routers`` reads them after the passes of a step. This is
the same on every pipeline stage, whether or not it has the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from hpc_train.config.schema import GPTConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.models.gpt_sizes import expert_width
from hpc_train.models.linear_layers import CASTS, product_dtype
from hpc_train.models.model import TokenShares, canonical_name
from hpc_train.models.transformer import PreNormLayer, widened

OPERATOR = "hpc_train::grouped_product"
_FUNCTIONAL = torch.ops._c10d_functional
ROUTED, TARGET_COUNTS = "routed", "target_counts"  # keys of the context


def routing_context(targets: Tensor) -> dict[str, Tensor]:
    """Returns which tokens of ``targets`` ``[micro, tokens]`` are not padding, ``[micro, tokens]``, and the number of
    targets of each sequence, ``[micro]``."""
    counted = targets != IGNORED
    return {ROUTED: counted.flip(1).cumsum(1).flip(1) > 0, TARGET_COUNTS: counted.sum(1)}


@dataclass(frozen=True)
class SequenceShards:
    """The ranks that hold the tokens of the same sequences: equal shards of what ``tokens`` gives the ranks that share
    them, in the order of the ranks.

    Attributes:
        groups: groups whose product are these ranks; neighbors are in the first.
        ranks: their number.
        rank: the position of this rank.
    """

    groups: tuple[dist.ProcessGroup, ...]
    ranks: int
    rank: int
    tokens: TokenShares

    def part(self, sequences: Tensor) -> Tensor:
        """Returns the tokens of this rank of ``[micro, seq]``."""
        shards = self.ranks // self.tokens.ranks
        return self.tokens.of_rank(sequences, 1).chunk(shards, 1)[self.rank % shards]

    def gather(self, values: Tensor) -> Tensor:
        """Returns the ``values`` of all ranks, ``[ranks, ...]``. Collective."""
        gathered = values.unsqueeze(0)
        for group in self.groups:
            arriving = _FUNCTIONAL.all_gather_into_tensor(gathered, group.size(), group.group_name)
            gathered = _FUNCTIONAL.wait_tensor(arriving)
        return gathered


class Router(nn.Module):
    """Chooses ``top_k`` experts for each token and computes the weights of their results.

    Logits, scores and losses are computed in at least fp32, from a weight that is rounded to the dtype of the hidden
    states, as under ZeRO, so that every strategy chooses the same experts.

    Attributes:
        expert_bias: added to the scores for the choice, but not for the weights (Wang et al. 2024, arXiv:2408.15664).
        loss_scale: the factor with which the loss of a step is differentiated.
        loss_sum: the sum of the auxiliary losses in this step, ``[1]``: compiled layers (torch 2.13) lose what they add
            to a tensor without dimensions.
        counts: the number of choices of each expert in this step, and last, the number of those that were dropped.
        shards: set by context and tensor parallelism; None if this rank holds whole sequences.
    """

    shards: SequenceShards | None = None
    expert_bias: Tensor | None
    loss_scale: Tensor
    loss_sum: Tensor
    counts: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe.experts is not None
        self.config = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, config.dim))
        self.register_buffer("expert_bias", None if moe.bias_rate is None else torch.zeros(moe.experts))
        self.register_buffer("loss_scale", torch.zeros(()), persistent=False)
        self.register_buffer("loss_sum", torch.zeros(1), persistent=False)
        self.register_buffer("counts", torch.zeros(moe.experts + 1, dtype=torch.int64), persistent=False)

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the weights and the numbers of the chosen experts, and whether a choice has an effect, all
        ``[micro, tokens, top_k]``."""
        logits = self._logits(hidden)
        scores = logits.softmax(-1) if self.config.router == "softmax" else logits.sigmoid()
        preferences = scores if self.expert_bias is None else scores + self.expert_bias
        experts = preferences.topk(self.config.top_k, -1).indices
        weights = scores.gather(-1, experts)
        if self.config.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        routed = context.get(ROUTED)
        if routed is None:
            routed = torch.ones_like(experts[..., 0], dtype=torch.bool)
        elif self.shards is not None:
            routed = self.shards.part(routed)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, experts, True) & routed.unsqueeze(-1)
        kept = chosen
        if self.training:
            load = chosen.sum(1)
            earlier, load_of_sequences = self._load_of_others(load)
            if self.config.capacity_factor is not None:
                places = chosen.cumsum(1) + earlier.unsqueeze(1)
                kept = chosen & (places <= self._capacity(load_of_sequences))
            self.counts.add_(torch.cat((load.sum(0), (chosen & ~kept).sum().view(1))))
            if self.config.balance_loss or self.config.z_loss:
                loss = self._auxiliary_loss(logits, scores, load_of_sequences, routed, context.get(TARGET_COUNTS))
                self.loss_sum.add_(loss.detach())
                weights = _WithLoss.apply(weights, loss, self.loss_scale)
        has_effect = kept.gather(-1, experts)
        return torch.where(has_effect, weights, 0.0), experts, has_effect

    def _logits(self, hidden: Tensor) -> Tensor:
        kind = hidden.device.type
        in_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if in_autocast else nullcontext():
            return F.linear(widened(hidden), widened(_held(self.weight).to(hidden.dtype)))

    def _load_of_others(self, load: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the load of the earlier tokens of the sequences, which other ranks hold, and of the whole sequences.
        Both have the shape of ``load``, that of the tokens of this rank, ``[micro, experts]``."""
        is_needed = self.config.capacity_factor is not None or self.config.balance_loss or self.config.z_loss
        if self.shards is None or not is_needed:
            return torch.zeros_like(load), load
        loads = self.shards.gather(load)
        return loads[: self.shards.rank].sum(0), loads.sum(0)

    def _tokens(self, load: Tensor) -> Tensor:
        """Returns the number of tokens of each sequence with the ``load``, ``[micro]``: each has ``top_k`` choices."""
        return load.sum(1) // self.config.top_k

    def _capacity(self, load: Tensor) -> Tensor:
        """Returns the most choices of an expert in each sequence with the ``load``, ``[micro, 1, 1]``."""
        moe = self.config
        assert moe.experts is not None and moe.capacity_factor is not None
        share = moe.capacity_factor * moe.top_k / moe.experts
        return (self._tokens(load).double() * share).ceil().view(-1, 1, 1)

    def _auxiliary_loss(
        self, logits: Tensor, scores: Tensor, load: Tensor, routed: Tensor, target_counts: Tensor | None
    ) -> Tensor:
        """Returns the sum over the sequences of their balance loss and z-loss, weighted by their targets; of sequences
        that several ranks hold, the part of this rank's tokens.

        The balance loss is ``experts * sum_e(f_e p_e)`` with ``f_e`` the share of the choices and ``p_e`` the mean
        share of the scores of expert ``e``: 1 if both are even (Fedus et al. 2021, arXiv:2101.03961, section 2.2; per
        sequence and for sigmoid scores: DeepSeek-V3, arXiv:2412.19437, section 2.1.2). The z-loss is the mean square of
        ``log(sum(exp(logits)))`` (Zoph et al. 2022, arXiv:2202.08906, section 3.3).

        Args:
            load: the number of choices of each expert in the sequences, ``[micro, experts]``.
        """
        tokens = self._tokens(load).clamp(min=1)
        shares = scores / scores.sum(-1, keepdim=True)
        mean_shares = torch.where(routed.unsqueeze(-1), shares, 0.0).sum(1) / tokens.unsqueeze(-1)
        fractions = load / (self.config.top_k * tokens.unsqueeze(-1))
        balance = len(self.weight) * (fractions * mean_shares).sum(-1)
        squares = torch.where(routed, logits.logsumexp(-1).square(), 0.0).sum(1) / tokens
        losses = self.config.balance_loss * balance + self.config.z_loss * squares
        return (losses * (tokens if target_counts is None else target_counts)).sum()


class _WithLoss(torch.autograd.Function):
    """Returns ``weights``; the backward pass also differentiates ``loss`` times ``scale``."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient, scale.clone(), None


class Experts(nn.Module):
    """Computes gated feed-forward branches, ``w2(f(w1 x) * w3 x)``, each for its own rows.

    The parameters of all experts are stacked: ``w1`` and ``w3`` ``[experts, width, dim]``, ``w2`` ``[experts, dim,
    width]``. Under expert parallelism they are DTensors, and this rank computes the rows of its shard. A subclass may
    have other parameters, stacked in the same way.
    """

    def __init__(self, config: GPTConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        assert config.moe.experts is not None
        width = expert_width(config)
        self._activation = activation
        self.w1 = nn.Parameter(torch.empty(config.moe.experts, width, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.moe.experts, config.dim, width))
        self.w3 = nn.Parameter(torch.empty(config.moe.experts, width, config.dim))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Returns the results for ``rows`` ``[rows, dim]``, of which expert ``e`` has those up to ``ends[e]``."""
        dtype = product_dtype(rows)
        weights = (_held(weight).to(dtype) for weight in self.__dict__.get(CASTS) or self.parameters())
        return self.compute(rows.to(dtype), ends, *weights)

    def compute(self, rows: Tensor, ends: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        """Returns the results of ``forward``. Subclasses override it.

        Args:
            w1, w2, w3: the weights of this rank's experts in the dtype of ``rows``, in the order of the parameters.
        """
        gated = self._activation(grouped_product(rows, w1, ends)) * grouped_product(rows, w3, ends)
        return grouped_product(gated, w2, ends)


def _held(weights: Tensor) -> Tensor:
    """Returns the weights that this rank holds. The gradient of replicated weights is that of the tokens of this
    rank."""
    if not isinstance(weights, DTensor):
        return weights
    gradient = [Partial() if placement.is_replicate() else placement for placement in weights.placements]
    return weights.to_local(grad_placements=gradient)


class OwnTokens(ParallelStyle):
    """Replicates the parameters of a module whose ranks compute different tokens, and whose gradients are partial
    sums."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in [*module.named_parameters(recurse=False)]:
            replicated = DTensor.from_local(parameter.detach(), device_mesh, [Replicate()], run_check=False)
            module.register_parameter(name, nn.Parameter(replicated, requires_grad=parameter.requires_grad))
        return module


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Returns ``rows[i] @ weights[e].T`` for each row, where ``e`` is the first group with ``i < ends[e]``.

    Args:
        rows: ``[rows, inputs]``.
        weights: ``[groups, outputs, inputs]``.
        ends: the end of each group, int32 ``[groups]``, of which the last is ``len(rows)``.
    """
    # torch 2.13 has kernels for bf16, of rows that are multiples of 16 bytes; in other dtypes it loops as well
    is_aligned = all(size * rows.itemsize % 16 == 0 for size in weights.shape[1:])
    if is_aligned and rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return _looped_product(rows, weights, ends)


# operators of their own, so that compiled layers stay one graph
@torch.library.custom_op(OPERATOR, mutates_args=())
def _looped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    pairs = zip(rows.split(_sizes(ends)), weights.unbind(), strict=True)
    return torch.cat([group @ weight.T for group, weight in pairs])


@torch.library.custom_op("hpc_train::grouped_outer_product", mutates_args=())
def _looped_outer_product(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    sizes = _sizes(ends)
    pairs = zip(gradient.split(sizes), rows.split(sizes), strict=True)
    return torch.stack([of_group.T @ group for of_group, group in pairs])


def _sizes(ends: Tensor) -> list[int]:
    sizes: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return sizes


@_looped_product.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@_looped_outer_product.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])


def _keep_factors(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    of_rows = _looped_product(gradient, weights.transpose(1, 2), ends)
    return of_rows, _looped_outer_product(gradient, rows, ends), None


_looped_product.register_autograd(_product_gradients, setup_context=_keep_factors)


class SelectedRows(torch.autograd.Function):
    """Returns the rows of ``values`` in ``order``, which numbers ``copies`` of each row, one after another.

    ``inverse`` is the inverse permutation of ``order``. The backward pass adds the gradients of the copies without
    atomic additions, so it is deterministic.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return values.index_select(0, order // copies)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse).unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the stable order that sorts rows by expert, its inverse, and the end of the rows of each expert in that
    order, int32 ``[experts]``.

    Args:
        chosen: the expert of each row, ``[rows]``; ``experts`` for a row of none.
    """
    ordered, order = chosen.sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(experts, device=order.device)
    return order, inverse, torch.searchsorted(ordered, numbers, right=True, out_int32=True)


class Exchange(Protocol):
    """Interface of expert parallelism, which computes rows on the ranks that hold their experts."""

    def start(self, experts: Experts, rows: Tensor, ends: Tensor) -> Tensor:
        """Returns what ``experts(rows, ends)`` returns for the rows up to ``ends[-1]`` if every rank holds all experts;
        ``finish`` waits for it."""

    def finish(self, results: Tensor) -> Tensor:
        """Waits for the results of ``start``."""


class MixtureOfExperts(nn.Module):
    """Adds up the results of the chosen experts, weighted by the router, and the result of the shared experts.

    Attributes:
        exchange: set by expert parallelism; None if this rank holds all experts.
    """

    exchange: Exchange | None = None

    def __init__(self, config: GPTConfig, activation: Callable[[Tensor], Tensor], shared: nn.Module | None) -> None:
        super().__init__()
        self._top_k = config.moe.top_k
        self.router = Router(config)
        self.experts = Experts(config, activation)
        self.shared = shared

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        weights, chosen, has_effect = self.router(hidden, context)
        number = len(self.router.weight)
        exchange = self.exchange
        if exchange is not None:  # rows without an effect are sorted behind those of all experts, and do not travel
            chosen = torch.where(has_effect, chosen, number)
        order, inverse, ends = sort_by_expert(chosen.flatten(), number)
        compute = self.experts if exchange is None else partial(exchange.start, self.experts)
        results = compute(SelectedRows.apply(hidden.flatten(0, 1), order, inverse, self._top_k), ends)
        shared = None if self.shared is None else self.shared(hidden)  # while results return from other ranks
        if exchange is not None:
            results = exchange.finish(results)
            if len(results) < len(order):
                results = F.pad(results, (0, 0, 0, len(order) - len(results)))
        results = SelectedRows.apply(results, inverse, order, 1).unflatten(0, chosen.shape)
        mixed = (results * weights.unsqueeze(-1).to(results.dtype)).sum(-2)
        if shared is None:
            return mixed
        return mixed + shared


class MoELayer(PreNormLayer):
    """A layer whose feed-forward branch is a ``MixtureOfExperts``."""

    def _feed_forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        return self.ffn(hidden, context)


def load_metrics(choices: Tensor) -> dict[str, Tensor]:
    """Returns the metrics of the choices of a step, in fp64.

    expert_load is the load of each expert in each layer relative to an even load, ``[layers, experts]``, of which
    expert_load_max is the largest value. expert_entropy is the entropy of the load relative to that of an even load,
    the mean over the layers. dropped_share is the share of the choices that experts without space did not compute.

    Args:
        choices: ``Router.counts`` of each layer with experts, for the global batch.
    """
    counts = choices[:, :-1].double()
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    entropy = -torch.special.xlogy(shares, shares).sum(1) / math.log(counts.shape[1])
    load = shares * counts.shape[1]
    dropped = choices[:, -1].sum() / counts.sum().clamp(min=1)
    return {
        "expert_load": load,
        "expert_load_max": load.max(),
        "expert_entropy": entropy.mean(),
        "dropped_share": dropped,
    }


class Routers:
    """Collects what the routers of ``parts`` compute in a training step, and updates their biases after it.

    The buffers of a step are zero between steps, so replicas have equal buffers.

    Args:
        replicas: the ranks of ``dp_cp``.
        tensor_ranks: the ranks of ``tp``, which compute other tokens of the same sequences.
    """

    def __init__(
        self, parts: Iterable[nn.Module], replicas: dist.ProcessGroup, tensor_ranks: dist.ProcessGroup
    ) -> None:
        modules = (named for part in parts for named in part.named_modules())
        self._by_layer = {
            int(canonical_name(name).split(".")[1]): module for name, module in modules if isinstance(module, Router)
        }
        self._replicas = replicas
        self._tensor_ranks = tensor_ranks
        self._load: Tensor | None = None  # the choices of the global batch: [routers, experts]

    def begin(self, factor: float, loss_scale: Tensor | None) -> None:
        """Sets the factor, times ``loss_scale`` if given, with which the step differentiates its losses."""
        for router in self._by_layer.values():
            router.loss_scale.fill_(factor)
            if loss_scale is not None:
                router.loss_scale.mul_(loss_scale)

    def finish(self) -> tuple[Tensor, Mapping[int, Tensor]] | None:
        """Returns the sum of the auxiliary losses of the tensor-parallel ranks, and layer -> ``Router.counts``; None
        without routers. Collective over these ranks, and over all of a stage if the routers have biases."""
        routers = [*self._by_layer.values()]
        if not routers:
            return None
        loss = torch.stack([router.loss_sum for router in routers]).sum()
        dist.all_reduce(loss, group=self._tensor_ranks)
        counts = torch.stack([router.counts for router in routers])
        for router in routers:
            router.loss_sum.zero_()
            router.counts.zero_()
        if routers[0].expert_bias is not None:
            self._load = counts[:, :-1].clone()
            dist.all_reduce(self._load, group=self._replicas)
            dist.all_reduce(self._load, group=self._tensor_ranks)
        return loss, dict(zip(self._by_layer, counts, strict=True))

    @torch.no_grad()
    def commit(self, finite: Tensor) -> None:
        """Raises the biases of the experts with fewer choices than the mean and lowers the others by ``bias_rate``,
        if the step was ``finite``, a scalar bool on the device.

        The number of choices are integers, so the biases have the same bits under every layout.
        """
        if self._load is None:
            return
        for router, load in zip(self._by_layer.values(), self._load, strict=True):
            assert router.expert_bias is not None and router.config.bias_rate is not None
            direction = (load.sum() - load * len(load)).sign()  # of the mean minus the load, in integers
            router.expert_bias.add_(direction * finite, alpha=router.config.bias_rate)
        self._load = None
