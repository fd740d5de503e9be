"""Lets ``prepare`` work without worker processes in the short form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hpc_train.data import image_shards, prepare
from hpc_train.data.conversion import Progress
from tests.checkpoint.progress import LONG


def run_jobs(
    function: Callable[..., None], jobs: Sequence[Any], workers: int, on_progress: Callable[[Progress], None]
) -> None:
    """Does what ``conversion.run_jobs`` does, in this process: each worker would take a second to start."""
    counts = np.zeros((len(jobs), 2), np.int64)
    for number, job in enumerate(jobs):

        def report(done: int, items: int, number: int = number) -> None:
            counts[number] = done, items

        function(job, report)
        on_progress(Progress(*counts.sum(0).tolist()))


@pytest.fixture(autouse=True)
def without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    if not LONG:
        for module in (prepare, image_shards):
            monkeypatch.setattr(module, "run_jobs", run_jobs)
