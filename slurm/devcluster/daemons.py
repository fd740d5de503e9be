"""The cluster as a value, and its processes: started unless they run, found again by pid file, ended one by one."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4", "n5", "n6", "n7")
PORTS = 20  # that a cluster takes


class Refused(Exception):
    """The cluster cannot or must not be started here (exit code 2)."""


class Failed(Exception):
    """Something that should have started did not (exit code 1)."""


@dataclass(frozen=True)
class Cluster:
    """Where the cluster lives and which parts it has."""

    state: Path
    network: bool = False
    accounting: bool = True
    port: int = 26000  # +1 controller, +2 database, +3 or +11… nodes
    limit_memory: bool = False

    @property
    def conf(self) -> Path:
        return self.state / "etc" / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def pid_file(self, name: str) -> Path:
        return self.state / "run" / f"{name}.pid"


def make_state(state: Path) -> None:
    """Makes the state directory, unless this user has one. Others can guess its name, and it holds the key.

    Raises Refused if another user may have written files there.
    """
    state.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        state.mkdir(mode=0o755)  # munged refuses a socket that some users cannot reach
    refuse_unsafe(state)


def refuse_unsafe(state: Path) -> None:
    """Raises Refused if another user may have written files in the directory."""
    try:
        status = state.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        wrong = "is a symbolic link"
    elif not stat.S_ISDIR(status.st_mode):
        wrong = "is not a directory"
    elif status.st_uid != os.getuid():
        wrong = f"belongs to the user with id {status.st_uid}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = "can be written by other users"
    else:
        return
    raise Refused(f"{state} is not safe to use, because it {wrong}; remove it, or name another one with --state")


def alive(cluster: Cluster, name: str) -> bool:
    """Whether the daemon of this pid file runs (and the pid was not given to somebody else)."""
    try:
        pid = int(cluster.pid_file(name).read_text())
        return name.partition("-")[0].encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def run_daemon(cluster: Cluster, name: str, command: list[str]) -> None:
    """Starts a program that goes to the background by itself, unless it runs."""
    if alive(cluster, name):
        return
    done = call(cluster, *command, check=False)
    if done.returncode:
        log = cluster.state / "log" / f"{name}.log"
        tail = "\n".join(log.read_text().splitlines()[-5:]) if log.exists() else done.stderr
        raise Failed(f"{name} did not start:\n{tail}")


def stop(cluster: Cluster, *names: str) -> None:
    """Ends daemons by TERM, together; those that are still there after 15 s by KILL."""
    pids = [int(cluster.pid_file(name).read_text()) for name in names if alive(cluster, name)]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    if not wait_for("daemons to stop", lambda: not _there(pids), 15, must=False):
        for pid in _there(pids):
            os.kill(pid, signal.SIGKILL)


def _there(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def kill_strays(cluster: Cluster) -> None:
    """Daemons, step daemons and tasks of this cluster that outlived their pid files or the state directory."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and _belongs(cluster, process):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue


def _belongs(cluster: Cluster, process: Path) -> bool:
    name, arguments = (process / "comm").read_text().strip(), (process / "cmdline").read_bytes().split(b"\0")
    if name in ("munged", "mariadbd"):
        mark = f"={cluster.state}/etc/".encode()
        return any(mark in argument for argument in arguments)
    variables = (process / "environ").read_bytes().split(b"\0")
    if not any(variable.startswith(f"SLURM_CONF={cluster.state}/etc".encode()) for variable in variables):
        return False
    # a shell that merely talks to the cluster is left alone; what is a task of a job knows its rank
    return name.startswith("slurm") or any(variable.startswith(b"SLURM_PROCID=") for variable in variables)


def call(cluster: Cluster, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command with the cluster's configuration; one that hangs on a dead daemon is ended after 60 s."""
    done = subprocess.run(
        command,
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode:
        raise Failed(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done


def answers(cluster: Cluster | None, *command: str) -> bool:
    environment = cluster.environment if cluster else dict(os.environ)
    try:
        return subprocess.run(command, env=environment, capture_output=True, timeout=3, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def wait_for(what: str, done: Callable[[], bool], seconds: float, must: bool = True) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            if must:
                raise Failed(f"gave up waiting for {what}; the logs are in the state directory")
            return False
        time.sleep(0.1)
    return True
