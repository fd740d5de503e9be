"""Checks that are made up for the tests of the runner."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time

from gpu_checks.check import Probe


def good(probe: Probe) -> None:
    probe.note("a fact", 1.0)
    probe.within("one", 1.0, 0.5, 1.5)


def bad(probe: Probe) -> None:
    probe.equal("one", 1, 1)
    print("the log of a check that finds something")
    probe.within("not a number", float("nan"), high=1)


def empty(probe: Probe) -> None:
    probe.note("nothing is expected of", "this")


def raises(probe: Probe) -> None:
    probe.equal("before the error", 1, 1)
    raise ArithmeticError("raised on purpose")


def segfaults(probe: Probe) -> None:
    probe.equal("before the fault", 1, 1)
    ctypes.string_at(0)


def never_ends(probe: Probe) -> None:
    """Starts a process in a separate session, and waits for ever."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (probe.place.out / "pid").write_text(str(started.pid))
    probe.equal("before the end", 1, 1)
    time.sleep(600)


def plans(probe: Probe) -> None:
    probe.within("seconds that it has", probe.check.limit_s, 1, 60)


def talks(probe: Probe) -> None:
    os.write(1, b"begin" + b"x" * 1_000_000 + b"end")
    raise ArithmeticError("after a million characters")


def fails_once(probe: Probe) -> None:
    flag = probe.place.out / "flag"
    probe.equal("an earlier run", flag.exists(), True)
    flag.touch()


def counts(probe: Probe) -> None:
    path = probe.place.out / "count"
    path.write_text(str(int(path.read_text()) + 1 if path.exists() else 1))
    probe.equal("the count", path.read_text() != "", True)
