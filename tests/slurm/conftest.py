"""Provides real clusters to the tests of this folder."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.doors import command
from tests.slurm.cluster import Cluster, link, reconfigured, side_by_side
from tests.slurm.runs import with_python

CLUSTERS: dict[str, tuple[str, ...]] = {  # options of each cluster; the short form uses the first
    "cluster": (),
    "plain": ("--no-accounting",),
    "limited": ("--no-accounting", "--limit-memory"),  # kills steps that exceed their memory
    "cloud": ("--no-accounting",),  # powers nodes down and up
    "network": ("--network", "--no-accounting"),  # its nodes are connected by a network
}


@pytest.fixture(scope="session")
def clusters(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Cluster]]]:
    """Starts the clusters that the selected tests use, by name."""
    items = [item for item in request.session.items if not any(mark.args[0] for mark in item.iter_markers("skipif"))]
    used = {name for item in items for name in getattr(item, "fixturenames", ())}
    with side_by_side({name: options for name, options in CLUSTERS.items() if name in used}) as started:
        yield started


@pytest.fixture(scope="session")
def cluster(clusters: dict[str, Future[Cluster]]) -> Cluster:
    return clusters["cluster"].result()


@pytest.fixture(scope="session")
def python(cluster: Cluster) -> Cluster:
    """``cluster`` with this interpreter as ``python``, the command that batch scripts call."""
    return with_python(cluster)


@pytest.fixture(scope="session")
def plain(clusters: dict[str, Future[Cluster]]) -> Cluster:
    return clusters["plain"].result()


@pytest.fixture(scope="session")
def limited(clusters: dict[str, Future[Cluster]]) -> Cluster:
    return clusters["limited"].result()


@pytest.fixture(scope="session")
def cloud(clusters: dict[str, Future[Cluster]]) -> Iterator[Cluster]:
    """A cluster that powers nodes down and up on request; ResumeProgram does nothing, so that a node never starts."""
    started = clusters["cloud"].result()
    settings = "SuspendProgram=/bin/true\nResumeProgram=/bin/true\nSuspendTime=100000\nSuspendTimeout=5\n"
    with reconfigured(started, lambda text: f"{text}{settings}ResumeTimeout=60\n"):
        yield started


@pytest.fixture(scope="session")
def network(clusters: dict[str, Future[Cluster]]) -> Cluster:
    return clusters["network"].result()


@pytest.fixture
def uneven(network: Cluster) -> Iterator[Cluster]:
    """The network, with a slow link of its node n2."""
    link(network, "n2", "200mbit")
    yield network
    link(network, "n2", "whole")


@pytest.fixture
def call(
    cluster: Cluster, called: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs a command of ``hpc_train`` on ``cluster``, in this process."""
    monkeypatch.setattr("tests.conftest.environment", lambda: cluster.environment)
    return called


@pytest.fixture(scope="session")
def local_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Returns the loss of each step of the small hybrid run on this machine; other layouts give the same losses."""
    directory = tmp_path_factory.mktemp("local")
    arguments = ["+strategy=hybrid", *command.TINY, "cluster=local", "cluster.cpu_workers=2", "run.name=run"]
    done = command.hpc_train(*arguments, cwd=directory, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line["loss"] for line in RunDirectory(directory / "outputs" / "run").read_metrics()]


@pytest.fixture(autouse=True)
def no_jobs_left(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    yield
    for name in CLUSTERS.keys() & {*request.fixturenames}:
        request.getfixturevalue(name).cancel_below(tmp_path)
