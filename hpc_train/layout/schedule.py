"""Chooses the pipeline schedule of a layout, and divides a step into micro-batches. This module imports no torch.

Under ``train.reproducible=any_world_size`` a step has a fixed number of logical micro-batches, whatever the number of
ranks. Each data-parallel rank computes consecutive ones.
"""

from __future__ import annotations

import math

from hpc_train.config.schema import BatchConfig, Config
from hpc_train.errors import UserError
from hpc_train.layout.partition import check_split
from hpc_train.layout.techniques import AUTO, SCHEDULES, PipelineSchedule, find_schedule, schedules_where, supports
from hpc_train.units import counted


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
