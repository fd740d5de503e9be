"""Makes the markup of the page from the templates in this folder, and draws its charts as SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup as Html

if TYPE_CHECKING:
    from jinja2 import Environment


CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")  # HTML does not allow them
TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colors and cursor movements


@cache
def environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes 0.1 s

    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=printable,
        keep_trailing_newline=True,
    )


def printable(value: Any) -> Any:
    """Returns what a template shows of ``value``: nothing for None, and text without control characters."""
    if value is None:
        return ""
    if isinstance(value, Html):
        return value
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", TERMINAL.sub("", str(value)))


def text(value: object) -> Html:
    """Returns ``value`` as markup: markup is unchanged, everything else is escaped."""
    return Html.escape(printable(value))


def block(name: str, *values: object, **named: object) -> Html:
    """Returns the macro ``name`` of ``templates/blocks.html`` with these values, of which text is escaped."""
    macro = getattr(environment().get_template("blocks.html").module, name)
    return Html(macro(*values, **named).strip())


def joined(content: Iterable[object]) -> Html:
    return Html("").join(text(each) for each in content)


def paragraphs(lines: Iterable[object]) -> Html:
    return joined(block("paragraph", line) for line in lines)


def commands(lines: Sequence[str], label: str) -> Html:
    """Returns command lines as a block; what follows three spaces in a line is a comment. ``label`` is the purpose of
    the block, which must differ from the labels of all other blocks of the page."""
    return block("preformatted", "\n".join(line.replace("   ", "   # ", 1) for line in lines), label)


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]], best: int | None = None, numbers: int = 0
) -> Html:
    """Returns a table whose first cell of each row is its heading.

    Args:
        best: the index of a row to mark.
        numbers: how many of the last columns hold numbers, which are aligned at the right.
    """
    return block("table", caption, columns, rows, best, numbers)


def section(title: str, *content: object) -> Html:
    """Returns a section of the page with its heading; ``content`` that is empty or None is left out."""
    return block("section", _name(title), title, *filter(None, content))


def picture(title: str, description: str, width: float, height: float, *shapes: Html) -> Html:
    """Returns an SVG picture with its description as text."""
    return block("picture", _name(title), title, description, width, height, *shapes)


def _name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


Point = tuple[float, float]

WIDTH, HEIGHT = 640.0, 250.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 28.0, 12.0, 52.0
WIDE = 7
POINTS = 400  # the largest number of points of a line; more would not be visible
LOG_FROM = 30.0  # ratio of the largest to the smallest value from which the axis is logarithmic


@dataclass(frozen=True)
class Series:
    """Holds one line, or points that are not connected.

    Attributes:
        color: a color of the style sheet, such as ``c0``.
        wide: whether the line is so wide that it remains visible on both sides of a line that covers it.
    """

    name: str
    points: Sequence[Point]
    color: str
    dashed: bool = False
    dots: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Scale:
    """Maps values to positions between ``start`` and ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low = self.low
        high = self.high
        if self.log:
            low, high, value = map(math.log10, (low, high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Returns round values within the scale."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
            inside = [value for value in values if self.low <= value <= self.high]
            if len(inside) <= most + 2:
                return inside
            decades = [value for value in inside if f"{value:e}".startswith("1.0")]
            return decades[:: math.ceil(len(decades) / most) or 1]
        least = (self.high - self.low) / most
        step = 1.0
        if least > 0 and math.isfinite(least):
            power = 10.0 ** math.floor(math.log10(least))
            step = next(digit * power for digit in (1, 2, 2.5, 5, 10) if digit * power >= least * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Returns a number with at most four digits: 0.25, 1,500, 12k, 3.4M."""
    size = abs(value)
    for size_of_unit, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(1e4, size_of_unit):
            return f"{value / size_of_unit:.4g}{unit}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def line_chart(
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    from_zero: bool = False,
    percent: bool = False,
    height: float = HEIGHT,
) -> Html:
    """Returns a chart over the steps, with its legend.

    Args:
        description: what the chart shows, as text with figures, for readers who do not see it.
        from_zero: whether the vertical axis begins at 0.
        percent: whether the values are shares of 1.
    """
    lines = [replace(line, points=thinned(line.points)) for line in series if line.points]
    steps = [at for line in lines for at, _ in line.points]
    x = Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    if x.high == x.low:
        x = replace(x, high=x.low + 1)
    y = _vertical([value for line in lines for _, value in line.points], from_zero, height)

    axes = []
    for value in y.ticks():
        up = y.at(value)
        words = f"{100 * value:.3g} %" if percent else short(value)
        axes.append(block("line", f"M{LEFT:g} {up:.1f}H{WIDTH - RIGHT:g}", "line", 1))
        axes.append(block("label", words, f"{LEFT - 8:g}", f"{up + 4:.1f}", "end"))
    for value in x.ticks():
        axes.append(block("label", short(value), f"{x.at(value):.1f}", f"{height - BOTTOM + 20:g}", "middle"))
    axes.append(block("label", "step", f"{WIDTH - RIGHT:g}", f"{height - 6:g}", "end", "soft"))

    shapes = []
    for line in lines:
        points = [(x.at(at), y.at(value)) for at, value in line.points]
        if line.dots or len(points) == 1:
            shapes.append(block("dots", points, line.color))
        else:
            path = "M" + "L".join(f"{at:.1f} {up:.1f}" for at, up in points)
            shapes.append(block("line", path, line.color, WIDE if line.wide else 1.8, line.dashed))
    return block("figure", picture(title, description, WIDTH, height, joined(axes), joined(shapes)), legend(lines))


LOADS = (  # the largest load relative to the mean, color, opacity, name
    (0.0, "bad", 1.0, "no token"),
    (0.5, "c0", 0.15, "at most half of the mean"),
    (1.0, "c0", 0.3, "at most the mean"),
    (1.5, "c0", 0.45, "at most 1.5 times the mean"),
    (2.0, "c0", 0.65, "at most twice"),
    (math.inf, "c0", 1.0, "more than twice"),
)


def heat_map(
    title: str, description: str, rows: Sequence[tuple[str, Sequence[float]]], across: str, ends: tuple[str, str]
) -> Html:
    """Returns a picture with a row of cells for each name, colored by the load, with its legend.

    Args:
        rows: name and loads relative to the mean; all rows are equally long.
        across: the name of the horizontal axis.
        ends: what the first and the last column are.
    """
    up = max(4.0, min(18.0, 320.0 / len(rows)))
    wide = (WIDTH - LEFT - RIGHT) / len(rows[0][1])
    paths: dict[int, list[str]] = {}
    for row, (_, loads) in enumerate(rows):
        for column, load in enumerate(loads):
            level = next(level for level, (most, *_) in enumerate(LOADS) if load <= most)
            corner = f"M{LEFT + column * wide:.1f} {TOP + row * up:.1f}"
            paths.setdefault(level, []).append(f"{corner}h{wide:.1f}v{up:.1f}h-{wide:.1f}z")
    height = TOP + len(rows) * up + BOTTOM
    shapes = []
    key = []
    for level, parts in sorted(paths.items()):
        _, color, opacity, name = LOADS[level]
        shapes.append(block("area", "".join(parts), color, name, opacity))
        key.append((name, "area", color, opacity, False))
    for row in range(0, len(rows), max(1, round(14 / up))):
        shapes.append(block("label", rows[row][0], f"{LEFT - 8:g}", f"{TOP + (row + 0.5) * up + 4:.1f}", "end"))
    below = f"{height - BOTTOM + 20:g}"
    shapes.append(block("label", ends[0], f"{LEFT:g}", below))
    shapes.append(block("label", ends[1], f"{WIDTH - RIGHT:g}", below, "end"))
    shapes.append(block("label", across, f"{WIDTH - RIGHT:g}", f"{height - 6:g}", "end", "soft"))
    return block("figure", picture(title, description, WIDTH, height, joined(shapes)), block("legend", key))


def _vertical(values: Sequence[float], from_zero: bool, height: float) -> Scale:
    low = min(values)
    high = max(values)
    scale = Scale(low, high, height - BOTTOM, TOP)
    if from_zero:
        return replace(scale, low=0.0, high=max(0.0, 1.08 * high) or 1.0)
    if low > 0 and high / low >= LOG_FROM:
        return replace(scale, low=low / 1.1, high=high * 1.1, log=True)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return replace(scale, low=low - margin, high=high + margin)


def thinned(points: Sequence[Point]) -> list[Point]:
    """Returns at most POINTS points: both ends, and the lowest and highest of each of equal parts, in their order."""
    if len(points) <= POINTS:
        return list(points)
    parts = POINTS // 2 - 1
    extremes = [points[0]]
    for part in range(parts):
        chunk = points[part * len(points) // parts : (part + 1) * len(points) // parts]
        extremes += sorted({min(chunk, key=itemgetter(1)), max(chunk, key=itemgetter(1))})
    return list(dict.fromkeys([*extremes, points[-1]]))


def legend(series: Sequence[Series]) -> Html:
    """Returns the names of the lines with a sample of each; one entry per name."""
    samples = {
        line.name: (line.name, "dots" if line.dots else "line", line.color, WIDE if line.wide else 3, line.dashed)
        for line in series
    }
    return block("legend", list(samples.values()))


def color_key(names: Sequence[tuple[str, str]]) -> Html:
    """Returns a legend of filled areas: (name, color)."""
    return block("legend", [(name, "area", color, 0, False) for name, color in names])
