"""Cuts a model into pipeline stages, and keeps the copies of a tied weight on several stages equal.

Copies on several ranks add up their gradients, so that equal optimizers take equal steps. Of copies on one rank (the
first and the last stage of ZBV) only the first is trained, and the others are overwritten from it before each step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.models.model import Model, canonical_name
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.reduction import local_gradient
from hpc_train.plan.partition import check_split, layer_counts


def split_layers(n_layers: int, stages: int, split: Any = "even") -> tuple[range, ...]:
    """The layers of each stage; how many are an even share says ``config.stages``.

    Args:
        split: ``even``, or the number of layers of each stage; ``flops`` and ``measured`` are found by ``balance.py``.

    Raises:
        UserError: the layers do not suffice, or the list does not fit them.
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


@dataclass(frozen=True)
class _Tie:
    """One canonical parameter as this rank holds it: the copy that is trained, and others."""

    kept: nn.Parameter
    others: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup | None  # the ranks with a copy, where there are several


class TiedWeights:
    """The tied parameters of one pipeline.

    Args:
        parts: stage -> module, of this rank.
        tied: alias -> canonical name, of the whole model.
        layers: the layers of every stage.
        placement: the pp rank of every stage.

    Attributes:
        copies: canonical names that this rank has a copy of and another rank counts in the gradient norm.
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
            held = [_find(parts[s], name) for s, name in zip(stages, names, strict=True) if s in parts]
            unique = list({id(parameter): parameter for parameter in held}.values())
            if unique:
                self._ties.append(_Tie(unique[0], tuple(unique[1:]), groups[ranks]))
            if unique and placement[stages[0]] != mesh.pp_rank:
                copies.add(canonical)
        self.copies = frozenset(copies)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the trained value to the other copies on this rank. Call it before a forward."""
        for tie in self._ties:
            for other in tie.others:
                _local(other).copy_(_local(tie.kept))

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Sums the gradients of all copies into each. Call it after the backward and the reduction over dp."""
        for tie in self._ties:
            gradient = local_gradient(tie.kept)
            for other in tie.others:
                gradient.add_(local_gradient(other))
                other.grad = None
            if tie.group is not None and gradient.numel():
                dist.all_reduce(gradient, group=tie.group)


def _group_across(pp_ranks: tuple[int, ...], mesh: Mesh) -> dist.ProcessGroup | None:
    """The group of ``pp_ranks`` in this rank's pipeline. Collective: every rank makes the groups of all pipelines."""
    if len(pp_ranks) == 1:
        return None
    own = None
    pipelines = mesh.device_mesh.mesh.flatten(1).t()  # [pipelines, pp]
    for pipeline in pipelines.tolist():
        members = [pipeline[pp_rank] for pp_rank in pp_ranks]
        group = dist.new_group(members)
        if mesh.rank in members:
            own = group
    return own


def _find(part: nn.Module, name: str) -> nn.Parameter:
    found = part.named_parameters(remove_duplicate=False)
    return next(parameter for raw, parameter in found if canonical_name(raw) == name)


def _local(parameter: nn.Parameter) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
