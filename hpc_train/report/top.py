"""Shows the runs in the terminal: a table, and for the chosen run its curves, its newest step and its events."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from rich.markup import escape as escape_markup
from textual import work
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, Header, Sparkline, Static

from hpc_train.report.live_runs import Details, Row, Runs
from hpc_train.run.events import Event
from hpc_train.run.streams import escaped
from hpc_train.units import counted

COLUMNS = ("run", "state", "step", "loss", "speed", "GPU", "time left", "restarts")
RIGHT = COLUMNS[2:]
POINTS = 200  # the largest number of points of a curve


class Top(App[None]):
    """Runs the live view. Files are read in a thread, so that a slow file system does not freeze the keyboard."""

    TITLE = "hpc_train top"
    CSS = """
    DataTable { height: 1fr; }
    #chosen { height: 14; border-top: solid $primary; }
    #facts { width: 1fr; padding: 0 1; }
    #stages { width: auto; max-width: 40%; padding: 0 1; }
    #events { width: 2fr; padding: 0 1; }
    Sparkline { height: 2; margin: 0 1; }
    """
    BINDINGS: ClassVar[list[Any]] = [("q", "quit", "quit"), ("r", "refresh_now", "refresh")]

    def __init__(self, runs: Runs, interval_s: float) -> None:
        super().__init__()
        self._runs = runs
        self._interval_s = interval_s
        self._rows: list[Row] = []
        self._details: Details | None = None

    def compose(self) -> ComposeResult:
        yield Header()
        yield DataTable(cursor_type="row", zebra_stripes=True)
        with Horizontal(id="chosen"):
            with Vertical(id="facts"):
                yield Static("", id="newest")
                yield Static("loss", classes="label")
                yield Sparkline([], id="losses")
                yield Static("samples/s", classes="label")
                yield Sparkline([], id="rates")
            yield Static("", id="stages")
            yield Static("", id="events")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).add_columns(*COLUMNS)
        self.set_interval(self._interval_s, self.action_refresh_now)
        self.action_refresh_now()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        chosen = next((row for row in self._rows if str(row.run.run.path) == event.row_key.value), None)
        if chosen is not None and (self._details is None or self._details.run.run.path != chosen.run.run.path):
            self._details = Details(chosen.run)
            self.action_refresh_now()

    def action_refresh_now(self) -> None:
        """Starts to read the runs; ``_show`` shows them when they have been read."""
        self._read()

    @work(thread=True, exclusive=True, group="read")
    def _read(self) -> None:
        details = self._details
        rows = self._runs.rows()
        if details is not None:
            details.look()
        self.call_from_thread(self._show, rows, details)

    def _show(self, rows: list[Row], details: Details | None) -> None:
        table = self.query_one(DataTable)
        paths = [str(row.run.run.path) for row in rows]
        if paths != [str(row.run.run.path) for row in self._rows]:
            table.clear()
            for row, path in zip(rows, paths, strict=True):
                table.add_row(*map(escape, row.cells()), key=path)
        else:
            for number, row in enumerate(rows):
                for column, text in enumerate(row.cells()):
                    table.update_cell_at((number, column), escape(text), update_width=True)  # type: ignore[arg-type]
        self._rows = rows
        self.sub_title = self._runs.note or counted(len(rows), "run", "runs")
        chosen = next((row for row in rows if details is not None and row.run.run.path == details.run.run.path), None)
        if chosen is not None and details is not None:
            self.query_one("#newest", Static).update(escape("\n".join(details.lines(chosen.view))))
            self.query_one("#losses", Sparkline).data = [*details.losses.values()][-POINTS:]
            self.query_one("#rates", Sparkline).data = [*details.rates.values()][-POINTS:]
            self.query_one("#stages", Static).update(escape("\n".join(details.stages)))
            self.query_one("#events", Static).update(escape("\n".join(map(_event, reversed(details.events)))))


def escape(text: str) -> str:
    """Returns ``text`` escaped so that the widgets show it unchanged, with control characters made visible."""
    return escape_markup(escaped(text))


def _event(event: Event) -> str:
    at = time.strftime("%m-%d %H:%M:%S", time.localtime(event.time))
    step = "" if event.step is None else f" step {event.step}"
    what = (event.message or event.reason).strip().splitlines()
    return f"{at} {event.name}{step}" + (f": {what[0]}" if what else "")
