"""The tokens of data=sft on shared file systems: processes share the work, with and without locks, and wait quietly."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_train.data import sft
from hpc_train.data.sft_inputs import Part

FORK = multiprocessing.get_context("fork")
LINE = '{"text": "x"}\n'


class SlowEncoder:
    def encode(self, record: Any) -> sft.Tokens:
        time.sleep(0.02)
        return np.array([1, 2, 3], np.uint32)


def parts(file: Path, count: int) -> list[Part]:
    """Returns the parts of a new file, of four records each."""
    file.write_text(LINE * 4 * count)
    size = len(LINE) * 4
    return [Part(str(file), number * size, (number + 1) * size, False, size * count, 1) for number in range(count)]


def tokenize(made: list[Part], folder: Path, locks: bool, together: Barrier, writes: Any) -> None:
    if not locks:
        fcntl.flock = refused
    write = sft._write

    def counted(*values: Any) -> None:
        with writes.get_lock():
            writes.value += 1
        write(*values)

    sft._write = counted
    together.wait()
    sft.tokenized(made, folder, "settings", SlowEncoder)  # type: ignore[arg-type]


def refused(*_: Any) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("locks", [True, False])
def test_processes_take_different_parts(tmp_path: Path, locks: bool) -> None:
    made, writes, together = parts(tmp_path / "a.jsonl", 16), FORK.Value("i"), FORK.Barrier(8)
    given = (made, tmp_path / "cache", locks, together, writes)
    processes = [FORK.Process(target=tokenize, args=given) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    assert writes.value == 16
    assert len(list((tmp_path / "cache").iterdir())) == 16, "locks or unfinished parts are left"


def test_a_process_that_died_is_replaced_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, folder = parts(tmp_path / "a.jsonl", 2), tmp_path / "cache"
    folder.mkdir()
    (folder / f"{sft._key(made[0], 'settings')}.lock").touch()
    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(sft, "_WAITS_S", (0.1, 0.2))
    monkeypatch.setattr(sft, "_WITHOUT_LOCKS_S", 1.0)
    began = time.monotonic()
    stored = sft.tokenized(made, folder, "settings", SlowEncoder)  # type: ignore[arg-type]
    assert all(each.exists for each in stored) and time.monotonic() - began > 0.8


HOLD = """
import fcntl, sys, time
files = [open(name, "w") for name in sys.argv[1:]]
for file in files: fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(600)
"""


@pytest.mark.long_form(6)
def test_a_waiting_process_looks_seldom_and_replaces_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder = parts(tmp_path / "a.jsonl", 200), tmp_path / "cache"
    folder.mkdir()
    locks = [str(folder / f"{sft._key(part, 'settings')}.lock") for part in made]
    opened: Counter[str] = Counter()
    monkeypatch.setattr(sft, "_WAITS_S", (0.1, 0.8))
    with subprocess.Popen([sys.executable, "-c", HOLD, *locks], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        encoder = type("Fast", (), {"encode": lambda self, record: np.array([1, 2], np.uint32)})
        waiting = threading.Thread(target=sft.tokenized, args=(made, folder, "settings", encoder), daemon=True)
        sys.addaudithook(lambda event, values: opened.update([str(values[0])]) if event == "open" else None)
        waiting.start()
        time.sleep(3)
        holder.kill()
        seen = sum(opened[lock] for lock in locks)
    assert 0 < seen <= 80, "4 after each wait of 0.16 s or more"
    waiting.join(30)
    assert not waiting.is_alive() and len(list(folder.iterdir())) == 200
