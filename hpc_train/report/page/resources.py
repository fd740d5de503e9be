"""Builds the sections about the resources of a run: the time of its jobs, memory, nodes, and a pipeline step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, color_key, joined, picture, section, table
from hpc_train.report.pipeline_step import BACKWARD, FORWARD, NAMES, WEIGHT, Chunk, Rows, rows_of, stage_times
from hpc_train.run.ledger import Account
from hpc_train.units import counted, format_bytes, format_duration, format_hours, milliseconds


def held(account: Account) -> list[tuple[str, str]]:
    """Returns the time and the devices that jobs have held, with their names."""
    rows = []
    if account.held_s:
        rows.append(("time allocated", format_duration(account.held_s)))
    if account.gpu_s:
        rows.append(("GPU-hours", format_hours(account.gpu_hours)))
    if account.rank_s:
        rows.append(("rank-hours, no GPU", format_hours(account.rank_s / 3600)))
    return rows


LEFT, WIDTH = 92.0, 640.0  # pictures with bars: the position at which the bars begin, and the width of the picture
Area = tuple[float, float, str, str]  # position, width, color and description of an area of a bar


def _bars(title: str, description: str, rows: Sequence[tuple[str, Sequence[Area]]], height: float, gap: float) -> Html:
    """Draws a horizontal bar of colored areas for each row, with the name of the row next to it."""
    shapes: list[Html] = []
    for number, (name, areas) in enumerate(rows):
        top = number * (height + gap)
        shapes.append(block("label", name, 0, f"{top + height / 2 + 5:g}"))
        for at, width, color, words in areas:
            shapes.append(block("area", f"M{at:.1f} {top:g}h{width:.1f}v{height:g}h-{width:.1f}z", color, words))
    return picture(title, description, WIDTH, len(rows) * (height + gap), joined(shapes))


ACCOUNTS = {  # field of an account -> (name, color)
    "queue_s": ("queue", "wait"),
    "start_up_s": ("start-up", "c3"),
    "steps_s": ("steps", "c2"),
    "evaluation_s": ("evaluation", "c0"),
    "checkpoint_s": ("checkpoints", "c1"),
    "verification_s": ("verification", "soft"),
    "lost_s": ("lost work", "bad"),
    "corrupted_s": ("lost to wrong numbers", "warn"),
    "restart_s": ("restarts", "c4"),
    "frozen_s": ("frozen nodes", "c5"),
    "suspended_s": ("suspended", "line"),
    "other_s": ("other", "lost"),
}
MOST_JOBS = 40  # bars; a longer chain is one bar
LEAST_S = 0.05


def time_spent(facts: RunFacts) -> Html | None:
    """Returns the section with the time account of all jobs (goodput); None before the first process."""
    total = facts.ledger.total
    if not total.held_s and not total.queue_s:
        return None
    jobs = facts.ledger.jobs
    if 2 <= len(jobs) <= MOST_JOBS:
        accounts = {f"job {number}": account for number, account in enumerate(jobs, 1)}
    else:
        accounts = {"all jobs": total}

    hours = format_hours((total.gpu_s or total.rank_s) / 3600)
    used = f"{hours} GPU-hours" if total.gpu_s else f"{hours} rank-hours without GPU"
    if len(jobs) > 1:
        used += f", over {len(jobs)} jobs"
    words = (
        f"{total.useful_share:.0%} of {format_duration(total.held_s)} was useful: steps and evaluations that were kept "
        f"({used})."
    )
    if facts.is_command and not total.steps_s:
        words = f"{format_duration(total.held_s)} ({used}). The command does not report its steps."
    if total.lost_s >= 1:
        words += f" {format_duration(total.lost_s)} of work was lost."
    if total.corrupted_steps:
        steps = counted(round(total.corrupted_steps), "step", "steps")
        words += f" Wrong numbers cost {steps}, {format_duration(total.corrupted_s)}."

    longest = max(sum(getattr(account, name) for name in ACCOUNTS) for account in accounts.values())
    bars = [(name, _account_areas(account, longest)) for name, account in accounts.items()]
    rows = []
    for name, (part, _) in ACCOUNTS.items():
        seconds = getattr(total, name)
        if seconds >= LEAST_S:
            is_held = total.held_s and seconds not in (total.queue_s, total.suspended_s)
            rows.append([part, format_duration(seconds), f"{seconds / total.held_s:.1%}" if is_held else ""])
    return section(
        "Time",
        block("paragraph", words),
        block(
            "figure",
            _bars("Where the time went", words, bars, 24.0, 14.0),
            color_key([shown for name, shown in ACCOUNTS.items() if getattr(total, name) >= LEAST_S]),
        ),
        table("Time of all jobs", ("part", "time", "of the allocated time"), rows, numbers=2),
    )


def _account_areas(account: Account, longest: float) -> list[Area]:
    areas: list[Area] = []
    at = LEFT
    for field_name, (part, color) in ACCOUNTS.items():
        seconds = getattr(account, field_name)
        width = seconds / (longest or math.inf) * (WIDTH - LEFT)
        if seconds >= LEAST_S and width >= 0.2:
            areas.append((at, width, color, f"{part}: {format_duration(seconds)}"))
        at += width
    return areas


MEMORY_PARTS = {"parameters": "c0", "gradients": "c1", "optimizer": "c3", "activations": "c2"}
MOST_RANKS = 16  # bars: the ranks with the highest peaks
TIGHT = 0.9  # share of the device's memory


def memory(facts: RunFacts) -> Html | None:
    """Returns the section about the memory of each rank by part, next to the memory of its device; None if no memory
    was measured.
    """
    measured = (facts.record.get("memory") or {}).get("ranks") or []
    if not measured:
        peaks = [line.peak_memory_bytes for line in facts.lines if line.peak_memory_bytes]
        if not peaks:
            return None
        words = f"The highest logged peak of a rank is {format_bytes(max(peaks))}."
        return section("Memory", block("paragraph", f"{words} The parts are measured when a run is done."))
    order = sorted(range(len(measured)), key=lambda rank: -measured[rank]["peak"])[:MOST_RANKS]
    shown = {f"rank {number}": measured[number] for number in sorted(order)}
    device = _device_memory(facts, shown.values())
    words = _memory_words(facts, measured[order[0]], order[0])

    unit = (WIDTH - LEFT) / max(device or 0, *(rank["peak"] for rank in shown.values()), 1)
    bars: list[tuple[str, list[Area]]] = []
    for name, rank in shown.items():
        areas: list[Area] = []
        if device:
            areas.append((LEFT, device * unit, "wait", f"device: {format_bytes(device)}"))
        at = LEFT
        for part, color in MEMORY_PARTS.items():
            areas.append((at, rank[part] * unit, color, f"{part}: {format_bytes(rank[part])}"))
            at += rank[part] * unit
        bars.append((name, areas))

    key = list(MEMORY_PARTS.items())
    columns = [*MEMORY_PARTS, "peak"]
    if device:
        key.append(("free memory of the device", "wait"))
        columns.append("device")
    caption = "Peak by rank"
    if len(measured) > MOST_RANKS:
        caption = f"The {MOST_RANKS} of {len(measured)} ranks with the highest peaks"
    rows = [[name, *(format_bytes(rank[column]) for column in columns)] for name, rank in shown.items()]
    return section(
        "Memory",
        block("paragraph", words),
        block("figure", _bars("Memory by part", words, bars, 20.0, 10.0), color_key(key)),
        table(caption, ("rank", *columns), rows, numbers=len(columns)),
    )


def _device_memory(facts: RunFacts, ranks: Iterable[Mapping[str, Any]]) -> int | None:
    """Returns the memory of a device; None on the CPU, whose memory all processes share, and for older runs."""
    if not any(event.gpus for event in facts.of_event("started")):
        return None
    return max((rank.get("device") or 0 for rank in ranks), default=0) or None


def _memory_words(facts: RunFacts, rank: Mapping[str, Any], number: int) -> str:
    text = f"The highest peak is {format_bytes(rank['peak'])}, on rank {number}"
    device = _device_memory(facts, [rank])
    if device:
        share = rank["peak"] / device
        text += f", {share:.0%} of the {format_bytes(device)} of its GPU"
        if share >= TIGHT:
            text += " (little is left)"
    elif rank.get("device"):
        text += f"; the machine has {format_bytes(rank['device'])}, which all its processes share"
    estimated = (facts.record.get("memory") or {}).get("estimated")
    if estimated:
        text += f"; the estimate before the run was {format_bytes(estimated)}"
    if device:
        return f"{text}."
    return f"{text}. On a CPU, the Python process itself is counted under activations."


LEVELS = ("bad", "warn", "good")
MOST_NODES = 128


@dataclass
class NodeMark:
    """Counts the events of a node, and lists their ranks."""

    ranks: Sequence[int] = ()
    failed: Counter[str] = field(default_factory=Counter)
    slow: Counter[str] = field(default_factory=Counter)

    @property
    def level(self) -> str:
        if self.failed:
            return "bad"
        return "warn" if self.slow else "good"


def nodes(facts: RunFacts) -> Html | None:
    """Returns the section with the nodes of all attempts, their ranks, and which were slow or failed; None if no node
    has started the run.
    """
    title = "Nodes and ranks"
    marks = _node_marks(facts)
    if not marks:
        return None
    levels = Counter(mark.level for mark in marks.values())
    words = f"{counted(len(marks), 'node', 'nodes')}; none was slow and none failed."
    if levels["good"] < len(marks):
        problems = []
        if levels["bad"]:
            problems.append(f"{levels['bad']} had failures")
        if levels["warn"]:
            problems.append(f"{counted(levels['warn'], 'was', 'were')} slow")
        words = f"{counted(len(marks), 'node', 'nodes')}, of which {' and '.join(problems)}."
    order = sorted(
        marks, key=lambda name: (LEVELS.index(marks[name].level), min(marks[name].ranks, default=1 << 30), name)
    )
    cells = block("nodes", [_node_cell(name, marks[name]) for name in order[:MOST_NODES]])
    rest = len(order) - MOST_NODES
    more = f"{rest} more nodes had no problem." if rest > 0 else ""
    return section(title, block("paragraph", words), cells, block("paragraph", more))


def _node_marks(facts: RunFacts) -> dict[str, NodeMark]:
    marks: dict[str, NodeMark] = defaultdict(NodeMark)
    names: Sequence[str] = ()
    world_size = 0
    for event in facts.of_event("started"):
        names = event.nodes or [str(event.node)]
        for name in names:
            marks[name].ranks = ()
        world_size = event.world_size
    if names:  # nodes have consecutive ranks, in the order of the event
        per_node = facts.newest_attempt.get("workers_per_node") or -(-world_size // len(names))
        for index, name in enumerate(names):
            marks[name].ranks = range(index * per_node, min(world_size, (index + 1) * per_node))
    for event in facts.events:
        words = event.kind.node_failed or event.kind.node_slow
        if not event.node or not words:
            continue
        if event.failure and event.name == "worker_failed":
            words = f"{words} ({event.failure})"
        if event.rank is not None:
            words = f"rank {event.rank} {words}"
        mark = marks[event.node]
        counter = mark.failed if event.kind.node_failed else mark.slow
        counter[words] += 1
    return marks


def _node_cell(name: str, mark: NodeMark) -> tuple[str, str, str, list[str]]:
    """Returns the name of a node, its level, its ranks, and what happened on it."""
    ranks = mark.ranks
    if not ranks:
        which = "not in the newest attempt"
    elif len(ranks) == 1:
        which = f"rank {ranks[0]}"
    else:
        which = f"ranks {ranks[0]} to {ranks[-1]}"
    problems = [f"{what}, {count} times" for what, count in (mark.failed + mark.slow).items()]
    return name, mark.level, which, [problem.removesuffix(", 1 times") for problem in problems] or ["ok"]


CHUNK_COLORS = {FORWARD: "c0", BACKWARD: "c2", WEIGHT: "c3", "": "wait"}


def pipeline(facts: RunFacts) -> Html | None:
    """Returns the section with a step of the pipeline: when each rank ran forward and backward passes, next to the same
    order without waiting; None for a run without a pipeline.
    """
    title = "Pipeline step"
    steps = facts.of_event("pipeline_step")
    if not steps:
        if (facts.newest_attempt.get("layout") or {}).get("pp", 1) < 2:
            return None
        return section(title, block("paragraph", "No step was recorded yet; the fifth step of an attempt is recorded."))
    event = steps[-1]
    measured = rows_of(event)
    total = event.seconds
    ideal = ideal_rows(measured)
    best = max((chunk.end for chunks in ideal.values() for chunk in chunks), default=0.0)
    words = (
        f"One of the first steps under the schedule {event.schedule}, {event.micro_batches} micro-batches. It took "
        f"{milliseconds(total)}, of which the ranks waited {_waiting(measured, total):.1%}. Ideal, with equal stages "
        f"and no communication: {milliseconds(best)}, {_waiting(ideal, best):.1%} waiting."
    )
    kinds = dict.fromkeys(chunk.kind for chunks in measured.values() for chunk in chunks)
    key = color_key([(NAMES[kind], CHUNK_COLORS[kind]) for kind in (*kinds, "")])
    longest = max(total, best)
    unit = (WIDTH - LEFT) / (longest or math.inf)
    return section(
        title,
        block("paragraph", words),
        block("heading", f"Measured, {milliseconds(total)}"),
        block("figure", _step_picture("Measured pipeline step", words, measured, total, unit), key),
        block("heading", f"Ideal, {milliseconds(best)}"),
        block("figure", _step_picture("Ideal pipeline step", words, ideal, best, unit)),
        _stage_table(measured, total),
    )


def _waiting(rows: Rows, total: float) -> float:
    busy = [sum(chunk.seconds for chunk in chunks) for chunks in rows.values()]
    return max(0.0, 1 - fmean(busy) / total) if busy and total else 0.0


def ideal_rows(measured: Rows) -> Rows:
    """Returns the chunks of each rank in the measured order, each of which starts as soon as its inputs exist.

    Every stage takes the mean time of all stages, and messages take no time. The n-th chunk of a kind on a stage is
    micro-batch n.
    """
    times = defaultdict(list)
    for chunks in measured.values():
        for chunk in chunks:
            times[chunk.kind].append(chunk.seconds)
    mean = {kind: fmean(seconds) for kind, seconds in times.items()}
    queues = {rank: list(chunks) for rank, chunks in measured.items()}
    last = max((chunk.stage for chunks in measured.values() for chunk in chunks), default=0)
    done: dict[tuple[str, int, int], float] = {}
    counts: dict[tuple[str, int], int] = defaultdict(int)
    ideal: Rows = {rank: [] for rank in measured}
    free = dict.fromkeys(measured, 0.0)
    while any(queues.values()):
        ready = [rank for rank, queue in queues.items() if queue and _inputs(queue[0], counts, last, done) is not None]
        for rank in ready or [next(rank for rank, queue in queues.items() if queue)]:
            chunk = queues[rank].pop(0)
            begin = max(free[rank], _inputs(chunk, counts, last, done) or 0.0)
            free[rank] = begin + mean[chunk.kind]
            done[chunk.kind, chunk.stage, counts[chunk.kind, chunk.stage]] = free[rank]
            counts[chunk.kind, chunk.stage] += 1
            ideal[rank].append(Chunk(chunk.kind, chunk.stage, begin, free[rank]))
    return ideal


def _inputs(
    chunk: Chunk, counts: dict[tuple[str, int], int], last: int, done: dict[tuple[str, int, int], float]
) -> float | None:
    """Returns when the inputs of the next micro-batch of this kind exist; None if an input is not computed yet."""
    stage = chunk.stage
    number = counts[chunk.kind, stage]
    if chunk.kind == FORWARD:
        needed = [(FORWARD, stage - 1, number)][: min(stage, 1)]  # stage 0 needs none
    elif chunk.kind == BACKWARD and stage < last:
        needed = [(FORWARD, stage, number), (BACKWARD, stage + 1, number)]
    elif chunk.kind == BACKWARD:
        needed = [(FORWARD, stage, number)]
    else:
        needed = [(BACKWARD, stage, number)]
    if any(inputs not in done for inputs in needed):
        return None
    return max((done[inputs] for inputs in needed), default=0.0)


def _step_picture(title: str, words: str, rows: Rows, total: float, unit: float) -> Html:
    """Draws a bar per rank; ``unit`` is the width of a second."""
    bars: list[tuple[str, list[Area]]] = []
    for rank in sorted(rows):
        areas: list[Area] = [(LEFT, max(0.1, total * unit), "wait", "")]
        several = len({chunk.stage for chunk in rows[rank]}) > 1
        for chunk in rows[rank]:
            width = chunk.seconds * unit
            if width > 3:
                width -= 0.6  # so that two chunks in a row can be told apart
            name = NAMES[chunk.kind]
            if several:
                name += f" of stage {chunk.stage}"
            label = f"{name}: {milliseconds(chunk.seconds)}"
            areas.append((LEFT + chunk.begin * unit, max(0.1, width), CHUNK_COLORS[chunk.kind], label))
        bars.append((f"rank {rank}", areas))
    return _bars(title, words, bars, 22.0, 6.0)


def _stage_table(measured: Rows, total: float) -> Html:
    times = list(stage_times(measured, total))
    kinds = [kind for kind in (FORWARD, BACKWARD, WEIGHT) if any(kind in stage.means for stage in times)]
    rows = []
    for stage in times:
        means = [milliseconds(stage.means[kind]) if kind in stage.means else "" for kind in kinds]
        rows.append([f"stage {stage.stage}", f"rank {stage.rank}", *means, f"{stage.waited:.1%}"])
    columns = ("stage", "rank", *(f"{NAMES[kind]} per micro-batch" for kind in kinds), "rank waited")
    return table("Mean time per micro-batch", columns, rows, numbers=len(columns) - 2)
