"""Plots with matplotlib: curves over the steps, a sweep over each varied key, and how training scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.config.import_path import install_extra
from hpc_train.errors import UserError
from hpc_train.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


IMAGES = (".png", ".pdf", ".svg")
SHARES = {  # key of the metrics -> name and line style
    "data_wait_share": ("data", "-"),
    "comm_share": ("communication", "--"),
    "bubble_share": ("pipeline bubble", "-."),
    "host_share": ("host", ":"),
}
PANEL = (6.0, 3.6)  # inches
COLORS = 10  # colors in matplotlib's default cycle
MOST_LABELS = 12  # the largest number of labels in a legend
FEW_POINTS = 20
WIDE = 20.0  # ratio of the largest to the smallest value of a key from which its axis is logarithmic
WIDE_LOSS = 100.0  # the same ratio for the loss

Line = Mapping[str, Any]


def check_plot(path: Path, option: str) -> None:
    """Checks that a plot can be written, before anything is measured or read. ``option`` is the option of the command
    line that names the file. Raises UserError if matplotlib is not installed, or does not support the file type, or the
    file cannot be written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(
            "plotting requires matplotlib, which is not installed", where=option, fix=install_extra("plots")
        ) from error
    if path.suffix not in IMAGES:
        raise UserError(
            f"{path} is not an image file", where=option, fix=f"use a file name that ends in {', '.join(IMAGES)}"
        )
    fix = "name a file in a directory that exists"
    if path.is_dir():
        raise UserError(f"{path} is a directory", where=option, fix=fix)
    if not path.parent.is_dir():
        raise UserError(f"the directory {path.parent} does not exist", where=option, fix=fix)
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        fix = "name a file in a directory that you may write"
        raise UserError(f"{path} cannot be written ({error.strerror})", where=option, fix=fix) from error


@dataclass(frozen=True)
class Curves:
    """Holds the logged steps of one run. ``name`` is the label of the run."""

    name: str
    lines: Sequence[Line]

    def of(self, key: str, over: str) -> tuple[list[float], list[float]]:
        """Returns x and y of a metric; a value that is not finite is NaN, which leaves a gap."""
        points = [line for line in self.lines if key in line]
        return [self._at(line, over) for line in points], [_number(line[key]) for line in points]

    @property
    def marker(self) -> str:
        """Returns the marker of points; a line with one point would not be visible without a marker."""
        return "." if len(self.lines) <= FEW_POINTS else ""

    def has(self, key: str) -> bool:
        return any(key in line for line in self.lines)

    def _at(self, line: Line, over: str) -> float:
        if over == "hours":
            return (_number(line.get("time")) - _number(self.lines[0].get("time"))) / 3600
        return _number(line.get(over))


@dataclass(frozen=True)
class Results:
    """Holds the final value of a metric for each run of a sweep, and the keys that were varied.

    Attributes:
        values: NaN for a run without the metric.
        varied: the values of each key, one per run.
        best: the index of the best run; None without one.
    """

    metric: str
    values: Sequence[float]
    varied: Mapping[str, Sequence[Any]]
    best: int | None

    def compares(self, key: str) -> bool:
        """Returns whether runs with different values of ``key`` have the metric."""
        finite = zip(self.varied[key], map(math.isfinite, self.values), strict=True)
        return len({str(value) for value, known in finite if known}) > 1


def draw(path: Path, curves: Sequence[Curves], over: str, results: Results | None) -> None:
    """Writes loss, throughput, memory and time shares of all runs in one picture, with a panel per varied key below.
    ``over`` is ``step``, ``hours``, ``samples`` or ``tokens``. Raises UserError if the file cannot be written, for
    instance because the disk is full."""
    from cycler import cycler
    from matplotlib import colormaps, rc_context

    colors: Any = {}
    if len(curves) > COLORS:  # no two runs share a color
        spread = [colormaps["turbo"](index / (len(curves) - 1)) for index in range(len(curves))]
        colors = {"axes.prop_cycle": cycler(color=spread)}
    with rc_context(colors):  # includes saving, which is when the color of a line is looked up
        figure = _figure(curves, over, results)
        try:
            figure.savefig(path, dpi=120)
        except OSError as error:
            fix = "free some space, or name a file on another disk"
            raise UserError(f"{path} cannot be written ({error.strerror})", where=str(path.parent), fix=fix) from error


def _figure(curves: Sequence[Curves], over: str, results: Results | None) -> Figure:
    from matplotlib.figure import Figure

    keys: list[str] = []
    if results is not None:
        keys = [key for key in results.varied if results.compares(key)]
    rows = 2 + math.ceil(len(keys) / 2)
    figure = Figure(figsize=(2 * PANEL[0], rows * PANEL[1]), layout="constrained")
    panels = [axes for row in figure.subplots(rows, 2, squeeze=False) for axes in row]
    _loss(panels[0], curves, over)
    _throughput(panels[1], curves, over)
    _memory(panels[2], curves, over)
    _shares(panels[3], curves, over)
    for axes in panels[:4]:
        axes.set_xlabel(over)
        axes.xaxis.get_major_locator().set_params(integer=over != "hours")
    for axes, key in zip(panels[4:], keys, strict=False):
        assert results is not None
        _over_key(axes, results, key)
    for axes in panels[4 + len(keys) :]:
        axes.set_axis_off()
    if 1 < len(curves) <= MOST_LABELS:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


def _loss(axes: Axes, curves: Sequence[Curves], over: str) -> None:
    for number, run in enumerate(curves):
        axes.plot(*run.of("loss", over), color=f"C{number}", label=run.name, linewidth=1, marker=run.marker)
        axes.plot(*run.of("val_loss", over), color=f"C{number}", linestyle="--", marker="s", fillstyle="none")
    values = [line["loss"] for run in curves for line in run.lines if line.get("loss") is not None]
    if values and min(values) > 0 and max(values) >= WIDE_LOSS * min(values):
        axes.set_yscale("log")
    _titled(axes, "loss (dashed, squares: validation)")


def _throughput(axes: Axes, curves: Sequence[Curves], over: str) -> None:
    """Counts tokens, or samples for models with one target per sample, whose tokens are their samples."""
    lines = [line for run in curves for line in run.lines]
    by_sample = all(line.get("tokens_per_s") == line.get("samples_per_s") for line in lines)
    key = "samples_per_s" if by_sample else "tokens_per_s"
    for number, run in enumerate(curves):
        axes.plot(*run.of(key, over), color=f"C{number}", linewidth=1, marker=run.marker)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    _titled(axes, key.replace("_per_s", " per second"))


def _memory(axes: Axes, curves: Sequence[Curves], over: str) -> None:
    for number, run in enumerate(curves):
        at, peak = run.of("peak_memory_bytes", over)
        axes.plot(at, [value / GIB for value in peak], color=f"C{number}", linewidth=1, marker=run.marker)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    _titled(axes, "peak memory of a rank, GiB")


def _shares(axes: Axes, curves: Sequence[Curves], over: str) -> None:
    for key, (name, style) in SHARES.items():
        for number, run in enumerate(curves):
            axes.plot(*run.of(key, over), color=f"C{number}", linestyle=style, linewidth=1, marker=run.marker)
        if any(run.has(key) for run in curves):
            axes.plot([], [], color="black", linestyle=style, label=name)
    axes.set_ylim(0, 1)
    _titled(axes, "share of the time that ranks wait")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _over_key(axes: Axes, results: Results, key: str) -> None:
    values = results.varied[key]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) == len(values):
        at = [float(value) for value in numbers]
        if min(at) > 0 and max(at) >= WIDE * min(at):
            axes.set_xscale("log")
    else:
        names = sorted({str(value) for value in values})
        at = [float(names.index(str(value))) for value in values]
        axes.set_xticks(range(len(names)), names)
    axes.scatter(at, results.values, color="C0")
    if results.best is not None:
        axes.scatter(at[results.best], results.values[results.best], color="C3", marker="*", s=150, label="best")
        axes.legend()
    axes.set_xlabel(key)
    _titled(axes, results.metric)


def _titled(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


DAY = 86400


def draw_scaling(path: Path, points: Sequence[Mapping[str, Any]], title: str) -> None:
    """Writes the picture of the points of ``plan --simulate --json``, with their intervals as bands."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * PANEL[0], 2 * PANEL[1]), layout="constrained")
    figure.suptitle(title)
    speed, parts, useful, days = figure.subplots(2, 2).flat
    gpus = [point["gpus"] for point in points]
    first = points[0]["samples_per_s"]["middle"]
    _band(speed, gpus, [{name: value / first for name, value in point["samples_per_s"].items()} for point in points])
    speed.plot(gpus, [count / gpus[0] for count in gpus], color="black", linestyle=":", label="ideal")
    speed.set_yscale("log", base=2)
    speed.set_title(f"speed-up over {gpus[0]} GPUs", fontsize="medium")
    speed.legend()
    names = list(points[0]["parts_s"])
    parts.stackplot(gpus, [[point["parts_s"][name] for point in points] for name in names], labels=names, alpha=0.8)
    parts.set_title("seconds of a step", fontsize="medium")
    parts.legend(fontsize="small")
    _band(useful, gpus, [point["useful"] for point in points])
    useful.set_ylim(max(0.0, min(point["useful"]["low"] for point in points) - 0.05), 1.005)
    useful.set_title("share of the time in useful steps", fontsize="medium")
    if all(point["seconds"] for point in points):
        _band(days, gpus, [{name: value / DAY for name, value in point["seconds"].items()} for point in points])
        days.set_yscale("log")
        days.set_title("days to the end", fontsize="medium")
    else:
        days.set_axis_off()
    for axes in (speed, parts, useful, days):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _band(axes: Axes, gpus: Sequence[int], ranges: Sequence[Mapping[str, float]]) -> None:
    axes.fill_between(gpus, [each["low"] for each in ranges], [each["high"] for each in ranges], alpha=0.3)
    axes.plot(gpus, [each["middle"] for each in ranges], marker=".")
