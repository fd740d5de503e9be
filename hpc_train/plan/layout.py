"""The effective layout of one attempt, from the frozen config and the allocated nodes and workers.

It imports no torch, so that the submission refuses an impossible layout before the job waits in a queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_train.config.schema import Config, StrategyConfig
from hpc_train.errors import UserError
from hpc_train.plan.compression import check_compression
from hpc_train.plan.reproducible import check_reproducible, divide
from hpc_train.plan.stages import check_split
from hpc_train.plan.techniques import (
    AUTO,
    SCHEDULES,
    TREE,
    DataParallelKind,
    PipelineSchedule,
    PipelineShape,
    find_kind,
    find_schedule,
    kinds_where,
    schedules_where,
)

SPLITS = ("even", "flops", "measured")  # the words of pp_split


@dataclass(frozen=True)
class Layout:
    """The effective split of one attempt. Global rank = (pp_rank * dp + dp_rank) * tp + tp_rank.

    ``shard`` ranks, neighbours within dp, hold one copy of the ZeRO state; dp / shard such groups replicate it. A step
    of one rank is ``micro_batches`` micro-batches of ``micro_size`` samples; where dp x micro_batches x micro_size
    exceeds the global batch the rest is padding.

    ``logical_micro_batches`` of a step, 0 where their number is not fixed (``train.reproducible``): each dp rank has
    consecutive ones.
    """

    dp: int
    pp: int
    tp: int
    shard: int
    data_parallel: str
    schedule: str
    stages_per_rank: int
    micro_batches: int
    micro_size: int
    notes: tuple[str, ...] = ()
    logical_micro_batches: int = 0

    def logical_of(self, dp_rank: int) -> range:
        """The logical micro-batches that a dp rank computes."""
        logical = self.logical_micro_batches
        return range(dp_rank * logical // self.dp, (dp_rank + 1) * logical // self.dp)

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pp * self.stages_per_rank

    @property
    def kind(self) -> DataParallelKind:
        return TREE if self.logical_micro_batches else find_kind(self.data_parallel)

    @property
    def shards_state(self) -> bool:
        """Whether the data-parallel ranks share the state of the model."""
        return self.dp > 1 and bool(self.kind.shards)

    @property
    def pipeline(self) -> PipelineSchedule:
        return find_schedule(self.schedule)

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return self.pipeline.place(self.pp, self.stages_per_rank)

    @property
    def bubble_share(self) -> float:
        """The share of a step in which a rank computes nothing, as the schedule's row assumes it."""
        return self.pipeline.bubble(self._shape) if self.pp > 1 else 0.0

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations ``stage`` keeps at the moment when its rank keeps most."""
        if self.pp == 1:
            return 1
        placement = self.placement
        rank = placement[stage]
        held = [number for number, owner in enumerate(placement) if owner == rank]
        return min(self.micro_batches, self.pipeline.in_flight(self._shape, rank)[held.index(stage)])

    @property
    def _shape(self) -> PipelineShape:
        return PipelineShape(self.pp, self.stages_per_rank, self.micro_batches)

    def __str__(self) -> str:
        split = f"dp {self.dp} x pp {self.pp} x tp {self.tp}"
        kind = self.data_parallel if self.dp > 1 else "no replicas"
        schedule = f", {self.schedule}" if self.pp > 1 else ""
        return f"{split} ({kind}{schedule}), {self.micro_batches} micro-batches of {self.micro_size}"


def resolve_layout(config: Config, nodes: int, workers_per_node: int) -> Layout:
    """Derives the layout of ``config`` on ``nodes`` x ``workers_per_node`` ranks.

    Raises:
        UserError: the strategy cannot be laid out there; the message holds the fix.
    """
    strategy = config.strategy
    available = nodes * workers_per_node
    notes: list[str] = []
    tp = _tensor_parallel(strategy, workers_per_node)
    pp = _pipeline(config, nodes, available // tp, notes)
    dp = _data_parallel(strategy, available, pp, tp)
    _check_use(dp * pp * tp, nodes, available, notes)
    stages_per_rank = strategy.stages_per_rank if pp > 1 else 1
    asked = _asked_kind(config)
    _check_tensor_parallel(config, asked, dp, tp)
    schedule, (micro_batches, micro_size) = _schedule(config, asked, dp, pp, stages_per_rank, notes)
    kind = _used_kind(config, asked, dp, tp, notes)
    reproducible, logical = config.train.reproducible is not None, 0
    if reproducible:
        check_reproducible(config, pp, tp)
        logical, micro_batches, micro_size = divide(config, dp)
    return Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        shard=_shard(strategy, find_kind(asked), dp, workers_per_node // tp),
        data_parallel=TREE.name if reproducible else kind,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        micro_batches=micro_batches,
        micro_size=micro_size,
        notes=tuple(notes),
        logical_micro_batches=logical,
    )


def _divisors(number: int) -> str:
    return " or ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _tensor_parallel(strategy: StrategyConfig, workers_per_node: int) -> int:
    if strategy.tp < 1 or workers_per_node % strategy.tp:
        raise UserError(
            f"strategy.tp={strategy.tp} does not divide the {workers_per_node} workers of a node",
            where="strategy.tp",
            fix=f"strategy.tp={_divisors(workers_per_node)}: tensor parallelism stays inside a node",
        )
    return strategy.tp


def _pipeline(config: Config, nodes: int, columns: int, notes: list[str]) -> int:
    """``pp: auto`` is one stage per node on several nodes, two stages on one, one where two do not divide."""
    strategy = config.strategy
    if strategy.pp == "fill":
        return _fill_pipeline(config, columns, notes)
    if strategy.pp == "auto":
        pp = nodes if nodes > 1 else 2
        if columns % pp:
            notes.append(
                f"{pp} pipeline ranks do not divide {columns} ranks: {columns} replicas of 1 stage are used instead"
            )
            return 1
        return pp
    if not isinstance(strategy.pp, int) or strategy.pp < 1:
        raise UserError(f"strategy.pp is {strategy.pp!r}", where="strategy.pp", fix="1 or more, auto, or fill")
    if strategy.pp > columns:
        raise UserError(
            f"{strategy.pp} pipeline ranks do not fit on {columns} workers",
            where="strategy.pp",
            fix=f"strategy.pp={columns} or fewer, or more workers (cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return strategy.pp


def _fill_pipeline(config: Config, columns: int, notes: list[str]) -> int:
    """``pp: fill`` uses all ranks that dp and tp leave, but no more than there are layers to cut."""
    strategy = config.strategy
    if not isinstance(strategy.dp, int):
        raise UserError(
            "dp and pp cannot both be fill", where="strategy.dp, strategy.pp", fix="a number for one of them"
        )
    room = max(1, columns // max(1, strategy.dp))
    layers = getattr(config.model, "n_layers", None)
    most = room if layers is None else max(1, layers // strategy.stages_per_rank)
    if most < room:
        notes.append(
            f"{layers} layers suffice for {most} pipeline ranks of {strategy.stages_per_rank} stages, not for {room}"
        )
    return min(room, most)


def _data_parallel(strategy: StrategyConfig, available: int, pp: int, tp: int) -> int:
    room = available // (pp * tp)
    if strategy.dp == "fill":
        return room
    if not isinstance(strategy.dp, int) or strategy.dp < 1:
        raise UserError(f"strategy.dp is {strategy.dp!r}", where="strategy.dp", fix="1 or more, or fill")
    if strategy.dp > room:
        raise UserError(
            f"dp {strategy.dp} x pp {pp} x tp {tp} needs {strategy.dp * pp * tp} workers, {available} are there",
            where="strategy.dp",
            fix="strategy.dp=fill, or more workers (cluster.nodes, cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return strategy.dp


def _asked_kind(config: Config) -> str:
    """The kind that the config names, or the one that replaces it under ``train.debug``."""
    kind = config.strategy.data_parallel
    return (find_kind(kind).debugged_as if config.train.debug else None) or kind


def _used_kind(config: Config, asked: str, dp: int, tp: int, notes: list[str]) -> str:
    """The kind that sums the gradients: compressed ones may need another kind than ``asked``."""
    kind = find_kind(asked)
    if dp == 1:
        return asked
    check_compression(config, kind, tp)
    if config.strategy.compression == "none" or kind.compressed_as in (None, asked):
        return asked
    assert kind.compressed_as is not None
    notes.append(f"the data-parallel kind {kind.compressed_as} sums compressed gradients in place of {kind.name}")
    return kind.compressed_as


def _check_use(world_size: int, nodes: int, available: int, notes: list[str]) -> None:
    if world_size == available:
        return
    if nodes > 1:
        raise UserError(
            f"the layout uses {world_size} of {available} workers on {nodes} nodes",
            where="strategy",
            fix="strategy.dp=fill, or fewer nodes: idle nodes cost GPU-hours too",
        )
    notes.append(f"the layout uses {world_size} of {available} workers")


def _check_tensor_parallel(config: Config, asked: str, dp: int, tp: int) -> None:
    if tp > 1 and config.train.compile:
        raise UserError(
            "compiled layers fail in the backward under tensor parallelism (torch 2.13)",
            where="train.compile, strategy.tp",
            fix="train.compile=false, or strategy.tp=1",
        )
    if tp > 1 and dp > 1 and not find_kind(asked).tensor_parallel:
        raise UserError(
            f"{find_kind(asked).name} cannot reduce the gradients of tensor-parallel parameters",
            where="strategy.data_parallel",
            fix=f"strategy.data_parallel={kinds_where(lambda row: row.tensor_parallel)}",
        )


def _schedule(
    config: Config, kind: str, dp: int, pp: int, stages_per_rank: int, notes: list[str]
) -> tuple[str, tuple[int, int]]:
    """The schedule, and the micro-batches of a step and the samples in each."""
    asked = config.strategy.schedule
    if asked != AUTO or pp == 1:
        schedule = "1f1b" if asked == AUTO else asked
        return schedule, _scheduled(config, schedule, kind, dp, pp, stages_per_rank)
    problems: list[UserError] = []
    for row in reversed(SCHEDULES.values()):
        least, most = row.stages_per_rank
        if row.auto is None or not least <= stages_per_rank <= most:
            continue
        try:
            found = _scheduled(config, row.name, kind, dp, pp, stages_per_rank)
        except UserError as problem:
            problems.append(problem)
            continue
        notes.append(f"schedule {row.name}: {row.auto}")
        return row.name, found
    raise problems[0]


def _scheduled(config: Config, schedule: str, kind: str, dp: int, pp: int, stages_per_rank: int) -> tuple[int, int]:
    row = find_schedule(schedule)
    if pp > 1:
        _check_pipeline(config, schedule, kind if dp > 1 else None, stages_per_rank)
        check_split(config.strategy.pp_split, getattr(config.model, "n_layers", None), pp * stages_per_rank)
    return _micro_batches(config, row, dp, pp, pp * stages_per_rank)


def _check_pipeline(config: Config, schedule: str, kind: str | None, stages_per_rank: int) -> None:
    """Raises UserError where ``schedule`` does not go with the stages, the kind (None: no replicas) or the options."""
    row = find_schedule(schedule)
    least, most = row.stages_per_rank
    if not least <= stages_per_rank <= most:
        wanted = f"{least} to {most} stages" if least < most else f"{least} stage{'s' if least > 1 else ''}"
        raise UserError(
            f"schedule {row.name} needs {wanted} per rank, not {stages_per_rank}",
            where="strategy.stages_per_rank",
            fix=f"strategy.stages_per_rank={least}",
        )
    if kind is not None:
        _check_pair(schedule, kind)
    _check_backward(config, row, kind)


def _check_pair(schedule: str, kind: str) -> None:
    row, replicas = find_schedule(schedule), find_kind(kind)
    if kind in row.data_parallel or schedule in replicas.schedules:
        return
    raise UserError(
        f"schedule {row.name} does not go with {replicas.name}: {row.data_parallel_reason}",
        where="strategy.schedule, strategy.data_parallel",
        fix=f"strategy.data_parallel={' or '.join(row.data_parallel)}",
    )


def _check_backward(config: Config, row: PipelineSchedule, kind: str | None) -> None:
    """Raises UserError for options that do not go with how the schedule runs its backward."""
    if config.train.compile and not row.compiles:
        raise UserError(
            f"schedule {row.name} runs the backward in two parts, and a compiled layer has only one",
            where="train.compile",
            fix=f"train.compile=false, or strategy.schedule={schedules_where(lambda row: row.compiles)}",
        )
    if config.train.activation_checkpointing == "ops" and not row.ops_checkpointing:
        raise UserError(
            f"schedule {row.name} runs the backward in two parts, and what ops has kept can be taken once only",
            where="train.activation_checkpointing",
            fix=f"full or selective, or strategy.schedule={schedules_where(lambda row: row.ops_checkpointing)}",
        )
    if config.strategy.static_graph and kind is not None and find_kind(kind).static_graph:
        raise UserError(
            "a static graph expects forward and backward in turns, and a pipeline runs several forwards first",
            where="strategy.static_graph",
            fix="strategy.static_graph=false",
        )


def _shard(strategy: StrategyConfig, kind: DataParallelKind, dp: int, dp_per_node: int) -> int:
    if not kind.shards:
        return 1
    if strategy.shard == "fill":
        return dp
    shard = min(dp, max(1, dp_per_node)) if strategy.shard == "node" else strategy.shard
    if not isinstance(shard, int) or shard < 1 or dp % shard:
        raise UserError(
            f"{dp} data-parallel ranks do not divide into shard groups of {strategy.shard!r}",
            where="strategy.shard",
            fix=f"fill, node, or a divisor of {dp}",
        )
    return shard


def _micro_batches(config: Config, schedule: PipelineSchedule, dp: int, pp: int, stages: int) -> tuple[int, int]:
    """Micro-batches per step and rank, and samples per micro-batch."""
    batch = config.batch
    if batch.global_size < dp:
        raise UserError(
            f"a global batch of {batch.global_size} samples leaves some of {dp} data-parallel ranks without one",
            where="batch.global_size",
            fix=f"batch.global_size={dp} or more, or fewer data-parallel ranks",
        )
    local = math.ceil(batch.global_size / dp)
    if isinstance(batch.micro_size, int) and isinstance(batch.micro_batches, int):
        raise UserError(
            "micro_size and micro_batches are both set, and one follows from the other",
            where="batch.micro_size, batch.micro_batches",
            fix="leave one of them auto",
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
    _check_micro_batches(schedule, pp, stages, count)
    return count, size


def _least_padding(local: int, stages: int, step: int) -> int:
    """Four micro-batches per stage, or the number between one and four that pads least (the more the better)."""
    candidates = range(stages, 4 * stages + 1, step)
    return min(candidates, key=lambda count: (count * math.ceil(local / count), -count))


def _check_micro_batches(schedule: PipelineSchedule, pp: int, stages: int, count: int) -> None:
    if pp == 1:
        return
    if schedule.micro_batches == "one":
        if count == 1:
            return
        others = schedules_where(lambda row: row.stages_per_rank == (1, 1) and row.micro_batches == "any")
        raise UserError(
            f"schedule {schedule.name} takes one micro-batch per step, not {count}",
            where="batch.micro_batches",
            fix=f"strategy.schedule={others}, or leave batch.micro_size and batch.micro_batches auto",
        )
    if count < stages:
        raise UserError(
            f"{count} micro-batches cannot fill {stages} pipeline stages",
            where="batch.micro_batches",
            fix=f"at least {stages} micro-batches per step: a smaller batch.micro_size or a larger batch.global_size",
        )
    if schedule.micro_batches == "multiple_of_ranks" and count % pp:
        raise UserError(
            f"schedule {schedule.name} needs a multiple of its {pp} ranks as micro-batches, not {count}",
            where="batch.micro_batches",
            fix=f"batch.micro_batches={count - count % pp + pp}, a multiple of {pp}",
        )
