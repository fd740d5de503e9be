"""Writes the metrics of all attempts to one table, ``<run>/metrics.csv``, with one row per logged step."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import append_text, write_text
from hpc_train.telemetry.sinks.sink import HEAD, Backend, Line


class Csv(Backend):
    """Appends a row per line of metrics.

    The table is written anew, from the files in ``metrics/``, when an attempt begins, when steps are done again, and
    when a line has a new column.

    Args:
        first_step: completed steps when the attempt begins; rows of later steps are removed. None keeps them.
    """

    name = "csv"
    label = "CSV"

    def __init__(self, run: RunDirectory, first_step: int | None = None) -> None:
        self.path = run.path / "metrics.csv"
        self._directory = run
        self._first_step = first_step
        self._columns: list[str] = []
        self._last = 0

    def open(self) -> bool:
        kept = self._directory.read_metrics()
        self._rewrite(line for line in kept if self._first_step is None or line["step"] <= self._first_step)
        return True

    def write(self, lines: Sequence[Line]) -> None:
        steps = [self._last, *(line["step"] for line in lines)]
        if steps == sorted(set(steps)) and all(line.keys() <= set(self._columns) for line in lines):
            append_text(self.path, self._rows(lines))
            self._last = steps[-1]
            return
        merged = {line["step"]: line for line in self._directory.read_metrics()} | {
            line["step"]: line for line in lines
        }
        self._rewrite(merged[step] for step in sorted(merged) if step <= steps[-1])

    def _rewrite(self, lines: Iterable[Line]) -> None:
        kept = list(lines)
        self._columns = [*HEAD, *dict.fromkeys(key for line in kept for key in line if key not in HEAD)]
        self._last = kept[-1]["step"] if kept else 0
        header = ",".join(self._columns) + "\n"
        write_text(self.path, header + self._rows(kept))

    def _rows(self, lines: Iterable[Line]) -> str:
        """Returns the rows; a value that a line does not have is empty."""
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(lines)
        return text.getvalue()
