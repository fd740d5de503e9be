"""Writes the sections of the page of a sweep: what happened, the table, parallel coordinates, and why runs failed."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_train.report.page.markup import (
    Html,
    Scale,
    block,
    commands,
    joined,
    paragraphs,
    picture,
    section,
    short,
    table,
)
from hpc_train.report.page.settings import training_again
from hpc_train.report.page.verdict import clock
from hpc_train.run.exits import Exit
from hpc_train.run.ledger import Account, ledger, read_frozen
from hpc_train.runs.comparison import DEFAULT, Comparison
from hpc_train.runs.diagnosis import SweepFailure, find_cause, shown, sweep_failures
from hpc_train.runs.job_status import View
from hpc_train.runs.job_table import common_directory, is_unfinished, retry_lines, rows_of
from hpc_train.runs.lookup import RunHandle
from hpc_train.units import counted, format_duration, format_hours

ROWS = 1000  # of the table
LINES = 300  # of the picture
NAMED = 20  # runs of one cause
HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 300.0, 34.0, 16.0, 70.0, 80.0
FEW, LABEL = 5, 16.0  # values that are all written beside an axis; the height of one
LEAST_WIDTH, AXIS = 560.0, 150.0


@dataclass(frozen=True)
class SweepFacts:
    """Holds the runs of a sweep with their states, and what tells them apart."""

    found: Sequence[RunHandle]
    views: Sequence[View]
    compared: Comparison

    @property
    def best(self) -> int | None:
        return self.compared.best(self.views)


def sweep_verdict(of_sweep: SweepFacts, failures: Sequence[SweepFailure]) -> Html:
    """Returns the first section: the states of the runs, the best one, and what to do."""
    views, best = of_sweep.views, of_sweep.best
    states = Counter(view.state for view in views)
    head = f"{len(views)} runs: {', '.join(f'{count} {state}' for state, count in states.most_common())}"
    level = "bad" if failures else "good" if all(view.exit == Exit.DONE for view in views) else ""
    metric, values = of_sweep.compared.ranked_by(views), of_sweep.compared.values(views)
    words = None
    if best is not None:
        run = of_sweep.found[best].run
        how = "highest" if metric.highest else "lowest"
        named = f"{run.path.name} ({of_sweep.compared.words(run)})".removesuffix(" ()")
        words = block("paragraph", f"The best by {metric.name}, the {how}: run {named} with {values[best]:.4f}.")
    where = common_directory([item.run.path.parent for item in of_sweep.found])
    todo = retry_lines(where, of_sweep.found[0].run, views) if any(map(is_unfinished, views)) else []
    if failures:
        first = shown(of_sweep.found[failures[0].runs[0]].run.path)
        todo = [f"python -m hpc_train why {first}   shows all about the first failure", *todo]
    box = block("todo", "What to do", commands(todo, "commands that help")) if todo else None
    return section("Verdict", block("paragraph", head, f"verdict {level}"), _cost(of_sweep), words, box)


def sweep_table(of_sweep: SweepFacts) -> Html:
    """Returns the section with the table of the runs, which ``wait`` and a submission print as well."""
    count, best = len(of_sweep.found), of_sweep.best
    order = sorted(range(count), key=lambda index: index != best)[:ROWS]
    shown_rows = sorted(order)
    over = all(view.exit is not None for view in of_sweep.views)
    found = rows_of(of_sweep.found, of_sweep.views, of_sweep.compared, shown_rows, ended=over)
    title = f"{counted(count, 'run', 'runs')}" + (f", of which {ROWS} are listed" if count > ROWS else "")
    marked = shown_rows.index(best) if best is not None else None
    columns = (*found.names, *found.numbers)
    return section("Runs", table(title, columns, found.rows, marked, len(found.numbers)))


def sweep_failed(of_sweep: SweepFacts, failures: Sequence[SweepFailure]) -> Html | None:
    """Returns the section with the causes, each with the runs that failed from it; None without failures."""
    causes = [_failure(of_sweep, each, number) for number, each in enumerate(failures, 1)]
    return section("Failures and causes", *causes) if causes else None


def failures_of(of_sweep: SweepFacts) -> list[SweepFailure]:
    return sweep_failures(of_sweep.found, of_sweep.views)


def _failure(of_sweep: SweepFacts, failure: SweepFailure, number: int) -> Html:
    names = [_failed_run(of_sweep, index) for index in failure.runs[:NAMED]]
    names += [f"and {len(failure.runs) - NAMED} more"] * (len(failure.runs) > NAMED)
    return joined(
        [
            block("heading", f"{failure.kind} in {counted(len(failure.runs), 'run', 'runs')}"),
            block("preformatted", failure.message, f"message of cause {number}") if failure.message else None,
            block("bullets", names),
            paragraphs([f"at {failure.place}"] if failure.place else []),
            paragraphs([f"What to do: {failure.advice}"] if failure.advice else []),
        ]
    )


def _failed_run(of_sweep: SweepFacts, index: int) -> str:
    """Returns the name of a run, what tells it apart, and where and when it failed."""
    run = of_sweep.found[index].run
    cause = find_cause(run.read_events())
    where = [] if cause is None else [f"{cause.who}, {clock(cause.time)}"]
    return ": ".join([f"{run.path.name}  {of_sweep.compared.words(run)}".rstrip(), *where])


def _cost(of_sweep: SweepFacts) -> Html:
    """Returns what all runs together have held, from their events alone: those of many runs are read at once."""
    spent = Account()
    for item, view in zip(of_sweep.found, of_sweep.views, strict=True):
        now = None if view.exit is not None else time.time()
        spent += ledger(item.run.read_events(), (), (), now, read_frozen(item.run)).total
    return block(
        "facts",
        (
            ("time held", format_duration(spent.held_s) if spent.held_s else None),
            ("GPU-hours", format_hours(spent.gpu_hours) if spent.gpu_s else None),
            ("rank-hours, no GPU", format_hours(spent.rank_s / 3600) if spent.rank_s else None),
        ),
    )


def reproduce_one(of_sweep: SweepFacts) -> Html:
    """Returns the section with the commands that start the best run again, or the first one if none is the best."""
    index = of_sweep.best or 0
    run = of_sweep.found[index].run
    which = "the best run" if of_sweep.best is not None else "the first run"
    words = f"These commands start {which}, {run.path.name}, again. The page of each run has those of its own."
    again = commands(training_again(run.record()), "commands that reproduce a run")
    return section("Reproduce", block("paragraph", words), again)


def coordinates(of_sweep: SweepFacts) -> Html | None:
    """Returns the section with parallel coordinates; None if the runs do not differ in a key."""
    compared, views = of_sweep.compared, of_sweep.views
    keys, metric, best = compared.keys, compared.ranked_by(of_sweep.views), of_sweep.best
    if not keys:
        return None
    settings = [compared.of_run(item.run) for item in of_sweep.found]
    values = compared.values(views)
    known = [value for value in values if value is not None]
    width = max(LEAST_WIDTH, LEFT + RIGHT + AXIS * len(keys))
    places = [LEFT + (width - LEFT - RIGHT) * number / len(keys) for number in range(len(keys) + 1)]
    axes = [_Axis.of(key, [own[key] for own in settings], at) for key, at in zip(keys, places, strict=False)]
    last = _Axis.of(metric.name, [repr(value) for value in known], places[-1]) if known else None
    lines = []
    for index in sorted(range(len(views)), key=lambda index: (index == best, values[index] is not None))[-LINES:]:
        points = [axis.at(settings[index][axis.name]) for axis in axes]
        value = values[index]
        if value is not None and last is not None:
            points.append(last.at(repr(value)))
        words = compared.words(of_sweep.found[index].run)
        lines.append(_line(points, index == best, views[index].exit != Exit.DONE, words))
    drawn = [*lines, *(axis.drawn() for axis in [*axes, *([last] if last else [])])]
    words = _words(of_sweep, keys, metric.name)
    title = "Parallel coordinates"
    return section(title, block("paragraph", words), block("figure", picture(title, words, width, HEIGHT, *drawn)))


def _words(of_sweep: SweepFacts, keys: Sequence[str], metric: str) -> str:
    best = of_sweep.best
    text = f"Each line is a run; it crosses the axes of {', '.join(keys)} and of {metric} at its values."
    unfinished = any(view.exit != Exit.DONE for view in of_sweep.views)
    text += " Dashed lines are runs that are not done." if unfinished else ""
    if best is None:
        return text
    return f"{text} The thick line is the best: {of_sweep.compared.words(of_sweep.found[best].run)}."


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
        numbers = [_number(value) for value in words if value != DEFAULT]
        finite = [number for number in numbers if number is not None]
        low, high = HEIGHT - BOTTOM, TOP
        if len(finite) == len(words) and len(set(finite)) > 1:
            wide = min(finite) > 0 and max(finite) / min(finite) >= 10
            scale = Scale(min(finite), max(finite), low, high, log=wide)
            return cls(name, x, scale, {}, sorted(set(finite)))
        step = (low - high) / max(1, len(words) - 1)
        middle = (low + high) / 2
        places = {word: low - index * step if len(words) > 1 else middle for index, word in enumerate(words)}
        return cls(name, x, None, places)

    def at(self, value: str) -> tuple[float, float]:
        return self.x, self.places[value] if self.scale is None else self.scale.at(float(value))

    def drawn(self) -> Html:
        parts = [block("line", f"M{self.x:.1f} {TOP:g}V{HEIGHT - BOTTOM:g}", "text", 1.2)]
        parts.append(block("label", self.name, f"{self.x:.1f}", 14, "middle"))
        for label, up in self._labels():
            place = (f"{self.x + 6:.1f}", f"{up + 4:.1f}")
            parts += [block("label", label, *place, kind="halo"), block("label", label, *place)]
        return joined(parts)

    def _labels(self) -> list[tuple[str, float]]:
        """Returns the values of a few runs, or else the ends of the axis with round values between them."""
        if self.scale is None:
            return [(word[:16], up) for word, up in self.places.items()]
        scale = self.scale
        if len(self.values) <= FEW:
            return [(short(value), scale.at(value)) for value in self.values]
        ends = [scale.at(end) for end in (scale.low, scale.high)]
        inside = [tick for tick in scale.ticks(4) if min(abs(scale.at(tick) - end) for end in ends) > LABEL]
        return [(short(value), scale.at(value)) for value in (scale.low, scale.high, *inside)]


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _line(points: Sequence[tuple[float, float]], best: bool, unfinished: bool, words: str) -> Html:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    color, width = ("c1", 4) if best else ("lost", 1.5) if unfinished else ("c0", 1.5)
    return block("line", path, color, width, unfinished, 1 if best else 0.7, words)
