"""Writes the metrics of all attempts to one table, ``<run>/metrics.csv``, with one row per logged step."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import append_text, write_text
from hpc_train.telemetry.sinks.backend import HEAD, Backend, Line


class Csv(Backend):
    """Appends a row per line of metrics.

    The table is written anew, from the files in ``metrics/``, when a job begins, when steps are done again, and when a
    line has a new column.
    """

    name = "csv"
    label = "CSV"

    def __init__(self, run: RunDirectory, output: Path | None = None) -> None:
        self.path = (output or run.path) / "metrics.csv"
        self._directory = run
        self._columns: list[str] = []
        self._last = 0

    def open(self) -> bool:
        self._rewrite(self._directory.read_metrics())
        return True

    def write(self, lines: Sequence[Line]) -> None:
        fresh = [line for line in lines if line["step"] > self._last]
        if len(fresh) == len(lines) and all(line.keys() <= set(self._columns) for line in lines):
            append_text(self.path, self._rows(lines))
            self._last = lines[-1]["step"]
        else:
            self._rewrite([line for line in self._directory.read_metrics() if line["step"] <= lines[-1]["step"]])

    def _rewrite(self, kept: Sequence[Line]) -> None:
        self._columns = [*HEAD, *dict.fromkeys(key for line in kept for key in line if key not in HEAD)]
        self._last = kept[-1]["step"] if kept else 0
        header = ",".join(self._columns) + "\n"
        write_text(self.path, header + self._rows(kept))

    def _rows(self, lines: Iterable[Line]) -> str:
        """Returns the rows; a value that a line does not have is empty."""
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(lines)
        return text.getvalue()
