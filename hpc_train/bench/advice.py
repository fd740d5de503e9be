"""Measures which bucket size and which gradient compression are the fastest in a layout, for ``bench step``."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from hpc_train.config.schema import Config
from hpc_train.data.dataset import StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.compatibility import OF_LAYOUT, OF_RUN, check_compatibility
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.compression import make_exchange
from hpc_train.parallel.mesh import Mesh, largest, synchronize, synchronize_ranks
from hpc_train.parallel.precision.dtypes import parameter_dtype
from hpc_train.parallel.reduction import GradientReduction

SIZES_MB = (1.0, 5.0, 25.0, 100.0)
WARM_UP = 2  # untimed steps with each bucket size, since DDP rebuilds its buckets after the first
COUNTED = 3  # timed steps with each bucket size
TECHNIQUES = ("none", "bf16", "powersgd", "topk")  # from the largest to the smallest message
PAYS = 2 / 3  # a technique is advised if it takes less than this share of the time of the previous choice
SAMPLE_BYTES = 16 * 2**20  # bytes of gradients that are compressed, which take 1.3 s at 100 Mbit/s
ROUNDS = 3  # measured sums with each technique, of which the first is not counted


def bucket_seconds(
    config: Config, mesh: Mesh, layers: Sequence[range] | None, batch: StepBatch
) -> dict[float, float] | None:
    """Measures forward, backward and reduction of ``batch`` with several bucket sizes. Collective.

    Args:
        layers: those of each pipeline stage, as for ``build_engine``.

    Returns:
        Size in MB -> median seconds on the slowest rank; None if this layout does not reduce gradients in buckets.
    """
    if mesh.layout.dp_cp == 1 or not mesh.layout.kind.buckets:
        return None
    seconds: dict[float, float] = {}
    for size in SIZES_MB:
        strategy = replace(config.strategy, bucket_cap_mb=size)
        engine = build_engine(replace(config, strategy=strategy), mesh, layers)
        steps: list[float] = []
        for step in range(WARM_UP + COUNTED):
            synchronize_ranks(mesh)
            began = time.perf_counter()
            if engine.updates is not None:
                engine.updates.begin(lambda parameters, finite: None)
            engine.train_step(step, batch)
            synchronize(mesh.device)
            steps.append(time.perf_counter() - began)
        seconds[size] = largest(median(steps[WARM_UP:]), mesh)
        gradients = sum(p.numel() * p.element_size() for p in engine.named_parameters().values() if p.requires_grad)
        if size * 2**20 >= largest(gradients / mesh.layout.tp, mesh):
            break  # all gradients are in one bucket
        del engine
        gc.collect()  # DDP is in reference cycles
    return seconds


def compression_seconds(config: Config, mesh: Mesh) -> dict[str, float] | None:
    """Measures the sum of one step's gradients with each technique of ``strategy.compression``. Collective.

    The sum is measured by itself, though in training it overlaps with the backward pass.

    Returns:
        Technique -> seconds on the slowest rank; None if this layout does not compress gradients before they are sent.
    """
    if mesh.layout.dp_cp == 1 or not mesh.layout.kind.buckets:
        return None
    techniques = [name for name in TECHNIQUES if _is_supported(name, config, mesh)]
    parameters, share = _sample(config, mesh)
    return {name: largest(_seconds(name, config, mesh, parameters) / share, mesh) for name in techniques}


def advised(seconds: Mapping[str, float]) -> str:
    """Returns the technique that pays. A lossy one must win by a margin.

    Args:
        seconds: technique -> seconds, from the least lossy one.
    """
    chosen, *others = seconds
    for technique in others:
        if seconds[technique] < PAYS * seconds[chosen]:
            chosen = technique
    return chosen


def advice(config: Config, mesh: Mesh, layers: Sequence[range] | None, batch: StepBatch) -> dict[str, Any]:
    """Returns for each key its best value and the measured seconds by value; empty for other layouts. Collective."""
    result: dict[str, Any] = {}
    sizes = bucket_seconds(config, mesh, layers, batch)
    if sizes is not None:
        best = min(sizes, key=lambda size: sizes[size])
        result["strategy.bucket_cap_mb"] = {"best": best, "seconds": {f"{size:g}": sizes[size] for size in sizes}}
    techniques = compression_seconds(config, mesh)
    if techniques is not None:
        result["strategy.compression"] = {"best": advised(techniques), "seconds": techniques}
    return result


def _is_supported(technique: str, config: Config, mesh: Mesh) -> bool:
    strategy = replace(config.strategy, compression=technique)
    try:
        check_compatibility((*OF_LAYOUT, *OF_RUN), replace(config, strategy=strategy), mesh.layout)
    except UserError:
        return False
    return True


def _sample(config: Config, mesh: Mesh) -> tuple[dict[str, nn.Parameter], float]:
    """Returns parameters with the shapes of the model's, and their share of the parameters of one rank."""
    dtype = parameter_dtype(config.precision.name)
    capacity = SAMPLE_BYTES // dtype.itemsize
    model = build_model(config.model, config.train.seed, values=False)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    total = sum(map(math.prod, shapes.values())) / mesh.layout.pp
    sample: dict[str, nn.Parameter] = {}
    taken = 0
    for name, (length, *rest) in reversed([(name, shape) for name, shape in shapes.items() if shape]):
        rows = min(length, max(1, (capacity - taken) // math.prod(rest)))
        sample[name] = nn.Parameter(torch.zeros(rows, *rest, dtype=dtype, device=mesh.device))
        taken += rows * math.prod(rest)
        if taken >= min(capacity, total):
            break
    return sample, min(1.0, taken / total)


def _seconds(technique: str, config: Config, mesh: Mesh, parameters: Mapping[str, nn.Parameter]) -> float:
    """Returns the shortest time of a few sums over the data-parallel ranks, as measured on this rank."""
    group = mesh.group("dp_cp")
    exchange = make_exchange(technique, config.strategy, parameters, group)
    reduction = GradientReduction(parameters.values(), group, config.strategy.bucket_cap_mb)
    rounds: list[float] = []
    for _ in range(ROUNDS):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        synchronize_ranks(mesh)
        began = time.perf_counter()
        reduction.begin(1, exchange)
        reduction.reduce()
        exchange.commit(torch.ones((), dtype=torch.bool, device=mesh.device))
        synchronize(mesh.device)
        rounds.append(time.perf_counter() - began)
    return min(rounds[1:])
