"""Draws the losses of a run with characters, for the summary at its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

WIDTH, HEIGHT = 56, 10
TRAIN, VALIDATION = "•", "o"

Point = tuple[int, float]


def loss_chart(metrics: Sequence[dict[str, Any]], width: int = WIDTH, height: int = HEIGHT) -> str:
    """Draws the training loss (•) and the validation loss (o) over the steps; empty with fewer than two losses.

    Each column shows the mean of the losses in its range of steps.
    """
    train = _points(metrics, "loss")
    validation = _points(metrics, "val_loss")
    if len(train) < 2:
        return ""
    steps = [step for step, _ in train + validation]
    values = [value for _, value in train + validation]
    low, high = min(values), max(values)
    grid = [[" "] * width for _ in range(height)]
    for points, mark in ((train, TRAIN), (validation, VALIDATION)):
        for column, value in _columns(points, min(steps), max(steps), width):
            row = 0 if high == low else round((high - value) / (high - low) * (height - 1))
            grid[row][column] = mark
    labels = {0: f"{high:.3f}", height - 1: f"{low:.3f}"}
    lines = [f"{labels.get(row, ''):>8} ┤{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    first = f"step {min(steps)}"
    last = str(max(steps))
    axis = f"{'':>8} └{'─' * width}"
    return "\n".join([*lines, axis, f"{'':>10}{first}{last:>{max(1, width - len(first))}}"])


def _points(metrics: Iterable[dict[str, Any]], key: str) -> list[Point]:
    return [(line["step"], line[key]) for line in metrics if line.get(key) is not None]


def _columns(points: Sequence[Point], first: int, last: int, width: int) -> list[tuple[int, float]]:
    columns: dict[int, list[float]] = {}
    for step, value in points:
        columns.setdefault(round((step - first) / max(1, last - first) * (width - 1)), []).append(value)
    return [(column, sum(values) / len(values)) for column, values in columns.items()]
