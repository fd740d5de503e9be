"""Computes causal attention of sequences whose tokens the ranks of a ring share (Liu et al. 2023, arXiv:2310.01889).

No rank holds whole sequences. Keys and values travel around the ring, one neighbor per round, while each rank computes
attention of its queries to those that it holds. The results of the rounds are merged by their log-sum-exps, in fp32 or
fp64. The backward pass computes each round again from the merged log-sum-exps; the gradients of keys and values travel
with these, in fp32 or fp64, and end at their owners. The next message is on its way during the products of a round.

Of ``2 * ranks`` chunks of a sequence, rank ``r`` holds the chunks ``r`` and ``2 * ranks - 1 - r`` (``TokenShares``), so
that under a causal mask all ranks compute equally much in each round: the own tokens, then either all queries and the
first chunk, or the second chunk and all keys.

Flash attention computes the pairs of chunks without packed documents and without the edge of a window, in half
precision on GPUs and in every dtype on CPUs. Other pairs, and scores with a soft cap, are plain products with a mask, a
limited number of rows at a time. Pairs that a window excludes are skipped, on CPUs also those that share no document:
on a GPU the host would have to wait for the device to know these.

PyTorch's ring (``torch.distributed.tensor.experimental._attention``, 2.13) is not used: it has neither windows nor
documents nor soft caps, needs kernels of GPUs, and replaces attention of the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from hpc_train.models.packed_attention import RING_OPERATOR, Scores

MOST_SCORES = 2**25  # of plain products at a time: 128 MiB in fp32


class Ring:
    """Computes attention over the tokens of all ranks of ``group``.

    Args:
        group: the ranks in the order of ``TokenShares``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group.group_name

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None, scores: Scores
    ) -> Tensor:
        """Returns causal attention in the shape of ``query``. Collective, differentiable.

        Args:
            query: ``[micro, tokens, heads, head_dim]`` of the tokens of this rank.
            key, value: ``[micro, tokens, kv_heads, head_dim]``.
            document_ids: ``[micro, seq]`` of whole sequences, if attention stays inside documents.
            scores: how scores are computed.
        """
        scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
        options = self._group, scale, scores.window, scores.cap
        mixed: Tensor = _ring_attention(query, key, value, document_ids, *options)[0]
        return mixed


@dataclass(frozen=True)
class _Block:
    """Queries and keys of a round that are computed at once.

    Attributes:
        rows, columns: which of the tokens of this rank, and of the rank whose keys are here.
        causal: whether each query has the keys up to its own position; otherwise it has all, but for ``masked``.
        masked: whether documents or a window exclude some pairs.
    """

    rows: slice
    columns: slice
    causal: bool
    masked: bool


@dataclass(frozen=True)
class _Rounds:
    """The rounds of a rank.

    Attributes:
        length: the number of tokens of a rank.
        document_ids: ``[micro, seq]``, or None.
    """

    group: dist.ProcessGroup
    length: int
    document_ids: Tensor | None
    scale: float
    window: int | None
    cap: float | None

    def __iter__(self) -> Iterator[int]:
        """Yields the rank whose keys and values are here in each round."""
        for turn in range(self.group.size()):
            yield (self.group.rank() - turn) % self.group.size()

    def blocks(self, source: int) -> list[_Block]:
        """Returns what is computed with the keys of the rank ``source``."""
        half = self.length // 2
        whole, first, second = slice(0, self.length), slice(0, half), slice(half, self.length)
        rank = self.group.rank()
        is_narrow = self.window is not None and self.window < 2 * half * self.group.size()
        if self.document_ids is None and not is_narrow:
            if source == rank:
                return [_Block(whole, whole, causal=True, masked=False)]
            if source < rank:
                return [_Block(whole, first, causal=False, masked=False)]
            return [_Block(second, whole, causal=False, masked=False)]
        blocks = []
        last = 2 * self.group.size() - 1
        for row, rows in ((rank, first), (last - rank, second)):
            for column, columns in ((source, first), (last - source, second)):
                apart = row - column  # in chunks
                in_reach = self.window is None or (apart - 1) * half + 1 < self.window
                if apart >= 0 and in_reach:
                    is_cut = self.window is not None and (apart + 1) * half > self.window
                    masked = self.document_ids is not None or is_cut
                    blocks.append(_Block(rows, columns, causal=apart == 0, masked=masked))
        return blocks

    def tiles(self, block: _Block, source: int, query: Tensor) -> Iterator[tuple[slice, Tensor | None]]:
        """Yields rows of ``block`` for plain products, with their mask ``[micro or 1, rows, columns]``; None if they
        have all keys."""
        columns = self._positions(source, query.device)[block.columns]
        count = max(1, MOST_SCORES // (query.shape[0] * query.shape[2] * len(columns)))
        for begin in range(block.rows.start, block.rows.stop, count):
            rows = slice(begin, min(begin + count, block.rows.stop))
            if not block.causal and not block.masked:
                yield rows, None
                continue
            positions = self._positions(self.group.rank(), query.device)[rows]
            distance = positions.unsqueeze(1) - columns
            mask = (distance >= 0).unsqueeze(0)
            if self.window is not None:
                mask = mask & (distance < self.window)
            if self.document_ids is not None:
                of_rows, of_columns = self.document_ids[:, positions], self.document_ids[:, columns]
                mask = mask & (of_rows.unsqueeze(2) == of_columns.unsqueeze(1))
            if query.device.type != "cpu" or mask.any():
                yield rows, mask

    def _positions(self, rank: int, device: torch.device) -> Tensor:
        """Returns the positions of the tokens of ``rank`` in a sequence."""
        half = self.length // 2
        offsets = torch.arange(half, device=device)
        return torch.cat((offsets + rank * half, offsets + (2 * self.group.size() - 1 - rank) * half))

    def send_on(self, tensor: Tensor) -> _Message:
        """Begins to send ``tensor`` to the next rank, and to receive that of the rank before. Collective."""
        arriving = torch.empty_like(tensor)
        rank = self.group.rank()
        to, origin = (dist.get_global_rank(self.group, (rank + step) % self.group.size()) for step in (1, -1))
        sent = dist.P2POp(dist.isend, tensor, to, self.group)
        received = dist.P2POp(dist.irecv, arriving, origin, self.group)
        return _Message(tensor, arriving, dist.batch_isend_irecv([sent, received]))


@dataclass(frozen=True)
class _Message:
    """A tensor on its way; what is sent stays alive until it has arrived."""

    sent: Tensor
    arriving: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.arriving


@torch.library.custom_op(RING_OPERATOR, mutates_args=())
def _ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor | None,
    group: str,
    scale: float,
    window: int | None,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Returns attention in the shape of ``query``, and the log-sum-exps of its scores ``[micro, heads, tokens]``."""
    ranks = _resolve_process_group(group)  # type: ignore[arg-type]
    rounds = _Rounds(ranks, query.shape[1], document_ids, scale, window, cap)
    wide = torch.promote_types(query.dtype, torch.float32)
    mixed = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
    normalizers = query.new_full((query.shape[0], query.shape[2], query.shape[1]), -torch.inf, dtype=wide)
    held = torch.stack((key, value))
    last = (rounds.group.rank() + 1) % rounds.group.size()
    for source in rounds:
        message = None if source == last else rounds.send_on(held)
        for block in rounds.blocks(source):
            keys, values = held[:, :, block.columns]
            if _uses_flash(query, rounds, block):
                part, of_part = flash(query[:, block.rows], keys, values, block.causal, scale)
                merge(mixed, normalizers, block.rows, part, of_part)
                continue
            for rows, mask in rounds.tiles(block, source, query):
                part, of_part = _plain(query[:, rows], keys, values, mask, scale, cap)
                merge(mixed, normalizers, rows, part, of_part)
        if message is not None:
            held = message.wait()
    return mixed.to(query.dtype), normalizers


@_ring_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    micro, tokens, heads, _width = query.shape
    mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
    return mixed, query.new_empty((micro, heads, tokens), dtype=wide)


@torch.library.custom_op("hpc_train::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    normalizers: Tensor,
    document_ids: Tensor | None,
    group: str,
    scale: float,
    window: int | None,
    cap: float | None,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of ``query``, and of ``key`` and ``value`` in one tensor, as an operator must not return
    views."""
    ranks = _resolve_process_group(group)  # type: ignore[arg-type]
    rounds = _Rounds(ranks, query.shape[1], document_ids, scale, window, cap)
    wide = normalizers.dtype
    of_query = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
    # what each row subtracts from the gradients of its shares, ``[micro, heads, tokens]``
    means = (gradient.to(wide) * mixed).sum(-1).transpose(1, 2)
    held = torch.stack((key, value))
    returning: _Message | None = None  # the sums of the ranks before
    last = (rounds.group.rank() + 1) % rounds.group.size()
    for source in rounds:
        message = None if source == last else rounds.send_on(held)
        of_held = torch.zeros_like(held, dtype=wide)
        for block in rounds.blocks(source):
            keys, values = held[:, :, block.columns]
            if _uses_flash(query, rounds, block):
                of_block = gradient[:, block.rows], query[:, block.rows], mixed[:, block.rows]
                part = flash_backward(*of_block, normalizers[..., block.rows], keys, values, block.causal, scale)
                _add(of_query, of_held, block.rows, block.columns, part)
                continue
            for rows, mask in rounds.tiles(block, source, query):
                of_rows = normalizers[..., rows], means[..., rows]
                part = _plain_backward(gradient[:, rows], query[:, rows], *of_rows, keys, values, mask, scale, cap)
                _add(of_query, of_held, rows, block.columns, part)
        if returning is not None:
            of_held += returning.wait()
        returning = rounds.send_on(of_held)
        if message is not None:
            held = message.wait()
    assert returning is not None
    return of_query.to(query.dtype), returning.wait().to(key.dtype)


@_ring_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query, memory_format=torch.contiguous_format), key.new_empty((2, *key.shape))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, document_ids, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, document_ids)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    of_query, of_held = _ring_attention_backward(gradient, *ctx.saved_tensors, *ctx.options)
    return (of_query, *of_held.unbind(), None, *(None for _ in ctx.options))


_ring_attention.register_autograd(_gradients, setup_context=_keep)


def merge(mixed: Tensor, normalizers: Tensor, rows: slice, part: Tensor, of_part: Tensor) -> None:
    """Adds the result ``part`` of ``rows`` with further keys to ``mixed``, and its log-sum-exps to ``normalizers``."""
    before = normalizers[..., rows]
    total = torch.logaddexp(before, of_part.to(before.dtype))
    finite = total.clamp(min=torch.finfo(total.dtype).min)  # rows without keys so far
    mixed[:, rows] *= (before - finite).exp().transpose(1, 2).unsqueeze(-1)
    mixed[:, rows] += (of_part - finite).exp().transpose(1, 2).unsqueeze(-1) * part
    normalizers[..., rows] = total


def _add(of_query: Tensor, of_held: Tensor, rows: slice, columns: slice, part: tuple[Tensor, Tensor, Tensor]) -> None:
    of_query[:, rows] += part[0]
    of_held[0, :, columns] += part[1]
    of_held[1, :, columns] += part[2]


def _uses_flash(query: Tensor, rounds: _Rounds, block: _Block) -> bool:
    """Returns whether flash attention computes ``block``."""
    if block.masked or rounds.cap is not None:
        return False
    if query.device.type == "cpu":
        return True
    # as in ``packed_attention.kernel_for``
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    fits = query.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    return is_half and fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Returns attention ``[micro, rows, heads, head_dim]`` and the log-sum-exps ``[micro, heads, rows]``."""
    if query.device.type == "cpu":
        heads = _of_every_query(query, key, value)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mixed, normalizers = attend(*heads, 0.0, causal, scale=scale)
        return mixed.transpose(1, 2), normalizers
    lengths = query.shape[1], key.shape[1]
    results = torch.ops.aten._flash_attention_forward(
        query, key, value, None, None, *lengths, 0.0, causal, False, scale=scale
    )
    return results[0], results[1]


def flash_backward(
    gradient: Tensor,
    query: Tensor,
    mixed: Tensor,
    normalizers: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the part of the gradients of query, key and value from these keys, for the result ``mixed`` and the
    log-sum-exps ``normalizers`` of all keys."""
    if query.device.type == "cpu":
        heads = _of_every_query(query, key, value)
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient.transpose(1, 2), *heads, mixed.transpose(1, 2), normalizers.contiguous(), 0.0, causal, scale=scale
        )
        shared = ((of.unflatten(1, (key.shape[2], -1)).sum(2)).transpose(1, 2) for of in (of_key, of_value))
        return (of_query.transpose(1, 2), *shared)
    lengths = query.shape[1], key.shape[1]
    tensors = gradient.contiguous(), query, key, value, mixed, normalizers.contiguous()
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which is not used
    unused = torch.empty(0, device=query.device)
    return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
        *tensors, None, None, *lengths, 0.0, causal, state, unused, scale=scale
    )


def _of_every_query(query: Tensor, *shared: Tensor) -> Iterator[Tensor]:
    """Yields ``query`` and the ``shared`` keys or values as ``[micro, heads, tokens, head_dim]``, all with as many
    heads."""
    yield query.transpose(1, 2)
    for heads in shared:
        yield heads.repeat_interleave(query.shape[2] // heads.shape[2], dim=2).transpose(1, 2)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Returns what ``flash`` returns; without any key, zeros and log-sum-exps of minus infinity."""
    scores, _ = _scores(query, key, mask, scale, cap)
    normalizers = scores.logsumexp(-1)
    shares = (scores - normalizers.clamp(min=torch.finfo(scores.dtype).min).unsqueeze(-1)).exp()
    mixed = shares.to(value.dtype).flatten(2, 3) @ value.transpose(1, 2)
    return _rows_of(mixed, query), normalizers.flatten(1, 2)


def _plain_backward(
    gradient: Tensor,
    query: Tensor,
    normalizers: Tensor,
    means: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what ``flash_backward`` returns; ``means`` is the product of ``gradient`` and the result of all keys."""
    groups = (key.shape[2], -1)
    scores, slopes = _scores(query, key, mask, scale, cap)
    shares = (scores - normalizers.unflatten(1, groups).unsqueeze(-1)).exp()
    of_mixed = _groups_of(gradient, key)
    of_shares = (of_mixed @ value.transpose(1, 2).transpose(2, 3)).view_as(scores).to(scores.dtype)
    of_scores = shares * (of_shares - means.unflatten(1, groups).unsqueeze(-1)) * scale
    if slopes is not None:
        of_scores = of_scores * slopes
    of_products = of_scores.to(query.dtype).flatten(2, 3)
    of_key = of_products.transpose(2, 3) @ _groups_of(query, key)
    of_value = shares.to(query.dtype).flatten(2, 3).transpose(2, 3) @ of_mixed
    return _rows_of(of_products @ key.transpose(1, 2), query), of_key.transpose(1, 2), of_value.transpose(1, 2)


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Returns the scores ``[micro, kv_heads, queries per head, rows, columns]`` in at least fp32, and the slopes of a
    soft cap."""
    products = _groups_of(query, key) @ key.transpose(1, 2).transpose(2, 3)
    scores = products.unflatten(2, (-1, query.shape[1])).to(torch.promote_types(query.dtype, torch.float32)) * scale
    slopes = None
    if cap is not None:
        bent = torch.tanh(scores / cap)
        slopes = 1 - bent.square()
        scores = cap * bent
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return scores, slopes


def _groups_of(heads: Tensor, key: Tensor) -> Tensor:
    """Returns ``[micro, rows, heads, head_dim]`` as ``[micro, kv_heads, rows of its queries, head_dim]``."""
    return heads.unflatten(2, (key.shape[2], -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _rows_of(grouped: Tensor, query: Tensor) -> Tensor:
    """Returns the result of ``_groups_of`` in the shape of ``query``."""
    return grouped.unflatten(2, (-1, query.shape[1])).permute(0, 3, 1, 2, 4).flatten(2, 3)
