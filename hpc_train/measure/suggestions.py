"""When the devices are kept from computing for several lines of metrics in a row: what by, and what could be changed.

Values only: no torch. Each limit is told once in an attempt.

What could be changed in a config where a share of its steps is too large. Values only: no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.measure.streak import Streak
from hpc_train.plan.layout import Layout
from hpc_train.plan.techniques import KINDS, SCHEDULES, PipelineShape
from hpc_train.plan.validate import validate

LEAST_UTILISATION = 0.6
IN_A_ROW = 3  # lines of metrics, after the first of an attempt, which has the start of everything in it
SHARES = {  # limit -> key of the metrics, and the share of the time that is too much in any case
    "data": ("data_wait_share", 0.1),
    "communication": ("comm_share", 0.3),
    "bubble": ("bubble_share", 0.3),
    "host": ("host_share", 0.3),
}
RATIOS = {  # limit -> key of the metrics, and the largest of the ranks over their mean that is too much
    "imbalance": ("compute_imbalance", 1.25),
    "memory": ("memory_imbalance", 1.3),
}
LEAST_SHARE = 0.1  # what takes less is not to blame
WORDS = {
    "data": "the ranks wait for data {:.0%} of the time",
    "communication": "the ranks wait for communication {:.0%} of the time",
    "bubble": "the pipeline's bubble takes {:.0%} of the time",
    "host": "the GPUs wait for the host {:.0%} of the time",
    "imbalance": "one rank computes {:.2f} times as long as the mean of all",
    "memory": "one rank holds {:.2f} times as much memory as the mean of all",
}


@dataclass(frozen=True)
class Advice:
    """``limit``: what keeps the devices from computing; ``value``: its share of the time, or the ratio of ranks."""

    limit: str
    value: float
    fixes: tuple[Suggestion, ...]

    @property
    def message(self) -> str:
        said = WORDS[self.limit].format(self.value)
        return f"{said}; what may help: " + ", or ".join(map(str, self.fixes)) if self.fixes else said

    def details(self) -> dict[str, Any]:
        """For the event."""
        told = [[f"{key}={value}" for key, value in fix.overrides.items()] for fix in self.fixes]
        return {"limit": self.limit, "value": round(self.value, 4), "message": self.message, "overrides": told}


@dataclass
class AdviceWatch:
    """Looks at every line of metrics of an attempt."""

    setting: SuggestedSetting
    _lines: int = field(default=0, init=False)
    _limits: Streak[str] = field(default_factory=lambda: Streak(IN_A_ROW), init=False)

    def look(self, line: Mapping[str, Any]) -> Advice | None:
        """Advice on a limit that ``IN_A_ROW`` lines agree on and that was not reported before."""
        self._lines += 1
        limit = find_limit(line, self._limits.confirmed) if self._lines > 1 else None
        if not self._limits.confirms(limit) or limit is None:
            return None
        key, _ = (SHARES | RATIOS)[limit]
        return Advice(limit, line[key], tuple(fixes(limit, self.setting)))


def find_limit(line: Mapping[str, Any], told: set[str] | frozenset[str] = frozenset()) -> str | None:
    """The limit that takes most, where utilisation is low or its own threshold is passed; then uneven ranks.

    Utilisation is the share of the time that is left for computing, or NVML's where that is lower. A share that is
    not in ``line`` is not known and not blamed.
    """
    shares = {limit: line[key] for limit, (key, _) in SHARES.items() if line.get(key) is not None}
    utilisation = min(1.0 - sum(shares.values()), line.get("gpu_util", 1.0))
    worst = max(shares, key=lambda limit: shares[limit], default=None)
    if worst is not None and utilisation < LEAST_UTILISATION and shares[worst] >= LEAST_SHARE and worst not in told:
        return worst
    excess = {limit: share - SHARES[limit][1] for limit, share in shares.items() if limit not in told}
    most_excess = max(excess, key=lambda limit: excess[limit], default=None)
    if most_excess is not None and excess[most_excess] > 0:
        return most_excess
    for limit, (key, most) in RATIOS.items():
        if limit not in told and line.get(key, 1.0) > most:
            return limit
    return None


@dataclass(frozen=True)
class SuggestedSetting:
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
class Suggestion:
    """Overrides for the next submission, and what they would do."""

    overrides: Mapping[str, Any]
    why: str

    def __str__(self) -> str:
        return " ".join(f"{key}={_written(value)}" for key, value in self.overrides.items()) + f" ({self.why})"


def fixes(limit: str, setting: SuggestedSetting) -> list[Suggestion]:
    """For ``limit`` (a key of ``LIMITS``), the cheapest first; only such as this very run would be allowed."""
    return [fix for fix in LIMITS[limit](setting) if _is_allowed(fix, setting)]


def _data(setting: SuggestedSetting) -> Iterator[Suggestion]:
    workers = max(1, 2 * setting.loader_workers)
    if workers <= setting.cores:
        yield Suggestion({"batch.loader_workers": workers}, "more processes that read samples")
    elif setting.config.cluster.cpus_per_gpu == "auto":
        yield Suggestion({"cluster.cpus_per_gpu": 2 * setting.cores}, "cores for more processes that read samples")


def _communication(setting: SuggestedSetting) -> Iterator[Suggestion]:
    layout, batch = setting.layout, setting.config.batch
    shards = layout.kind.shards
    if "parameters" in shards and layout.micro_batches > 1:
        yield _larger_micro_batches(layout, "parameters are gathered for each micro-batch")
    for kind in KINDS.values() if "parameters" in shards else ():
        if kind.shards == shards - {"parameters"}:
            yield Suggestion({"strategy.data_parallel": kind.name}, "parameters stay gathered; takes memory")
    if shards and setting.nodes > 1 and layout.shard == layout.dp:
        yield Suggestion({"strategy.shard": "node"}, "state is sharded inside a node; takes memory")
    if layout.kind.bucket_search != "never":
        yield Suggestion({"strategy.bucket_cap_mb": "auto"}, "the fastest of a few sizes of gradient buckets")
    if layout.kind.compressed_as is not None and setting.config.strategy.compression == "none":
        yield Suggestion({"strategy.compression": "bf16"}, "half the bytes; powersgd and topk send far less")
    if layout.tp > 1:
        yield Suggestion({"strategy.tp": layout.tp // 2}, "fewer ranks exchange activations in every layer")
    if layout.dp > 1 and layout.pp == 1:
        stages = setting.nodes if setting.nodes > 1 else 2
        yield Suggestion({"strategy.pp": stages}, "stages exchange hidden states, and replicas fewer gradients")
    if layout.dp > 1:
        follow = {"batch.micro_batches": 2 * layout.micro_batches} if batch.micro_size == "auto" else {}
        size = {"batch.global_size": 2 * batch.global_size, **follow, "run.fork": "NAME"}
        yield Suggestion(size, "accumulates twice as much between reductions; it is another run")


def _bubble(setting: SuggestedSetting) -> Iterator[Suggestion]:
    layout = setting.layout
    if layout.micro_size > 1:
        more = {"batch.micro_batches": 2 * layout.micro_batches, "batch.micro_size": "auto"}
        yield Suggestion(more, "the pipeline fills and drains less often")
    yield _balanced()
    if layout.stages_per_rank == 1:
        shape = PipelineShape(layout.pp, 2, layout.micro_batches)
        several = [row for row in SCHEDULES.values() if row.stages_per_rank[0] == 2]
        for row in sorted(several, key=lambda row: (row.bubble(shape), row.placement != "v")):
            chosen = {"strategy.schedule": row.name, "strategy.stages_per_rank": 2}
            yield Suggestion(chosen, "two shorter stages on each rank")
    if layout.pp > 2:
        yield Suggestion({"strategy.pp": layout.pp // 2}, "fewer stages; takes memory")


def _host(setting: SuggestedSetting) -> Iterator[Suggestion]:
    if not setting.config.train.compile:
        yield Suggestion({"train.compile": True}, "fewer and larger kernels")
    if setting.layout.micro_batches > 1:
        yield _larger_micro_batches(setting.layout, "more work for each kernel")


def _imbalance(setting: SuggestedSetting) -> Iterator[Suggestion]:
    if setting.layout.pp > 1:
        yield _balanced()


def _memory(setting: SuggestedSetting) -> Iterator[Suggestion]:
    layout = setting.layout
    if layout.pp > 1:
        yield _balanced()
        yield Suggestion({"strategy.tp": 2 * layout.tp}, "every layer, the largest too, is shared by more ranks")


LIMITS: dict[str, Callable[[SuggestedSetting], Iterator[Suggestion]]] = {
    "data": _data,
    "communication": _communication,
    "bubble": _bubble,
    "host": _host,
    "imbalance": _imbalance,
    "memory": _memory,
}


def _larger_micro_batches(layout: Layout, why: str) -> Suggestion:
    return Suggestion(
        {"batch.micro_size": 2 * layout.micro_size, "batch.micro_batches": "auto"}, f"{why}; takes memory"
    )


def _balanced() -> Suggestion:
    return Suggestion({"strategy.pp_split": "measured"}, "stages cut by what their layers take in time and memory")


def _is_allowed(fix: Suggestion, setting: SuggestedSetting) -> bool:
    """Whether it changes something, and the run would be accepted with it."""
    config = setting.config
    for key, value in fix.overrides.items():
        config = _with(config, key.split("."), value)
    if config == setting.config:
        return False
    try:
        validate(config, setting.nodes, setting.workers_per_node)
    except UserError:
        return False
    return True


def _with(config: Any, path: list[str], value: Any) -> Any:
    if len(path) == 1:
        return replace(config, **{path[0]: value})
    return replace(config, **{path[0]: _with(getattr(config, path[0]), path[1:], value)})


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
