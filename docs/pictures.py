"""Draws the pictures of the documentation as SVG files, from the code that they describe.

    python docs/pictures.py    writes docs/pictures/*.svg; `make docs` does it first
    python docs/pictures.py record http://localhost:9090 RUN BEGIN END
                               writes docs/pictures/dashboard.json: what the Prometheus of `make monitoring-up` has of a
                               run between two times, in seconds since 1970

A picture follows the light or dark mode of the reader and has a title and a description for screen readers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen
from xml.sax.saxutils import escape

from hpc_train.elastic.priority import LiveRun, WaitingJob, decide
from hpc_train.layout.layout import Layout
from hpc_train.layout.orders import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from hpc_train.layout.partition import layer_counts
from hpc_train.layout.techniques import State
from hpc_train.planner.prediction import Timeline, simulate
from hpc_train.report.page import markup
from hpc_train.report.page.markup import Scale, short
from hpc_train.units import format_duration

FOLDER = Path(__file__).parent / "pictures"
TEMPLATES = Path(markup.__file__).parent / "templates"
LIGHT = {
    "paper": "#ffffff",
    "panel": "#f1f5f9",
    "line": "#94a3b8",
    "ink": "#1e293b",
    "soft": "#475569",
    "blue": "#2563eb",
    "green": "#15803d",
    "amber": "#b45309",
    "red": "#b91c1c",
    "violet": "#6d28d9",
    "on": "#ffffff",  # text on one of the five colors
}
DARK = {
    "paper": "#1e2129",
    "panel": "#2a2f3a",
    "line": "#64748b",
    "ink": "#e2e8f0",
    "soft": "#a8b3c4",
    "blue": "#7aa5f8",
    "green": "#5ec27f",
    "amber": "#e9ab53",
    "red": "#f28b82",
    "violet": "#b59bf5",
    "on": "#14161c",
}


class Drawing:
    """Collects the elements of one picture. Coordinates are in pixels, from the upper left corner."""

    def __init__(self, title: str, description: str, width: int, height: int) -> None:
        self.title = title
        self.description = description
        self.width = width
        self.height = height
        self.elements: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, border: str = "", round_by: float = 2
    ) -> None:
        """Draws a rectangle in the colors ``fill`` and ``border``; without ``border`` it has none."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_by:g}"'
        self.elements.append(f'<rect class="{fill}{border and f" {border}-border"}" {size}/>')

    def text(self, x: float, y: float, words: str, color: str = "ink", anchor: str = "start", style: str = "") -> None:
        """Writes ``words`` with their baseline at ``y``; ``style`` is a class such as ``bold`` or ``small``."""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self.elements.append(f'<text class="{f"{color} {style}".strip()}" {place}>{escape(words)}</text>')

    def label(
        self, x: float, y: float, width: float, height: float, fill: str, words: str, style: str, round_by: float
    ) -> None:
        """Draws a rectangle with ``words`` in its middle; one in the color ``panel`` has a border."""
        plain = fill == "panel"
        self.box(x, y, width, height, fill, "line" if plain else "", round_by)
        self.text(x + width / 2, y + height / 2 + 5, words, "ink" if plain else "on", "middle", style)

    def path(self, points: Sequence[tuple[float, float]], color: str = "line", arrow: bool = True) -> None:
        """Draws a line through ``points``, with an arrowhead at its end or without."""
        way = " ".join(f"{round(x, 1):g},{round(y, 1):g}" for x, y in points)
        marker = ' marker-end="url(#head)"' if arrow else ""
        self.elements.append(f'<polyline class="{color}-border" fill="none" points="{way}"{marker}/>')

    def svg(self) -> str:
        """Returns the file."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="description">{escape(self.description)}</desc>',
            "<style>",
            "text { font: 13px system-ui, 'DejaVu Sans', sans-serif; white-space: pre }",
            ".small { font-size: 11px } .large { font-size: 20px } .bold { font-weight: 600 }",
            ".mono { font: 12.5px ui-monospace, 'DejaVu Sans Mono', monospace }",
            *colors(LIGHT),
            "@media (prefers-color-scheme: dark) {",
            *colors(DARK),
            "}",
            "</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="line" d="M0 0L8 4L0 8z"/></marker></defs>',
            f'<rect class="paper" width="{self.width}" height="{self.height}" rx="6"/>',
            *self.elements,
            "</svg>",
        ]
        return "\n".join([*lines, ""])


def colors(palette: dict[str, str]) -> Iterator[str]:
    """Yields the rules of the classes that fill with a color and that draw a border in it."""
    for name, color in palette.items():
        yield f".{name} {{ fill: {color} }} .{name}-border {{ stroke: {color}; stroke-width: 1.2 }}"


def parts() -> Drawing:
    """Draws the path from a command to training workers."""
    drawing = Drawing(
        "From a command to a training run",
        "A command composes and checks the config and freezes it in the run directory. Submitit sends it to Slurm or "
        "starts it here; a batch script of your own starts the same frozen run. One agent per node starts and watches "
        "one worker per GPU. The workers train and write checkpoints, metrics and events into the run directory.",
        720,
        400,
    )
    boxes = [
        (20, 16, 330, "python -m hpc_train +strategy=hybrid -m", "mono"),
        (390, 16, 310, "your batch script: freeze, agent", "mono"),
        (20, 76, 330, "compose and check the config", ""),
        (20, 136, 330, "freeze: config.yaml, run.json, code", ""),
        (20, 196, 330, "submitit: Slurm, or this machine", ""),
        (20, 256, 330, "one agent per node: starts, watches, restarts", ""),
    ]
    for x, y, width, words, style in boxes:
        drawing.label(x, y, width, 34, "panel", words, style, 5)
    for y in (50, 110, 170, 230):
        drawing.path([(185, y), (185, y + 25)])
    drawing.path([(545, 50), (545, 93), (352, 93)])
    drawing.path([(620, 50), (620, 273), (352, 273)])
    for rank in range(4):
        drawing.label(20 + 84 * rank, 326, 78, 34, "blue", f"worker {rank}", "bold", 5)
        drawing.path([(59 + 84 * rank, 290), (59 + 84 * rank, 325)])
    drawing.text(185, 382, "one per GPU; mesh of pp x dp x cp x tp", "soft", "middle", "small")
    drawing.box(430, 306, 270, 76, "panel", "green", 5)
    drawing.text(565, 329, "run directory", anchor="middle", style="bold")
    drawing.text(565, 349, "checkpoints, metrics, events, logs", "soft", "middle")
    drawing.text(565, 369, "status, why, report and top read it", "soft", "middle", "small")
    drawing.path([(352, 343), (429, 343)])
    return drawing


CELLS = 4  # layers, parts of a matrix, samples and tokens in the picture
HELD: tuple[tuple[str, State], ...] = (
    ("weights", "parameters"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer"),
)
RANKS = 4


def split(name: str, note: str, data_parallel: str = "allreduce", **axes: int) -> tuple[str, str, Layout]:
    """Returns a row of the picture of layouts: its name, a sentence, and the layout of four ranks."""
    ranks = {"dp": 1, "pp": 1, "tp": 1, "cp": 1, **axes}
    shard = ranks["dp"] * ranks["cp"]
    return (
        name,
        note,
        Layout(
            **ranks,
            shard=shard,
            data_parallel=data_parallel,
            schedule="1f1b",
            stages_per_rank=1,
            micro_batches=4,
            micro_size=1,
        ),
    )


ROWS = (
    split("dp", "gradients are summed", "ddp", dp=4),
    split("zero1", "+ optimizer sharded", "zero1", dp=4),
    split("zero2", "+ gradients sharded", "zero2", dp=4),
    split("zero3", "+ weights sharded", "zero3", dp=4),
    split("pp", "one stage per rank", pp=4),
    split("tp", "a part of each matrix", tp=4),
    split("cp", "a part of each sequence", "zero3", cp=4),
    split("hybrid", "2 stages x 2 replicas", "ddp", pp=2, dp=2),
)


def held_cells(layout: Layout, rank: int, state: State) -> set[tuple[int, int]]:
    """Returns which (layer, part of its matrices) of the model a rank keeps between two micro-batches."""
    tp_rank = rank % layout.tp
    replica = rank // layout.tp % layout.dp_cp
    pp_rank = rank // layout.stage_ranks
    counts = layer_counts(CELLS, layout.stages)
    columns = range(CELLS * tp_rank // layout.tp, CELLS * (tp_rank + 1) // layout.tp)
    if layout.shards_state and state in layout.kind.shards:
        part = replica % layout.shard
        columns = columns[len(columns) * part // layout.shard : len(columns) * (part + 1) // layout.shard]
    return {
        (sum(counts[:stage]) + layer, column)
        for stage, owner in enumerate(layout.placement)
        if owner == pp_rank
        for layer in range(counts[stage])
        for column in columns
    }


def read_cells(layout: Layout, rank: int) -> set[tuple[int, int]]:
    """Returns which (sample, part of its tokens) of the global batch a rank computes."""
    cp_rank = rank // layout.tp % layout.cp
    dp_rank = rank // layout.tp // layout.cp % layout.dp
    samples = range(CELLS * dp_rank // layout.dp, CELLS * (dp_rank + 1) // layout.dp)
    tokens = range(CELLS * cp_rank // layout.cp, CELLS * (cp_rank + 1) // layout.cp)
    return {(sample, token) for sample in samples for token in tokens}


def layouts() -> Drawing:
    """Draws what each of four ranks holds under each strategy."""
    drawing = Drawing(
        "What each of four ranks holds under each strategy",
        "Data parallel: every rank holds the whole model and a quarter of the samples. ZeRO 1, 2 and 3 shard the "
        "optimizer state, then also the gradients, then also the weights. Pipeline: a quarter of the layers, all "
        "samples. Tensor parallel: a quarter of each layer, all samples. Context parallel: a quarter of the tokens of "
        "all samples, with sharded state. Hybrid: half of the layers and half of the samples.",
        760,
        80 + 58 * len(ROWS) + 26,
    )
    fills = ("blue", "green", "violet", "amber")
    for number, (words, fill) in enumerate(zip([*(name for name, _ in HELD), "batch"], fills, strict=True)):
        drawing.box(160 + 104 * number, 14, 12, 12, fill)
        drawing.text(178 + 104 * number, 25, words)
    drawing.text(16, 25, "held by a rank:", "soft")
    for rank in range(RANKS):
        drawing.text(160 + 150 * rank, 60, f"rank {rank}", style="bold")
    for row, (name, note, layout) in enumerate(ROWS):
        y = 74 + 58 * row
        drawing.text(16, y + 16, name, style="bold")
        drawing.text(16, y + 32, note, "soft", style="small")
        for rank in range(RANKS):
            grids = [*(held_cells(layout, rank, state) for _, state in HELD), read_cells(layout, rank)]
            for number, (cells, fill) in enumerate(zip(grids, fills, strict=True)):
                grid(drawing, 160 + 150 * rank + 34 * number, y, cells, fill)
    below = 80 + 58 * len(ROWS) + 10
    words = "Model: a row is a layer, a column a part of its matrices. Batch: a row is a sample, a column a part of it."
    drawing.text(16, below, words, "soft", style="small")
    return drawing


def grid(drawing: Drawing, x: float, y: float, cells: set[tuple[int, int]], fill: str) -> None:
    """Draws a square of CELLS x CELLS cells of which ``cells`` are filled."""
    size = 7
    drawing.box(x, y, CELLS * size + 1, CELLS * size + 1, "panel", "line", 1)
    for row, column in sorted(cells):
        drawing.box(x + 1 + size * column, y + 1 + size * row, size - 1, size - 1, fill, round_by=0)


FILLS = {FORWARD: "blue", FULL_BACKWARD: "green", BACKWARD_INPUT: "green", BACKWARD_WEIGHT: "amber"}
MICRO_BATCHES = 8


def planned(schedule: str, stages_per_rank: int) -> Timeline:
    """Returns when four ranks compute what; a forward of a quarter of the model takes 2 units, a backward 4."""
    layout = Layout(
        dp=1,
        pp=RANKS,
        tp=1,
        shard=1,
        data_parallel="allreduce",
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        micro_batches=MICRO_BATCHES,
        micro_size=1,
    )
    stages = layout.stages
    forwards = [2 / stages_per_rank] * stages
    backwards = [4 / stages_per_rank] * stages
    return simulate(layout, MICRO_BATCHES, forwards, backwards, [0.0] * (stages - 1))


def schedules() -> Drawing:
    """Draws a step of 1F1B and a step of the zero-bubble schedule ZB-V."""
    timelines = [("1f1b", planned("1f1b", 1)), ("zbv", planned("zbv", 2))]
    idle = {name: 1 - timeline.busy / timeline.seconds for name, timeline in timelines}
    drawing = Drawing(
        "A step of the schedules 1f1b and zbv on four ranks",
        "Eight micro-batches on four ranks. "
        f"Under 1f1b a rank is idle for {idle['1f1b']:.0%} of the step, mostly at its beginning and end. "
        f"The zero-bubble schedule zbv computes gradients of weights there; {idle['zbv']:.0%} is left.",
        760,
        330,
    )
    unit = 10.3
    for number, (name, timeline) in enumerate(timelines):
        y = 20 + 146 * number
        units = timeline.seconds
        drawing.text(16, y + 6, f"strategy.schedule={name}", style="bold")
        words = f"{units:g} units of time, idle {idle[name]:.0%}"
        drawing.text(744, y + 6, words, "soft", "end")
        drawing.box(66, y + 14, unit * timelines[0][1].seconds, 104, "paper", "line", 0)
        drawing.box(66, y + 14, unit * units, 104, "panel", round_by=0)
        for rank, events in enumerate(timeline.ranks):
            top = y + 17 + 25 * rank
            drawing.text(16, top + 16, f"rank {rank}", "soft", style="small")
            for event in events:
                left = 66 + unit * event.begin
                width = unit * (event.end - event.begin)
                fill = FILLS[event.action.work]
                drawing.label(left + 0.4, top, width - 0.8, 23, fill, str(event.action.micro_batch), "small", 1)
    legend = [
        ("blue", "forward"),
        ("green", "backward (under zbv: of inputs)"),
        ("amber", "gradients of weights"),
        ("panel", "idle"),
    ]
    x = 66.0
    for fill, words in legend:
        drawing.box(x, 304, 12, 12, fill, "line" if fill == "panel" else "")
        drawing.text(x + 18, 315, words, "soft")
        x += 40 + 7.2 * len(words)
    return drawing


def life() -> Drawing:
    """Draws the life of a run that loses a node."""
    drawing = Drawing(
        "The life of a run that loses a node",
        "The submission freezes the run. Slurm queues the job and starts it on nodes n1 and n2; the workers train and "
        "save. Node n2 is lost: the workers are stopped and Slurm queues the job again without n2. On n1 and n3 the "
        "run continues from the newest checkpoint, finishes and writes its report.",
        860,
        300,
    )
    lanes = ("login node", "Slurm", "node n1", "node n2", "node n3", "run directory")
    scale = 7.25

    def at(time: float) -> float:
        return 120 + scale * time

    for number, lane in enumerate(lanes):
        y = 16 + 42 * number
        drawing.text(14, y + 19, lane, style="bold")
        drawing.box(at(0), y, scale * 100, 30, "panel", round_by=3)
    bars = [
        (0, 0, 14, "blue", "check, freeze"),
        (1, 14, 24, "amber", "queued"),
        (1, 24, 50, "green", "job runs"),
        (1, 50, 62, "amber", "requeued"),
        (1, 62, 94, "green", "job runs, without n2"),
        (2, 24, 31, "violet", "start"),
        (2, 31, 50, "blue", "attempt 0"),
        (2, 62, 69, "violet", "start"),
        (2, 69, 94, "blue", "attempt 1"),
        (3, 24, 31, "violet", "start"),
        (3, 31, 46, "blue", "attempt 0"),
        (3, 46, 50, "red", "lost"),
        (4, 62, 69, "violet", "start"),
        (4, 69, 94, "blue", "attempt 1"),
    ]
    for lane_number, begin, end, fill, words in bars:
        drawing.label(at(begin), 16 + 42 * lane_number, scale * (end - begin) - 1, 30, fill, words, "small", 3)
    y = 16 + 42 * 5
    for moment, words in (
        (7, "config"),
        (35, "save 1"),
        (42.5, "save 2"),
        (79, "save 3"),
        (91, "last save"),
        (97.5, "report"),
    ):
        drawing.box(at(moment) - 3, y + 3, 6, 6, "green", round_by=3)
        drawing.text(at(moment), y + 24, words, anchor="middle", style="small")
    drawing.path([(at(7), 46), (at(7), y)])
    drawing.path([(at(42.5), y + 36), (at(42.5), y + 44), (at(69), y + 44), (at(69), 16 + 42 * 4 + 31)])
    drawing.text(
        at(55), y + 60, "attempt 1 begins with save 2; the steps after it are repeated", "soft", "middle", "small"
    )
    return drawing


@dataclass
class QueuedRun:
    """A simulated run with ``work`` in node-hours; ``history`` has the nodes that it held in each step."""

    name: str
    nodes: int
    least: int
    priority: int
    work: float
    submitted: float
    held: int = 0
    shrunk_at: float = 0.0
    history: list[int] = field(default_factory=list)

    def is_over(self) -> bool:
        return sum(self.history) * STEP_H >= self.work - 1e-9

    def hours(self) -> tuple[float, float]:
        """Returns when it was started first and when it ended."""
        steps = [step for step, nodes in enumerate(self.history) if nodes]
        return round(steps[0] * STEP_H, 1), round((steps[-1] + 1) * STEP_H, 1)


STEP_H = 0.1
CLUSTER_NODES = 8
POLICIES = ("order of submission", "elastic.priority, elastic.grow", "PreemptMode=REQUEUE")


def queue(policy: str) -> list[QueuedRun]:
    """Simulates two runs and an urgent third under one of ``POLICIES``, in steps of six minutes.

    Runs start in the order of their submission when their nodes are idle. With ``elastic.priority``, runs give nodes
    back as ``decide`` says, and take idle nodes again when no run waits. With ``PreemptMode=REQUEUE``, Slurm takes all
    nodes of runs of lower priority, the newest first, which wait until they are idle. A change takes no time and loses
    no step.
    """
    runs = [
        QueuedRun("a", 4, 1, 0, 40, 0),
        QueuedRun("b", 4, 2, 0, 48, 0),
        QueuedRun("urgent", 4, 4, 5, 8, 1),
    ]
    hour = 0.0
    while not all(run.is_over() for run in runs):
        waiting = [run for run in runs if not run.held and run.submitted <= hour and not run.is_over()]
        idle = CLUSTER_NODES - sum(run.held for run in runs)
        for run in sorted(waiting, key=lambda run: -run.priority):
            lower = [other for other in reversed(runs) if other.held and other.priority < run.priority]
            while policy == "PreemptMode=REQUEUE" and idle < run.nodes and lower:
                preempted = lower.pop(0)
                idle += preempted.held
                preempted.held = 0
            if run.nodes <= idle:
                run.held = run.nodes
                idle -= run.nodes
                waiting.remove(run)
        if policy.startswith("elastic.priority"):
            jobs = [WaitingJob(run.name, run.name, run.priority, run.nodes, frozenset({"gpu"})) for run in waiting]
            live = [
                LiveRun(run.name, run.priority, run.held, run.held, run.least, 3600, "gpu", shrunk_at=run.shrunk_at)
                for run in runs
                if run.held
            ]
            by_name = {run.name: run for run in runs}
            for shrink in decide(jobs, live, {"gpu": idle}, 3600 * (hour + 1)):
                by_name[shrink.job_id].held -= shrink.nodes
                by_name[shrink.job_id].shrunk_at = 3600 * (hour + 1)
            for run in runs:
                more = min(idle, run.nodes - run.held) if run.held and not waiting else 0
                run.held += more
                idle -= more
        for run in runs:
            run.history.append(run.held)
            if run.is_over():
                run.held = 0
        hour = round(hour + STEP_H, 1)
    return runs


Spans = list[tuple[float, float, int]]  # (begin, end, nodes)


def urgent() -> Drawing:
    """Draws the nodes of two simulated runs and an urgent third over time."""
    results: dict[str, dict[str, Spans]] = {}
    for policy in POLICIES:
        results[policy] = {run.name: [] for run in queue(policy)}
        for run in queue(policy):
            first = 0
            for nodes, steps in groupby(run.history):
                last = first + len([*steps])
                if nodes:
                    results[policy][run.name].append((STEP_H * first, STEP_H * last, nodes))
                first = last
    return nodes_of_runs("Two runs and an urgent third on eight nodes", results, "h", 42.0, 2)


def urgent_measured() -> Drawing:
    """Draws the nodes of a run and an urgent second, as ``benchmarks.urgent_run`` has measured them."""
    recorded = json.loads((FOLDER / "urgent_measured.json").read_text())
    results = {
        policy: {
            name: [(begin / 60, end / 60, nodes) for begin, end, nodes in spans]
            for name, spans in result["held"].items()
        }
        for policy, result in recorded.items()
    }
    return nodes_of_runs("A long run and an urgent second on four nodes, measured", results, "min", 26.0, 4)


def nodes_of_runs(title: str, results: dict[str, dict[str, Spans]], unit: str, unit_width: float, tick: int) -> Drawing:
    """Draws the nodes of each run over time, under one policy above the other.

    Args:
        results: what each run holds under each policy.
        unit_width: pixels per ``unit`` of time.
        tick: units between two marks of the axis.
    """
    ends = {
        policy: ", ".join(f"{name} ends after {spans[-1][1]:.3g} {unit}" for name, spans in runs.items())
        for policy, runs in results.items()
    }
    of_policy = 42 + 36 * max(map(len, results.values()))
    description = " ".join(f"{policy}: {words}." for policy, words in ends.items())
    drawing = Drawing(title, description, 760, 30 + of_policy * len(results))
    for number, (policy, runs) in enumerate(results.items()):
        top = 18 + of_policy * number
        drawing.text(16, top + 4, policy, style="bold")
        drawing.text(744, top + 4, ends[policy], "soft", "end", "small")
        for lane, ((name, spans), fill) in enumerate(zip(runs.items(), ("blue", "green", "amber"), strict=False)):
            y = top + 14 + 36 * lane
            drawing.text(16, y + 20, name, "soft")
            drawing.box(80, y, 655, 32, "panel", round_by=0)
            for begin, end, nodes in spans:
                x = 80 + unit_width * begin
                drawing.box(x, y + 32 - 8 * nodes, unit_width * (end - begin), 8 * nodes, fill, round_by=0)
    for mark in range(0, int(655 / unit_width) + 1, tick):
        drawing.text(80 + unit_width * mark, of_policy * len(results) + 8, f"{mark} {unit}", "soft", "middle", "small")
    return drawing


def screen(name: str, title: str, description: str) -> Drawing:
    """Draws the text of a console that ``NAME.txt`` in the folder of the pictures has recorded."""
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    drawing = Drawing(title, description, round(24 + 7.55 * max(map(len, lines))), 22 + 16 * len(lines))
    for number, line in enumerate(lines):
        color = "blue" if line.startswith("$ ") else "ink"
        drawing.text(12, 24 + 16 * number, line, color, style="mono")
    return drawing


DASHBOARD = FOLDER.parents[1] / "deploy" / "monitoring" / "grafana" / "dashboards" / "run.json"
RECORDED = FOLDER / "dashboard.json"
POINTS = 80  # of a curve
LINES = ("blue", "amber", "green")
Curves = dict[str, list[tuple[float, float]]]


def panels() -> list[dict[str, Any]]:
    """Returns the panels of the dashboard of one run above its row about the speed."""
    everything = json.loads(DASHBOARD.read_text())["panels"]
    return everything[: [panel["title"] for panel in everything].index("Speed")]


def record(url: str, run: str, begin: str, end: str) -> None:
    """Writes the values of the panels by title and legend, as pairs of seconds since ``begin`` and a value."""
    recorded: dict[str, Any] = {"run": run, "begin": float(begin), "end": float(end), "panels": {}}
    step = (float(end) - float(begin)) / POINTS
    for panel in panels():
        curves: Curves = {}
        first = end if panel["type"] == "stat" else begin
        for target in panel.get("targets", []):
            query = target["expr"].replace("$user", ".+").replace("$run", run)
            asked = urlencode({"query": query, "start": first, "end": end, "step": f"{step:.3f}"})
            with urlopen(f"{url}/api/v1/query_range?{asked}") as answer:
                series = json.load(answer)["data"]["result"]
            for one in series:
                name = target["legendFormat"].replace("{{state}}", one["metric"].get("state", ""))
                curves[name] = [
                    (round(time - float(begin), 1), float(f"{float(value):.5g}")) for time, value in one["values"]
                ]
        recorded["panels"][panel["title"]] = curves
    RECORDED.write_text(json.dumps(recorded, separators=(",", ":")).replace("},", "},\n") + "\n")


def with_unit(value: float, unit: str) -> str:
    """Returns a value of a panel in the unit that the dashboard gives."""
    match unit:
        case "percentunit":
            return f"{value:.1%}"
        case "s":
            return format_duration(value)
        case _:
            return short(value)


def dashboard() -> Drawing:
    """Draws the upper part of the Grafana dashboard of one run, with the recorded values."""
    recorded = json.loads(RECORDED.read_text())
    shown = panels()
    column = 36
    row = 20
    below = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in shown)
    drawing = Drawing(
        "The Grafana dashboard of one run",
        "Above: state, progress, time left, goodput, whether the run stalls, and the number of ranks. Below: curves of "
        "the loss, the accuracy, the gradient norm, the learning rate, the step and that of the last checkpoint, the "
        "data seen, and rollbacks. After a killed worker the step falls back to that of the last checkpoint.",
        24 * column + 8,
        row * below + 44,
    )
    drawing.text(12, 26, f"hpc_train: one run / {recorded['run']}", style="bold")
    times = [time.strftime("%H:%M:%S", time.gmtime(recorded[name])) for name in ("begin", "end")]
    drawing.text(24 * column - 4, 26, f"{times[0]} to {times[1]} UTC", "soft", "end")
    for panel in shown:
        place = panel["gridPos"]
        x = 4 + column * place["x"]
        y = 40 + row * place["y"]
        if panel["type"] == "row":
            drawing.text(x + 8, y + 15, panel["title"], style="bold")
            continue
        width = column * place["w"] - 4
        height = row * place["h"] - 4
        drawing.box(x, y, width, height, "panel", "line", 3)
        letters = int(width / 7.2)
        title = panel["title"]
        drawing.text(x + 8, y + 17, title if len(title) <= letters else f"{title[:letters]}…", style="small bold")
        unit = panel["fieldConfig"]["defaults"]["unit"]
        curves = {name: line for name, line in recorded["panels"][panel["title"]].items() if line}
        if panel["type"] == "stat":
            newest = {name: with_unit(line[-1][1], unit) for name, line in curves.items()}
            for number, (name, value) in enumerate(newest.items()):
                words = name if title == "State" else f"{value} {name}"
                middle = x + width * (2 * number + 1) / (2 * len(newest))
                style = "large bold" if len(newest) == 1 else "bold"
                drawing.text(middle, y + 52, words, "green", "middle", style)
        else:
            chart(drawing, (x, y, width, height), curves, unit, recorded["end"] - recorded["begin"])
    return drawing


def chart(
    drawing: Drawing, place: tuple[float, float, float, float], curves: Curves, unit: str, seconds: float
) -> None:
    """Draws the curves of a panel over ``seconds``, with a legend below."""
    x, y, width, height = place
    values = [value for line in curves.values() for _, value in line]
    low = min(values)
    high = max(values)
    across = Scale(0, seconds, x + 46, x + width - 10)
    up = Scale(low, high if high > low else low + 1, y + height - 44, y + 30)
    for value in up.ticks(4):
        drawing.box(across.start, round(up.at(value), 1), across.end - across.start, 0.5, "line", round_by=0)
        drawing.text(x + 42, up.at(value) + 4, with_unit(value, unit), "soft", "end", "small")
    for value in across.ticks(4):
        drawing.text(across.at(value), y + height - 28, format_duration(value), "soft", "middle", "small")
    at = x + 10
    for color, (name, line) in zip(LINES, curves.items(), strict=False):
        drawing.path([(across.at(time), up.at(value)) for time, value in line], color, arrow=False)
        drawing.box(at, y + height - 15, 10, 3, color)
        drawing.text(at + 15, y + height - 9, name, "soft", style="small")
        at += 28 + 6.2 * len(name)


def report() -> Drawing:
    """Draws the beginning of the report page of a run, whose recorded HTML is in ``pictures/report.html``."""
    drawing = Drawing(
        "The report page of a run",
        "The verdict: the run is done and has recovered from a failure; its steps, losses, accuracy, and time. Then "
        "what it trains and from which commit, and the loss over the steps with lost work in gray.",
        860,
        1850,
    )
    # without the rules for phones and for paper, which would depend on the size of the picture
    style = (TEMPLATES / "style.css").read_text().partition("@media (max-width")[0]
    page = (FOLDER / "report.html").read_text().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    drawing.elements.append(
        '<foreignObject width="860" height="1850"><body xmlns="http://www.w3.org/1999/xhtml">'
        f"<style>{style}</style>\n{page}</body></foreignObject>"
    )
    return drawing


def pictures() -> dict[str, str]:
    """Returns the content of each file by its name."""
    drawings = {
        "parts": parts(),
        "layouts": layouts(),
        "schedules": schedules(),
        "life": life(),
        "urgent": urgent(),
        "urgent_measured": urgent_measured(),
        "dashboard": dashboard(),
        "report": report(),
        "top": screen(
            "top",
            "The live view of runs",
            "A table of three runs with state, step, loss, speed, time left and restarts. Below, for the chosen run: "
            "waiting times, peak memory, curves of loss and speed, the times of its pipeline stages, and its events.",
        ),
        "final_screen": screen(
            "final_screen",
            "The console at the end of a run",
            "The last lines that a training prints: the steps with their loss, a chart of the losses, what the run "
            "cost, and the commands that look at it.",
        ),
    }
    return {f"{name}.svg": drawing.svg() for name, drawing in drawings.items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"]:
        record(*sys.argv[2:])
    for file, content in pictures().items():
        (FOLDER / file).write_text(content)
