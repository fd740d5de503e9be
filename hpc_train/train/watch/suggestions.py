"""Finds the limit of a run's throughput from its metrics and suggests changes of the config. It does not import torch.

A limit is reported once per attempt, after several consecutive lines of metrics have shown it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_train.config.import_path import install_extra
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.techniques import KINDS, SCHEDULES, PipelineShape
from hpc_train.layout.validate import validate
from hpc_train.train.watch.stragglers import Streak

LEAST_UTILIZATION = 0.6
IDLE_LINES = 10  # lines of metrics in a row without a token for an expert
IN_A_ROW = 3  # lines of metrics; the first line of an attempt does not count, since it includes the start-up
SHARES = {  # limit -> (metric, largest acceptable share of the time)
    "data": ("data_wait_share", 0.1),
    "communication": ("comm_share", 0.3),
    "bubble": ("bubble_share", 0.3),
    "host": ("host_share", 0.3),
}
RATIOS = {  # limit -> (metric, largest acceptable ratio of a rank to the mean)
    "imbalance": ("compute_imbalance", 1.25),
    "memory": ("memory_imbalance", 1.3),
}
LEAST_COST = 0.05  # share of the time that uneven replicas cost
LEAST_SHARE = 0.1  # smallest share that can be a limit
LEAST_PEAK_RATIO = 2.0  # of the peak in bf16 to the peak in the precision of the run
WORDS = {
    "precision": "the peak rate of the GPUs in bf16 is {:.1f} times the rate in this precision",
    "data": "the ranks wait for data {:.0%} of the time",
    "communication": "the ranks wait for communication {:.0%} of the time",
    "bubble": "the pipeline's bubble takes {:.0%} of the time",
    "host": "the GPUs wait for the host {:.0%} of the time",
    "imbalance": "one rank computes {:.2f} times as long as the mean of all",
    "replicas": "the replicas wait for the slowest one {:.0%} of the time",
    "memory": "one rank holds {:.2f} times as much memory as the mean of all",
    "experts": "{:.0f} experts had no token in the last " + f"{IDLE_LINES} logged steps",
}


@dataclass(frozen=True)
class Advice:
    """Describes a limit of the throughput and possible fixes.

    Attributes:
        limit: a key of ``LIMITS``.
        value: its share of the time, the ratio of a rank to the mean, the ratio of the peak rates, or a number of
            experts.
        example: the first of these experts.
    """

    limit: str
    value: float
    fixes: tuple[Suggestion, ...]
    example: str = ""

    @property
    def message(self) -> str:
        problem = WORDS[self.limit].format(self.value) + self.example
        if not self.fixes:
            return problem
        return f"{problem}; this may help: " + ", or ".join(map(str, self.fixes))

    def details(self) -> dict[str, Any]:
        """Returns the details of the event."""
        overrides = [[f"{key}={value}" for key, value in fix.overrides.items()] for fix in self.fixes]
        return {"limit": self.limit, "value": round(self.value, 4), "message": self.message, "overrides": overrides}


@dataclass
class AdviceWatch:
    """Checks every line of metrics of an attempt for a limit."""

    setting: SuggestedSetting
    _lines: int = field(default=0, init=False)
    _limits: Streak[str] = field(default_factory=lambda: Streak(IN_A_ROW), init=False)
    _idle: dict[tuple[int, int], int] = field(default_factory=dict, init=False)  # (layer, expert) -> lines in a row

    def look(self, line: Mapping[str, Any]) -> Advice | None:
        """Returns advice on a limit that the last ``IN_A_ROW`` lines have shown and that was not reported before."""
        self._lines += 1
        unused = self._unused_experts(line)
        if unused is not None:
            return unused
        limit = find_limit(line, self._limits.confirmed) if self._lines > 1 else None
        if not self._limits.confirms(limit) or limit is None:
            return None
        value = _peak_ratio(line)
        if limit != "precision":
            key, _ = (SHARES | RATIOS)[limit]
            value = line[key]
        return Advice(limit, value, tuple(fixes(limit, self.setting)))

    def on_replicas(self, cost: float) -> Advice | None:
        """Returns advice if uneven replicas cost more than ``LEAST_COST``, a share of the time, and no imbalance was
        reported before."""
        alike = {"replicas", "imbalance"}
        if cost <= LEAST_COST or alike & self._limits.confirmed:
            return None
        self._limits.confirmed |= alike
        return Advice("replicas", cost, tuple(fixes("replicas", self.setting)))

    def _unused_experts(self, line: Mapping[str, Any]) -> Advice | None:
        """Returns advice, once, if experts had no token in the last ``IDLE_LINES`` lines."""
        loads = line.get("expert_load") or []
        idle = [(layer, expert) for layer, row in enumerate(loads) for expert, load in enumerate(row) if load == 0]
        self._idle = {place: self._idle.get(place, 0) + 1 for place in idle}
        dead = [place for place, lines in self._idle.items() if lines >= IDLE_LINES]
        if not dead or "experts" in self._limits.confirmed:
            return None
        self._limits.confirmed.add("experts")
        layer, expert = dead[0]
        model: Any = self.setting.config.model
        example = f", such as expert {expert} of layer {layer + model.moe.dense_layers}"
        return Advice("experts", len(dead), tuple(fixes("experts", self.setting)), example)


def find_limit(line: Mapping[str, Any], reported: set[str] | frozenset[str] = frozenset()) -> str | None:
    """Returns the precision if the GPUs are much faster in bf16; else the largest limit if utilization is low or the
    limit exceeds its threshold, else an imbalance of ranks.

    Utilization is the share of the time that remains for computation, or the GPU utilization if that is lower. A share
    that is missing in ``line`` is unknown and cannot be the limit.
    """
    if "precision" not in reported and _peak_ratio(line) > LEAST_PEAK_RATIO:
        return "precision"
    shares = {limit: line[key] for limit, (key, _) in SHARES.items() if line.get(key) is not None}
    utilization = min(1.0 - sum(shares.values()), line.get("gpu_util", 1.0))
    worst = max(shares, key=lambda limit: shares[limit], default=None)
    if worst is not None and utilization < LEAST_UTILIZATION and shares[worst] >= LEAST_SHARE and worst not in reported:
        return worst
    excess = {limit: share - SHARES[limit][1] for limit, share in shares.items() if limit not in reported}
    most_excess = max(excess, key=lambda limit: excess[limit], default=None)
    if most_excess is not None and excess[most_excess] > 0:
        return most_excess
    for limit, (key, most) in RATIOS.items():
        if limit not in reported and line.get(key, 1.0) > most:
            return limit
    return None


def _peak_ratio(line: Mapping[str, Any]) -> float:
    """Returns the ratio of the peak rate in bf16 to that in the precision of the run; 1 if it is unknown."""
    if not line.get("mfu") or not line.get("mfu_of_precision"):
        return 1.0
    return float(line["mfu_of_precision"] / line["mfu"])


@dataclass(frozen=True)
class SuggestedSetting:
    """Holds the config and resources of a run, to which suggestions must apply.

    Attributes:
        loader_workers: number of loader workers of this rank.
        cores: number of cores for this rank and its loader workers.
        in_job: whether the run is in a Slurm job, which may request more cores.
        would_gain_by_dali: whether Pillow decodes images that DALI could decode on the GPU.
    """

    config: Config
    layout: Layout
    nodes: int
    workers_per_node: int
    loader_workers: int
    cores: int
    in_job: bool = False
    would_gain_by_dali: bool = False


@dataclass(frozen=True)
class Suggestion:
    """Holds overrides for the next submission and the reason for them."""

    overrides: Mapping[str, Any]
    why: str

    def __str__(self) -> str:
        values = {
            key: str(value).lower() if isinstance(value, bool) else value for key, value in self.overrides.items()
        }
        return " ".join(f"{key}={value}" for key, value in values.items()) + f" ({self.why})"


BALANCED = Suggestion(
    {"strategy.pp_split": "measured"}, "splits stages by the measured time and memory of their layers"
)


def fixes(limit: str, setting: SuggestedSetting) -> list[Suggestion]:
    """Returns suggestions for ``limit`` (a key of ``LIMITS``) that are valid for this run, the cheapest first."""
    return [fix for fix in LIMITS[limit](setting) if _is_allowed(fix, setting)]


def _precision(setting: SuggestedSetting) -> Iterator[Suggestion]:
    if setting.config.precision.name == "fp32":
        yield Suggestion({"precision.name": "bf16"}, "products in bf16, and weights and optimizer in fp32")
        yield Suggestion({"precision.tf32": True}, "the range of fp32 with 10 bits of precision")


def _data(setting: SuggestedSetting) -> Iterator[Suggestion]:
    workers = max(1, 2 * setting.loader_workers)
    if workers <= setting.cores:
        yield Suggestion({"batch.loader_workers": workers}, "more processes read samples")
    elif setting.in_job and setting.config.cluster.cpus_per_gpu == "auto":
        yield Suggestion({"cluster.cpus_per_gpu": 2 * setting.cores}, "more cores for processes that read samples")
    if setting.would_gain_by_dali:
        yield Suggestion({"data.decoder": "auto"}, f"NVIDIA DALI decodes images on the GPU; {install_extra('dali')}")


def _communication(setting: SuggestedSetting) -> Iterator[Suggestion]:
    layout = setting.layout
    batch = setting.config.batch
    shards = layout.kind.shards
    if "parameters" in shards and layout.micro_batches > 1:
        yield _larger_micro_batches(layout, "parameters are gathered for each micro-batch")
    for kind in KINDS.values() if "parameters" in shards else ():
        if kind.shards == shards - {"parameters"}:
            yield Suggestion({"strategy.data_parallel": kind.name}, "parameters stay gathered; needs more memory")
    if shards and setting.nodes > 1 and layout.shard == layout.dp_cp:
        yield Suggestion({"strategy.shard": "node"}, "state is sharded only within a node; needs more memory")
    if layout.kind.compressed_as is not None and setting.config.strategy.compression == "none":
        less = "" if shards else "; powersgd and topk send far less"
        yield Suggestion({"strategy.compression": "bf16"}, f"halves the bytes of gradients{less}")
    if layout.tp > 1:
        yield Suggestion({"strategy.tp": layout.tp // 2}, "fewer ranks exchange activations in every layer")
    if layout.dp > 1 and layout.pp == 1:
        yield Suggestion(
            {"strategy.pp": max(2, setting.nodes)}, "stages exchange activations, and replicas fewer gradients"
        )
    if layout.cp > 1:
        why = "fewer ranks exchange heads, keys or values in every layer; needs more memory"
        yield Suggestion({"strategy.cp": layout.cp // 2}, why)
    if layout.dp_cp > 1:
        size: dict[str, Any] = {"batch.global_size": 2 * batch.global_size}
        if batch.micro_size == "auto":
            size["batch.micro_batches"] = 2 * layout.micro_batches
        size["run.fork"] = "NAME"
        yield Suggestion(size, "accumulates twice as many samples between reductions; needs a new run")


def _bubble(setting: SuggestedSetting) -> Iterator[Suggestion]:
    layout = setting.layout
    if layout.micro_size > 1:
        more = {"batch.micro_batches": 2 * layout.micro_batches, "batch.micro_size": "auto"}
        yield Suggestion(more, "the pipeline fills and drains less often")
    yield BALANCED
    if layout.stages_per_rank == 1:
        shape = PipelineShape(layout.pp, 2, layout.micro_batches)
        several = [row for row in SCHEDULES.values() if row.stages_per_rank[0] == 2]
        for row in sorted(several, key=lambda row: (row.bubble(shape), row.placement != "v")):
            chosen = {"strategy.schedule": row.name, "strategy.stages_per_rank": 2}
            yield Suggestion(chosen, "two shorter stages on each rank")
    if layout.pp > 2:
        yield Suggestion({"strategy.pp": layout.pp // 2}, "fewer stages; needs more memory")


def _host(setting: SuggestedSetting) -> Iterator[Suggestion]:
    if not setting.config.train.compile:
        yield Suggestion({"train.compile": True}, "fewer and larger kernels")
    if setting.layout.micro_batches > 1:
        yield _larger_micro_batches(setting.layout, "more work for each kernel")


def _imbalance(setting: SuggestedSetting) -> Iterator[Suggestion]:
    if setting.layout.pp > 1:
        yield BALANCED
    yield from _replicas(setting)


def _replicas(setting: SuggestedSetting) -> Iterator[Suggestion]:
    layout = setting.layout
    why = "slow replicas hand micro-batches to others"
    yield Suggestion({"batch.balance": True}, why)
    if layout.micro_size > 1:
        more = {"batch.micro_batches": 2 * layout.micro_batches, "batch.micro_size": "auto"}
        yield Suggestion({"batch.balance": True} | more, f"{why}, in smaller parts")


def _memory(setting: SuggestedSetting) -> Iterator[Suggestion]:
    if setting.layout.pp > 1:
        yield BALANCED
        yield Suggestion({"strategy.tp": 2 * setting.layout.tp}, "splits every layer over more ranks")


def _experts(setting: SuggestedSetting) -> Iterator[Suggestion]:
    moe = getattr(setting.config.model, "moe", None)
    if moe is None:
        return
    why = "needs a new run"
    if moe.bias_rate is None:
        yield Suggestion(
            {"model.moe.bias_rate": 0.001, "run.fork": "NAME"}, f"raises the scores of experts with few tokens; {why}"
        )
    loss = 10 * moe.balance_loss or 0.01
    yield Suggestion({"model.moe.balance_loss": loss, "run.fork": "NAME"}, f"the loss of an uneven load; {why}")


LIMITS: dict[str, Callable[[SuggestedSetting], Iterator[Suggestion]]] = {
    "precision": _precision,
    "data": _data,
    "communication": _communication,
    "bubble": _bubble,
    "host": _host,
    "imbalance": _imbalance,
    "replicas": _replicas,
    "memory": _memory,
    "experts": _experts,
}


def _larger_micro_batches(layout: Layout, why: str) -> Suggestion:
    sizes = {"batch.micro_size": 2 * layout.micro_size, "batch.micro_batches": "auto"}
    return Suggestion(sizes, f"{why}; needs more memory")


def _changed(values: Any, path: list[str], value: Any) -> Any:
    """Returns ``values``, a config or a group of it, with another value of the key at ``path``."""
    name, *rest = path
    if rest:
        value = _changed(getattr(values, name), rest, value)
    return replace(values, **{name: value})


def _is_allowed(fix: Suggestion, setting: SuggestedSetting) -> bool:
    """Returns whether the suggestion changes the config and the result is valid for this run."""
    config = setting.config
    for override, value in fix.overrides.items():
        config = _changed(config, override.split("."), value)
    if config == setting.config:
        return False
    try:
        validate(config, setting.nodes, setting.workers_per_node)
    except UserError:
        return False
    return True
