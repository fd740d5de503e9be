"""``strategy.schedule``: the pipeline schedule of a layout, and the micro-batches of a step. No torch."""

from __future__ import annotations

import math

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.plan.stages import check_split
from hpc_train.plan.techniques import AUTO, SCHEDULES, PipelineSchedule, find_kind, find_schedule, schedules_where


def choose_schedule(
    config: Config, kind: str, dp: int, pp: int, stages_per_rank: int, notes: list[str]
) -> tuple[str, tuple[int, int]]:
    """Chooses the schedule, and returns it with the micro-batches of a step and the samples in each.

    Args:
        kind: the data-parallel kind.
        notes: gets the reason where ``strategy.schedule=auto`` chose.

    Raises:
        UserError: the schedule does not go with the kind, the stages, the micro-batches or another option.
    """
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


def _micro_batches(config: Config, schedule: PipelineSchedule, dp: int, pp: int, stages: int) -> tuple[int, int]:
    """Micro-batches per step and rank, and samples per micro-batch."""
    batch = config.batch
    if batch.global_size < dp:
        raise UserError(
            f"a global batch of {batch.global_size} leaves some of the {dp} data-parallel ranks without a sample",
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
