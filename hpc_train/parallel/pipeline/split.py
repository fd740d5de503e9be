"""Cuts a model into pipeline stages, and keeps the copies of a tied weight on several stages equal.

The gradients of copies on several ranks are summed, so that all ranks apply the same update. If one rank holds several
copies (the first and last stage of ZBV), it trains only the first and overwrites the others before each step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_train.layout.partition import check_split, layer_counts
from hpc_train.models.model import Model, canonical_name
from hpc_train.parallel.mesh import Mesh, split_world
from hpc_train.parallel.precision.masters import local_part
from hpc_train.parallel.reduction import local_gradient


def split_layers(n_layers: int, stages: int, split: Any = "even") -> tuple[range, ...]:
    """Returns the layers of each stage; ``layout.partition.layer_counts`` defines an even split.

    Args:
        split: ``even``, or the number of layers of each stage; ``balance.py`` implements ``flops`` and ``measured``.

    Raises:
        UserError: there are too few layers, or the list does not match their number.
    """
    check_split(split, n_layers, stages)
    counts = layer_counts(n_layers, stages, split)
    starts = [sum(counts[:stage]) for stage in range(stages + 1)]
    return tuple(range(start, end) for start, end in pairwise(starts))


def cut(model: Model, stage: int, layers: Sequence[range]) -> Model:
    """Returns a copy of ``model`` (on ``meta``) with the parts of ``stage``; parameters keep their global names.

    Args:
        layers: the layers of every stage from ``split_layers``.
    """
    omitted: list[nn.Module | None] = [layer for key, layer in model.layers.items() if int(key) not in layers[stage]]
    omitted += [model.stem] * (stage > 0) + [model.head] * (stage < len(layers) - 1)
    part = copy.deepcopy(model, {id(module): None for module in omitted})  # omitted parts are copied as None
    for key in [key for key, layer in part.layers.items() if layer is None]:
        del part.layers[key]
    return part


def stage_of(name: str, layers: Sequence[range]) -> int:
    """Returns the stage of the parameter with the global ``name``."""
    part, *rest = name.split(".")
    if part == "stem":
        return 0
    if part == "layers":
        return next(stage for stage, numbers in enumerate(layers) if int(rest[0]) in numbers)
    return len(layers) - 1


@dataclass(frozen=True)
class _Tie:
    """Holds this rank's copies of one canonical parameter: the trained one and the others."""

    trained: nn.Parameter
    others: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup | None  # the ranks with a copy; None if there is only one


class TiedWeights:
    """Synchronizes the tied parameters of one pipeline.

    Args:
        parts: stage -> module of this rank.
        tied: alias -> canonical name in the whole model.
        layers: the layers of every stage.
        placement: the pp rank of every stage.

    Attributes:
        copies: canonical names of this rank's copies that another rank counts in the gradient norm.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        tied: Mapping[str, str],
        layers: Sequence[range],
        placement: Sequence[int],
        mesh: Mesh,
    ) -> None:
        self._ties: list[_Tie] = []
        copies = set()
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for canonical in sorted(set(tied.values())):
            names = [canonical, *(alias for alias, target in tied.items() if target == canonical)]
            stages = [stage_of(name, layers) for name in names]
            ranks = tuple(sorted({placement[stage] for stage in stages}))
            if ranks not in groups:
                groups[ranks] = _group_across(ranks, mesh)
            local: dict[nn.Parameter, None] = {}  # each once, in the order of the stages
            for stage, name in zip(stages, names, strict=True):
                named = parts[stage].named_parameters(remove_duplicate=False) if stage in parts else ()
                local |= dict.fromkeys(parameter for raw, parameter in named if canonical_name(raw) == name)
            if local:
                trained, *others = local
                self._ties.append(_Tie(trained, tuple(others), groups[ranks]))
                if placement[stages[0]] != mesh.pp_rank:
                    copies.add(canonical)
        self.copies = frozenset(copies)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the trained value to the other copies on this rank. Call it before a forward."""
        for tie in self._ties:
            for other in tie.others:
                local_part(other).copy_(local_part(tie.trained))

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Sums the gradients of all copies into each. Call it after the backward and the reduction over dp."""
        for tie in self._ties:
            gradient = local_gradient(tie.trained)
            for other in tie.others:
                gradient.add_(local_gradient(other))
                other.grad = None
            if tie.group is not None and gradient.numel():
                dist.all_reduce(gradient, group=tie.group)


def _group_across(pp_ranks: tuple[int, ...], mesh: Mesh) -> dist.ProcessGroup | None:
    """Returns the group of ``pp_ranks`` in this rank's pipeline; None if it is not in it. Collective over all ranks."""
    if len(pp_ranks) == 1:
        return None
    if len(pp_ranks) == mesh.layout.pp:
        return mesh.group("pp")
    pipelines = mesh.device_mesh.mesh.flatten(1).t().tolist()
    lines = [[pipeline[pp_rank] for pp_rank in pp_ranks] for pipeline in pipelines]
    return split_world(lines, mesh.device, mesh.timeout, "tied_weights")
