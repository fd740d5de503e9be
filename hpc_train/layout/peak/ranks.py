"""States what each pipeline rank computes in a step, and when it gathers and reduces. Imports no torch.

A step of many micro-batches repeats itself, so a rank has the passes of the first ones only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

from hpc_train.config.schema import Config
from hpc_train.config.values import LayerMode
from hpc_train.layout.compilation import CompilerMode, compiler_mode
from hpc_train.layout.layout import Layout
from hpc_train.layout.orders import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    Action,
    PipelineShape,
    Work,
)
from hpc_train.layout.partition import layer_counts
from hpc_train.layout.recomputation import recomputation_of

Gathers = Literal["never", "step", "layer"]
Reduces = Literal["each", "last", "after", "inside"]


class Run(NamedTuple):
    """Consecutive layers of a stage that are alike.

    Attributes:
        mode: what they recompute.
        moves: whether their activations are in host memory if the config offloads them, as those of all layers but
            the last of the model are.
        layers: how many they are.
    """

    mode: LayerMode
    moves: bool
    layers: int


@dataclass(frozen=True)
class Stage:
    """A stage of a rank.

    Attributes:
        first, last: whether it has the stem, and the head.
        runs: its layers, in the order of the forward.
    """

    first: bool
    last: bool
    runs: tuple[Run, ...]

    @property
    def layers(self) -> int:
        return sum(run.layers for run in self.runs)


@dataclass(frozen=True)
class Rank:
    """Describes what one pipeline rank does in a step.

    Attributes:
        stages: its stages by number.
        actions: its passes, without those that repeat others.
        micro_batches: how many it computes in truth.
        gathers: whether ZeRO keeps parameters whole for the ``step`` or gathers them for each ``layer``; ``never``.
        reduces: whether gradients are reduced in ``each`` backward, in the ``last`` one of a step, or ``after`` it,
            whole; ``inside`` uses each as soon as it is final.
        keeps_gradients: whether gradients have memory from step to step, in DDP's buckets.
        bucket: the bytes of a bucket of gradients that is sent beside the backward if ``reduces`` is ``inside`` or
            ``after``; 0 where none is, and for DDP, which sends its gradients themselves.
        copied: the bytes of the copy that is sent for each byte of a gradient.
        captured: whether its layers run as CUDA graphs.
    """

    stages: dict[int, Stage]
    actions: tuple[Action, ...]
    micro_batches: int
    gathers: Gathers
    reduces: Reduces
    keeps_gradients: bool
    bucket: float = 0.0
    copied: float = 1.0
    captured: bool = False


def ranks_of(config: Config, layout: Layout) -> Iterator[Rank]:
    """Returns the pipeline ranks; of those with equal stages only the first, which keeps the most micro-batches, unless
    the stages form a V, where the order of the passes decides.
    """
    seen, stages = set[tuple[Stage, ...]](), stages_of(config, layout)
    for rank in range(layout.pp):
        own = tuple(stages[number] for number, owner in enumerate(layout.placement) if owner == rank)
        if own not in seen or layout.pipeline.placement == "v":
            seen.add(own)
            found = rank_of(layout, rank, stages)
            sends = layout.dp_cp > 1 and layout.kind.buckets and not found.keeps_gradients
            if found.reduces == "after" and sends:
                bucket = config.strategy.bucket_cap_mb * 2**20
                copied = 0.5 if config.strategy.compression in ("bf16", "fp16") else 1.0
                found = replace(found, bucket=bucket, copied=copied)
            found = replace(found, captured=compiler_mode(config) == CompilerMode.CUDA_GRAPHS)
            yield replace(found, reduces="inside") if config.optim.in_backward else found


def rank_of(layout: Layout, rank: int, stages: Sequence[Stage]) -> Rank:
    """Returns one pipeline rank of ``layout``, whose ``stages`` are those of ``stages_of``."""
    own = {number: stages[number] for number, owner in enumerate(layout.placement) if owner == rank}
    gathers, reduces = _sharing(layout)
    views = layout.data_parallel == "ddp" and layout.dp_cp > 1  # DDP's gradients are views of its buckets
    return Rank(own, _actions(layout, rank, [*own]), layout.micro_batches, gathers, reduces, views)


def _sharing(layout: Layout) -> tuple[Gathers, Reduces]:
    """Returns what ``Rank.gathers`` and ``Rank.reduces`` are in ``layout``."""
    if not layout.shards_state:
        return "never", "after"
    shards = layout.kind.shards
    each = layout.micro_batches == 1 or "gradients" in shards
    return "layer" if "parameters" in shards else "step", "each" if each else "last"


def stages_of(config: Config, layout: Layout) -> list[Stage]:
    """Returns the stages of the model."""
    counts = layer_counts(config.model.n_layers, layout.stages, config.strategy.pp_split if layout.pp > 1 else "even")
    recomputation, last = recomputation_of(config, layout), config.model.n_layers - 1
    found, first = [], 0
    for stage, count in enumerate(counts):
        numbers = range(first, first + count)
        kinds = ((recomputation.mode(number), number < last) for number in numbers)
        runs = tuple(Run(*kind, len([*group])) for kind, group in groupby(kinds))
        found.append(Stage(stage == 0, stage == layout.stages - 1, runs))
        first += count
    return found


def _actions(layout: Layout, rank: int, stages: Sequence[int]) -> tuple[Action, ...]:
    """Returns the passes of a rank in the first micro-batches of a step."""
    if layout.pp == 1:
        batches = range(min(2, layout.micro_batches))
        return tuple(Action(work, 0, batch) for batch in batches for work in (FORWARD, FULL_BACKWARD))
    in_flight = {stage: layout.in_flight(stage) for stage in stages}
    order = layout.pipeline.order
    if order is None:
        forwards = [Action(FORWARD, stage, batch) for stage in stages for batch in range(in_flight[stage])]
        works: tuple[Work, ...] = (FULL_BACKWARD,)
        if layout.pipeline.splits_backward:
            works = (BACKWARD_INPUT, BACKWARD_WEIGHT)
        backwards = [action._replace(work=work) for action in reversed(forwards) for work in works]
        return (*forwards, *backwards) * (2 if layout.micro_batches > max(in_flight.values()) else 1)
    turn = layout.pp if layout.pipeline.micro_batches == "multiple_of_ranks" else 1
    enough = -(-(max(in_flight.values()) + 2) // turn) * turn
    return order(PipelineShape(layout.pp, layout.stages_per_rank, min(layout.micro_batches, enough)), rank)
