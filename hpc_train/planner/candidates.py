"""Lists the layouts of a training on a number of devices, predicts each, and ranks those that fit. Imports no torch.

A key that the user sets keeps its value; each other key takes every value that may be the best. A layout that
``checked_layout`` rejects is not a candidate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from typing import Any

from hpc_train.config.extensions import experts_of, family_of
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.counted import counted
from hpc_train.layout.layout import Layout
from hpc_train.layout.resolve import SIMPLEST
from hpc_train.layout.techniques import SCHEDULES
from hpc_train.layout.validate import checked_layout
from hpc_train.planner.machine import Machine
from hpc_train.planner.prediction import Prediction, predict_step
from hpc_train.planner.work import count_model, count_work

KINDS = ("ddp", "zero1", "zero2", "zero3")  # allreduce where ddp does not support tensor parallelism
CHECKPOINTING = ("none", "selective", "full")
SIMULATED = 40  # the best candidates, whose pipelines are simulated; the others have the bubble of their schedule's row
COMPILE = "train.compile"
FAST_LINKS = 10e9  # bytes/s of a device; with faster links, replicas replace a pipeline that waits. Assumed
FURTHER: Mapping[str, tuple[Any, ...]] = {  # keys that are compared only if they are asked for
    "strategy.offload": ("none", "optimizer"),
    "strategy.compression": ("none", "bf16"),
    "strategy.schedule": ("1f1b", *(name for name in SCHEDULES if name not in ("1f1b", "sequential"))),
    COMPILE: (False, True),
    "strategy.cp": (1, 2, 4, 8, 16, 32),
}
_FIRST = FURTHER["strategy.schedule"][0]
MICRO_SIZES = (1, 2, 4, 8, 16, 32, 64)
Values = Mapping[str, Any]  # by config key
DERIVED: Values = {"strategy.schedule": "auto", "strategy.dp": "fill", "batch.micro_batches": "auto"}
ON_CPUS: Values = {"cluster.gpus_per_node": 0}  # GPUs are found on the nodes; the number of ranks on CPUs is a choice


@dataclass(frozen=True)
class Candidate:
    """A layout with its prediction, and with ``values``, the config keys that select it."""

    nodes: int
    values: Values
    prediction: Prediction

    @property
    def layout(self) -> Layout:
        return self.prediction.layout

    @property
    def devices(self) -> int:
        return self.layout.world_size

    @property
    def complexity(self) -> tuple[int, ...]:
        """Orders layouts that are equally fast: those with fewer techniques come first."""
        layout = self.layout
        ckpt = str(self.values["train.activation_checkpointing"])
        split = (layout.pp > 1) + (layout.tp > 1) + (layout.cp > 1) + (layout.ep > 1)
        kind = KINDS.index(layout.data_parallel) if layout.data_parallel in KINDS else 0
        again = CHECKPOINTING.index(ckpt) if ckpt in CHECKPOINTING else len(CHECKPOINTING)
        return (split, kind, again)

    def to_json(self) -> dict[str, Any]:
        """Returns the layout with its settings and its prediction."""
        prediction = self.prediction
        memory = self.prediction.memory
        return {
            "layout": str(self.layout),
            "settings": dict(self.values),
            "step_s": prediction.step_s,
            "parts_s": prediction.parts_s,
            "memory_bytes": prediction.needed_bytes,
            "memory_parts": None if memory is None else vars(memory),
            "device_bytes": prediction.device_bytes,
            "samples_per_s": prediction.samples_per_s,
        }


def candidates(
    config: Config, machine: Machine, devices: int, fixed: Collection[str], also: Collection[str] = ()
) -> list[Candidate]:
    """Returns the candidates on ``devices`` devices, also those that do not fit.

    Args:
        fixed: the config keys that keep their values.
        also: keys of ``FURTHER`` whose values are compared as well.

    Raises:
        UserError: ``devices`` do not fill whole nodes, or the model cannot be counted.
    """
    count_model(config)
    works = {compiled: count_work(with_values(config, {COMPILE: compiled})) for compiled in _compiled(config, also)}
    per_node = machine.devices_per_node
    if devices > per_node and devices % per_node:
        raise UserError(
            f"{devices} devices do not fill nodes of {per_node}",
            where="--gpus",
            fix=f"a multiple of {per_node}, or a number below it",
        )
    nodes = max(1, devices // per_node)
    workers = min(devices, per_node)
    by_key: dict[tuple[Any, ...], Candidate] = {}
    for values in _choices(config, machine, devices, fixed, also):
        chosen = with_values(config, values)
        try:
            layout = checked_layout(chosen, nodes, workers)
        except UserError:
            continue
        if _waits(layout, machine) and "strategy.pp" not in fixed:
            continue
        if layout.world_size == devices and _key(values, layout) not in by_key:
            prediction = predict_step(chosen, layout, machine, False, works[chosen.train.compile])
            by_key[_key(values, layout)] = Candidate(nodes, values, prediction)
    for candidate in [*islice(fastest(by_key.values()), SIMULATED)]:
        demand = candidate.prediction.demand
        work = works[demand.config.train.compile]
        prediction = replace(predict_step(demand.config, candidate.layout, machine, True, work), demand=demand)
        by_key[_key(candidate.values, candidate.layout)] = replace(candidate, prediction=prediction)
    return [*by_key.values()]


def fastest(predicted: Iterable[Candidate], tolerance: float = 0.0) -> Iterator[Candidate]:
    """Yields the candidates that fit, the fastest first; among those within ``tolerance`` the simplest is first.

    The memory of a candidate is computed only when the caller reaches it.
    """
    close, others = close_and_others(predicted, tolerance)
    yield from close
    yield from others


def close_and_others(predicted: Iterable[Candidate], tolerance: float) -> tuple[list[Candidate], Iterator[Candidate]]:
    """Returns the candidates that fit and are within ``tolerance`` of the fastest, the simplest first, and all others
    that fit, the fastest first. Those that leave no room in the memory come after all that do.
    """
    ordered = sorted(predicted, key=lambda candidate: -candidate.prediction.samples_per_s)
    roomy = (candidate for candidate in ordered if candidate.prediction.has_room)
    tight = (candidate for candidate in ordered if candidate.prediction.fits and not candidate.prediction.has_room)
    preferred = chain(roomy, tight)
    first = next(preferred, None)
    if first is None:
        return [], iter(())
    least = first.prediction.samples_per_s * (1 - tolerance)
    close = [first]
    for candidate in preferred:
        if candidate.prediction.samples_per_s < least or candidate.prediction.has_room < first.prediction.has_room:
            preferred = chain([candidate], preferred)
            break
        close.append(candidate)
    return sorted(close, key=lambda candidate: candidate.complexity), preferred


def distinct(ranked: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yields the first candidate of each split, data-parallel kind, schedule, and value of ``FURTHER``."""
    seen = set[tuple[object, ...]]()
    for candidate in ranked:
        layout = candidate.layout
        further = tuple(candidate.values.get(name) for name in FURTHER)
        sizes = (layout.dp, layout.pp, layout.tp, layout.ep, layout.shard)
        split = (sizes, layout.data_parallel, layout.schedule, further)
        if split not in seen:
            seen.add(split)
            yield candidate


def with_values(config: Config, values: Values) -> Config:
    """Returns ``config`` with other values of ``group.key``."""
    return replace(config, **{group: replace(getattr(config, group), **keys) for group, keys in nested(values).items()})


def nested(values: Values) -> dict[str, dict[str, Any]]:
    """Returns the values of ``group.key`` by group and key."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        group, key = name.split(".")
        groups.setdefault(group, {})[key] = value
    return groups


def _choices(
    config: Config, machine: Machine, devices: int, fixed: Collection[str], also: Collection[str]
) -> Iterator[Values]:
    model: Any = counted(config).model
    why_not = family_of(model).why_not_stages
    most_stages = max(1, getattr(model, "n_layers", 1))
    if why_not is not None and why_not(model):
        most_stages = 1
    per_node = min(devices, machine.devices_per_node)
    kind_is_open = "strategy.data_parallel" not in fixed
    splits = family_of(config.model).tensor_parallel is not None
    experts = experts_of(model)
    sizes = [size for size in MICRO_SIZES if size <= config.batch.global_size]
    open_values: dict[str, Iterable[Any]] = {
        "strategy.tp": [tp for tp in _powers(per_node) if tp == 1 or splits],
        "strategy.ep": [ep for ep in _powers(devices) if ep == 1 or (experts and experts.number % ep == 0)],
        "strategy.pp": [pp for pp in _powers(devices) if pp <= most_stages],
        "strategy.stages_per_rank": (1, 2),
        "strategy.data_parallel": KINDS,
        "strategy.shard": ("fill", "node"),
        "train.activation_checkpointing": CHECKPOINTING,
        "batch.micro_size": sizes if _splits_batch(config) else ("auto",),
        **{name: values for name, values in FURTHER.items() if name in also},
    }
    for name in [*open_values]:
        if name in fixed:
            group, key = name.split(".")
            open_values[name] = [getattr(getattr(config, group), key)]
    for values in product(*open_values.values()):
        chosen = dict(zip(open_values, values, strict=True))
        if not _is_sensible(chosen, devices, per_node, fixed):
            continue
        if chosen["strategy.tp"] > 1 and chosen["strategy.data_parallel"] == "ddp" and kind_is_open:
            chosen["strategy.data_parallel"] = "allreduce"
        if chosen.get("strategy.cp", 1) > 1:
            chosen["strategy.context"] = "both"  # rings only where the heads or the node do not suffice
        derived = {name: value for name, value in DERIVED.items() if name not in open_values}
        chosen |= derived
        if machine.rates.cores:
            chosen |= {**ON_CPUS, "cluster.cpu_workers": per_node}
        yield {name: value for name, value in chosen.items() if name in open_values or name not in fixed}


def _compiled(config: Config, also: Collection[str]) -> Collection[bool]:
    """Returns the values of ``train.compile`` that are compared."""
    return FURTHER[COMPILE] if COMPILE in also else (config.train.compile,)


def _waits(layout: Layout, machine: Machine) -> bool:
    """Returns whether the stages of a pipeline compute one after the other although the links between them are fast."""
    rates = machine.rates
    spans_nodes = layout.world_size > machine.devices_per_node
    link = rates.fabric_bytes_per_s if spans_nodes else rates.node_bytes_per_s
    return layout.pp > 1 and layout.micro_batches == 1 and not rates.cores and link >= FAST_LINKS


def _splits_batch(config: Config) -> bool:
    """Returns whether the size of micro-batches is open: it is not determined by their number, by a reproducible sum,
    or by updates inside the backward (which need one micro-batch)."""
    is_determined = config.train.reproducible is not None or config.optim.in_backward
    return config.batch.micro_batches == "auto" and not is_determined


def _is_sensible(chosen: Values, devices: int, per_node: int, fixed: Collection[str]) -> bool:
    """Returns whether the open keys of a choice make a difference that simpler candidates do not have."""
    tp = chosen["strategy.tp"]
    pp = chosen["strategy.pp"]
    kind = chosen["strategy.data_parallel"]
    if not isinstance(pp, int):
        return True
    if tp * pp > devices:
        return False
    dp = devices // (tp * pp)
    differs = {
        "strategy.cp": dp % chosen.get("strategy.cp", 1) == 0,
        "strategy.ep": devices // pp % chosen["strategy.ep"] == 0,
        "strategy.compression": chosen.get("strategy.compression", "none") == "none" or dp > 1,
        "strategy.schedule": chosen.get("strategy.schedule", _FIRST) == _FIRST or pp > 1,
        "strategy.stages_per_rank": chosen["strategy.stages_per_rank"] == 1 or pp > 1,
        # the stages of a pipeline hold their parameters and gradients whole, as with zero1
        "strategy.data_parallel": kind == "ddp" or (dp > 1 and (pp == 1 or kind == "zero1")),
        "strategy.shard": chosen["strategy.shard"] != "node" or (kind.startswith("zero") and dp * tp > per_node > tp),
    }
    return all(differs[name] for name in differs if name not in fixed)


def refusal(config: Config, nodes: int, per_node: int, fixed: Collection[str]) -> UserError | None:
    """Returns why the simplest layout with the values of the ``fixed`` keys is rejected, or None if it is accepted."""
    simplest = {**SIMPLEST, "strategy.dp": "fill"}
    if _splits_batch(config):
        simplest["batch.micro_size"] = 1
    try:
        checked_layout(with_values(config, {k: v for k, v in simplest.items() if k not in fixed}), nodes, per_node)
    except UserError as error:
        return error
    return None


def _key(values: Values, layout: Layout) -> tuple[Any, ...]:
    return (layout, values["train.activation_checkpointing"], *(values.get(name) for name in FURTHER))


def _powers(most: int) -> list[int]:
    """Returns the powers of two up to ``most``, and ``most`` itself."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]
    return sorted({*powers, most})
