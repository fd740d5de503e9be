"""A real Slurm on this machine for tests: started once, private, on ports of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.doors import command

DEVCLUSTER = command.REPOSITORY / "slurm" / "devcluster" / "devcluster.py"
PORTS = 20  # that a devcluster takes


@dataclass(frozen=True)
class Cluster:
    """A running cluster. ``environment`` makes it the current one for a command."""

    environment: dict[str, str]

    def call(self, *arguments: str, cwd: Path | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """A command of Slurm, or a batch script's, to its end."""
        return subprocess.run(
            arguments, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
        )

    def hpc_train(self, *arguments: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """One call of the command line, to its end."""
        return command.hpc_train(*arguments, cwd=cwd, timeout=timeout, env=self.environment)

    def start(self, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        """A call of the command line that the test goes on beside."""
        return command.start(*arguments, cwd=cwd, env=self.environment)

    def state(self, job_id: str) -> str:
        """The state of a job, running or ended, as the controller knows it."""
        found = self.call("squeue", "--noheader", "--array", "--states=all", f"--jobs={job_id}", "--format=%T")
        return found.stdout.split()[0] if found.stdout.split() else ""

    def wait_for_state(self, job_id: str, *states: str, seconds: float = 60) -> str:
        wait_for(f"job {job_id} to be {' or '.join(states)}", lambda: self.state(job_id) in states, seconds)
        return self.state(job_id)


def wait_for(what: str, done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"gave up waiting for {what} after {seconds:g} s")
        time.sleep(0.2)


@contextmanager
def running(state: Path, *options: str) -> Iterator[Cluster]:
    """A cluster under ``state``; skips the test, with the reason, where this machine cannot start one."""
    call = [sys.executable, str(DEVCLUSTER)]
    settings = [f"--state={state}", f"--port={_free_ports()}", *options]
    environment = command.environment(SLURM_CONF=str(state / "etc" / "slurm.conf"))
    environment["PATH"] += ":/usr/sbin:/sbin"
    up = subprocess.run([*call, "up", *settings], env=environment, capture_output=True, text=True, check=False)
    try:
        if up.returncode == 2:
            pytest.skip(up.stderr.strip().splitlines()[-1])
        assert up.returncode == 0, up.stderr
        yield Cluster(environment)
    finally:
        subprocess.run([*call, "down", *settings], env=environment, capture_output=True, timeout=120, check=False)
        shutil.rmtree(state, ignore_errors=True)


def _free_ports() -> int:
    """The first of ``PORTS`` ports in a row that nobody listens on."""
    for first in range(30000, 32000, PORTS):
        with ExitStack() as held:
            try:
                for port in range(first, first + PORTS):
                    held.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports for a cluster")
