"""Cutting a model into pipeline stages: which layers and parts a stage holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from hpc_train.config.stages import check_split, layer_counts
from hpc_train.models.model import Model


def split_layers(n_layers: int, stages: int, split: Any = "even") -> tuple[range, ...]:
    """The layers of each stage; how many are an even share says ``config.stages``.

    Args:
        split: ``even``, or the number of layers of each stage; ``flops`` and ``measured`` are found by ``balance.py``.

    Raises:
        ConfigError: the layers do not suffice, or the list does not fit them.
    """
    check_split(split, n_layers, stages)
    counts = layer_counts(n_layers, stages, split)
    starts = [sum(counts[:stage]) for stage in range(stages + 1)]
    return tuple(range(start, end) for start, end in pairwise(starts))


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
