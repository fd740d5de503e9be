"""Derives the effective layout of one attempt from the frozen config and the allocated nodes and workers.

This module imports no torch, so the submission refuses an impossible layout before the job waits in a queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpc_train.config.schema import BatchConfig, Config, CustomModelConfig, OptimConfig, StrategyConfig, TextDataConfig
from hpc_train.config.values import runs_own_code
from hpc_train.errors import UserError
from hpc_train.layout.compatibility import OF_LAYOUT, check_compatibility
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import estimate, needed_bytes
from hpc_train.layout.partition import check_split
from hpc_train.layout.recomputation import describe_recomputation
from hpc_train.layout.techniques import (
    AUTO,
    SCHEDULES,
    TREE,
    DataParallelKind,
    PipelineSchedule,
    asked_kind,
    find_kind,
    find_schedule,
    schedules_where,
    supports,
)
from hpc_train.units import counted, format_bytes


def resolve_layout(config: Config, nodes: int, workers_per_node: int, device_bytes: float | None = None) -> Layout:
    """Derives the layout of ``config`` on ``nodes`` x ``workers_per_node`` ranks.

    Args:
        device_bytes: the memory of the smallest GPU, for ``strategy.pp=auto`` on several nodes; None if unknown.

    Raises:
        UserError: the strategy does not fit these ranks.
    """
    config = for_nodes(config, nodes)
    check_chosen(config)
    tp = _tensor_parallel(config.strategy, workers_per_node)
    ranks = Ranks(nodes, workers_per_node, tp, _context_parallel(config.strategy, nodes * workers_per_node // tp))
    notes: list[str] = []
    if runs_own_code(config):
        return _of_own_code(config, ranks, notes)
    pp = pipeline_ranks(config, ranks, lambda candidate: _lay_out(config, ranks, candidate, []), device_bytes, notes)
    return _lay_out(config, ranks, pp, notes)


def _lay_out(config: Config, ranks: Ranks, pp: int, notes: list[str]) -> Layout:
    """Returns the layout with ``pp`` pipeline ranks.

    Raises:
        UserError: the strategy does not fit these ranks.
    """
    strategy, tp, cp = config.strategy, ranks.tp, ranks.cp
    dp = _data_parallel(strategy, ranks, pp)
    _check_use(dp * pp * cp * tp, ranks.nodes, ranks.available, notes)
    stages_per_rank = stages_of_rank(strategy) if pp > 1 else 1
    asked = asked_kind(config)
    synchronized = asked if dp * cp > 1 else None
    schedule, (micro_batches, micro_size) = choose_schedule(config, synchronized, dp, pp, stages_per_rank, notes)
    kind = _used_kind(config, asked, dp * cp, notes)
    reproducible, logical = config.train.reproducible is not None, 0
    if reproducible:
        logical, micro_batches, micro_size = divide(config, dp)
    layout = Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        shard=_shard(strategy, find_kind(asked), dp * cp, ranks.per_node // tp),
        data_parallel=TREE.name if reproducible else kind,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        micro_batches=micro_batches,
        micro_size=micro_size,
        notes=(*notes, *notices(config)),
        logical_micro_batches=logical,
        cp=cp,
    )
    check_compatibility(OF_LAYOUT, config, layout)
    chosen = describe_recomputation(config, layout)
    return layout if chosen is None else replace(layout, notes=(*layout.notes, chosen))


def _of_own_code(config: Config, ranks: Ranks, notes: list[str]) -> Layout:
    """Returns the ranks of custom code, which has no micro-batches that hpc_train knows of.

    Raises:
        UserError: the strategy does not fit these ranks.
    """
    strategy, tp, cp = config.strategy, ranks.tp, ranks.cp
    pp = strategy.pp
    if pp == "fill" and isinstance(strategy.dp, int):
        pp = ranks.columns // max(1, strategy.dp)
    if not isinstance(pp, int) or pp < 1:
        raise UserError(
            f"strategy.pp is {strategy.pp!r}, which depends on a model that custom code does not tell",
            where="strategy.pp",
            fix="strategy.pp=N",
        )
    dp = _data_parallel(strategy, ranks, pp)
    _check_use(dp * pp * cp * tp, ranks.nodes, ranks.available, notes)
    return Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        shard=_shard(strategy, find_kind(strategy.data_parallel), dp * cp, ranks.per_node // tp),
        data_parallel=strategy.data_parallel,
        schedule=strategy.schedule,
        stages_per_rank=1,
        micro_batches=0,
        micro_size=0,
        notes=tuple(notes),
        cp=cp,
    )


def _divisors(number: int) -> str:
    return " or ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _tensor_parallel(strategy: StrategyConfig, workers_per_node: int) -> int:
    if not isinstance(strategy.tp, int) or strategy.tp < 1 or workers_per_node % strategy.tp:
        raise UserError(
            f"strategy.tp is {strategy.tp}, which does not divide the {workers_per_node} workers of a node",
            where="strategy.tp",
            fix=f"strategy.tp={_divisors(workers_per_node)}, because tensor parallelism stays within a node",
        )
    return strategy.tp


def _context_parallel(strategy: StrategyConfig, columns: int) -> int:
    """Returns ``strategy.cp``, of which each of ``columns`` tensor-parallel groups holds one rank.

    Raises:
        UserError: it is not a number, or there are too few ranks.
    """
    if not isinstance(strategy.cp, int) or not 1 <= strategy.cp <= columns:
        raise UserError(
            f"strategy.cp is {strategy.cp!r}, but there are {columns} ranks that can share the tokens of a sample",
            where="strategy.cp",
            fix=f"a number from 1 to {columns}, or more workers (cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return strategy.cp


def _data_parallel(strategy: StrategyConfig, ranks: Ranks, pp: int) -> int:
    room = ranks.columns // pp
    if strategy.dp == "fill":
        return room
    if not isinstance(strategy.dp, int) or strategy.dp < 1:
        raise UserError(f"strategy.dp is {strategy.dp!r}", where="strategy.dp", fix="a number from 1, or fill")
    if strategy.dp > room:
        context = f" x cp {ranks.cp}" if ranks.cp > 1 else ""
        raise UserError(
            f"dp {strategy.dp} x pp {pp}{context} x tp {ranks.tp} needs {strategy.dp * pp * ranks.cp * ranks.tp} "
            f"workers, but only {ranks.available} are available",
            where="strategy.dp",
            fix="strategy.dp=fill, or more workers (cluster.nodes, cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return strategy.dp


def _used_kind(config: Config, asked: str, holders: int, notes: list[str]) -> str:
    """Returns the kind that sums the gradients. Compressed gradients may need another kind than ``asked``."""
    kind = find_kind(asked)
    if holders == 1:
        return asked
    replacements = (
        (config.strategy.compression != "none", kind.compressed_as, "compress gradients"),
        (config.optim.in_backward, kind.updated_as, "update parameters inside the backward"),
    )
    for wanted, other, what in replacements:
        if wanted and other is not None and other != asked:
            notes.append(f"the data-parallel kind {other} replaces {kind.name}, which cannot {what}")
            return other
    return asked


def _check_use(world_size: int, nodes: int, available: int, notes: list[str]) -> None:
    if world_size == available:
        return
    if nodes > 1:
        raise UserError(
            f"the layout uses {world_size} of {available} workers on {nodes} nodes",
            where="strategy",
            fix="strategy.dp=fill, or fewer nodes, because idle nodes also cost GPU-hours",
        )
    notes.append(f"the layout uses {world_size} of {available} workers")


def _shard(strategy: StrategyConfig, kind: DataParallelKind, holders: int, per_node: int) -> int:
    if not kind.shards:
        return 1
    if strategy.shard == "fill":
        return holders
    shard = min(holders, max(1, per_node)) if strategy.shard == "node" else strategy.shard
    if not isinstance(shard, int) or shard < 1 or holders % shard:
        raise UserError(
            f"strategy.shard is {strategy.shard!r}, which does not divide {holders} data-parallel ranks",
            where="strategy.shard",
            fix=f"fill, node, or a divisor of {holders}",
        )
    return shard


def notices(config: Config) -> Iterator[str]:
    """Yields the notices about the settings of a run."""
    if config.train.steps is not None:
        yield from long_warmup(config.optim, config.train.steps)
    data = config.data
    if isinstance(config.model, CustomModelConfig) and isinstance(data, TextDataConfig) and data.path is None:
        yield "the data is the source of Python's standard library as bytes, because neither data nor data.path is set"


def long_warmup(optim: OptimConfig, steps: int) -> Iterator[str]:
    """Yields a notice if a run of ``steps`` steps ends during the warm-up of the learning rate."""
    if 0 < steps < optim.warmup_steps:
        yield (
            f"the learning rate never reaches optim.lr: optim.warmup_steps={optim.warmup_steps}, but the run has "
            f"{steps} steps"
        )


ONLY_CHOSEN = ("tp", "data_parallel", "shard", "stages_per_rank")  # auto has no other meaning there
# what the planner starts from where a key is open
SIMPLEST: Mapping[str, Any] = {
    "strategy.tp": 1,
    "strategy.data_parallel": "ddp",
    "strategy.shard": "fill",
    "strategy.stages_per_rank": 1,
    "strategy.pp": 1,
    "strategy.schedule": "1f1b",
    "train.activation_checkpointing": "none",
}


def open_keys(config: Config) -> tuple[str, ...]:
    """Returns the dotted names of the keys that the planner chooses; none after it has chosen."""
    if config.strategy.name != AUTO:
        return ()
    found = [name for name in SIMPLEST if getattr(getattr(config, _group(name)), _key(name)) == "auto"]
    batch, is_divided = config.batch, config.train.reproducible is not None  # which determines the micro-batches
    size = batch.micro_size == batch.micro_batches == "auto" and not is_divided
    return (*found, "batch.micro_size") if size else tuple(found)


def _group(name: str) -> str:
    return name.partition(".")[0]


def _key(name: str) -> str:
    return name.partition(".")[2]


def check_chosen(config: Config) -> None:
    """Raises UserError if a key of the layout is open, or ``auto`` without ``strategy=auto``."""
    left = [f"strategy.{name}" for name in ONLY_CHOSEN if getattr(config.strategy, name) == "auto"]
    if not left:
        return
    if config.strategy.name != AUTO:
        raise UserError(
            f"{left[0]} is auto, which only strategy=auto chooses",
            where=left[0],
            fix=f"+strategy=auto, or {left[0]}=VALUE",
        )
    if runs_own_code(config):
        raise UserError(
            "strategy=auto cannot choose a layout for custom code, because it does not know the model",
            where="strategy, run.entry or run.command",
            fix="a strategy with a layout, such as +strategy=dp",
        )
    raise UserError(
        f"strategy=auto chooses {left[0]} when a training is submitted, but this command does not submit one",
        where="strategy",
        fix="a strategy with a layout, such as +strategy=dp; the command plan shows which layouts are fast",
    )


def for_nodes(config: Config, nodes: int) -> Config:
    """Returns ``config`` with the layout that was chosen for ``nodes`` nodes.

    Raises:
        UserError: no layout fitted this number of nodes.
    """
    others = config.strategy.for_nodes
    if str(nodes) not in others:
        return config
    chosen = others[str(nodes)]
    if chosen is None:
        raise UserError(
            f"strategy=auto found no layout for {nodes} nodes when the run was submitted",
            where="cluster.nodes, elastic.min_nodes",
            fix="other numbers of nodes",
        )
    found = with_groups(config, chosen)
    return replace(found, strategy=replace(found.strategy, for_nodes={}))


def with_groups(config: Config, groups: Mapping[str, Mapping[str, Any]]) -> Config:
    """Returns ``config`` with other values of keys, by group and name.

    Raises:
        UserError: there is no such group or key.
    """
    try:
        return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in groups.items()})
    except (AttributeError, TypeError) as error:
        where = "strategy.for_nodes"
        raise UserError(
            f"{where} holds {groups!r}: {error}", where=where, fix="{'NODES': {GROUP: {KEY: VALUE}}}"
        ) from error


@dataclass(frozen=True)
class Ranks:
    """The ranks of an attempt. A tensor-parallel group has ``tp`` of them, and a context-parallel group ``cp``."""

    nodes: int
    per_node: int
    tp: int
    cp: int = 1

    @property
    def available(self) -> int:
        return self.nodes * self.per_node

    @property
    def columns(self) -> int:
        """Ranks that pipeline and data parallelism divide."""
        return self.available // (self.cp * self.tp)


def pipeline_ranks(
    config: Config, ranks: Ranks, lay_out: Callable[[int], Layout], device_bytes: float | None, notes: list[str]
) -> int:
    """Returns the number of pipeline ranks.

    Args:
        lay_out: returns the layout with a number of pipeline ranks; raises UserError if there is none.
        device_bytes: the memory of the smallest GPU; None if unknown.
        notes: receives the reasons for an automatic choice.

    Raises:
        UserError: ``strategy.pp`` is wrong, or needs more ranks than there are.
    """
    pp, columns = config.strategy.pp, ranks.columns
    if pp == "fill":
        return _fill(config, columns, notes)
    if pp == "auto":
        if ranks.nodes > 1:
            return _fewest_that_fit(config, columns, lay_out, device_bytes, notes)
        return 1 if _indivisible(2, columns, notes) else 2
    if not isinstance(pp, int) or pp < 1:
        raise UserError(f"strategy.pp is {pp!r}", where="strategy.pp", fix="a number from 1, auto, or fill")
    if pp > columns:
        raise UserError(
            f"{pp} pipeline ranks{_times(ranks)} need more than the {ranks.available} available workers",
            where="strategy.pp",
            fix=f"strategy.pp={columns} or fewer, or more workers (cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return pp


def _times(ranks: Ranks) -> str:
    """Returns by how many ranks of the other axes that share a model the pipeline ranks are multiplied."""
    return f" x cp {ranks.cp} x tp {ranks.tp}" if ranks.cp * ranks.tp > 1 else ""


def stages_of_rank(strategy: StrategyConfig) -> int:
    """Returns ``strategy.stages_per_rank``. Raises UserError if it is not a number."""
    if not isinstance(strategy.stages_per_rank, int):
        raise UserError(
            f"strategy.stages_per_rank is {strategy.stages_per_rank!r}",
            where="strategy.stages_per_rank",
            fix="a number from 1",
        )
    return strategy.stages_per_rank


def _indivisible(pp: int, columns: int, notes: list[str]) -> bool:
    if columns % pp == 0:
        return False
    notes.append(f"{pp} pipeline ranks do not divide {columns} ranks: {columns} replicas of 1 stage are used instead")
    return True


def _fewest_that_fit(
    config: Config,
    columns: int,
    lay_out: Callable[[int], Layout],
    device_bytes: float | None,
    notes: list[str],
) -> int:
    """Returns the fewest pipeline ranks from 2 whose stages fit; those with the smallest stages if none do."""
    layers = getattr(config.model, "n_layers", None)
    most = columns if layers is None else layers // stages_of_rank(config.strategy)
    candidates = [pp for pp in range(2, min(columns, most) + 1) if columns % pp == 0]
    if not candidates:
        divisor = next((pp for pp in range(2, columns + 1) if columns % pp == 0), 2)
        if not _indivisible(divisor, columns, notes):
            notes.append(f"{layers} layers are too few for {divisor} pipeline ranks: 1 stage is used instead")
        return 1
    needed: dict[int, float] = {}
    for pp in candidates:
        try:
            memory = estimate(config, lay_out(pp))
        except UserError:  # such as fewer samples than replicas
            continue
        if memory is None or device_bytes is None:
            notes.append(_unknown(pp, "of the model" if memory is None else "of a rank's device"))
            return pp
        needed[pp] = needed_bytes(memory.total)
        if needed[pp] <= device_bytes:
            notes.append(_fit(pp, needed, device_bytes))
            return pp
    if not needed:
        return candidates[0]  # its error explains why there is no layout
    best = min(needed, key=lambda pp: needed[pp])
    notes.append(
        f"the stages of no number of pipeline ranks fit: {best} are used, whose stages need about "
        f"{format_bytes(needed[best])} of the {format_bytes(device_bytes or 0)} of a GPU"
    )
    return best


def _unknown(pp: int, whose: str) -> str:
    number = f"{pp} pipeline ranks are used, the fewest possible"
    return f"{number}, because the memory {whose} is unknown here; strategy.pp=N sets another number"


def _fit(pp: int, needed: dict[int, float], device_bytes: float) -> str:
    """Describes the choice of ``pp``, the last one in ``needed``."""
    small = [f"{fewer} need {format_bytes(size)}" for fewer, size in needed.items() if fewer != pp]
    more = f" ({', '.join(small)})" if small else ""
    return (
        f"{pp} pipeline ranks are the fewest whose stages fit: about "
        f"{format_bytes(needed[pp])} of the {format_bytes(device_bytes)} of a GPU{more}"
    )


def _fill(config: Config, columns: int, notes: list[str]) -> int:
    """Returns the pipeline ranks of ``pp: fill``: all ranks that dp, cp and tp leave, but at most one per layer."""
    strategy = config.strategy
    if not isinstance(strategy.dp, int):
        raise UserError(
            "strategy.dp and strategy.pp cannot both be fill",
            where="strategy.dp, strategy.pp",
            fix="a number for one of them",
        )
    room = max(1, columns // max(1, strategy.dp))
    layers = getattr(config.model, "n_layers", None)
    most = room if layers is None else max(1, layers // stages_of_rank(strategy))
    if most < room:
        notes.append(
            f"{layers} layers suffice for {most} pipeline ranks of {stages_of_rank(strategy)} stages, not for {room}"
        )
    return min(room, most)


def choose_schedule(
    config: Config, kind: str | None, dp: int, pp: int, stages_per_rank: int, notes: list[str]
) -> tuple[str, tuple[int, int]]:
    """Chooses the schedule. Returns its name, the number of micro-batches of a step, and the samples in each.

    Args:
        kind: the data-parallel kind; None if no ranks hold the same parameters.
        notes: receives the reason for the choice of ``strategy.schedule=auto``.

    Raises:
        UserError: the schedule does not support the stages or the micro-batches.
    """
    asked = config.strategy.schedule
    if asked != AUTO or pp == 1:
        schedule = "1f1b" if asked == AUTO else asked
        return schedule, _scheduled(config, schedule, dp, pp, stages_per_rank)
    problems: list[UserError] = []
    rows = [row for row in reversed(SCHEDULES.values()) if row.auto is not None and row.has_room_for(stages_per_rank)]
    for row in rows:
        if kind is not None and not supports(row.name, kind):
            continue
        try:
            divided = _scheduled(config, row.name, dp, pp, stages_per_rank)
        except UserError as problem:
            problems.append(problem)
            continue
        notes.append(f"schedule {row.name}: {row.auto}")
        return row.name, divided
    if problems:
        raise problems[0]
    return rows[0].name, _scheduled(config, rows[0].name, dp, pp, stages_per_rank)  # whose row excludes the kind


def _scheduled(config: Config, schedule: str, dp: int, pp: int, stages_per_rank: int) -> tuple[int, int]:
    row = find_schedule(schedule)
    if pp > 1:
        _check_stages(row, stages_per_rank)
        check_split(config.strategy.pp_split, getattr(config.model, "n_layers", None), pp * stages_per_rank)
    return _micro_batches(config, row, dp, pp, pp * stages_per_rank)


def _check_stages(row: PipelineSchedule, stages_per_rank: int) -> None:
    if row.has_room_for(stages_per_rank):
        return
    least, most = row.stages_per_rank
    wanted = f"{least} to {most} stages" if least < most else f"{least} stage{'s' if least > 1 else ''}"
    raise UserError(
        f"strategy.stages_per_rank is {stages_per_rank}, but the schedule {row.name} requires {wanted} per rank",
        where="strategy.stages_per_rank",
        fix=f"strategy.stages_per_rank={least}",
    )


def _micro_batches(config: Config, schedule: PipelineSchedule, dp: int, pp: int, stages: int) -> tuple[int, int]:
    """Returns the micro-batches per step and rank, and the samples per micro-batch."""
    batch = config.batch
    if batch.global_size < dp:
        raise UserError(
            f"batch.global_size is {batch.global_size}, so some of the {dp} data-parallel ranks would be without a "
            "sample",
            where="batch.global_size",
            fix=f"batch.global_size={dp} or more, or fewer data-parallel ranks",
        )
    local = math.ceil(batch.global_size / dp)
    if isinstance(batch.micro_size, int) and isinstance(batch.micro_batches, int):
        raise UserError(
            "batch.micro_size and batch.micro_batches are both set, but each determines the other",
            where="batch.micro_size, batch.micro_batches",
            fix="set one of them to auto",
        )
    if isinstance(batch.micro_size, int):
        size = min(batch.micro_size, local)
        count = math.ceil(local / size)
    elif isinstance(batch.micro_batches, int):
        count = batch.micro_batches
        size = math.ceil(local / count)
    elif pp == 1 or schedule.micro_batches == "one":
        return 1, local
    else:
        step = stages if schedule.micro_batches == "multiple_of_ranks" else 1
        count = _least_padding(local, stages, step)
        size = math.ceil(local / count)
    _check_micro_batches(batch, schedule, pp, stages, count)
    return count, size


def _least_padding(local: int, stages: int, step: int) -> int:
    """Returns the number of micro-batches, one to four per stage, with the least padding; more are better."""
    candidates = range(stages, 4 * stages + 1, step)
    return min(candidates, key=lambda count: (count * math.ceil(local / count), -count))


def _check_micro_batches(batch: BatchConfig, schedule: PipelineSchedule, pp: int, stages: int, count: int) -> None:
    if pp == 1:
        return
    is_given = isinstance(batch.micro_batches, int)  # otherwise it follows from the sizes
    where, size = ("batch.micro_batches", "") if is_given else ("batch.micro_size", "batch.micro_size=auto and ")
    if schedule.micro_batches == "one":
        if count == 1:
            return
        others = schedules_where(lambda row: row.stages_per_rank == (1, 1) and row.micro_batches == "any")
        raise UserError(
            f"the schedule {schedule.name} runs one micro-batch per step, but there are {count}",
            where="batch.micro_batches",
            fix=f"strategy.schedule={others}, or batch.micro_size=auto and batch.micro_batches=auto",
        )
    if count < stages:
        raise UserError(
            f"{counted(count, 'micro-batch', 'micro-batches')} per step cannot fill {stages} pipeline stages",
            where=where,
            fix=f"batch.micro_batches={stages} or more"
            if is_given
            else f"a smaller batch.micro_size or a larger batch.global_size, for {stages} micro-batches or more",
        )
    if schedule.micro_batches == "multiple_of_ranks" and count % pp:
        raise UserError(
            f"the schedule {schedule.name} requires a multiple of {pp} micro-batches on {pp} pipeline ranks, but the "
            f"step has {count}",
            where=where,
            fix=f"{size}batch.micro_batches={count - count % pp + pp}, a multiple of {pp}",
        )


_REPRODUCIBLE = "train.reproducible"
AUTO_LOGICAL = 8  # logical micro-batches, as many as a node usually has GPUs


def divide(config: Config, dp: int) -> tuple[int, int, int]:
    """Returns the logical micro-batches of a step, the micro-batches of each of ``dp`` ranks, and the samples of each.

    Raises:
        UserError: there are fewer logical micro-batches than ranks, or fewer samples than logical micro-batches.
    """
    batch = config.batch
    logical = _logical_micro_batches(batch)
    if dp > logical:
        raise UserError(
            f"{logical} logical micro-batches are too few for {dp} ranks",
            where=f"batch.logical_micro_batches, {_REPRODUCIBLE}",
            fix=f"at most {logical} ranks, or a new run with batch.logical_micro_batches={dp} or more",
        )
    return logical, math.ceil(logical / dp), math.ceil(batch.global_size / logical)


def _logical_micro_batches(batch: BatchConfig) -> int:
    if not isinstance(batch.logical_micro_batches, int):
        return min(AUTO_LOGICAL, batch.global_size)
    if batch.logical_micro_batches > batch.global_size:
        raise UserError(
            f"batch.global_size is {batch.global_size}, less than {batch.logical_micro_batches} logical micro-batches",
            where="batch.logical_micro_batches",
            fix=f"batch.logical_micro_batches={batch.global_size} or fewer",
        )
    return batch.logical_micro_batches
