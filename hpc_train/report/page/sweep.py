"""Writes the sections of the page of a sweep: what happened, the table, parallel coordinates, and why runs failed."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_train.config.run_path import relative
from hpc_train.report.page.markup import Html, Scale, block, commands, joined, picture, section, short, table
from hpc_train.report.page.resources import held
from hpc_train.report.page.settings import training_again
from hpc_train.report.page.verdict import clock
from hpc_train.run.exits import Exit
from hpc_train.run.ledger import Account, account_for, attempts_of, read_frozen
from hpc_train.runs.comparison import DEFAULT, Comparison
from hpc_train.runs.diagnosis import SweepFailure, find_cause
from hpc_train.runs.job_status import View
from hpc_train.runs.job_table import common_directory, is_unfinished, retry_lines, rows_of
from hpc_train.runs.lookup import RunHandle
from hpc_train.units import counted, format_metric

ROWS = 1000  # the largest number of rows of the table
LINES = 300  # the largest number of lines of the picture
NAMED = 20  # the largest number of runs that are listed for one cause
HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 330.0, 58.0, 16.0, 20.0, 100.0
FEW, LABEL = 5, 22.0  # up to this many values are all written beside an axis; the height of a label on a phone
LEAST_WIDTH, AXIS = 560.0, 150.0
NAME, WORD = 26, 11  # the most characters of a key and of a value that have room on a phone


@dataclass(frozen=True)
class SweepFacts:
    handles: Sequence[RunHandle]
    views: Sequence[View]
    compared: Comparison

    @property
    def best(self) -> int | None:
        return self.compared.best(self.views)


def sweep_verdict(sweep: SweepFacts, failures: Sequence[SweepFailure]) -> Html:
    """Returns the first section: the states of the runs, the best one, and what to do."""
    views = sweep.views
    states = Counter(view.state for view in views)
    by_state = ", ".join(f"{count} {state}" for state, count in states.most_common())
    head = f"{counted(len(views), 'run', 'runs')}: {by_state}"
    level = ""
    todo: list[str] = []
    if failures:
        level = "bad"
        first = relative(sweep.handles[failures[0].runs[0]].run.path)
        todo.append(f"python -m hpc_train why {first}   shows all about the first failure")
    elif all(view.exit == Exit.DONE for view in views):
        level = "good"
    if any(map(is_unfinished, views)):
        where = common_directory([item.run.path.parent for item in sweep.handles])
        todo += retry_lines(where, sweep.handles[0].run, views)
    words = None
    best = sweep.best
    if best is not None:
        run = sweep.handles[best].run
        metric = sweep.compared.ranked_by(views)
        how = "highest" if metric.highest else "lowest"
        name = f"{run.path.name} ({sweep.compared.words(run)})".removesuffix(" ()")
        value = sweep.compared.values(views)[best]
        words = block("paragraph", f"The best by {metric.name}, the {how}: run {name} with {format_metric(value)}.")
    box = block("todo", "What to do", commands(todo, "commands that help"))
    spent = Account()  # from the events alone, which are quick to read
    for item, view in zip(sweep.handles, views, strict=True):
        now = time.time() if view.exit is None else None
        spent += account_for(attempts_of(item.run.read_events(), (), read_frozen(item.run)), (), now).total
    return section("Verdict", block("paragraph", head, f"verdict {level}"), block("facts", held(spent)), words, box)


def sweep_table(sweep: SweepFacts) -> Html:
    """Returns the section with the table of the runs, which ``wait`` and a submission print as well."""
    count = len(sweep.handles)
    best = sweep.best
    indices = sorted(sorted(range(count), key=lambda index: index != best)[:ROWS])
    over = all(view.exit is not None for view in sweep.views)
    jobs = rows_of(sweep.handles, sweep.views, sweep.compared, indices, ended=over)
    title = counted(count, "run", "runs")
    if count > ROWS:
        title += f", of which {ROWS} are listed"
    best_row = indices.index(best) if best is not None else None
    return section("Runs", table(title, (*jobs.names, *jobs.numbers), jobs.rows, best_row, len(jobs.numbers)))


def sweep_failed(sweep: SweepFacts, failures: Sequence[SweepFailure]) -> Html | None:
    """Returns the section with the causes, each with the runs that failed from it; None without failures."""
    blocks: list[Html] = []
    for number, failure in enumerate(failures, 1):
        blocks.append(block("heading", f"{failure.kind} in {counted(len(failure.runs), 'run', 'runs')}"))
        blocks.append(block("preformatted", failure.message, f"message of cause {number}"))
        names = []
        for index in failure.runs[:NAMED]:  # the settings that distinguish the run, and where and when it failed
            run = sweep.handles[index].run
            names.append(f"{run.path.name}  {sweep.compared.words(run)}".rstrip())
            cause = find_cause(run.read_events())
            if cause is not None:
                names[-1] += f": {cause.who}, {clock(cause.time)}"
        if len(failure.runs) > NAMED:
            names.append(f"and {len(failure.runs) - NAMED} more")
        blocks.append(block("bullets", names))
        if failure.place:
            blocks.append(block("paragraph", f"at {failure.place}"))
        if failure.advice:
            blocks.append(block("paragraph", f"What to do: {failure.advice}"))
    return section("Failures and causes", *blocks) if blocks else None


def reproduce_one(sweep: SweepFacts) -> Html:
    """Returns the section with the commands that start the best run again, or the first one if none is the best."""
    run = sweep.handles[sweep.best or 0].run
    which = "the best run" if sweep.best is not None else "the first run"
    words = f"These commands start {which}, {run.path.name}, again. The page of each run has its commands."
    again = commands(training_again(run.record()), "commands that reproduce a run")
    return section("Reproduce", block("paragraph", words), again)


def coordinates(sweep: SweepFacts) -> Html | None:
    """Returns the section with parallel coordinates; None if the runs do not differ in a key."""
    compared = sweep.compared
    views = sweep.views
    keys = compared.keys
    best = sweep.best
    if not keys:
        return None
    metric = compared.ranked_by(views).name
    words = f"Each line is a run; it crosses the axes of {', '.join(keys)} and of {metric} at its values."
    if any(view.exit != Exit.DONE for view in views):
        words += " Dashed lines are runs that are not done."
    if best is not None:
        words += f" The thick line is the best: {compared.words(sweep.handles[best].run)}."

    settings = [compared.of_run(item.run) for item in sweep.handles]
    values = [None if value is None else repr(value) for value in compared.values(views)]
    width = max(LEAST_WIDTH, LEFT + RIGHT + AXIS * len(keys))
    places = [LEFT + (width - LEFT - RIGHT) * number / len(keys) for number in range(len(keys) + 1)]
    axes = [_Axis.of(key, [row[key] for row in settings], at) for key, at in zip(keys, places, strict=False)]
    last = _Axis.of(metric, [value for value in values if value is not None], places[-1])
    shapes = []
    for index in sorted(range(len(views)), key=lambda index: (index == best, values[index] is not None))[-LINES:]:
        points = [axis.at(settings[index][axis.name]) for axis in axes]
        value = values[index]
        if value is not None:
            points.append(last.at(value))
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        unfinished = views[index].exit != Exit.DONE
        label = compared.words(sweep.handles[index].run)
        if index == best:
            shapes.append(block("line", path, "c1", 4, unfinished, 1, label))
        else:
            shapes.append(block("line", path, "lost" if unfinished else "c0", 1.5, unfinished, 0.7, label))
    if any(value is not None for value in values):
        axes.append(last)
    rows = [14 if number % 2 == 0 else 38 for number in range(len(axes))]
    # from the right, so that a long name covers the next axis
    shapes += [axis.drawn(row, width) for axis, row in reversed([*zip(axes, rows, strict=True)])]
    title = "Parallel coordinates"
    return section(title, block("paragraph", words), block("figure", picture(title, words, width, HEIGHT, *shapes)))


@dataclass(frozen=True)
class _Axis:
    """Holds one vertical axis: a scale of numbers, or places of words."""

    name: str
    x: float
    scale: Scale | None
    places: Mapping[str, float]
    values: Sequence[float] = ()

    @classmethod
    def of(cls, name: str, values: Sequence[str], x: float) -> _Axis:
        words = list(dict.fromkeys(values))
        numbers = {number for word in words if word != DEFAULT and (number := _number(word)) is not None}
        low = HEIGHT - BOTTOM
        if len(numbers) > 1 and all(word != DEFAULT and _number(word) is not None for word in words):
            wide = min(numbers) > 0 and max(numbers) / min(numbers) >= 10
            return cls(name, x, Scale(min(numbers), max(numbers), low, TOP, log=wide), {}, sorted(numbers))
        if len(words) == 1:
            return cls(name, x, None, {words[0]: (low + TOP) / 2})
        step = (low - TOP) / max(1, len(words) - 1)
        return cls(name, x, None, {word: low - index * step for index, word in enumerate(words)})

    def at(self, value: str) -> tuple[float, float]:
        if self.scale is None:
            return self.x, self.places[value]
        return self.x, self.scale.at(float(value))

    def drawn(self, up: float, width: float) -> Html:
        """Returns the axis with its name at the height ``up``; neighbors have their names in different rows."""
        name = self.name if len(self.name) <= NAME else f"…{self.name[-NAME:]}"
        is_last = self.x > width - RIGHT - 1
        labels = [(name, (width, up, "end") if is_last else (self.x, up, "start"))]
        labels += [(words, (self.x + 6, at + 4, "start")) for words, at in self._labels()]
        parts = [block("line", f"M{self.x:.1f} {up + 6:g}V{HEIGHT - BOTTOM:g}", "text", 1.2)]
        for words, (x, y, anchor) in labels:
            parts += [block("label", words, f"{x:.1f}", f"{y:.1f}", anchor, kind) for kind in ("halo", "")]
        return joined(parts)

    def _labels(self) -> list[tuple[str, float]]:
        """Returns words, or the ends and what lies between: a few runs' values or round ones, where there is room."""
        scale = self.scale
        if scale is None:
            labels = [(word if len(word) <= WORD else f"{word[:WORD]}…", at) for word, at in self.places.items()]
        else:
            inside = self.values if len(self.values) <= FEW else scale.ticks(4)
            labels = [(short(value), scale.at(value)) for value in (scale.low, scale.high, *inside)]
        clear: list[tuple[str, float]] = []
        for label, at in labels:
            if all(abs(at - other) >= LABEL for _, other in clear):
                clear.append((label, at))
        return clear


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
