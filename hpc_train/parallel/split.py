"""Cutting a model into pipeline stages: which layers and parts a stage holds, and which rank holds which stage."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from hpc_train.config.layout import check_split
from hpc_train.models.model import Model


def split_layers(n_layers: int, stages: int, split: Any = "even") -> tuple[range, ...]:
    """The layers of each stage.

    ``even`` gives every stage ``n_layers // stages``. What remains goes to the middle stages, then to the first and
    only then to the last: the ends also carry the stem and the head, and the head (a product with the whole vocabulary)
    weighs more than the stem (a lookup).

    Args:
        split: ``even``, or the number of layers of each stage; ``flops`` and ``measured`` are found by ``balance.py``.

    Raises:
        ConfigError: the layers do not suffice, or the list does not fit them.
    """
    check_split(split, n_layers, stages)
    counts = _even(n_layers, stages) if split == "even" else [int(count) for count in split]
    starts = [sum(counts[:stage]) for stage in range(stages + 1)]
    return tuple(range(start, end) for start, end in pairwise(starts))


def _even(n_layers: int, stages: int) -> list[int]:
    counts = [n_layers // stages] * stages
    middle = sorted(range(1, stages - 1), key=lambda stage: abs(2 * stage - (stages - 1)))
    for stage in [*middle, 0, stages - 1][: n_layers % stages]:
        counts[stage] += 1
    return counts


def place_stages(pp: int, stages_per_rank: int, schedule: str) -> tuple[int, ...]:
    """The pp rank of each stage: in a loop (stage % pp), or there and back again (a V) for ``zbv``."""
    stages = range(pp * stages_per_rank)
    if schedule == "zbv":
        return tuple(min(stage, 2 * pp - 1 - stage) for stage in stages)
    return tuple(stage % pp for stage in stages)


def cut(model: Model, stage: int, layers: Sequence[range]) -> Model:
    """The part of ``model`` (built on ``meta``) that is ``stage``; parameters keep their global names.

    Args:
        layers: the layers of every stage, as ``split_layers`` gives them.
    """
    left_out: list[nn.Module | None] = [layer for key, layer in model.layers.items() if int(key) not in layers[stage]]
    left_out += [model.stem] * (stage > 0) + [model.head] * (stage < len(layers) - 1)
    part = copy.deepcopy(model, {id(module): None for module in left_out})  # what is left out is copied as None
    for key in [key for key, layer in part.layers.items() if layer is None]:
        del part.layers[key]
    return part


def stage_of(name: str, layers: Sequence[range]) -> int:
    """The stage that holds the parameter with the global ``name``."""
    part, *rest = name.split(".")
    if part != "layers":
        return 0 if part == "stem" else len(layers) - 1
    return next(stage for stage, held in enumerate(layers) if int(rest[0]) in held)
