"""Prints a table at the end of the test output: the cells compared with one process, and those refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.parallel.cells import Refused
from tests.parallel.oracle import Outcome, line

# These are the names of test properties, which pytest-xdist sends from the process of the test.
COMPARED, REFUSED = "compared with one process", "refused"


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[list[Outcome], list[Refused]], None]:
    """Returns a function that adds outcomes and refused cells to the table."""

    def add(outcomes: list[Outcome], refused: list[Refused]) -> None:
        properties = request.node.user_properties
        properties += [(COMPARED, line(outcome)) for outcome in outcomes]
        properties += [(REFUSED, f"{_split(entry)}: {entry.reason}") for entry in refused]

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    properties = [each for report in reports if report.when == "call" for each in report.user_properties]
    compared = [text for name, text in properties if name == COMPARED]
    refused = [text for name, text in properties if name == REFUSED]
    if not compared and not refused:
        return
    write = terminalreporter.write_line
    terminalreporter.section("layouts against one process")
    write("         relative errors: gradients, parameters after the last step, norms, losses")
    for text in compared:
        write(text)
    write(f"{len(compared)} compared, {len(refused)} refused:")
    for text, models in Counter(refused).items():
        write(f"  {text} ({models} cells)")


def _split(refused: Refused) -> str:
    cell = refused.cell
    return f"{cell.world_size} ranks, " + " ".join(f"{key}={value}" for key, value in cell.strategy.items())
