"""What the kernel says about a process that may hang."""

from __future__ import annotations

import errno
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hpc_train.run.exits import Failure, advice_for
from hpc_train.run.processes import (
    cpu_seconds,
    is_reading_or_writing,
    out_of_descriptors,
    out_of_resources,
    process_state,
    stopped_child,
)


@contextmanager
def shell(script: str) -> Iterator[int]:
    process = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    try:
        yield process.pid
    finally:
        subprocess.run(["kill", "-KILL", "--", f"-{process.pid}"], check=True)
        process.wait()


def test_a_process_whose_child_computes_is_not_idle() -> None:
    """As one that waits for a compiler."""
    with shell("while :; do :; done & wait") as pid:
        until = time.monotonic() + 60
        while cpu_seconds(pid) < 0.3 and time.monotonic() < until:
            time.sleep(0.05)
        assert cpu_seconds(pid) >= 0.3
        assert process_state(pid) == "S"


def test_a_process_that_sleeps_is_idle() -> None:
    with shell("sleep 1000; true") as pid:
        time.sleep(0.5)
        assert cpu_seconds(pid) < 0.2
        assert not is_reading_or_writing(pid)
    assert cpu_seconds(pid) == 0.0
    assert not is_reading_or_writing(pid)


def test_a_stopped_child_is_found() -> None:
    with shell("sleep 1000 & kill -STOP $!; echo; wait") as pid:
        until = time.monotonic() + 60
        while (child := stopped_child(pid)) is None and time.monotonic() < until:
            time.sleep(0.05)
        assert child is not None
        assert process_state(child) == "T"
    assert stopped_child(pid) is None


def test_no_free_descriptor_is_a_message_with_a_fix() -> None:
    own, machine = (out_of_descriptors(OSError(number, "")) for number in (errno.EMFILE, errno.ENFILE))
    assert own is not None and "ulimit -n" in own.fix and machine is not None and "fs.file-max" in machine.where
    assert out_of_descriptors(OSError(errno.ENOSPC, "")) is None
    assert out_of_descriptors(RuntimeError()) is None


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "fork")])
def test_advice_without_threads_and_processes(error: Exception) -> None:
    found = out_of_resources(error)
    assert found is not None
    assert "ulimit -u unlimited" in found.fix
    assert out_of_resources(RuntimeError("CUDA")) is out_of_resources(BlockingIOError(errno.EAGAIN, "", "x")) is None
    assert "ulimit -u" in advice_for(Failure.USER_ERROR, str(error)) or isinstance(error, OSError)
