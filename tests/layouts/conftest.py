"""One table at the end of the test output: what was compared with one process, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.layouts.cells import Refused
from tests.layouts.oracle import Outcome, line

COMPARED = pytest.StashKey[list[Outcome]]()
REFUSED = pytest.StashKey[list[Refused]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COMPARED], config.stash[REFUSED] = [], []


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[list[Outcome], list[Refused]], None]:
    """Adds outcomes and refusals to the table."""

    def add(outcomes: list[Outcome], refused: list[Refused]) -> None:
        request.config.stash[COMPARED].extend(outcomes)
        request.config.stash[REFUSED].extend(refused)

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    compared, refused = config.stash[COMPARED], config.stash[REFUSED]
    if not compared and not refused:
        return
    write = terminalreporter.write_line
    terminalreporter.section("layouts against one process")
    write("         relative errors: gradients, parameters after 5 steps, norms, losses")
    for outcome in compared:
        write(line(outcome))
    write(f"{len(compared)} compared, {len(refused)} refused:")
    for (split, reason), models in Counter((_split(entry), entry.reason) for entry in refused).items():
        write(f"  {split}: {reason} ({models} cells)")


def _split(refused: Refused) -> str:
    cell = refused.cell
    return f"{cell.world_size} ranks, " + " ".join(f"{key}={value}" for key, value in cell.strategy.items())
