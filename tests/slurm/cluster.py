"""Starts real Slurm clusters on this machine for tests; each is private and has its own ports."""

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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.doors import command

DEVCLUSTER = command.REPOSITORY / "slurm" / "devcluster" / "devcluster.py"
PORTS = 20  # number of ports that a devcluster uses
PREFIX = "hpc_train-tests-"  # prefix of the names of state directories


@dataclass(frozen=True)
class Cluster:
    """Represents a running cluster. A command with its ``environment`` uses this cluster."""

    environment: dict[str, str]

    def call(self, *arguments: str, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Runs a command of Slurm or a batch script and waits for it."""
        return subprocess.run(
            arguments, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
        )

    def hpc_train(self, *arguments: str, cwd: Path, timeout: float = 280) -> subprocess.CompletedProcess[str]:
        """Runs one ``hpc_train`` command and waits for it."""
        return command.hpc_train(*arguments, cwd=cwd, timeout=timeout, env=self.environment)

    def start(self, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        """Starts an ``hpc_train`` command and does not wait for it."""
        return command.start(*arguments, cwd=cwd, env=self.environment)

    def state(self, job_id: str) -> str:
        """Returns the state of a running or ended job, as the controller reports it."""
        found = self.call("squeue", "--noheader", "--array", "--states=all", f"--jobs={job_id}", "--format=%T")
        return found.stdout.split()[0] if found.stdout.split() else ""

    def cancel_below(self, directory: Path) -> None:
        """Cancels the jobs submitted from ``directory``, so that the jobs of a failed test do not block other tests."""
        listed = self.call("squeue", "--noheader", "--format=%A %Z").stdout.splitlines()
        found = (line.partition(" ") for line in listed)
        jobs = [job for job, _, path in found if Path(path).is_relative_to(directory)]
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


def link(cluster: Cluster, node: str, how: str) -> None:
    """``devcluster link``: cuts, restores or slows the link of a node."""
    state = Path(cluster.environment["SLURM_CONF"]).parents[1]
    call = [sys.executable, str(DEVCLUSTER), "link", node, how, f"--state={state}"]
    subprocess.run(call, env=cluster.environment, check=True, timeout=60)


@contextmanager
def reconfigured(cluster: Cluster, change: Callable[[str], str]) -> Iterator[None]:
    """Changes the text of ``slurm.conf`` of a running cluster, and restores it."""
    conf = Path(cluster.environment["SLURM_CONF"])
    original = conf.read_text()
    conf.write_text(change(original))
    try:
        assert cluster.call("scontrol", "reconfigure").returncode == 0
        yield
    finally:
        conf.write_text(original)
        cluster.call("scontrol", "reconfigure")


@contextmanager
def side_by_side(clusters: dict[str, tuple[str, ...]]) -> Iterator[dict[str, Future[Cluster]]]:
    """Starts and stops several clusters, given by name with their options, at the same time: each mostly waits."""
    with ThreadPoolExecutor(max(len(clusters), 1)) as threads:
        contexts = {name: running(*options, place=place) for place, (name, options) in enumerate(clusters.items())}
        started = {name: threads.submit(context.__enter__) for name, context in contexts.items()}
        try:
            yield started
        finally:
            up = [contexts[name] for name, cluster in started.items() if cluster.exception() is None]
            list(threads.map(lambda context: context.__exit__(None, None, None), up))


@contextmanager
def running(*options: str, place: int = 0) -> Iterator[Cluster]:
    """Starts a separate cluster; skips the test, with the reason, if this machine cannot start one.

    Args:
        place: differs between clusters that are started at the same time, so that they use other ports.
    """
    with _state_directory() as state:
        settings = [f"--state={state}", f"--port={_free_ports(place)}", *options]
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
    """Creates a state directory with a short path and with permissions that munge accepts.

    The path is short because the path of a socket may have at most 107 characters. The process that creates the
    directory holds a lock on it. An unlocked directory belongs to a process that was killed: its cluster is stopped.
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
    """Locks ``directory``; raises BlockingIOError if another process holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _free_ports(place: int) -> int:
    """Returns the first of ``PORTS`` consecutive free ports."""
    for block in range(100):
        # Sessions and clusters that start at the same time try different blocks.
        first = 30000 + PORTS * ((os.getpid() + 16 * place + block) % 100)  # for six clusters
        with ExitStack() as held:
            try:
                for port in range(first, first + PORTS):
                    held.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
            return first
    raise RuntimeError("no free ports for a cluster")
