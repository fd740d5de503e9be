"""What could be changed in a config where a share of its steps is too large. Values only: no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpc_train.config.errors import ConfigError
from hpc_train.config.layout import ZERO, Layout
from hpc_train.config.schema import Config
from hpc_train.config.validate import validate


@dataclass(frozen=True)
class Setting:
    """What a run was given.

    Attributes:
        loader_workers: of this rank.
        cores: that this rank may run on, loaders included.
    """

    config: Config
    layout: Layout
    nodes: int
    workers_per_node: int
    loader_workers: int
    cores: int


@dataclass(frozen=True)
class Mend:
    """Overrides for the next submission, and what they would do."""

    overrides: Mapping[str, Any]
    why: str

    def __str__(self) -> str:
        return " ".join(f"{key}={_written(value)}" for key, value in self.overrides.items()) + f" ({self.why})"


def mends(limit: str, setting: Setting) -> list[Mend]:
    """For ``limit`` (a key of ``LIMITS``), the cheapest first; only such as this very run would be allowed."""
    return [mend for mend in LIMITS[limit](setting) if _is_allowed(mend, setting)]


def _data(setting: Setting) -> Iterator[Mend]:
    workers = max(1, 2 * setting.loader_workers)
    if workers <= setting.cores:
        yield Mend({"batch.loader_workers": workers}, "more processes that read samples")
    elif setting.config.cluster.cpus_per_gpu == "auto":
        yield Mend({"cluster.cpus_per_gpu": 2 * setting.cores}, "cores for more processes that read samples")


def _communication(setting: Setting) -> Iterator[Mend]:
    layout, batch = setting.layout, setting.config.batch
    if layout.data_parallel == "zero3" and layout.micro_batches > 1:
        yield _larger_micro_batches(layout, "parameters are gathered for each micro-batch")
    if layout.data_parallel == "zero3":
        yield Mend({"strategy.data_parallel": "zero2"}, "parameters stay gathered; takes memory")
    if layout.data_parallel in ZERO and setting.nodes > 1 and layout.shard == layout.dp:
        yield Mend({"strategy.shard": "node"}, "state is sharded inside a node; takes memory")
    if layout.data_parallel in ("ddp", "reduce"):
        yield Mend({"strategy.bucket_cap_mb": "auto"}, "the fastest of a few sizes of gradient buckets")
        if setting.config.strategy.compression == "none":
            yield Mend({"strategy.compression": "bf16"}, "half the bytes; powersgd and topk send far less")
    if layout.tp > 1:
        yield Mend({"strategy.tp": layout.tp // 2}, "fewer ranks exchange activations in every layer")
    if layout.dp > 1 and layout.pp == 1:
        stages = setting.nodes if setting.nodes > 1 else 2
        yield Mend({"strategy.pp": stages}, "stages exchange hidden states, and replicas fewer gradients")
    if layout.dp > 1:
        follow = {"batch.micro_batches": 2 * layout.micro_batches} if batch.micro_size == "auto" else {}
        size = {"batch.global_size": 2 * batch.global_size, **follow, "run.fork": "NAME"}
        yield Mend(size, "accumulates twice as much between reductions; it is another run")


def _bubble(setting: Setting) -> Iterator[Mend]:
    layout = setting.layout
    if layout.micro_size > 1:
        more = {"batch.micro_batches": 2 * layout.micro_batches, "batch.micro_size": "auto"}
        yield Mend(more, "the pipeline fills and drains less often")
    yield _balanced()
    if layout.stages_per_rank == 1:
        for schedule in ("zbv", "interleaved_1f1b"):
            chosen = {"strategy.schedule": schedule, "strategy.stages_per_rank": 2}
            yield Mend(chosen, "two shorter stages on each rank")
    if layout.pp > 2:
        yield Mend({"strategy.pp": layout.pp // 2}, "fewer stages; takes memory")


def _host(setting: Setting) -> Iterator[Mend]:
    if not setting.config.train.compile:
        yield Mend({"train.compile": True}, "fewer and larger kernels")
    if setting.layout.micro_batches > 1:
        yield _larger_micro_batches(setting.layout, "more work for each kernel")


def _imbalance(setting: Setting) -> Iterator[Mend]:
    if setting.layout.pp > 1:
        yield _balanced()


def _memory(setting: Setting) -> Iterator[Mend]:
    layout = setting.layout
    if layout.pp > 1:
        yield _balanced()
        yield Mend({"strategy.tp": 2 * layout.tp}, "every layer, the largest too, is shared by more ranks")


LIMITS: dict[str, Callable[[Setting], Iterator[Mend]]] = {
    "data": _data,
    "communication": _communication,
    "bubble": _bubble,
    "host": _host,
    "imbalance": _imbalance,
    "memory": _memory,
}


def _larger_micro_batches(layout: Layout, why: str) -> Mend:
    return Mend({"batch.micro_size": 2 * layout.micro_size, "batch.micro_batches": "auto"}, f"{why}; takes memory")


def _balanced() -> Mend:
    return Mend({"strategy.pp_split": "measured"}, "stages cut by what their layers take in time and memory")


def _is_allowed(mend: Mend, setting: Setting) -> bool:
    """Whether it changes something, and the run would be accepted with it."""
    config = setting.config
    for key, value in mend.overrides.items():
        config = _with(config, key.split("."), value)
    if config == setting.config:
        return False
    try:
        validate(config, setting.nodes, setting.workers_per_node)
    except ConfigError:
        return False
    return True


def _with(config: Any, path: list[str], value: Any) -> Any:
    if len(path) == 1:
        return replace(config, **{path[0]: value})
    return replace(config, **{path[0]: _with(getattr(config, path[0]), path[1:], value)})


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
