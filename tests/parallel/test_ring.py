"""Attention of a ring is that of whole sequences: forward and gradients in fp64, with every mask and any heads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.models.attention import soft_cap
from hpc_train.models.model import TokenShares
from hpc_train.models.packed_attention import Scores, attention_mask
from hpc_train.parallel import ring
from hpc_train.parallel.ring import Ring
from tests.ranks import run_on_world

MICRO, TOKENS, HEAD_DIM = 2, 32, 8


@dataclass(frozen=True)
class Case:
    """How attention is computed: with ``rows`` rows of plain products at a time, or all."""

    heads: tuple[int, int]
    scores: Scores
    documents: bool
    rows: int | None = None
    dtype: torch.dtype = torch.float64


MASKS = [Scores(), *(Scores(window=window) for window in (2, 3, 8, 9, 31, 40)), Scores(0.3, 6, 1.5), Scores(cap=0.7)]
CASES = [Case(heads, scores, documents) for heads, scores, documents in product(((4, 4), (4, 1)), MASKS, (False, True))]
CASES += [Case((6, 2), Scores(window=7), documents, rows=1) for documents in (False, True)]
CASES += [Case((4, 2), Scores(window=window), False, dtype=torch.bfloat16) for window in (None, 5)]


def documents() -> Tensor:
    """Documents within and over chunks, in one case one of the whole sequence; -1 is padding."""
    ends = torch.tensor([3, 4, 13, 20, 29])
    ids = torch.bucketize(torch.arange(TOKENS), ends, right=True)
    ids[ids == len(ends)] = -1
    return torch.stack((ids, torch.zeros_like(ids)))


def whole(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    """Returns attention of whole sequences from all scores."""
    times = case.heads[0] // case.heads[1]
    key, value = (heads.repeat_interleave(times, dim=2) for heads in (key, value))
    scale = HEAD_DIM**-0.5 if case.scores.scale is None else case.scores.scale
    scores = soft_cap(torch.einsum("bqhd,bkhd->bhqk", query, key) * scale, case.scores.cap)
    ids = documents() if case.documents else None
    mask = attention_mask(ids, TOKENS, case.scores.window, torch.device("cpu"))
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", shares, value)


def errors(rank: int, ranks: int, cases: list[Case]) -> list[float]:
    """Returns the largest difference of results and gradients of each case, relative to the largest value."""
    shares = TokenShares(ranks, rank, ranks)
    group = dist.group.WORLD
    assert group is not None
    attend = Ring(group)
    differences = []
    for case in cases:
        generator = torch.Generator().manual_seed(0)
        counts = (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
        *heads, gradient = (
            torch.randn(MICRO, TOKENS, count, HEAD_DIM, dtype=torch.float64, generator=generator) for count in counts
        )
        all_heads = [tensor.to(case.dtype).double().requires_grad_() for tensor in heads]
        expected = whole(all_heads[0], all_heads[1], all_heads[2], case)
        expected.backward(gradient)
        local = [shares.of_rank(tensor.detach(), 1).to(case.dtype).requires_grad_() for tensor in all_heads]
        ids = documents() if case.documents else None
        least = ring.MOST_SCORES if case.rows is None else 1
        with mock.patch.object(ring, "MOST_SCORES", least):
            mixed = attend(local[0], local[1], local[2], ids, case.scores)
            mixed.backward(shares.of_rank(gradient, 1).to(case.dtype))
        pairs = [(mixed, expected), *((tensor.grad, full.grad) for tensor, full in zip(local, all_heads, strict=True))]
        of_case = 0.0
        for part, full in pairs:
            assert part is not None and full is not None and part.dtype == case.dtype
            difference = (part.detach() - shares.of_rank(full.detach(), 1)).abs().max() / full.detach().abs().max()
            of_case = max(of_case, float(difference))
        differences.append(of_case)
    return differences


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.long_form(20)) for ranks in (4, 8))])
def test_a_ring_computes_attention_of_whole_sequences(ranks: int) -> None:
    for of_rank in run_on_world(ranks, errors, CASES):
        for case, error in zip(CASES, of_rank, strict=True):
            assert error < (1e-10 if case.dtype == torch.float64 else 0.02), case


@pytest.mark.parametrize("split", [(2, 2), (4, 4), (4, 2), (8, 2), (6, 3), (4, 1)])
def test_the_shares_of_all_ranks_are_the_sequence(split: tuple[int, int]) -> None:
    ranks, of_ring = split
    sequence = torch.arange(48).view(1, -1, 1)
    shares = [TokenShares(ranks, rank, of_ring) for rank in range(ranks)]
    parts = [share.of_rank(sequence, 1) for share in shares]
    assert {part.shape[1] for part in parts} == {48 // ranks} and 48 % shares[0].unit == 0
    assert torch.equal(shares[0].joined(parts, 1), sequence)
    if of_ring > 1:  # the ranks that exchange heads hold an early chunk and the late one opposite
        exchanging = ranks // of_ring
        both = torch.cat(parts[:exchanging], 1).flatten()
        assert both.tolist() == [*range(24 // of_ring), *range(48 - 24 // of_ring, 48)]


def products(rank: int, ranks: int, scores: Scores) -> list[int]:
    """Returns the pairs of rows and keys that a rank computes in each round."""
    group = dist.group.WORLD
    assert group is not None
    rounds = ring._Rounds(group, TOKENS // ranks, None, 1.0, scores.window, scores.cap)

    def pairs(block: ring._Block) -> int:
        rows, columns = (part.stop - part.start for part in (block.rows, block.columns))
        return rows * columns // (1 + block.causal)

    return [sum(map(pairs, rounds.blocks(source))) for source in rounds]


def test_all_ranks_compute_equally_much_and_skip_what_a_window_excludes() -> None:
    causal = run_on_world(2, products, Scores())
    assert causal[0] == causal[1] == [TOKENS**2 // 8] * 2
    narrow = run_on_world(2, products, Scores(window=TOKENS // 8))
    assert all(sum(of_rank) < sum(causal[0]) for of_rank in narrow)
