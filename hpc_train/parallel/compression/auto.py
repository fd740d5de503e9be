"""``strategy.compression=auto``: measures each technique on this link and chooses the one that saves time.

Each technique sums a sample of the model's gradients over the data axis, as in training: the time includes what it
computes. That the sum overlaps with the backward is left out, so a lossy technique must win by a margin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hpc_train.config.schema import Config
from hpc_train.models.build import build_model
from hpc_train.parallel.bucket_search import first_cap
from hpc_train.parallel.compression.build import make_exchange
from hpc_train.parallel.compression.exchange import Exchange
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision import parameter_dtype
from hpc_train.parallel.reduction import GradientReduction

CANDIDATES = ("none", "bf16", "powersgd", "topk")  # from the most to the least of a gradient that is sent at once
PAYS = 2 / 3  # a technique is taken where it needs less than this share of the time of those before it
SAMPLE_BYTES = 16 * 2**20  # of gradients: 1.3 s at 100 Mbit/s
ROUNDS = 3  # the first one is not counted


@dataclass(frozen=True)
class Choice:
    """The choice, and the seconds that the gradients of one step take with each technique."""

    technique: str
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.seconds.items())
        return f"compression: {self.technique}; the gradients of a step would take: {figures}"


def choose(config: Config, mesh: Mesh) -> Choice:
    """Measures the link of ``mesh`` and chooses; the same on every rank. Collective."""
    parameters, share = _sample(config, mesh)
    own = [_seconds(name, config, mesh, parameters) / share for name in CANDIDATES]
    slowest = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=mesh.control)
    seconds = dict(zip(CANDIDATES, slowest.tolist(), strict=True))
    return Choice(decide(seconds), seconds)


def decide(seconds: Mapping[str, float]) -> str:
    """The technique that pays, of ``seconds`` by technique, those that lose less first."""
    chosen, *others = seconds
    for technique in others:
        if seconds[technique] < PAYS * seconds[chosen]:
            chosen = technique
    return chosen


def _sample(config: Config, mesh: Mesh) -> tuple[dict[str, nn.Parameter], float]:
    """Parameters of the model's shapes, and what share they are of those of one rank."""
    dtype = parameter_dtype(config.precision.name)
    capacity = SAMPLE_BYTES // dtype.itemsize
    model = build_model(config.model, config.train.seed)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    total = sum(map(math.prod, shapes.values())) / mesh.layout.pp
    sample: dict[str, nn.Parameter] = {}
    taken = 0
    for name, (whole, *rest) in reversed([(name, shape) for name, shape in shapes.items() if shape]):
        rows = min(whole, max(1, (capacity - taken) // math.prod(rest)))
        sample[name] = nn.Parameter(torch.zeros(rows, *rest, dtype=dtype, device=mesh.device))
        taken += rows * math.prod(rest)
        if taken >= min(capacity, total):
            break
    return sample, min(1.0, taken / total)


def _seconds(technique: str, config: Config, mesh: Mesh, parameters: Mapping[str, nn.Parameter]) -> float:
    """The least time of a few sums over the data axis, on this rank."""
    group, strategy = mesh.group("dp"), config.strategy
    exchange = make_exchange(technique, strategy, parameters, group)
    reduction = GradientReduction(parameters.values(), group, first_cap(strategy))
    found = [_round(reduction, exchange, mesh, parameters) for _ in range(ROUNDS)]
    return min(found[1:])


def _round(
    reduction: GradientReduction, exchange: Exchange, mesh: Mesh, parameters: Mapping[str, nn.Parameter]
) -> float:
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    _synchronize(mesh)
    began = time.perf_counter()
    reduction.begin(1, exchange)
    reduction.reduce()
    exchange.commit(torch.ones((), dtype=torch.bool, device=mesh.device))
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    return time.perf_counter() - began


def _synchronize(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    dist.barrier(group=mesh.control)
