"""Derives the layout of one attempt from the frozen config and the allocated nodes and workers, without torch.

With ``strategy=auto``, the planner chooses the values of keys that are ``auto``. The submission writes the choice into
the config, so that a frozen config contains no such key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import BatchConfig, Config, CustomModelConfig, OptimConfig, StrategyConfig, TextDataConfig
from hpc_train.config.values import check_divides, runs_own_code
from hpc_train.errors import UserError
from hpc_train.layout.compatibility import OF_LAYOUT, check_compatibility
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import estimate, needed_bytes, reserved_bytes
from hpc_train.layout.partition import check_split
from hpc_train.layout.recomputation import describe_recomputation
from hpc_train.layout.sizes import describe_active
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

# keys for which only the planner understands auto
ONLY_CHOSEN = ("tp", "ep", "data_parallel", "shard", "stages_per_rank")
# the values from which the planner starts if a key is open
SIMPLEST: Mapping[str, Any] = {
    "strategy.tp": 1,
    "strategy.ep": 1,
    "strategy.data_parallel": "ddp",
    "strategy.shard": "fill",
    "strategy.stages_per_rank": 1,
    "strategy.pp": 1,
    "strategy.schedule": "1f1b",
    "train.activation_checkpointing": "none",
}
AUTO_LOGICAL = 8  # logical micro-batches; a node usually has 8 GPUs


@dataclass(frozen=True)
class Ranks:
    """The ranks of an attempt. A tensor-parallel group has ``tp`` ranks, and a context-parallel group ``cp`` ranks."""

    nodes: int
    per_node: int
    tp: int
    cp: int

    @property
    def available(self) -> int:
        return self.nodes * self.per_node

    @property
    def columns(self) -> int:
        """Returns the number of ranks that pipeline and data parallelism divide."""
        return self.available // (self.cp * self.tp)


def resolve_layout(config: Config, nodes: int, workers_per_node: int, device_bytes: float | None = None) -> Layout:
    """Derives the layout of ``config`` on ``nodes`` x ``workers_per_node`` ranks.

    Args:
        device_bytes: the memory of the smallest GPU, for ``strategy.pp=auto`` on several nodes; None if unknown.

    Raises:
        UserError: the strategy does not fit these ranks.
    """
    config = for_nodes(config, nodes)
    check_chosen(config)
    tp = config.strategy.tp
    if not isinstance(tp, int) or tp < 1 or workers_per_node % tp:
        divisors = (str(number) for number in range(1, workers_per_node + 1) if workers_per_node % number == 0)
        raise UserError(
            f"strategy.tp is {tp}, which does not divide the {workers_per_node} workers of a node",
            where="strategy.tp",
            fix=f"strategy.tp={' or '.join(divisors)}, because tensor parallelism stays within a node",
        )
    cp = config.strategy.cp
    tensor_groups = nodes * workers_per_node // tp  # each holds one rank of a context-parallel group
    if not isinstance(cp, int) or not 1 <= cp <= tensor_groups:
        raise UserError(
            f"strategy.cp is {cp!r}, but there are {tensor_groups} ranks that can share the tokens of a sample",
            where="strategy.cp",
            fix=f"a number from 1 to {tensor_groups}, or more workers (cluster.gpus_per_node, cluster.cpu_workers)",
        )
    ranks = Ranks(nodes, workers_per_node, tp, cp)
    notes: list[str] = []
    if runs_own_code(config):
        return _of_user_code(config, ranks, notes)
    return _lay_out(config, ranks, _pipeline_ranks(config, ranks, device_bytes, notes), notes)


def _lay_out(config: Config, ranks: Ranks, pp: int, notes: list[str]) -> Layout:
    """Returns the layout with ``pp`` pipeline ranks. Raises UserError if the strategy does not fit these ranks."""
    strategy = config.strategy
    dp = _data_parallel(strategy, ranks, pp, notes)
    holders = dp * ranks.cp
    stages_per_rank = stages_of_rank(strategy) if pp > 1 else 1
    configured = asked_kind(config)
    synchronizes = holders > 1
    schedule, (micro_batches, micro_size) = _choose_schedule(config, synchronizes, dp, pp, stages_per_rank, notes)
    kind = configured
    if synchronizes:
        kind = _used_kind(config, configured, notes)
    logical = 0
    if config.train.reproducible is not None:
        kind = TREE.name
        logical, micro_batches, micro_size = _divide(config, dp)
    notes += notices(config)
    shard, replicas = _shard(strategy, find_kind(configured), holders, ranks)
    if strategy.local_steps is not None and replicas == 1:
        notes.append("there is one replica, so outer steps (strategy.local_steps) average nothing")
    assert isinstance(strategy.ep, int)
    layout = Layout(
        dp=dp,
        pp=pp,
        tp=ranks.tp,
        shard=shard,
        data_parallel=kind,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        micro_batches=micro_batches,
        micro_size=micro_size,
        notes=tuple(notes),
        logical_micro_batches=logical,
        cp=ranks.cp,
        ep=strategy.ep,
        ring=_ring(config, ranks),
        replicas=replicas,
    )
    _check_expert_ranks(layout)
    check_compatibility(OF_LAYOUT, config, layout)
    described = (describe_recomputation(config, layout), describe_active(config.model))
    return replace(layout, notes=(*layout.notes, *(text for text in described if text is not None)))


def _ring(config: Config, ranks: Ranks) -> int:
    """Returns the number of ranks of a ring of keys and values."""
    if ranks.cp == 1 or config.strategy.context == "ulysses":
        return 1
    if config.strategy.context == "ring":
        return ranks.cp
    return ranks.cp // _most_exchanging(config, ranks)


def _most_exchanging(config: Config, ranks: Ranks) -> int:
    """Returns the most context-parallel ranks of a node that the heads permit to exchange heads."""
    heads = family_of(config.model).context_heads
    if heads is None:
        return ranks.cp
    queries, keys = (getattr(config.model, name) // ranks.tp for name in heads)
    most = min(ranks.cp, max(1, ranks.per_node // ranks.tp))
    permitted = (
        number
        for number in range(1, most + 1)
        if ranks.cp % number == queries % number == 0 and (keys % number == 0 or number % max(1, keys) == 0)
    )
    return max(permitted)


def _of_user_code(config: Config, ranks: Ranks, notes: list[str]) -> Layout:
    """Returns the layout of custom code, whose micro-batches hpc_train does not know. Raises UserError if the strategy
    does not fit these ranks.
    """
    strategy = config.strategy
    pp = strategy.pp
    if pp == "fill" and isinstance(strategy.dp, int):
        pp = ranks.columns // max(1, strategy.dp)
    if not isinstance(pp, int) or pp < 1:
        raise UserError(
            f"strategy.pp is {strategy.pp!r}, which depends on a model that custom code does not describe",
            where="strategy.pp",
            fix="strategy.pp=N",
        )
    if strategy.local_steps is not None:
        raise UserError(
            "strategy.local_steps is set, but custom code takes its steps itself",
            where="strategy.local_steps, run.entry or run.command",
            fix="strategy.local_steps=null",
        )
    if config.run.roles:  # one process on each node of the job, which starts the roles
        strategy = replace(strategy, dp="fill")
    dp = _data_parallel(strategy, ranks, pp, notes)
    kind = find_kind(strategy.data_parallel)
    return Layout(
        dp=dp,
        pp=pp,
        tp=ranks.tp,
        shard=_shard(strategy, kind, dp * ranks.cp, ranks)[0],
        data_parallel=strategy.data_parallel,
        schedule=strategy.schedule,
        stages_per_rank=1,
        micro_batches=0,
        micro_size=0,
        notes=tuple(notes),
        cp=ranks.cp,
    )


def open_keys(config: Config) -> tuple[str, ...]:
    """Returns the dotted names of the keys that the planner chooses; none after it has chosen."""
    if config.strategy.name != AUTO:
        return ()
    names = []
    for name in SIMPLEST:
        group, _, key = name.partition(".")
        if getattr(getattr(config, group), key) == AUTO:
            names.append(name)
    batch = config.batch
    # train.reproducible determines the micro-batches
    if batch.micro_size == batch.micro_batches == AUTO and config.train.reproducible is None:
        names.append("batch.micro_size")
    return tuple(names)


def check_chosen(config: Config) -> None:
    """Raises UserError if a key of the layout is ``auto``, with or without ``strategy=auto``."""
    key = next((f"strategy.{name}" for name in ONLY_CHOSEN if getattr(config.strategy, name) == AUTO), None)
    if key is None:
        return
    if config.strategy.name != AUTO:
        raise UserError(
            f"{key} is auto, which only strategy=auto chooses", where=key, fix=f"+strategy=auto, or {key}=VALUE"
        )
    if runs_own_code(config):
        raise UserError(
            "strategy=auto cannot choose a layout for custom code, because it does not know the model",
            where="strategy, run.entry or run.command",
            fix="a strategy with a layout, such as +strategy=dp",
        )
    raise UserError(
        f"strategy=auto chooses {key} when a training is submitted, but this command does not submit one",
        where="strategy",
        fix="a strategy with a layout, such as +strategy=dp; the command plan shows which layouts are fast",
    )


def for_nodes(config: Config, nodes: int) -> Config:
    """Returns ``config`` with the frozen layout that ``strategy=auto`` chose for ``nodes`` nodes, if there is one.
    Raises UserError if there was no layout for this number of nodes, or if ``strategy.for_nodes`` names an unknown key.
    """
    others = config.strategy.for_nodes
    if str(nodes) not in others:
        return config
    chosen = others[str(nodes)]
    if chosen is None:
        raise UserError(
            f"strategy=auto found no layout for {counted(nodes, 'node', 'nodes')} when the run was submitted",
            where="cluster.nodes, elastic.min_nodes",
            fix="other numbers of nodes",
        )
    try:
        config = replace(config, **{group: replace(getattr(config, group), **keys) for group, keys in chosen.items()})
    except (AttributeError, TypeError) as error:
        where = "strategy.for_nodes"
        fix = "{'NODES': {GROUP: {KEY: VALUE}}}"
        raise UserError(f"{where} holds {chosen!r}: {error}", where=where, fix=fix) from error
    return replace(config, strategy=replace(config.strategy, for_nodes={}))


def _data_parallel(strategy: StrategyConfig, ranks: Ranks, pp: int, notes: list[str]) -> int:
    """Returns the number of data-parallel ranks. Raises UserError if ``strategy.dp`` is wrong, needs more ranks than
    there are, or leaves ranks of several nodes idle.
    """
    dp: int | str = strategy.dp
    room = ranks.columns // pp
    if dp == "fill":
        dp = room
    if not isinstance(dp, int) or dp < 1:
        raise UserError(f"strategy.dp is {dp!r}", where="strategy.dp", fix="a number from 1, or fill")
    used = dp * pp * ranks.cp * ranks.tp
    if dp > room:
        context = f" x cp {ranks.cp}" if ranks.cp > 1 else ""
        raise UserError(
            f"dp {dp} x pp {pp}{context} x tp {ranks.tp} needs {used} workers, but only {ranks.available} are "
            "available",
            where="strategy.dp",
            fix="strategy.dp=fill, or more workers (cluster.nodes, cluster.gpus_per_node, cluster.cpu_workers)",
        )
    if used < ranks.available:
        if ranks.nodes > 1:
            raise UserError(
                f"the layout uses {used} of {ranks.available} workers on {ranks.nodes} nodes",
                where="strategy",
                fix="strategy.dp=fill, or fewer nodes, because idle nodes also cost GPU-hours",
            )
        idle = counted(ranks.available - used, "other stays", "others stay")
        notes.append(f"strategy={strategy.name} uses {counted(used, 'worker', 'workers')}; the {idle} idle")
    return dp


def _used_kind(config: Config, configured: str, notes: list[str]) -> str:
    """Returns the kind that sums the gradients, which may differ from the ``configured`` kind."""
    kind = find_kind(configured)
    replacements = (
        (config.strategy.compression != "none", kind.compressed_as, "compress gradients"),
        (config.optim.in_backward, kind.updated_as, "update parameters inside the backward"),
        (config.strategy.ep != 1, kind.updated_as, "sum the gradients of experts over other ranks"),
    )
    for is_set, other, what in replacements:
        if is_set and other is not None and other != configured:
            notes.append(f"the data-parallel kind {other} replaces {kind.name}, which cannot {what}")
            return other
    return configured


def _shard(strategy: StrategyConfig, kind: DataParallelKind, holders: int, ranks: Ranks) -> tuple[int, int]:
    """Returns the number of the ``holders`` of the same parameters that shard them, and the number of replicas that
    ``strategy.local_steps`` trains. Raises UserError if ``strategy.shard`` does not fit."""
    is_local = strategy.local_steps is not None
    if not kind.shards and not is_local:
        return 1, 1
    shard: int | str = strategy.shard
    if shard == "fill" and is_local and holders > 1:
        raise UserError(
            f"strategy.local_steps is {strategy.local_steps}, but strategy.shard=fill makes all ranks one replica",
            where="strategy.local_steps, strategy.shard",
            fix="strategy.shard=node, or the number of data-parallel ranks of a replica",
        )
    if shard == "fill":
        shard = holders
    elif shard == "node":
        shard = min(holders, max(1, ranks.per_node // ranks.tp))
    if not isinstance(shard, int) or shard < 1 or holders % shard:
        raise UserError(
            f"strategy.shard is {strategy.shard!r}, which does not divide {holders} data-parallel ranks",
            where="strategy.shard",
            fix=f"fill, node, or a divisor of {holders}",
        )
    if is_local and shard % ranks.cp:
        raise UserError(
            f"strategy.shard is {strategy.shard!r}, but {ranks.cp} context-parallel ranks share each sample",
            where="strategy.shard, strategy.cp",
            fix=f"a multiple of {ranks.cp}",
        )
    return shard if kind.shards else 1, holders // shard if is_local else 1


def _check_expert_ranks(layout: Layout) -> None:
    """Raises UserError unless ``ep`` divides the ranks of a stage, and so that the ranks which share the ZeRO state of
    a layer hold whole copies of the experts, or a part of one."""
    ep = layout.ep
    check_divides(ep, layout.replica.stage_ranks, "strategy.ep", "the number of ranks of a pipeline stage")
    sharing = layout.shard * layout.tp
    if layout.shards_state and max(ep, sharing) % min(ep, sharing):
        raise UserError(
            f"strategy.ep is {ep}, and {sharing} ranks share the ZeRO state of a layer, but one of them must divide "
            "the other",
            where="strategy.ep, strategy.shard",
            fix=f"strategy.shard=fill, or strategy.ep={math.gcd(ep, sharing)}",
        )


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
            f"{counted(steps, 'step', 'steps')}"
        )


# The number of pipeline ranks


def _pipeline_ranks(config: Config, ranks: Ranks, device_bytes: float | None, notes: list[str]) -> int:
    """Returns ``strategy.pp`` as a number. ``notes`` receives the reasons for an automatic choice. Raises UserError if
    ``strategy.pp`` is wrong, or needs more ranks than there are.
    """
    pp = config.strategy.pp
    if pp == "fill":
        return _fill(config, ranks.columns, notes)
    if pp == AUTO:
        if ranks.nodes > 1:
            return _fewest_that_fit(config, ranks, device_bytes, notes)
        if ranks.columns % 2:
            notes.append(_indivisible(2, ranks.columns))
            return 1
        return 2
    if not isinstance(pp, int) or pp < 1:
        raise UserError(f"strategy.pp is {pp!r}", where="strategy.pp", fix="a number from 1, auto, or fill")
    if pp > ranks.columns:
        others = f" x cp {ranks.cp} x tp {ranks.tp}" if ranks.cp * ranks.tp > 1 else ""
        raise UserError(
            f"{pp} pipeline ranks{others} need more than the {ranks.available} available workers",
            where="strategy.pp",
            fix=f"strategy.pp={ranks.columns} or fewer, or more workers (cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return pp


def stages_of_rank(strategy: StrategyConfig) -> int:
    """Returns ``strategy.stages_per_rank``. Raises UserError if it is not a number."""
    key = "strategy.stages_per_rank"
    if not isinstance(strategy.stages_per_rank, int):
        raise UserError(f"{key} is {strategy.stages_per_rank!r}", where=key, fix="a number from 1")
    return strategy.stages_per_rank


def _indivisible(pp: int, columns: int) -> str:
    return f"{pp} pipeline ranks do not divide {columns} ranks: {columns} replicas of 1 stage are used instead"


def _fewest_that_fit(config: Config, ranks: Ranks, device_bytes: float | None, notes: list[str]) -> int:
    """Returns the smallest number of pipeline ranks, at least 2, with which the stages fit into the memory of a GPU. If
    no number fits, returns the number with the smallest stages.

    More stages enlarge the pipeline bubble; the remaining ranks are replicas. Because the ranks of a stage are
    consecutive, the stages of a replica are on different nodes if there are at least as many nodes as stages.
    """
    columns = ranks.columns
    layers = getattr(config.model, "n_layers", None)
    most = columns if layers is None else layers // stages_of_rank(config.strategy)
    candidates = [pp for pp in range(2, min(columns, most) + 1) if columns % pp == 0]
    if not candidates:
        divisor = next((pp for pp in range(2, columns + 1) if columns % pp == 0), None)
        if divisor is None:
            notes.append(_indivisible(2, columns))
        else:
            notes.append(f"{layers} layers are too few for {divisor} pipeline ranks: 1 stage is used instead")
        return 1
    needed: dict[int, float] = {}
    for pp in candidates:
        try:
            layout = _lay_out(config, ranks, pp, [])
            memory = estimate(config, layout)
        except UserError:  # such as fewer samples than replicas
            continue
        if memory is None or device_bytes is None:
            whose = "the model" if memory is None else "a rank's device"
            notes.append(
                f"{pp} pipeline ranks are used, the fewest possible, because the memory of {whose} is unknown here; "
                "strategy.pp=N sets another number"
            )
            return pp
        needed[pp] = needed_bytes(memory.total, reserved_bytes(layout))
        if needed[pp] <= device_bytes:
            fewer = ", ".join(f"{number} need {format_bytes(size)}" for number, size in needed.items() if number != pp)
            note = f"{pp} pipeline ranks are the fewest whose stages fit: about {format_bytes(needed[pp])} of the "
            note += f"{format_bytes(device_bytes)} of a GPU"
            notes.append(f"{note} ({fewer})" if fewer else note)
            return pp
    if not needed:
        return candidates[0]  # the error for this number explains why there is no layout
    best = min(needed, key=lambda pp: needed[pp])
    notes.append(
        f"the stages do not fit with any number of pipeline ranks: {best} are used, whose stages need about "
        f"{format_bytes(needed[best])} of the {format_bytes(device_bytes or 0)} of a GPU"
    )
    return best


def _fill(config: Config, columns: int, notes: list[str]) -> int:
    """Returns the number of pipeline ranks for ``strategy.pp=fill``: all ranks that dp, cp and tp leave, but at most
    one per layer."""
    strategy = config.strategy
    if not isinstance(strategy.dp, int):
        raise UserError(
            "strategy.dp and strategy.pp cannot both be fill",
            where="strategy.dp, strategy.pp",
            fix="a number for one of them",
        )
    room = max(1, columns // max(1, strategy.dp))
    layers = getattr(config.model, "n_layers", None)
    if layers is None:
        return room
    stages = stages_of_rank(strategy)
    most = max(1, layers // stages)
    if most < room:
        notes.append(f"{layers} layers suffice for {most} pipeline ranks of {stages} stages, not for {room}")
    return min(room, most)


# The schedule and the micro-batches


def _choose_schedule(
    config: Config, synchronizes: bool, dp: int, pp: int, stages_per_rank: int, notes: list[str]
) -> tuple[str, tuple[int, int]]:
    """Chooses the schedule. Returns its name, the number of micro-batches of a step, and the samples in each.

    Args:
        synchronizes: whether several ranks hold the same parameters.
        notes: receives the reason for the choice of ``strategy.schedule=auto``.

    Raises:
        UserError: the schedule does not support the stages or the micro-batches.
    """
    schedule = config.strategy.schedule
    if schedule == AUTO and pp == 1:
        schedule = "1f1b"
    if schedule != AUTO:
        return schedule, _micro_batches(config, find_schedule(schedule), dp, pp, stages_per_rank)
    problems: list[UserError] = []
    rows = [row for row in reversed(SCHEDULES.values()) if row.auto is not None and row.has_room_for(stages_per_rank)]
    for row in rows:
        if synchronizes and not supports(row.name, asked_kind(config)):
            continue
        try:
            divided = _micro_batches(config, row, dp, pp, stages_per_rank)
        except UserError as problem:
            problems.append(problem)
            continue
        notes.append(f"schedule {row.name}: {row.auto}")
        return row.name, divided
    if problems:
        raise problems[0]
    return rows[0].name, _micro_batches(config, rows[0], dp, pp, stages_per_rank)  # the table then refuses the kind


def _micro_batches(
    config: Config, schedule: PipelineSchedule, dp: int, pp: int, stages_per_rank: int
) -> tuple[int, int]:
    """Returns the micro-batches per step and rank, and the samples per micro-batch. Raises UserError if the schedule
    does not support the stages or the micro-batches.
    """
    stages = pp * stages_per_rank
    if pp > 1:
        if not schedule.has_room_for(stages_per_rank):
            least, most = schedule.stages_per_rank
            required = f"{least} to {most} stages" if least < most else counted(least, "stage", "stages")
            raise UserError(
                f"strategy.stages_per_rank is {stages_per_rank}, but the schedule {schedule.name} requires {required} "
                "per rank",
                where="strategy.stages_per_rank",
                fix=f"strategy.stages_per_rank={least}",
            )
        check_split(config.strategy.pp_split, getattr(config.model, "n_layers", None), stages)
    batch = config.batch
    if batch.global_size < dp:
        raise UserError(
            f"batch.global_size is {batch.global_size}, so some of the {dp} data-parallel ranks would have no sample",
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
    else:  # one to four micro-batches per stage, with the least padding; of equal counts, the largest
        step = stages if schedule.micro_batches == "multiple_of_ranks" else 1
        candidates = range(stages, 4 * stages + 1, step)
        count = min(candidates, key=lambda count: (count * math.ceil(local / count), -count))
        size = math.ceil(local / count)
    if pp > 1:
        _check_micro_batches(batch, schedule, pp, stages, count)
    return count, size


def _check_micro_batches(batch: BatchConfig, schedule: PipelineSchedule, pp: int, stages: int, count: int) -> None:
    """Raises UserError if the schedule does not support a step of ``count`` micro-batches."""
    if schedule.micro_batches == "one":
        if count == 1:
            return
        others = schedules_where(lambda row: row.stages_per_rank == (1, 1) and row.micro_batches == "any")
        raise UserError(
            f"the schedule {schedule.name} runs one micro-batch per step, but there are {count}",
            where="batch.micro_batches",
            fix=f"strategy.schedule={others}, or batch.micro_size=auto and batch.micro_batches=auto",
        )
    enough = count - count % pp + pp
    if isinstance(batch.micro_batches, int):
        where = "batch.micro_batches"
        more = f"batch.micro_batches={stages} or more"
        multiple = f"batch.micro_batches={enough}, a multiple of {pp}"
    else:  # the number follows from the sizes
        where = "batch.micro_size"
        more = f"a smaller batch.micro_size or a larger batch.global_size, for {stages} micro-batches or more"
        multiple = f"batch.micro_size=auto and batch.micro_batches={enough}, a multiple of {pp}"
    if count < stages:
        what = f"{counted(count, 'micro-batch', 'micro-batches')} per step cannot fill {stages} pipeline stages"
        raise UserError(what, where=where, fix=more)
    if schedule.micro_batches == "multiple_of_ranks" and count % pp:
        raise UserError(
            f"the schedule {schedule.name} requires a multiple of {pp} micro-batches on {pp} pipeline ranks, but the "
            f"step has {count}",
            where=where,
            fix=multiple,
        )


def _divide(config: Config, dp: int) -> tuple[int, int, int]:
    """Returns the number of logical micro-batches of a step under ``train.reproducible``, the number of micro-batches
    of each of ``dp`` ranks, and the number of samples of each micro-batch.

    The number of logical micro-batches does not depend on the ranks. Each data-parallel rank computes consecutive
    micro-batches. Raises UserError if there are fewer logical micro-batches than ranks, or fewer samples than logical
    micro-batches.
    """
    batch = config.batch
    key = "batch.logical_micro_batches"
    if isinstance(batch.logical_micro_batches, int):
        logical = batch.logical_micro_batches
    else:
        logical = min(AUTO_LOGICAL, batch.global_size)
    if logical > batch.global_size:
        raise UserError(
            f"batch.global_size is {batch.global_size}, less than {logical} logical micro-batches",
            where=key,
            fix=f"{key}={batch.global_size} or fewer",
        )
    if dp > logical:
        raise UserError(
            f"{logical} logical micro-batches are too few for {dp} ranks",
            where=f"{key}, train.reproducible",
            fix=f"at most {logical} ranks, or a new run with {key}={dp} or more",
        )
    return logical, math.ceil(logical / dp), math.ceil(batch.global_size / logical)
