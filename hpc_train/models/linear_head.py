"""Computes the loss of a head that ends with a matrix, in chunks and together with its gradients.

The gradient of the loss with respect to the logits follows directly from the logits: ``softmax(logits)`` minus the
one-hot target. For each chunk of tokens, the forward pass therefore computes the logits, the loss, the gradient of the
logits in the same memory, and from it the gradients of the hidden states and of the matrix. No logits are kept for the
backward pass and no product is computed twice; the backward pass only multiplies both gradients by the incoming
gradient. The gradient of the matrix is summed over the chunks in at least fp32.

With tensor parallelism, the rows of the matrix, and thus the words of the logits, are distributed over the ranks. The
hidden states are gathered once. The ranks reduce the largest logit, the sum of the exponentials and the logit of the
target, so they exchange three numbers per token instead of the logits (Shoeybi et al. 2019, arXiv:1909.08053, section
3).

The gradient of the matrix is kept for the backward pass instead of the logits. A pipeline stage that keeps several
micro-batches at a time would keep one such gradient for each (``layout/loss_chunks.py`` then chooses chunks that are
computed again).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate

from hpc_train.data.dataset import IGNORED
from hpc_train.models.attention import soft_cap
from hpc_train.models.linear_layers import cast_weight
from hpc_train.models.transformer import Compiler, CrossEntropyHead, in_compute_dtype, widened

FP16_ROWS = 1024  # the most rows of a product; a sum over more tokens might exceed the range of fp16


@dataclass(frozen=True)
class _Logits:
    """The settings for the logits: the soft cap, the words of this rank, and the coefficient of the z-loss."""

    cap: float | None
    shard: VocabularyShard | None
    z_loss: float


ChunkLoss = Callable[[Tensor, Tensor, _Logits], tuple[Tensor, Tensor]]


class LinearHead(CrossEntropyHead):
    """Computes the logits ``[micro, seq, vocab]`` by a norm, a matrix without bias and an optional soft cap.

    ``cap`` bounds the logits, as in Gemma 2; see ``soft_cap``. The matrix is registered as ``name``, which names its
    weight in checkpoints. With ``fused``, the loss is computed together with its gradients, in ``chunks`` chunks of the
    tokens of a micro-batch.
    """

    fused: bool = False
    _chunk_loss: ChunkLoss | None = None

    def __init__(self, norm: nn.Module, output: nn.Linear, cap: float | None = None, name: str = "output") -> None:
        super().__init__()
        self.norm = norm
        self._modules[name] = output
        self._name = name
        self._cap = cap

    @property
    def output(self) -> nn.Linear:
        """Returns the module with the matrix."""
        return self._modules[self._name]  # type: ignore[return-value]

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.output(self.norm(hidden))
        if self._cap is None:
            return logits
        return soft_cap(widened(logits), self._cap)

    @property
    def _fuses(self) -> bool:
        """Returns whether the loss is fused: ``fused`` is set, and no subclass computes other logits or losses."""
        plain = type(self.output) is nn.Linear and self.output.bias is None
        return self.fused and plain and type(self).forward is LinearHead.forward and not self._overrides_loss

    @property
    def _overrides_loss(self) -> bool:
        return type(self).loss is not LinearHead.loss or type(self)._loss is not CrossEntropyHead._loss

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not self._fuses or not torch.is_grad_enabled():
            return super().loss(hidden, targets)
        normed, weight, shard = self._factors(hidden)
        form = (self.chunks, self._cap, shard, self.z_loss, self._chunk_loss)
        return linear_cross_entropy(normed, weight, targets, *form)

    def compile_with(self, compiler: Compiler) -> None:
        """Compiles the norm and the computation of the loss from the logits of a chunk.

        A product with the matrix is a single kernel in any case, and the sum over the chunks is computed in place.
        """
        if not self._fuses:
            super().compile_with(compiler)
            return
        self._normed = compiler(self._normed)  # type: ignore[method-assign]
        self._chunk_loss = compiler(compilable_chunk_loss)

    def evaluate(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        spread = isinstance(self.output.weight, DTensor)
        if not self._fuses or not spread or self.observe is not None:  # metrics need full logits
            return super().evaluate(hidden, targets)
        normed, weight, shard = self._factors(hidden)
        assert shard is not None
        return _evaluate_shard(normed, weight, targets, self.chunks, self._cap, shard)

    def _factors(self, hidden: Tensor) -> tuple[Tensor, Tensor, VocabularyShard | None]:
        """Returns the normalized hidden states of all tokens, the matrix or this rank's shard of it, and the words of
        the shard."""
        normed = self._normed(hidden)
        weight = cast_weight(self.output)
        if not isinstance(weight, DTensor):
            return normed, weight, None
        return normed, weight.to_local(), shard_of(weight)

    def _normed(self, hidden: Tensor) -> Tensor:
        """Returns the normalized hidden states of all tokens, gathered if the norm returns shards under tensor
        parallelism."""
        normed = in_compute_dtype(self.norm(hidden))
        if isinstance(normed, DTensor):
            return gather_sequence(normed)
        return normed


@torch._disable_dynamo
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunks: int = 1,
    cap: float | None = None,
    shard: VocabularyShard | None = None,
    z_loss: float = 0.0,
    chunk_loss: ChunkLoss | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the result of ``cross_entropy_with_z`` for the logits ``soft_cap(hidden @ weight.T, cap)``.

    The softmax is computed in at least fp32, the products in the dtype of ``hidden`` and ``weight``. Gradients are
    computed only for tensors that require a gradient.

    Args:
        hidden: ``[..., dim]``.
        weight: ``[vocab, dim]``, or the rows of the words of ``shard``.
        targets: ``[...]`` int64; ``IGNORED`` targets do not count.
        chunks: the number of chunks of tokens. The logits of one chunk are in memory at a time.
        cap: bounds the logits.
        shard: the words of this rank; all ranks of its group call the function with the same hidden states and targets.
            The gradient of ``hidden`` is then the contribution of these words. None: all words.
        z_loss: the coefficient of the z-loss; with 0 the result equals ``cross_entropy``.
        chunk_loss: a compiled ``compilable_chunk_loss``; None computes it by single operators.

    Raises:
        IndexError: a target is not one of the classes (on CPUs; on GPUs a kernel raises an assertion). A compiled
            ``chunk_loss`` raises RuntimeError.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        parts = _cut(hidden, targets, chunks)
        form = (_Logits(cap, shard, z_loss), chunk_loss or _loss_and_gradient)
        total, of_hidden, of_weight = _sum_chunks(parts, hidden, weight, *form)
    # separate nodes, since a schedule with a split backward runs them at different times
    if of_hidden is not None:
        total = _Known.apply(total, hidden, of_hidden)
    if of_weight is not None:
        total = total + _Known.apply(torch.zeros_like(total), weight, of_weight)
    return total, (targets != IGNORED).sum()


def _cut(hidden: Tensor, targets: Tensor, chunks: int) -> list[tuple[Tensor, Tensor]]:
    return [*zip(hidden.flatten(0, -2).chunk(chunks), targets.flatten().chunk(chunks), strict=True)]


def _sum_chunks(
    parts: Sequence[tuple[Tensor, Tensor]],
    hidden: Tensor,
    weight: Tensor,
    kind: _Logits,
    chunk_loss: ChunkLoss,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the loss and its gradients with respect to ``hidden`` and ``weight``, or None for a tensor that does not
    require a gradient."""
    losses = []
    first = 0
    of_hidden = hidden.new_empty(hidden.shape) if hidden.requires_grad else None
    of_weight: Tensor | None = None
    # the product of a single chunk needs no sum; in fp16 it might exceed the range
    if len(parts) == 1 and hidden.dtype != torch.float16:
        dtype = hidden.dtype
    else:
        dtype = widened(hidden[:0]).dtype
    for rows, chunk_targets in parts:
        loss, of_logits = chunk_loss(rows @ weight.t(), chunk_targets, kind)
        losses.append(loss)
        if of_hidden is not None:
            torch.mm(of_logits, weight, out=of_hidden.view(-1, weight.shape[1]).narrow(0, first, len(rows)))
        if weight.requires_grad:
            of_weight = _plus_product(of_weight, of_logits, rows, dtype)
        first += len(rows)
        del of_logits  # otherwise it would exist together with the logits of the next chunk
    return torch.stack(losses).sum(), of_hidden, of_weight


def _loss_and_gradient(logits: Tensor, targets: Tensor, kind: _Logits) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses of ``logits`` ``[tokens, vocab]``, and their gradient in the memory of ``logits``.

    Softmax and loss are computed on logits minus their largest, in at least fp32; half precision is copied once.
    """
    shard = kind.shard
    wide, slope = _capped(logits, kind.cap)
    wide, total, top, loss = _exponentials(wide, targets, shard)
    if kind.z_loss:
        normalizer = total.log() + top
        loss = loss + kind.z_loss * torch.where(targets != IGNORED, normalizer.square(), 0.0).sum()
        wide.mul_((1 + 2 * kind.z_loss * normalizer).unsqueeze(-1))
    local_targets = targets
    if shard is not None:
        local_targets = shard.shard_targets(targets)
    wide[torch.arange(len(local_targets), device=local_targets.device), local_targets.clamp(min=0)] -= (
        local_targets != IGNORED
    ) * total
    if slope is not None:
        wide.mul_(slope)
    factor = (targets != IGNORED) / total
    return loss, torch.mul(wide, factor.unsqueeze(-1), out=logits)


def compilable_chunk_loss(logits: Tensor, targets: Tensor, kind: _Logits) -> tuple[Tensor, Tensor]:
    """Returns the result of ``_loss_and_gradient``. When compiled, it has no intermediate results in memory.

    The compiler computes exponentials again where they are used: it reads the logits for the maximum, for the sum and
    for the gradient, and writes the gradient over them. Eager operators read and write copies of the logits in fp32.
    """
    shard = kind.shard
    wide, slope = _capped(logits, kind.cap)
    wide = widened(wide)
    top = wide.amax(-1, keepdim=True)
    if shard is not None:
        top = shard.largest(top)
    local_targets = targets
    if shard is not None:
        local_targets = shard.shard_targets(targets)
    word = torch.where(local_targets == IGNORED, 0, local_targets).unsqueeze(-1)
    chosen = torch.where(
        local_targets == IGNORED, 0.0, (wide.gather(-1, word) - top).squeeze(-1)
    )  # also checks the target
    gradient = (wide - top).exp()
    total = gradient.sum(-1)
    if shard is not None:
        total, chosen = shard.sum(torch.stack((total, chosen)))
    counts = targets != IGNORED
    loss = torch.where(counts, total.log() - chosen, 0.0).sum()
    if kind.z_loss:
        normalizer = total.log() + top.squeeze(-1)
        loss = loss + kind.z_loss * torch.where(counts, normalizer.square(), 0.0).sum()
        gradient = gradient * (1 + 2 * kind.z_loss * normalizer).unsqueeze(-1)
    words = torch.arange(logits.shape[-1], device=logits.device)
    hit = (words == word) & (local_targets != IGNORED).unsqueeze(-1)
    gradient = torch.where(hit, gradient - total.unsqueeze(-1), gradient)
    if slope is not None:
        gradient = gradient * slope
    return loss, logits.copy_(gradient * (counts / total).unsqueeze(-1))


def _exponentials(
    logits: Tensor, targets: Tensor, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns ``exp(logits - largest)`` in at least fp32, in the memory of ``logits`` if possible; its sums over all
    words ``[tokens]``; the largest ``[tokens]``; and the sum of the losses."""
    top = widened(logits.amax(-1, keepdim=True))
    if shard is not None:
        shard.largest(top)
    wide = logits.sub_(top) if logits.dtype == top.dtype else torch.sub(logits, top)
    local_targets = targets
    if shard is not None:
        local_targets = shard.shard_targets(targets)
    chosen = -F.nll_loss(wide, local_targets, ignore_index=IGNORED, reduction="none")  # 0 for words of other ranks
    sums = torch.stack((wide.exp_().sum(-1), chosen))
    if shard is not None:
        shard.sum(sums)
    total, chosen = sums
    return wide, total, top.squeeze(-1), torch.where(targets != IGNORED, total.log() - chosen, 0.0).sum()


def _evaluate_shard(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunks: int, cap: float | None, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns loss, count and the number of correct predictions. Collective."""
    losses, correct = [], []
    with torch.autocast(hidden.device.type, enabled=False):
        for rows, chunk_targets in _cut(hidden, targets, chunks):
            logits = rows @ weight.t()
            logits, _ = _capped(logits, cap)
            correct.append(shard.count_correct(logits, chunk_targets))
            losses.append(_exponentials(logits, chunk_targets, shard)[3])
    return torch.stack(losses).sum(), (targets != IGNORED).sum(), torch.stack(correct).sum()


def _capped(logits: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns ``soft_cap(logits, cap)`` in at least fp32, and its derivative; ``logits`` and None without a cap."""
    if cap is None:
        return logits, None
    bounded = torch.tanh(widened(logits) / cap)
    return bounded * cap, 1 - bounded.square()


def _plus_product(total: Tensor | None, of_logits: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``total + of_logits.T @ rows`` in ``dtype``, in place."""
    left = of_logits.t()
    if dtype == of_logits.dtype:
        if total is None:
            return left @ rows
        return total.addmm_(left, rows)
    if of_logits.is_cuda and torch.version.hip is None:  # the kernel adds its product without rounding it
        if total is None:
            return torch.mm(left, rows, out_dtype=dtype)
        return torch.addmm(total, left, rows, out_dtype=dtype, out=total)
    most = FP16_ROWS if of_logits.dtype == torch.float16 else len(rows)
    for columns, some in zip(left.split(most, 1), rows.split(most), strict=True):
        product = columns @ some
        total = product.to(dtype) if total is None else total.add_(product)
    assert total is not None
    return total


class _Known(torch.autograd.Function):
    """Returns ``value``, whose ``gradient`` with respect to ``source`` is already computed. The backward pass scales it
    in place."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        ctx.dtype = source.dtype
        return value.clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: Tensor) -> tuple[None, Tensor, None]:
        if ctx.gradient is None:
            raise RuntimeError("the backward pass of a loss ran twice, although the first did not retain the graph")
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return None, (ctx.gradient * scale).to(ctx.dtype), None
        gradient = ctx.gradient
        ctx.gradient = None  # without other references, autograd uses the tensor as the gradient of the parameter
        return None, gradient.mul_(scale).to(ctx.dtype), None


@dataclass(frozen=True)
class VocabularyShard:
    """The words of this rank.

    Attributes:
        group: the ranks that share the vocabulary.
        first: the first word of this rank.
        words: the number of words of this rank.
        vocabulary: the number of words of all ranks.
    """

    group: dist.ProcessGroup
    first: int
    words: int
    vocabulary: int

    def shard_targets(self, targets: Tensor) -> Tensor:
        """Returns ``targets`` relative to the first word of this rank, and ``IGNORED`` for words of other ranks.

        A target that is not a word stays unchanged, so that the loss rejects it.
        """
        in_shard = self.is_local(targets)
        return torch.where(in_shard, targets - self.first, torch.where(self._is_word(targets), IGNORED, targets))

    def is_local(self, ids: Tensor) -> Tensor:
        """Returns which of ``ids`` are words of this rank."""
        return (ids >= self.first) & (ids < self.first + self.words)

    def _is_word(self, ids: Tensor) -> Tensor:
        return (ids >= 0) & (ids < self.vocabulary)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Returns the rows of ``table`` ``[words, dim]`` for ``ids``, and zeros for words of other ranks; raises
        IndexError if an id is not a word (on CPUs; on GPUs a kernel raises an assertion)."""
        in_shard = self.is_local(ids)
        rows = torch.where(in_shard, ids - self.first, torch.where(self._is_word(ids), 0, self.vocabulary))
        return F.embedding(rows, table) * in_shard.unsqueeze(-1)

    def largest(self, values: Tensor) -> Tensor:
        """Returns the maximum of ``values`` over the ranks, in place. Collective."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of ``values`` over the ranks, in place. Collective."""
        dist.all_reduce(values, group=self.group)
        return values

    def count_correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the number of ``targets`` ``[tokens]`` that have the largest logit. Collective.

        ``logits`` ``[tokens, words]`` cover the words of this rank. If words have equal logits, the first one is
        predicted.
        """
        maximum, word = logits.max(-1)
        largest = self.largest(maximum.clone())
        predicted = torch.where(maximum == largest, word + self.first, self.vocabulary)
        dist.all_reduce(predicted, dist.ReduceOp.MIN, group=self.group)
        return (predicted == targets).sum()


class WordEmbedding(nn.Embedding):
    """Looks up words. With tensor parallelism, each rank looks up only the words of its shard.

    The caller adds up the results of the ranks. DTensors would compute the gradient of the full table on every rank.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if not isinstance(weight, DTensor):
            return super().forward(input)
        ids = input.to_local() if isinstance(input, DTensor) else input
        rows = shard_of(weight).embed(ids, weight.to_local())
        return DTensor.from_local(rows, weight.device_mesh, [Partial()], run_check=False)


def shard_of(weight: DTensor) -> VocabularyShard:
    """Returns the words of this rank in ``weight`` ``[vocab, dim]``, whose rows are sharded over a mesh of one dim."""
    mesh = weight.device_mesh
    vocabulary = weight.shape[0]
    share = ceil(vocabulary / mesh.size())  # the last ranks may have fewer words
    first = min(mesh.get_local_rank() * share, vocabulary)
    return VocabularyShard(mesh.get_group(), first, min(share, vocabulary - first), vocabulary)


def gather_sequence(hidden: DTensor) -> Tensor:
    """Returns hidden states ``[micro, seq, dim]`` for all tokens. Collective.

    The gradient on each rank holds the contributions of its words. The backward pass adds up the contributions and
    returns the gradients of its tokens to each rank (a reduce-scatter).
    """
    gathered: Tensor = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return gathered
