"""Divides the layers of a model into pipeline stages, evenly or so that the slowest stage is as fast as possible.

A block is the stem, a layer or the head. A profile measures the seconds of each block, and ``partition`` finds the best
division by dynamic programming over (stages, blocks). Every stage gets at least one block. It imports no torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from hpc_train.errors import UserError


def layer_counts(n_layers: int, stages: int, split: Any = "even") -> list[int]:
    """The number of layers of each stage.

    ``even`` gives every stage ``n_layers // stages``. What remains goes to the middle stages, then to the first and
    only then to the last: the ends also carry the stem and the head, and the head (a product with the whole vocabulary)
    weighs more than the stem (a lookup).

    Args:
        split: ``strategy.pp_split``. Of ``flops`` and ``measured`` nobody knows before the profile: as ``even``.
    """
    if not isinstance(split, str):
        return [int(count) for count in split]
    counts = [n_layers // stages] * stages
    middle = sorted(range(1, stages - 1), key=lambda stage: abs(2 * stage - (stages - 1)))
    for stage in [*middle, 0, stages - 1][: n_layers % stages]:
        counts[stage] += 1
    return counts


def check_split(split: Any, layers: int | None, stages: int) -> None:
    """Checks that ``strategy.pp_split`` can cut a model of ``layers`` layers (None: not known) into ``stages`` stages.

    A stage may hold no layer where it holds the stem or the head: the first and the last may.

    Raises:
        UserError: it cannot.
    """
    if isinstance(split, str):
        most = None if layers is None else layers if split == "even" else layers + 2
        if most is not None and most < stages:
            raise UserError(
                f"{layers} layers cannot be cut into {stages} stages",
                where="strategy.pp",
                fix=f"at most {most} stages (pp x stages_per_rank), or a deeper model",
            )
        return
    counts = [*split]
    named = len(counts) == stages and min(counts) >= 0 and all(counts[1:-1])
    if not named or (layers is not None and sum(counts) != layers):
        raise UserError(
            f"pp_split {counts} does not name {stages} stages of {layers} layers in all",
            where="strategy.pp_split",
            fix="even, flops, measured, or one number of layers per stage (0 at most in the first and the last)",
        )


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
