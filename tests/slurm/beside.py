"""Tests that mostly wait run beside the others: ``@pytest.mark.beside``.

The first test of this folder starts them in threads, those of one file and one cluster in the order in which they
stand; pytest comes to them last and looks at their results. Such a test takes a cluster, the shared losses and
``tmp_path``, and nothing else.
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
AT_ONCE = 3  # such tests: they wait more than they work, but the machine may have two cores


def is_beside(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARK) is not None


class Beside:
    """The results of the tests that run beside the others, by their node ids."""

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
        """Starts ``items`` one after the other, in a thread that does not keep the interpreter from ending.

        Args:
            shared: the fixtures that they may take, by name.
            directory: makes a directory for a test of this name.
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
                except BaseException as error:  # pytest's own, a skip, are no Exceptions
                    result.set_exception(error)

        threading.Thread(target=work, daemon=True).start()

    def wait_for(self, item: pytest.Item) -> None:
        """Raises what ``item`` raised."""
        self._results[item.nodeid].result()


def _parameters(item: pytest.Function) -> dict[str, Any]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}
