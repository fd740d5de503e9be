"""Provides a real Slurm for faults on nodes, and long forms that resume after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.progress import LONG, Progress
from tests.faults.measured import Times, fault_step, trials
from tests.faults.on_slurm import STEPS, restore, undisturbed
from tests.slurm.cluster import Cluster, running


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "trials(usual): how often the long form does it, 3 times without")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trial" in metafunc.fixturenames:  # of the fixture step too
        marked = metafunc.definition.get_closest_marker("trials")
        metafunc.parametrize("trial", range(trials(marked.args[0] if marked else 3)))


@pytest.fixture(scope="package")
def nodes() -> Iterator[Cluster]:
    """Starts a separate cluster, because the tests kill its nodes; the long form has one with accounting."""
    with running(*([] if LONG else ["--no-accounting"])) as started:
        yield started


@pytest.fixture
def cluster(nodes: Cluster, tmp_path: Path) -> Iterator[Cluster]:
    restore(nodes)
    yield nodes
    nodes.cancel_below(tmp_path)


@pytest.fixture(scope="package")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the SHA-256 of the weights of the undisturbed run."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)


@pytest.fixture(scope="package")
def times() -> Iterator[Times]:
    found = Times(Progress.of("nodes"))
    yield found
    print(f"\n{found.table()}")


@pytest.fixture
def step(request: pytest.FixtureRequest, trial: int, times: Times) -> Iterator[int]:
    """Returns the step at which the fault is injected; skips a trial that has passed with this code."""
    case, failed = request.node.name, request.session.testsfailed
    if not times.progress.open([case]):
        pytest.skip("has passed with this code")
    yield fault_step(case)
    if request.session.testsfailed == failed:
        times.progress.passed(case)
