"""One real cluster for all tests of this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, running


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    # a short path: the sockets below it may have 107 characters
    with running(Path(tempfile.mkdtemp(prefix="hpc_train-slurm-"))) as started:
        yield started


@pytest.fixture(scope="module")
def cluster_without_accounting() -> Iterator[Cluster]:
    with running(Path(tempfile.mkdtemp(prefix="hpc_train-slurm-")), "--no-accounting") as started:
        yield started
