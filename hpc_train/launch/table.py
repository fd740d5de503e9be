"""Submitted jobs as a live table; as plain lines where the output is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hpc_train.config.schema import Config
from hpc_train.launch.watch import View, time_left
from hpc_train.telemetry.progress import duration

LINE_EVERY_S = 10.0
ROWS = 30  # a terminal shows no more; jobs that have ended are counted instead


class Row(Protocol):
    """What the table says of a job besides how it stands."""

    @property
    def number(self) -> int: ...

    @property
    def config(self) -> Config: ...


class JobTable:
    """``show`` takes how the jobs stand now; ``close`` leaves the last state on the screen."""

    def __init__(self, jobs: Sequence[Row], console: Console) -> None:
        self._jobs = jobs
        self._console = console
        self._live: Live | None = None
        self._told: dict[int, tuple[str, float]] = {}

    def show(self, views: Sequence[View]) -> None:
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._live.start()
            self._live.update(self._table(views), refresh=True)
        else:
            self._lines(views)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, views: Sequence[View]) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("job", "strategy", "state"):
            table.add_column(name)
        for name in ("nodes", "step", "loss", "tokens/s", "time left", "restarts"):
            table.add_column(name, justify="right")
        rows = list(zip(self._jobs, views, strict=True))
        shown = sorted(rows, key=lambda row: (row[1].exit == 0, row[0].number))[:ROWS]
        for job, view in sorted(shown, key=lambda row: row[0].number):
            table.add_row(*cells(job, view))
        if len(rows) > ROWS:
            done = sum(view.exit == 0 for view in views)
            table.caption = f"{len(rows)} jobs, {done} done, {len(rows) - len(shown)} not shown"
        return table

    def _lines(self, views: Sequence[View]) -> None:
        now = time.monotonic()
        for job, view in zip(self._jobs, views, strict=True):
            state, told_at = self._told.get(job.number, ("", 0.0))
            if view.state != state or (view.state == "running" and now - told_at > LINE_EVERY_S):
                self._told[job.number] = (view.state, now)
                self._console.print(plain_line(job, view), markup=False, highlight=False, soft_wrap=True)


def cells(job: Row, view: View) -> tuple[str, ...]:
    """One row: job, strategy, state, nodes, step, loss, tokens/s, time left, restarts."""
    metrics, steps = view.metrics, view.steps
    step, loss, speed = metrics.get("step"), metrics.get("loss"), metrics.get("tokens_per_s")
    seconds = time_left(view)
    left = "" if seconds is None else duration(seconds)
    return (
        str(job.number),
        job.config.strategy.name,
        view.state,
        str(view.nodes or job.config.cluster.nodes),
        "" if step is None else f"{step}" + (f"/{steps}" if steps else ""),
        "" if loss is None else f"{loss:.4f}",
        "" if speed is None else f"{speed:,.0f}",
        left,
        str(view.restarts or ""),
    )


def plain_line(job: Row, view: View) -> str:
    number, strategy, state, _, step, loss, speed, left, restarts = cells(job, view)
    parts = [f"job {number}", strategy, state]
    parts += [text for value, text in ((step, f"step {step}"), (loss, f"loss {loss}")) if value]
    parts += [text for value, text in ((speed, f"{speed} tokens/s"), (left, f"{left} left")) if value]
    parts += [f"{restarts} restart{'s' if view.restarts > 1 else ''}"] if restarts else []
    return " · ".join(parts)
