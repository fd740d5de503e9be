"""An attempt that falls asleep at the worst moment, between its last look and its rename, and is overtaken."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.manifest import METADATA, FileEntry, Manifest, read_manifest
from hpc_train.checkpoint.run_store import Superseded
from hpc_train.checkpoint.store import CheckpointStore, Retention
from hpc_train.run.directory import RunDirectory
from hpc_train.run.processes import process_state

FORK = multiprocessing.get_context("fork")
LIMIT_S = 100.0
EMPTY = FileEntry(0, "99aa06d3014798d86001c324468d497f")  # xxh3-128 of nothing


def commit(store: CheckpointStore, step: int, attempt: int) -> None:
    writing = store.begin(step, attempt)
    (writing / METADATA).touch()
    store.commit(writing, Manifest(step, {METADATA: EMPTY}, attempt=attempt))


def sleepy(run: RunDirectory, looks: int) -> CheckpointStore:
    """Of attempt 0, which falls asleep right after its look number ``looks`` that found nobody."""
    seen = []

    def look() -> None:
        if run.newest_attempt() > 0:
            raise Superseded
        seen.append(1)
        if len(seen) == looks:
            os.kill(os.getpid(), signal.SIGSTOP)

    return CheckpointStore(run.checkpoints, look)


def act(run: RunDirectory, what: str, looks: int, reported: Any) -> None:
    store = sleepy(run, looks)
    try:
        if what == "commit":
            commit(store, 2, attempt=0)
        elif what == "set aside":
            store.set_aside(store.committed()[-1], attempt=0)
        else:
            store.prune(Retention(1), attempt=0)
        reported.put("done")
    except Superseded:
        reported.put("superseded")
    except BaseException as error:
        reported.put(repr(error))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("what", "looks", "newer"),
    [("commit", 1, 2), ("commit", 1, 3), ("commit", 2, 2), ("commit", 2, 3), ("set aside", 1, 2), ("prune", 2, 2)],
)
def test_it_changes_nothing(tmp_path: Path, what: str, looks: int, newer: int) -> None:
    """The newer attempt has saved step ``newer`` meanwhile."""
    run, reported = RunDirectory(tmp_path), FORK.Queue()
    store = CheckpointStore(run.checkpoints)
    for step in (0, 1):
        commit(store, step, attempt=0)
    assert run.claim_attempt() == 0
    child = FORK.Process(target=act, args=(run, what, looks, reported))
    child.start()
    try:
        until(lambda: process_state(child.pid or 0) == "T")
        assert run.claim_attempt() == 1
        store.revoke(1)
        commit(store, newer, attempt=1)
        os.kill(child.pid or 0, signal.SIGCONT)
        assert reported.get(timeout=LIMIT_S) == "superseded"
    finally:
        child.kill()
        child.join()
    assert [found.step for found in store.committed()] == [0, 1, newer]
    assert [read_manifest(found.path).attempt for found in store.committed()] == [0, 0, 1]
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith("bad")]
