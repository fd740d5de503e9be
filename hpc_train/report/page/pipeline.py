"""Draws one pipeline step: when each rank ran forward and backward, beside the same order without waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from hpc_train.report.page.chart import color_key
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, joined, picture, section, table
from hpc_train.run.events import Event
from hpc_train.telemetry.pipeline_step import BACKWARD, FORWARD, NAMES, WEIGHT, Chunk, Rows, rows_of, stage_times
from hpc_train.units import milliseconds

COLORS = {FORWARD: "c0", BACKWARD: "c2", WEIGHT: "c3", "": "wait"}
ROW, GAP, LEFT, WIDTH = 22.0, 6.0, 92.0, 640.0


def pipeline(facts: RunFacts) -> Html | None:
    """Returns the section about the pipeline; None for a run without one."""
    layout = facts.newest_attempt.get("layout") or {}
    steps = facts.of_event("pipeline_step")
    if not steps:
        if layout.get("pp", 1) < 2:
            return None
        return section("Pipeline step", block("paragraph", "No step was recorded: the fifth step of an attempt is."))
    event = steps[-1]
    measured, total = rows_of(event), event.seconds
    ideal = ideal_rows(measured)
    best = max((chunk.end for chunks in ideal.values() for chunk in chunks), default=0.0)
    words = _words(event, measured, total, ideal, best)
    kinds = dict.fromkeys(chunk.kind for chunks in measured.values() for chunk in chunks)
    key = color_key([(NAMES[kind], COLORS[kind]) for kind in (*kinds, "")])
    longest = max(total, best)
    return section(
        "Pipeline step",
        block("paragraph", words),
        block("heading", f"Measured, {milliseconds(total)}"),
        block("figure", _drawn("Measured pipeline step", words, measured, total, longest), key),
        block("heading", f"Ideal, {milliseconds(best)}"),
        block("figure", _drawn("Ideal pipeline step", words, ideal, best, longest)),
        _by_stage(measured, total),
    )


def _words(event: Event, measured: Rows, total: float, ideal: Rows, best: float) -> str:
    waited, least = _waiting(measured, total), _waiting(ideal, best)
    return (
        f"One of the first steps under the schedule {event['schedule']}, {event['micro_batches']} micro-batches. It "
        f"took {milliseconds(total)}, of which the ranks waited {waited:.1%}. In the ideal, all stages take equally "
        f"long and messages no time: {milliseconds(best)}, {least:.1%} waiting."
    )


def _waiting(rows: Rows, total: float) -> float:
    busy = [sum(chunk.seconds for chunk in chunks) for chunks in rows.values()]
    return max(0.0, 1 - fmean(busy) / total) if busy and total else 0.0


def ideal_rows(measured: Rows) -> Rows:
    """Returns the chunks of each rank in the measured order, each begun as soon as its inputs exist.

    All stages take the mean time of all, and messages none. The n-th chunk of a kind on a stage is micro-batch n.
    """
    mean = _mean_seconds(measured)
    queues = {rank: list(chunks) for rank, chunks in measured.items()}
    last = max((chunk.stage for chunks in measured.values() for chunk in chunks), default=0)
    done: dict[tuple[str, int, int], float] = {}
    counts: dict[tuple[str, int], int] = defaultdict(int)
    found: Rows = {rank: [] for rank in measured}
    free = dict.fromkeys(measured, 0.0)
    while any(queues.values()):
        ready = [rank for rank, queue in queues.items() if queue and _inputs(queue[0], counts, last, done) is not None]
        for rank in ready or [next(rank for rank, queue in queues.items() if queue)]:
            chunk = queues[rank].pop(0)
            begin = max(free[rank], _inputs(chunk, counts, last, done) or 0.0)
            free[rank] = begin + mean[chunk.kind]
            done[chunk.kind, chunk.stage, counts[chunk.kind, chunk.stage]] = free[rank]
            counts[chunk.kind, chunk.stage] += 1
            found[rank].append(Chunk(chunk.kind, chunk.stage, begin, free[rank]))
    return found


def _mean_seconds(rows: Rows) -> dict[str, float]:
    times = defaultdict(list)
    for chunks in rows.values():
        for chunk in chunks:
            times[chunk.kind].append(chunk.seconds)
    return {kind: fmean(seconds) for kind, seconds in times.items()}


def _inputs(
    chunk: Chunk, counts: dict[tuple[str, int], int], last: int, done: dict[tuple[str, int, int], float]
) -> float | None:
    """Returns when the inputs of the next micro-batch of this kind exist; None if one is not computed yet."""
    number, stage = counts[chunk.kind, chunk.stage], chunk.stage
    if chunk.kind == FORWARD:
        needed = [(FORWARD, stage - 1, number)] if stage else []
    elif chunk.kind == BACKWARD:
        needed = [(FORWARD, stage, number), *([(BACKWARD, stage + 1, number)] if stage < last else [])]
    else:
        needed = [(BACKWARD, stage, number)]
    times = [done.get(each) for each in needed]
    return None if None in times else max([time for time in times if time is not None], default=0.0)


def _drawn(title: str, words: str, rows: Rows, total: float, longest: float) -> Html:
    unit = (WIDTH - LEFT) / longest if longest else 0.0
    bars = [_row(rank, rows[rank], row * (ROW + GAP), total, unit) for row, rank in enumerate(sorted(rows))]
    return picture(title, words, WIDTH, len(rows) * (ROW + GAP), *bars)


def _row(rank: int, chunks: Sequence[Chunk], top: float, total: float, unit: float) -> Html:
    parts = [block("label", f"rank {rank}", 0, f"{top + ROW - 6:g}")]
    parts.append(_box(0.0, total, top, unit, "wait", None))
    stages = len({chunk.stage for chunk in chunks})
    for chunk in chunks:
        of = f" of stage {chunk.stage}" if stages > 1 else ""
        parts.append(
            _box(
                chunk.begin,
                chunk.end,
                top,
                unit,
                COLORS[chunk.kind],
                f"{NAMES[chunk.kind]}{of}: {milliseconds(chunk.seconds)}",
            )
        )
    return joined(parts)


def _box(begin: float, end: float, top: float, unit: float, color: str, label: str | None) -> Html:
    width = (end - begin) * unit
    gap = 0.6 if width > 3 and label else 0.0  # so that two chunks in a row can be told apart
    shape = f"M{LEFT + begin * unit:.1f} {top:g}h{max(0.1, width - gap):.1f}v{ROW:g}h-{max(0.1, width - gap):.1f}z"
    return block("area", shape, color, label or "")


def _by_stage(measured: Rows, total: float) -> Html:
    times = list(stage_times(measured, total))
    kinds = [kind for kind in (FORWARD, BACKWARD, WEIGHT) if any(kind in of.means for of in times)]
    rows = []
    for of in times:
        means = [milliseconds(of.means[kind]) if kind in of.means else "" for kind in kinds]
        rows.append([f"stage {of.stage}", f"rank {of.rank}", *means, f"{of.waited:.1%}"])
    columns = ("stage", "rank", *(f"{NAMES[kind]} per micro-batch" for kind in kinds), "rank waited")
    return table("Mean time per micro-batch", columns, rows, numbers=len(columns) - 2)
