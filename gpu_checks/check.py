"""A check on a GPU machine: what it is called, what it may take, how it tells what it has found, and the table of it.

A check is a function of one argument, its ``Probe``. It runs in a separate process, which may crash or hang. Each
call of ``Probe.expect`` appends a line to the results at once, so what was measured before that remains. A check
without a single expectation has failed: it could not have found anything.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

RESULTS = "results.jsonl"


class Verdict(StrEnum):
    """How a check ended. Only ``NOT_RUN`` and ``CUT_OFF`` are neither good nor bad."""

    PASSED = "passed"
    FAILED = "failed"  # an expectation was not met
    CRASHED = "crashed"  # an exception, a signal, or no expectation at all
    TOO_SLOW = "too slow"  # it exceeded its own limit
    CUT_OFF = "cut off"  # the budget was used up
    NOT_RUN = "not run"

    @property
    def is_failure(self) -> bool:
        return self in (Verdict.FAILED, Verdict.CRASHED, Verdict.TOO_SLOW)


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        entry: its function, as "module:function".
        limit_s: seconds on a GPU after which its processes are killed. In these it is what is left of the budget, if
            that is less.
        gpus: the number of GPUs without which it says nothing; 0 runs on the CPU as well.
        least_s: with less of the budget left it is not started.
        expected_s: the seconds that it is estimated to take on a GPU.
    """

    name: str
    entry: str
    limit_s: float
    gpus: int = 1
    least_s: float = 10.0
    expected_s: float = 10.0

    def function(self) -> Callable[[Probe], None]:
        module, _, name = self.entry.partition(":")
        function: Callable[[Probe], None] = getattr(importlib.import_module(module), name)
        return function


@dataclass(frozen=True)
class Place:
    """Where checks run.

    Attributes:
        out: the folder of the results.
        scratch: a folder for run directories, removed at the end.
        gpus: the number of GPUs; 0 for the CPU.
        cpu_ranks: without GPUs, the number of ranks with which the checks for several GPUs run on the CPU; 0: not.
    """

    out: Path
    scratch: Path
    gpus: int
    cpu_ranks: int = 0

    @property
    def ranks(self) -> int:
        return self.gpus or self.cpu_ranks


@dataclass(frozen=True)
class Finding:
    """One measurement. ``ok`` is None if nothing was expected, as for a fact."""

    check: str
    what: str
    measured: str
    expected: str
    ok: bool | None


@dataclass(frozen=True)
class Probe:
    """Gives a check the place, a separate folder, and the methods that report what it finds."""

    check: Check
    place: Place

    @property
    def on_gpu(self) -> bool:
        return self.place.gpus > 0

    @property
    def device(self) -> str:
        return "cuda" if self.on_gpu else "cpu"

    @property
    def folder(self) -> Path:
        folder = self.place.scratch / self.check.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def expect(self, what: str, measured: Any, expected: str, ok: bool) -> bool:
        """Records whether what was measured is as expected, and returns ``ok``."""
        self._write(Finding(self.check.name, what, shown(measured), expected, bool(ok)))
        return bool(ok)

    def equal(self, what: str, measured: Any, expected: Any) -> bool:
        return self.expect(what, measured, shown(expected), measured == expected)

    def within(self, what: str, value: float, low: float = -math.inf, high: float = math.inf, unit: str = "") -> bool:
        """Expects ``low <= value <= high``, which NaN never meets."""
        bounds = [f">= {shown(low)}"] * (low > -math.inf) + [f"<= {shown(high)}"] * (high < math.inf)
        return self.expect(what, f"{shown(value)} {unit}".strip(), " and ".join(bounds), low <= value <= high)

    def note(self, what: str, measured: Any) -> None:
        """Records a fact."""
        self._write(Finding(self.check.name, what, shown(measured), "", None))

    def row(self, cells: Mapping[str, Any]) -> None:
        """Records a row of a table of measurements; ``cells`` maps each column to its value."""
        shown_cells = {column: shown(value) for column, value in cells.items()}
        append(self.place.out, {"kind": "row", "check": self.check.name, "cells": shown_cells})

    def rows(self, check: str) -> list[dict[str, str]]:
        """Returns the rows of the last run of ``check``."""
        return rows_of([line for line in read(self.place.out) if line.get("check") == check])

    def _write(self, finding: Finding) -> None:
        append(self.place.out, {"kind": "finding", **asdict(finding)})


def append(out: Path, line: dict[str, Any]) -> None:
    """Appends one line to the results; a single write, since the runner and a check may both append."""
    descriptor = os.open(out / RESULTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps({**line, "time": round(time.time(), 1)}) + "\n").encode())
    finally:
        os.close(descriptor)


def read(out: Path) -> list[dict[str, Any]]:
    """Reads the results; a last line that was cut off with its process is omitted."""
    path = out / RESULTS
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def shown(value: Any) -> str:
    """Formats a value for the table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value)) or "none"
    return str(value)


def table(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Returns a table with a row per check and one per finding, of the last run of each check.

    Args:
        lines: the lines of ``results.jsonl``.
        names: the checks in their order; others in ``lines`` follow.
    """
    machine: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] == "machine"), {})
    devices = machine.get("devices") or []
    rows = [f"{len(devices)} x {devices[0]}" if devices else "no GPU", f"torch {machine.get('torch')}"]
    heading = ", ".join([*rows, f"Python {machine.get('python')}"])
    seen = dict.fromkeys([*names, *(line["check"] for line in lines if "check" in line)])
    of_check = {name: [line for line in lines if line.get("check") == name] for name in seen}
    body = [row for name, those in of_check.items() for row in _rows(name, those)]
    measured = [cells for those in of_check.values() for cells in rows_of(those)]
    return "\n".join(
        [
            heading,
            "",
            *_measurements(measured),
            "| check | verdict | s | measured | expected |",
            "|" + " --- |" * 5,
            *body,
            "",
        ]
    )


def rows_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Returns the rows of measurements of the last run of one check."""
    rows: list[dict[str, str]] = []
    for line in lines:
        if line["kind"] == "begin":
            rows = []
        elif line["kind"] == "row":
            rows.append(line["cells"])
    return rows


def _measurements(rows: Sequence[dict[str, str]]) -> list[str]:
    """Returns a table for each sequence of ``rows`` with the same columns, in the form of the pages of measurements."""
    lines: list[str] = []
    columns: list[str] = []
    for cells in rows:
        if columns != [*cells]:
            columns = [*cells]
            lines += [""] * bool(lines) + [_row(*columns), "|---|" + "---:|" * (len(columns) - 1)]
        lines.append(_row(*cells.values()))
    return [*lines, ""] if lines else []


def _rows(name: str, lines: Sequence[dict[str, Any]]) -> list[str]:
    findings, verdict = last_run(lines)
    if verdict is None:
        return [_row(name, "no verdict", "", "", ""), *map(_finding, findings)]
    ran = verdict["verdict"] != Verdict.NOT_RUN
    first = _row(f"**{name}**", verdict["verdict"], f"{verdict['seconds']:.1f}" * ran, verdict["reason"], "")
    return [first, *map(_finding, findings)]


def last_run(lines: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Returns the findings and the verdict of the last run of one check; of one that was killed no verdict."""
    findings: list[dict[str, Any]] = []
    verdict = None
    for line in lines:
        match line["kind"]:
            case "begin":
                findings, verdict = [], None
            case "finding":
                findings.append(line)
            case "verdict":
                verdict = line
    return findings, verdict


def _finding(line: dict[str, Any]) -> str:
    mark = {True: "yes", False: "**NO**", None: ""}[line["ok"]]
    return _row(line["what"], mark, "", line["measured"], line["expected"])


def _row(*cells: str) -> str:
    return f"| {' | '.join(_escaped(cells))} |"


def _escaped(cells: Iterable[str]) -> list[str]:
    return [" ".join(str(cell).split()).replace("|", "\\|")[:400] for cell in cells]
