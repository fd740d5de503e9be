"""A real Slurm on this machine for tests: started once, private, on ports of its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.doors import command

DEVCLUSTER = command.REPOSITORY / "slurm" / "devcluster" / "devcluster.py"
PORTS = 20  # that a devcluster takes
PREFIX = "hpc_train-tests-"  # of state directories


@dataclass(frozen=True)
class Cluster:
    """A running cluster. ``environment`` makes it the current one for a command."""

    environment: dict[str, str]

    def call(self, *arguments: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """A command of Slurm, or a batch script's, to its end."""
        return subprocess.run(
            arguments, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
        )

    def hpc_train(self, *arguments: str, cwd: Path, timeout: float = 280) -> subprocess.CompletedProcess[str]:
        """One call of the command line, to its end."""
        return command.hpc_train(*arguments, cwd=cwd, timeout=timeout, env=self.environment)

    def start(self, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        """A call of the command line that the test goes on beside."""
        return command.start(*arguments, cwd=cwd, env=self.environment)

    def state(self, job_id: str) -> str:
        """The state of a job, running or ended, as the controller knows it."""
        found = self.call("squeue", "--noheader", "--array", "--states=all", f"--jobs={job_id}", "--format=%T")
        return found.stdout.split()[0] if found.stdout.split() else ""

    def cancel_below(self, directory: Path) -> None:
        """Cancels the jobs that were submitted from ``directory``: what a failed test leaves is in others' way."""
        listed = self.call("squeue", "--noheader", "--format=%A %Z").stdout.splitlines()
        jobs = [job for job, _, path in (line.partition(" ") for line in listed) if Path(path) == directory]
        if jobs:
            self.call("scancel", *jobs)

    def wait_for_state(self, job_id: str, *states: str, seconds: float = 240) -> str:
        wait_for(f"job {job_id} to be {' or '.join(states)}", lambda: self.state(job_id) in states, seconds)
        return self.state(job_id)


def wait_for(what: str, done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"gave up waiting for {what} after {seconds:g} s")
        time.sleep(0.3)


@contextmanager
def running(*options: str) -> Iterator[Cluster]:
    """A cluster of its own; skips the test, with the reason, where this machine cannot start one."""
    with _state_directory() as state:
        settings = [f"--state={state}", f"--port={_free_ports()}", *options]
        environment = command.environment(SLURM_CONF=str(state / "etc" / "slurm.conf"))
        environment["PATH"] += ":/usr/sbin:/sbin"
        up = _devcluster("up", *settings, environment=environment)
        try:
            if up.returncode == 2:
                pytest.skip(up.stderr.strip().splitlines()[-1])
            assert up.returncode == 0, up.stderr
            yield Cluster(environment)
        finally:
            _devcluster("down", *settings, environment=environment)


def _devcluster(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, str(DEVCLUSTER), *arguments]
    return subprocess.run(call, env=environment, capture_output=True, text=True, timeout=120, check=False)


@contextmanager
def _state_directory() -> Iterator[Path]:
    """A short path, since the sockets below it may have 107 characters, that munge finds open enough.

    The process that made it holds a lock on it. Where nobody does, that process was killed: its cluster is stopped.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError), _locked(left):
            _devcluster("down", f"--state={left}")
    path = Path(tempfile.mkdtemp(prefix="hpc_train-new-"))
    path.chmod(0o755)
    with _locked(path):
        path = path.rename(path.with_name(PREFIX + path.name.rpartition("-")[2]))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Raises BlockingIOError where another process has it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _free_ports() -> int:
    """The first of ``PORTS`` ports in a row that nobody listens on."""
    for block in range(100):
        first = 30000 + PORTS * ((os.getpid() + block) % 100)  # sessions that start together do not meet
        with ExitStack() as held:
            try:
                for port in range(first, first + PORTS):
                    held.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports for a cluster")
