"""Runs the tests marked ``@pytest.mark.beside`` in parallel with the other tests, because they mostly wait.

The first test of this folder starts them in threads. Tests of the same file and cluster share a thread and run in the
order of the file. pytest reaches these tests last and only reads their results. Such a test may use a cluster, the
shared losses and ``tmp_path``, but no other fixture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster

MARK = "beside"
AT_ONCE = 3  # maximum number of such tests at once: they mostly wait, but the machine may have only two cores


def is_beside(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARK) is not None


class Beside:
    """Holds the results of the tests that run in parallel with the others, by node id."""

    def __init__(self) -> None:
        self._results: dict[str, Future[None]] = {}
        self._places = threading.Semaphore(AT_ONCE)

    def start(
        self,
        items: list[pytest.Function],
        cluster: Cluster,
        shared: dict[str, Any],
        directory: Callable[[str], Path],
    ) -> None:
        """Starts ``items`` one after the other, in a thread that does not prevent the interpreter from exiting.

        Args:
            shared: the fixtures that the tests may use, by name.
            directory: creates a directory for the test with the given name.
        """
        results = [self._results.setdefault(item.nodeid, Future()) for item in items]

        def work() -> None:
            for item, result in zip(items, results, strict=True):
                try:
                    given = {**shared, **_parameters(item), "tmp_path": directory(item.name)}
                    try:
                        with self._places:
                            item.obj(**{name: given[name] for name in item.fixturenames if name in given})
                    finally:
                        cluster.cancel_below(given["tmp_path"])
                    result.set_result(None)
                except BaseException as error:  # pytest's skip does not derive from Exception
                    result.set_exception(error)

        threading.Thread(target=work, daemon=True).start()

    def wait_for(self, item: pytest.Item) -> None:
        """Waits for ``item`` and raises the exception that it raised, if any."""
        self._results[item.nodeid].result()


def _parameters(item: pytest.Function) -> dict[str, Any]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}
