"""Divides the layers of a model into pipeline stages, either evenly or so that the slowest stage is as fast as
possible.

A block is the stem, a layer or the head. A profile measures the seconds of each block, and ``partition`` finds the best
division by dynamic programming over (stages, blocks). Every stage gets at least one block. This module does not import
torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from hpc_train.errors import UserError


def layer_counts(n_layers: int, stages: int, split: Any = "even") -> list[int]:
    """Returns the number of layers of each stage.

    ``even`` gives every stage ``n_layers // stages`` layers. The middle stages get the remaining layers first, then the
    first stage and finally the last one, because the first stage also computes the stem (a lookup) and the last one the
    head (a product with the whole vocabulary).

    Args:
        split: ``strategy.pp_split``. Before the profile, ``flops`` and ``measured`` give the same counts as ``even``.
    """
    if not isinstance(split, str):
        return [int(count) for count in split]
    counts = [n_layers // stages] * stages
    middle = sorted(range(1, stages - 1), key=lambda stage: abs(2 * stage - (stages - 1)))
    for stage in [*middle, 0, stages - 1][: n_layers % stages]:
        counts[stage] += 1
    return counts


def check_split(split: Any, layers: int | None, stages: int) -> None:
    """Checks that ``strategy.pp_split`` can divide a model into ``stages`` stages.

    The first and the last stage may have no layer, because they have the stem and the head.

    Args:
        layers: the number of layers; None if unknown.

    Raises:
        UserError: the division is not possible.
    """
    if isinstance(split, str):
        if layers is None:
            return
        most = layers if split == "even" else layers + 2
        if most < stages:
            raise UserError(
                f"model.n_layers is {layers}, too few for {stages} pipeline stages",
                where="strategy.pp",
                fix=f"at most {most} stages (strategy.pp x strategy.stages_per_rank), or a larger model.n_layers",
            )
        return
    counts = [*split]
    fits = len(counts) == stages and min(counts) >= 0 and all(counts[1:-1])
    if not fits or (layers is not None and sum(counts) != layers):
        total = "" if layers is None else f" with {layers} layers in total"
        raise UserError(
            f"strategy.pp_split is {counts}, but must list {stages} stages{total}",
            where="strategy.pp_split",
            fix="even, flops, measured, or the number of layers of each stage (only the first and the last may have 0)",
        )


Fits = Callable[[int, range], bool]  # returns whether a stage may have these blocks
_Price = Callable[[int, range], float | None]  # returns the seconds of a stage with these blocks; None: not allowed


@dataclass(frozen=True)
class Prediction:
    """The predicted time of forward and backward.

    Attributes:
        stage_s: the seconds of each stage for one micro-batch.
        step_s: the seconds of a step with all its micro-batches.
        bubble_share: the share of the step in which a rank is idle, averaged over the ranks.
    """

    stage_s: tuple[float, ...]
    step_s: float
    bubble_share: float

    @property
    def imbalance(self) -> float:
        """Returns the time of the slowest stage divided by the mean; 1 means balanced."""
        return max(self.stage_s) * len(self.stage_s) / sum(self.stage_s)


def partition(seconds: Sequence[float], stages: int, fits: Fits = lambda _, __: True) -> tuple[range, ...] | None:
    """Returns the blocks of each stage. The slowest stage is as fast as possible, and the other stages are balanced.

    Args:
        seconds: the time of each block, in order.
        fits: returns whether a stage has enough memory for the given blocks.

    Returns:
        None if no division into ``stages`` stages fits.
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
    assert even is not None  # the fastest division is one of the candidates
    return even[1]


def _cheapest(
    blocks: int, stages: int, price: _Price, join: Callable[[float, float], float]
) -> tuple[float, tuple[range, ...]] | None:
    """Returns the division with the lowest total price; ``join`` combines the prices of stages."""
    best: dict[int, tuple[float, tuple[range, ...]]] = {0: (0.0, ())}  # key: the number of assigned blocks
    for stage in range(stages):
        following: dict[int, tuple[float, tuple[range, ...]]] = {}
        for first, (so_far, held) in best.items():
            for end in range(first + 1, blocks - (stages - stage - 1) + 1):
                cost = price(stage, range(first, end))
                if cost is not None and (end not in following or join(so_far, cost) < following[end][0]):
                    following[end] = (join(so_far, cost), (*held, range(first, end)))
        best = following
    return best.get(blocks)


def layers_of(blocks: Sequence[range]) -> tuple[range, ...]:
    """Returns the layers of each stage. Block 0 is the stem and the last block is the head."""
    last = blocks[-1].stop - 2
    return tuple(range(max(held.start - 1, 0), min(held.stop - 1, last)) for held in blocks)


def blocks_of(layers: Sequence[range]) -> tuple[range, ...]:
    """Returns the blocks of each stage from its layers."""
    cuts = [0, *(held.stop + 1 for held in layers[:-1]), layers[-1].stop + 2]
    return tuple(range(first, end) for first, end in pairwise(cuts))


def predict(
    seconds: Sequence[float], blocks: Sequence[range], placement: Sequence[int], micro_batches: int
) -> Prediction:
    """Predicts the step of a schedule that does not split the backward. Messages are assumed to take no time.

    The slowest rank computes all its micro-batches without a break. Before that, the first micro-batch passes the
    stages of the other ranks, and afterwards the backward of the last micro-batch passes them; with v stages per rank
    this takes v times less. For equal stages the bubble is (p - 1) / (v m + p - 1).

    Args:
        seconds: the time of each block for one micro-batch.
        placement: the pipeline rank of each stage.
    """
    stage_s = tuple(sum(seconds[held.start : held.stop]) for held in blocks)
    ranks = max(placement) + 1
    of_rank = [sum(cost for cost, rank in zip(stage_s, placement, strict=True) if rank == r) for r in range(ranks)]
    slowest = max(of_rank)
    total = sum(of_rank)
    step_s = micro_batches * slowest + (total - slowest) * ranks / len(stage_s)
    return Prediction(stage_s, step_s, 1 - micro_batches * total / (ranks * step_s))
