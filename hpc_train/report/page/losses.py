"""Draws the loss and the other metrics over the steps of all attempts; lost work is gray."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_train.report.page.chart import Point, Series, line_chart
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, section, table
from hpc_train.run.rows import Line
from hpc_train.units import counted

LOST = "lost work, done again or to be done again"
CHARTS = 8  # of metrics; the table has all
EVALUATED = "val_"  # the prefix of what evaluations add to the metrics


def losses(facts: RunFacts) -> Html:
    """Returns the section with the loss curves."""
    skipped = len(facts.lines) - sum(line.loss is not None for line in facts.lines)
    if skipped == len(facts.lines):
        return section("Loss", block("paragraph", _why_none(facts)))
    lost = [Series(LOST, part, "lost", wide=True) for part in _lost_parts(facts)]
    kept = Series("training loss", _kept(facts, "loss"), "c0")
    validation = _kept(facts, "val_loss")
    series = [*lost, kept, Series("validation loss", validation, "c1", dots=True)]
    count = sum(facts.lost)
    words = [_words(facts, validation)]
    if count:
        words.append(f"{_steps(count)} lost, after the last checkpoint before a failure or a rollback.")
    if skipped:
        words.append(f"{skipped} of {len(facts.lines)} logged losses are missing or not finite, and are not drawn.")
    chart = line_chart("Loss over steps", " ".join(words), series, "step")
    return section("Loss", block("paragraph", " ".join(words)), chart)


def _why_none(facts: RunFacts) -> str:
    if facts.record.get("own_code") == "command":
        return "The command of the run has not reported a loss."
    return "No step was logged, so there is no loss to show."


def _kept(facts: RunFacts, key: str) -> list[Point]:
    return facts.values(key) if facts.kept else []


def _steps(count: int) -> str:
    return f"{counted(count, 'logged step', 'logged steps')} {'was' if count == 1 else 'were'}"


def _point(line: Line) -> Point | None:
    return None if line.loss is None else (line.step, line.loss)


def _lost_parts(facts: RunFacts) -> Iterator[list[Point]]:
    """Yields the lost parts of the curve, each with the point before it, from which it went on."""
    part: list[Point] = []
    before: Point | None = None
    for line, is_lost in zip(facts.lines, facts.lost, strict=True):
        point = _point(line)
        goes_on = before is None or point is None or point[0] > before[0]
        if part and not (is_lost and goes_on):
            yield part
            part = []
        if is_lost and point is not None:
            if not part and before is not None and goes_on:
                part.append(before)
            part.append(point)
        before = point or before
    if part:
        yield part


def _words(facts: RunFacts, validation: list[Point]) -> str:
    points = _kept(facts, "loss")
    if not points:
        return "No step was kept."
    (first, begin), (last, end) = points[0], points[-1]
    text = f"The training loss went from {begin:.4f} at step {first} to {end:.4f} at step {last}"
    if not validation:
        return f"{text}."
    best = min(validation, key=lambda point: point[1])
    return f"{text}; the lowest validation loss is {best[1]:.4f}, at step {best[0]}."


def evaluated(facts: RunFacts) -> Iterator[tuple[str, list[Point]]]:
    """Yields the name of each metric of the evaluations but the loss, without ``val_``, with its points by step."""
    names = dict.fromkeys(key for line in facts.kept for key in line if key.startswith(EVALUATED))
    for key in names:
        points = _kept(facts, key)
        if key != "val_loss" and points:
            yield key.removeprefix(EVALUATED), points


def metrics(facts: RunFacts) -> Html | None:
    """Returns the section with the metrics of the evaluations besides the loss; None without any."""
    rows: list[list[str]] = []
    charts: list[Html] = []
    for name, points in evaluated(facts):
        values = [value for _, value in points]
        last_step, last = points[-1]
        rows.append([name, f"{last:.4g}", f"{last_step:,}", f"{min(values):.4g}", f"{max(values):.4g}"])
        if len(points) > 1 and len(charts) < CHARTS:
            words = f"{name} of the validation data went from {values[0]:.4g} to {last:.4g}."
            charts.append(line_chart(f"{name} over steps", words, [Series(name, points, "c1", dots=True)], "step"))
    if not rows:
        return None
    columns = ("metric", "last value", "at step", "lowest", "highest")
    return section("Metrics", table("Validation metrics", columns, rows, numbers=4), *charts)
