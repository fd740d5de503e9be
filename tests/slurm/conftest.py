"""Provides real clusters to the tests of this folder and starts the tests that run in parallel with the others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpc_train.run.directory import RunDirectory
from tests.checkpoint.progress import LONG
from tests.doors import command
from tests.slurm.beside import MARK, Beside, is_beside
from tests.slurm.cluster import Cluster, link, side_by_side

CLUSTERS: dict[str, tuple[str, ...]] = {  # options of each cluster
    "cluster": (),
    "plain": ("--no-accounting",),
    "contended": ("--no-accounting",),  # has the jobs of one test at a time, which may take all nodes or remove one
    "network": ("--network", "--no-accounting"),  # its nodes are connected by a network
    "uneven": ("--network", "--no-accounting"),  # likewise; the link of its node n2 is slow
}
if LONG:
    CLUSTERS["limited"] = ("--no-accounting", "--limit-memory")  # kills steps that exceed their memory
    CLUSTERS["quiet"] = ("--no-accounting",)  # has the jobs of one test only


@pytest.fixture(scope="session")
def clusters(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Cluster]]]:
    """Starts the clusters that the selected tests use, by name."""
    used = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with side_by_side({name: options for name, options in CLUSTERS.items() if name in used}) as started:
        yield started


@pytest.fixture(scope="session")
def cluster(clusters: dict[str, Future[Cluster]]) -> Cluster:
    return clusters["cluster"].result()


@pytest.fixture(scope="session")
def plain(clusters: dict[str, Future[Cluster]]) -> Cluster:
    return clusters["plain"].result()


@pytest.fixture(scope="session")
def contended(clusters: dict[str, Future[Cluster]]) -> Cluster:
    return clusters["contended"].result()


@pytest.fixture(scope="session")
def quiet(clusters: dict[str, Future[Cluster]]) -> Cluster:
    return clusters["quiet"].result()


@pytest.fixture(scope="session")
def limited(clusters: dict[str, Future[Cluster]]) -> Cluster:
    return clusters["limited"].result()


@pytest.fixture(scope="session")
def network(clusters: dict[str, Future[Cluster]]) -> Cluster:
    return clusters["network"].result()


@pytest.fixture(scope="session")
def uneven(clusters: dict[str, Future[Cluster]]) -> Cluster:
    cluster = clusters["uneven"].result()
    link(cluster, "n2", "200mbit")
    return cluster


@pytest.fixture(scope="session")
def local_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Returns the loss of each step of the small hybrid run on this machine; other layouts give the same losses."""
    directory = tmp_path_factory.mktemp("local")
    asked = ["+strategy=hybrid", *command.TINY, "cluster=local", "cluster.cpu_workers=2", "run.name=run"]
    done = command.hpc_train(*asked, cwd=directory, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line["loss"] for line in RunDirectory(directory / "outputs" / "run").read_metrics()]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: mostly waits, and runs beside the other tests of tests/slurm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the tests that run in parallel with the others to the end of this folder."""
    mine = [place for place, item in enumerate(items) if item.path.is_relative_to(__file__.rpartition("/")[0])]
    ordered = sorted((items[place] for place in mine), key=is_beside)
    for place, item in zip(mine, ordered, strict=True):
        items[place] = item
        if is_beside(item):
            item.add_marker(pytest.mark.timeout(900))  # it may wait for the earlier tests of its thread


@pytest.fixture(scope="session", autouse=True)
def beside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Beside:
    """Starts the tests that run in parallel with the others, in one thread for each file and cluster, or for all files
    of ``contended``.
    """
    results = Beside()
    tmp_path_factory.getbasetemp()  # created here, because pytest's factory is not thread-safe
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    marked = [item for item in functions if is_beside(item) and not _is_skipped(item)]
    shared: dict[str, Any] = {}
    for name in {*CLUSTERS, "local_losses"} & {used for item in marked for used in item.fixturenames}:
        with suppress(pytest.skip.Exception):  # pytest later skips each test that needs this fixture
            shared[name] = request.getfixturevalue(name)
    for name, path in dict.fromkeys(map(_thread_of, marked)):
        items = [item for item in marked if _thread_of(item) == (name, path)]
        if name in shared:
            results.start(items, shared[name], shared, lambda test: tmp_path_factory.mktemp(test[:30].rstrip("]")))
    return results


def _is_skipped(item: pytest.Function) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def _thread_of(item: pytest.Function) -> tuple[str, Path | None]:
    cluster = _cluster_of(item)
    return cluster, None if cluster == "contended" else item.path


def _cluster_of(item: pytest.Function) -> str:
    return next(name for name in CLUSTERS if name in item.fixturenames)


@pytest.fixture(autouse=True)
def no_jobs_left(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    yield
    for name in {*CLUSTERS} & {*request.fixturenames}:
        request.getfixturevalue(name).cancel_below(tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Replaces the call of a test that runs in parallel with the others by its result."""
    if not is_beside(pyfuncitem):
        return None
    results = pyfuncitem.funcargs["beside"]
    assert isinstance(results, Beside)
    results.wait_for(pyfuncitem)
    return True
