"""Builds the exchange of compressed gradients from the config, and chooses the technique for ``compression=auto``.

``auto`` measures each technique on this link and chooses the one that saves time. Each technique sums a sample of the
model's gradients over the data-parallel ranks as in training, so the time includes its computation. The measurement
ignores that the sum overlaps with the backward pass, so a lossy technique must win by a margin. An attempt in the same
layout reuses the choice of an earlier attempt, which ``run.json`` records.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import Config, StrategyConfig
from hpc_train.layout.buckets import first_cap
from hpc_train.models.build import build_model
from hpc_train.parallel.exchange import Dense, Exchange, PowerSGD, TopK
from hpc_train.parallel.mesh import Mesh, synchronize
from hpc_train.parallel.plain_objects import broadcast_plain
from hpc_train.parallel.precision.dtypes import parameter_dtype
from hpc_train.parallel.reduction import GradientReduction
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog


@dataclass(frozen=True)
class LocalTensor:
    """Holds the local compression state of a rank for one parameter.

    Each rank that sends a gradient of the parameter has a slot. Only the sum over all slots matters.

    Attributes:
        name: the canonical name of the parameter.
        key: ``residual`` or ``velocity``.
        slot: the slot of this rank, in [0, ``slots``).
    """

    name: str
    key: str
    tensor: Tensor
    slot: int
    slots: int


class Compression:
    """Selects the exchange of each step: dense for ``compression_warmup_steps``, then the technique of the config.

    Args:
        parameters: name -> parameter of one module; a tied copy has its own name.
        tied: alias -> canonical name in the whole model.
        cut: whether the model is cut into stages, each of which may have a copy of a tied parameter.
    """

    def __init__(
        self,
        strategy: StrategyConfig,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        tied: Mapping[str, str],
        cut: bool,
    ) -> None:
        self._parameters, self._group, self._tied, self._cut = parameters, group, tied, cut
        self._warmup_steps = strategy.compression_warmup_steps
        self._dense: Exchange = Dense(group)
        self._compressed = make_exchange(strategy.compression, strategy, parameters, group)

    def exchange(self, step: int) -> Exchange:
        return self._dense if step < self._warmup_steps else self._compressed

    @torch.no_grad()
    def commit(self, finite: Tensor) -> None:
        self._compressed.commit(finite)

    def local_state(self) -> Iterator[LocalTensor]:
        """Yields the state that differs between ranks, such as residuals."""
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        for own, parameter in self._parameters.items():
            name = self._tied.get(own, own)
            copies = [own]
            if self._cut:
                copies = [name, *(alias for alias, canonical in self._tied.items() if canonical == name)]
            slot = copies.index(own) * ranks + rank
            for key, tensor in self._compressed.local_state(parameter).items():
                yield LocalTensor(name, key, tensor, slot, ranks * len(copies))

    def shared_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the state that is the same on all ranks: ``NAME.KEY``, where a tied copy has its own name, and a
        tensor."""
        for name, parameter in self._parameters.items():
            for key, tensor in self._compressed.shared_state(parameter).items():
                yield f"{name}.{key}", tensor


def make_exchange(
    technique: str, strategy: StrategyConfig, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
) -> Exchange:
    """Returns the exchange of ``technique``, a value of ``strategy.compression`` other than ``auto``."""
    if technique == "topk":
        return TopK(parameters.values(), group, strategy.compression_share, strategy.compression_momentum)
    if technique == "powersgd":
        return PowerSGD(parameters, group, strategy.compression_rank)
    dtypes = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
    return Dense(group, dtypes[technique])


CANDIDATES = ("none", "bf16", "powersgd", "topk")  # from the largest to the smallest message
PAYS = 2 / 3  # a technique is chosen if it takes less than this share of the time of the previous choice
SAMPLE_BYTES = 16 * 2**20  # bytes of gradients, which take 1.3 s at 100 Mbit/s
ROUNDS = 3  # measured sums, of which the first is not counted


@dataclass(frozen=True)
class Choice:
    """Holds the chosen technique, and the seconds to sum the gradients of one step with each technique."""

    technique: str
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.seconds.items())
        return f"strategy.compression=auto chooses {self.technique}; summing the gradients of a step takes: {figures}"


def choose(config: Config, mesh: Mesh) -> Choice:
    """Measures all techniques on ``mesh`` and chooses one, the same on every rank. Collective."""
    parameters, share = _sample(config, mesh)
    own = [_seconds(name, config, mesh, parameters) / share for name in CANDIDATES]
    slowest = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=mesh.control)
    seconds = dict(zip(CANDIDATES, slowest.tolist(), strict=True))
    return Choice(decide(seconds), seconds)


def decide(seconds: Mapping[str, float]) -> str:
    """Returns the technique that pays; ``seconds`` maps techniques to times, ordered from the least lossy."""
    chosen, *others = seconds
    for technique in others:
        if seconds[technique] < PAYS * seconds[chosen]:
            chosen = technique
    return chosen


def _sample(config: Config, mesh: Mesh) -> tuple[dict[str, nn.Parameter], float]:
    """Returns parameters with the shapes of the model's, and their share of the parameters of one rank."""
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
    """Returns the shortest time of a few sums over the data-parallel ranks, as measured on this rank."""
    group, strategy = mesh.group("dp_cp"), config.strategy
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
    synchronize(mesh.device)
    return time.perf_counter() - began


def _synchronize(mesh: Mesh) -> None:
    synchronize(mesh.device)
    dist.barrier(group=mesh.control)


def with_chosen_compression(config: Config, run: RunDirectory, mesh: Mesh, events: EventLog | None = None) -> Config:
    """Replaces ``auto`` by the fastest technique; writes it to the log, ``events`` and ``run.json``. Collective.

    An attempt in the same layout reuses the earlier choice, so that its steps are the same as before.
    """
    if config.strategy.compression != "auto":
        return config
    technique = (
        "none"
        if mesh.layout.dp_cp == 1
        else _recorded_technique(run, mesh) or _measure_technique(config, run, mesh, events)
    )
    return replace(config, strategy=replace(config.strategy, compression=technique))


def _recorded_technique(run: RunDirectory, mesh: Mesh) -> str | None:
    """Returns the technique that ``run.json`` records for this layout; rank 0 reads it for all ranks."""
    known = broadcast_plain(run.record().get("compression") if mesh.rank == 0 else None, mesh.control)
    return known["technique"] if known and known["layout"] == str(mesh.layout) else None


def _measure_technique(config: Config, run: RunDirectory, mesh: Mesh, events: EventLog | None) -> str:
    choice = choose(config, mesh)
    if mesh.rank == 0:
        print(choice, flush=True)
        found = {"technique": choice.technique, "seconds": dict(choice.seconds)}
        record = {"layout": str(mesh.layout), **found}
        if events is None:
            run.update_record(compression=record)
        else:
            events.record(run, compression=record)
            events.write("compression_chosen", step=0, **found)
    return choice.technique
