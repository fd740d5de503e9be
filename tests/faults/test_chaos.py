"""Runs the kinds of ``tests.faults.chaos`` one by one on one cluster, except those that have passed with this code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.progress import Progress
from tests.faults.chaos import KINDS, Stage, perform, stage, why_impossible
from tests.faults.measured import SEED
from tests.faults.on_slurm import skip_unless_long

pytestmark = [skip_unless_long("an hour on a real Slurm"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("stage")) as found:
        yield found


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_fault_costs_no_step_and_is_told(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    progress = Progress.of("chaos")
    impossible = why_impossible(name)
    if impossible is not None or not progress.open([name]):
        pytest.skip(impossible or "has passed with this code")
    perform(name, request.getfixturevalue("ready"), int(SEED), tmp_path)
    progress.passed(name)
