"""Draws how a training scales: speed-up, the parts of a step, useful time and time to the end over the GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.report.plots import PANEL, check_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DAY = 86400


def check_scaling_plot(path: Path) -> None:
    """Raises UserError if the picture cannot be written."""
    check_plot(path, "--out")


def draw_scaling(path: Path, points: Sequence[Mapping[str, Any]], title: str) -> None:
    """Writes the picture of the points of ``plan --simulate --json``, with their intervals as bands."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * PANEL[0], 2 * PANEL[1]), layout="constrained")
    figure.suptitle(title)
    speed, parts, useful, days = figure.subplots(2, 2).flat
    gpus = [point["gpus"] for point in points]
    _speed(speed, gpus, points)
    _parts(parts, gpus, points)
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


def _speed(axes: Axes, gpus: Sequence[int], points: Sequence[Mapping[str, Any]]) -> None:
    first = points[0]["samples_per_s"]["middle"]
    _band(axes, gpus, [{name: value / first for name, value in point["samples_per_s"].items()} for point in points])
    axes.plot(gpus, [count / gpus[0] for count in gpus], color="black", linestyle=":", label="ideal")
    axes.set_yscale("log", base=2)
    axes.set_title(f"speed over that of {gpus[0]} GPUs", fontsize="medium")
    axes.legend()


def _parts(axes: Axes, gpus: Sequence[int], points: Sequence[Mapping[str, Any]]) -> None:
    names = list(points[0]["parts_s"])
    axes.stackplot(gpus, [[point["parts_s"][name] for point in points] for name in names], labels=names, alpha=0.8)
    axes.set_title("seconds of a step", fontsize="medium")
    axes.legend(fontsize="small")


def _band(axes: Axes, gpus: Sequence[int], ranges: Sequence[Mapping[str, float]]) -> None:
    axes.fill_between(gpus, [each["low"] for each in ranges], [each["high"] for each in ranges], alpha=0.3)
    axes.plot(gpus, [each["middle"] for each in ranges], marker=".")
