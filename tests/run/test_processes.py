"""What the kernel says about a process that may hang, and output that cannot be written, which ends no process."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpc_train.launch.executors.allocation import run_in_foreground
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Failure, advice_for
from hpc_train.run.freeze import freeze
from hpc_train.run.processes import (
    cpu_seconds,
    is_reading_or_writing,
    out_of_descriptors,
    out_of_resources,
    process_state,
    stopped_child,
)
from tests.config.composing import config_of


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


PROGRAM = """
import os, sys
from hpc_train.run.streams import nonfailing_streams, open_closed_streams, replace_unencodable
open_closed_streams()
replace_unencodable()
file = open(sys.argv[1], "w")
os.system("echo a child of this process")
with nonfailing_streams():
    print("loss 4.2 \\u00b7 1,234 tokens/s", flush=True)
    print("a warning \\u00b7", file=sys.stderr, flush=True)
    sys.stdout.close()
    print("after the end", flush=True)
file.write("whole")
"""


@pytest.mark.parametrize("closed", ["", ">&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full"])
def test_a_process_goes_on(closed: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    command = f'exec "$0" -c "$1" {file} {closed}'
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "whole", "no output of a child is in a file of its parent"
    if not closed:
        assert "loss 4.2 ? 1,234 tokens/s" in done.stdout


def test_a_full_disk_behind_standard_output_does_not_end_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ended = RunDirectory(tmp_path / "run"), []
    freeze(config_of(f"run.root={tmp_path}", "run.name=run"), run)
    monkeypatch.setattr("hpc_train.elastic.agent.run_agent", lambda run, *_, **__: ended.append(run) or 0)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run_in_foreground(run, None) == 0
    assert ended == [run]
