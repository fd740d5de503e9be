"""Cuts a sequence of blocks into pipeline stages so that the slowest stage is as fast as possible. No torch.

A block is the stem, a layer or the head. Every stage gets at least one, so the first may hold the stem alone and the
last the head alone. Min-max partition of a sequence by dynamic programming over (stages, blocks).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Fits = Callable[[int, range], bool]  # whether a stage may hold these blocks
_Price = Callable[[int, range], float | None]  # of a stage with these blocks; None: it may not hold them


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step of forward and backward.

    Attributes:
        stage_s: of each stage, for one micro-batch.
        step_s: of all micro-batches.
        bubble_share: the share of it in which a rank computes nothing, the mean over the ranks.
    """

    stage_s: tuple[float, ...]
    step_s: float
    bubble_share: float

    @property
    def imbalance(self) -> float:
        """The slowest stage against the mean: 1 is balance."""
        return max(self.stage_s) * len(self.stage_s) / sum(self.stage_s)


def partition(seconds: Sequence[float], stages: int, fits: Fits = lambda _, __: True) -> tuple[range, ...] | None:
    """The blocks of each stage: the slowest stage is as fast as possible, and of those splits the most even one.

    Args:
        seconds: of each block, in their order.
        fits: the cap of a stage, as by its memory.

    Returns:
        None where no split into ``stages`` stages fits.
    """
    until = [0.0, *accumulate(seconds)]

    def price(stage: int, blocks: range) -> float | None:
        return until[blocks.stop] - until[blocks.start] if fits(stage, blocks) else None

    fastest = _cheapest(len(seconds), stages, price, max)
    if fastest is None:
        return None
    bound = fastest[0] * (1 + 1e-9)

    def square(stage: int, blocks: range) -> float | None:
        cost = price(stage, blocks)
        return None if cost is None or cost > bound else cost**2

    even = _cheapest(len(seconds), stages, square, operator.add)
    assert even is not None  # the fastest split is one of those
    return even[1]


def _cheapest(
    blocks: int, stages: int, price: _Price, join: Callable[[float, float], float]
) -> tuple[float, tuple[range, ...]] | None:
    """The split with the least price, joined over its stages."""
    best: dict[int, tuple[float, tuple[range, ...]]] = {0: (0.0, ())}  # by the number of blocks that are placed
    for stage in range(stages):
        following: dict[int, tuple[float, tuple[range, ...]]] = {}
        for first, (so_far, held) in best.items():
            for end in range(first + 1, blocks - (stages - stage - 1) + 1):
                own = price(stage, range(first, end))
                if own is not None and (end not in following or join(so_far, own) < following[end][0]):
                    following[end] = (join(so_far, own), (*held, range(first, end)))
        best = following
    return best.get(blocks)


def layers_of(blocks: Sequence[range]) -> tuple[range, ...]:
    """The layers of each stage, from its blocks: block 0 is the stem, the last one the head."""
    last = blocks[-1].stop - 2
    return tuple(range(max(held.start - 1, 0), min(held.stop - 1, last)) for held in blocks)


def blocks_of(layers: Sequence[range]) -> tuple[range, ...]:
    """The blocks of each stage, from its layers."""
    cuts = [0, *(held.stop + 1 for held in layers[:-1]), layers[-1].stop + 2]
    return tuple(range(first, end) for first, end in pairwise(cuts))


def predict(
    seconds: Sequence[float], blocks: Sequence[range], placement: Sequence[int], micro_batches: int
) -> Prediction:
    """Predicts the step of a schedule that does not split the backward, with messages that take no time.

    The slowest rank works through all micro-batches; around its work the first has come through the other ranks' stages
    and the last has to go back through them, which v stages per rank make v times shorter. Equal stages give the known
    bubble, (p - 1) / (v m + p - 1).

    Args:
        seconds: of each block for one micro-batch.
        placement: the pp rank of each stage.
    """
    stage_s = tuple(sum(seconds[held.start : held.stop]) for held in blocks)
    ranks = max(placement) + 1
    of_rank = [sum(cost for cost, rank in zip(stage_s, placement, strict=True) if rank == r) for r in range(ranks)]
    slowest, total = max(of_rank), sum(of_rank)
    step_s = micro_batches * slowest + (total - slowest) * ranks / len(stage_s)
    return Prediction(stage_s, step_s, 1 - micro_batches * total / (ranks * step_s))
