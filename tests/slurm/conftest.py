"""One real cluster for all tests of this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, running


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with running(_state_directory()) as started:
        yield started


@pytest.fixture(scope="module")
def cluster_without_accounting() -> Iterator[Cluster]:
    with running(_state_directory(), "--no-accounting") as started:
        yield started


def _state_directory() -> Path:
    """A short path, since the sockets below it may have 107 characters, that munge finds open enough."""
    path = Path(tempfile.mkdtemp(prefix="hpc_train-slurm-"))
    path.chmod(0o755)
    return path
