"""The contract of what takes jobs: this machine or Slurm. Everything else about launching is the same for both.

A job: what the executor knows of it, and the tiny callable that travels to where it runs.

The GPUs and cores of this machine, shared among the jobs of all sweeps and users without a daemon.

Each GPU and each core is a lock file in one directory that all users share. A job holds the locks of what it uses as
long as its process lives: the kernel drops them with the process, however it ends. Jobs queue at a gate, so a large job
is not starved by small ones.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from hpc_train.cluster.allocation import workers_per_node
from hpc_train.cluster.gpus import visible_devices
from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.config.values import node_range
from hpc_train.elastic.agent import run_agent
from hpc_train.errors import UserError
from hpc_train.launch.job_status import JobStatus
from hpc_train.plan.layout import Layout
from hpc_train.run.code import reexec_from_snapshot
from hpc_train.run.directory import RunDirectory
from hpc_train.run.requests import StopRequests


class Executor(Protocol):
    """Submits jobs, knows which are still there, and can ask them to stop."""

    name: str

    def shape(self, cluster: ClusterConfig) -> tuple[int, int, int]:
        """Nodes (the most, of a range), GPUs per node and workers per node that a job gets.

        Raises:
            UserError: this place cannot give what is asked for.
        """

    def at_once(self, jobs: Sequence[Job]) -> int:
        """How many of ``jobs`` are to be there (waiting or running) at the same time."""

    def check(self, jobs: Sequence[Job]) -> list[str]:
        """Lines that say what ``jobs`` ask for and may cost. Writes nothing.

        Raises:
            UserError: this place would refuse one of them, or never start it.
        """

    def confirm(self, jobs: Sequence[Job], console: Console) -> None:
        """Asks the person at the terminal where ``jobs`` may cost much.

        Raises:
            UserError: they are not to be submitted.
        """

    def plan(self, jobs: Sequence[Job], sweep: Path) -> list[tuple[str, str]]:
        """Command line and batch script of each submission; nothing where no script is submitted."""

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        """Submits ``jobs``, whose runs are frozen; returns their ids in order.

        ``at_once`` is that of all jobs of the directory ``sweep``.

        Raises:
            UserError: the scheduler refuses them.
        """

    def identity(self, job_id: str) -> dict[str, Any]:
        """What ``run.submissions.add`` is told of a job, so that a live run is known as such."""

    def statuses(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """How ``ids`` stand; those that are not known here any more are left out."""

    def stop(self, ids: Collection[str]) -> None:
        """Asks jobs to save and stop."""

    def cancel(self, ids: Collection[str]) -> None:
        """Ends jobs for good; a place where a stop is quick lets them save."""

    def stop_command(self, ids: Collection[str]) -> str:
        """The command by which a person does the same."""

    def output(self, job: Job, job_id: str) -> Path:
        """The file with the standard error of the job's agent."""


def local_shape(cluster: ClusterConfig) -> tuple[int, int, int]:
    """Nodes, GPUs and workers of a job on this machine.

    Raises:
        UserError: more nodes or GPUs are asked for than this machine has.
    """
    if node_range(cluster) != (1, 1):
        raise UserError(
            f"{cluster.nodes} nodes are asked for, and this machine is one",
            where="cluster.nodes",
            fix="cluster.nodes=1, or submit where sbatch is",
        )
    return (1, *workers_per_node(cluster))


@dataclass(frozen=True)
class Job:
    """A validated job. ``overrides`` are those of its command line; ``gpus`` and ``workers`` are per node."""

    number: int
    overrides: tuple[str, ...]
    config: Config
    layout: Layout
    gpus: int
    workers: int
    run: RunDirectory

    @property
    def submitit_folder(self) -> Path:
        """Where submitit keeps its pickle and the output of the agent."""
        return self.run.logs / "submitit"


@dataclass(frozen=True)
class RunAgent:
    """Runs the agent of a frozen run and exits with its code; all that a pickle holds is a path and a share."""

    path: str
    share: Share | None = None

    def __call__(self) -> None:
        run = RunDirectory(Path(self.path))
        reexec_from_snapshot(run)
        reserved = None if self.share is None else partial(_reserve, self.share)
        # an exit, not a result: what failed must not look like a success to the scheduler
        sys.exit(run_agent(run, reserve=reserved))


def _reserve(share: Share, stop: StopRequests) -> AbstractContextManager[None]:
    return reserve(share, lambda: stop.requested)


POLL_S = 0.2


@dataclass(frozen=True)
class Share:
    """What one job takes of this machine: so many GPUs, or so many cores.

    ``sweep`` is the directory of the jobs submitted together, of which ``at_once`` may run at the same time.
    """

    gpus: int
    cores: int
    sweep: str
    at_once: int


def shared_directory() -> Path:
    """The directory of the lock files, the same for all users of this machine."""
    path = Path(tempfile.gettempdir()) / "hpc_train-slots"
    if not path.exists():
        path.mkdir(exist_ok=True)
        path.chmod(0o1777)
    return path


@contextmanager
def reserve(share: Share, waiting_is_over: Callable[[], bool], machine: Path | None = None) -> Iterator[None]:
    """Holds a job's share inside the ``with`` block; what it holds is all that the process sees of the machine.

    Waits until the share is free, or until ``waiting_is_over`` says that the caller has lost interest (nothing is held
    then).
    """
    machine = machine or shared_directory()
    turns = [f"turn-{number}" for number in range(share.at_once)]
    folder = Path(share.sweep) / ".slots"
    folder.mkdir(exist_ok=True)
    with take(folder, turns, 1, waiting_is_over):
        if share.gpus:
            devices = visible_devices()
            with take(machine, [f"gpu-{device}" for device in devices], share.gpus, waiting_is_over) as held:
                if held:
                    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(name.removeprefix("gpu-") for name in held)
                yield
        else:
            cores = [f"core-{core}" for core in sorted(os.sched_getaffinity(0))]
            with take(machine, cores, share.cores, waiting_is_over) as held:
                if held:
                    os.sched_setaffinity(0, {int(name.removeprefix("core-")) for name in held})
                yield


@contextmanager
def take(folder: Path, names: Sequence[str], count: int, waiting_is_over: Callable[[], bool]) -> Iterator[list[str]]:
    """Holds ``count`` of the locks ``names`` in ``folder``; none when waiting was over before they were free."""
    locks: dict[str, int] = {}
    try:
        gate = _wait_for_gate(folder, names, waiting_is_over)
        try:
            while len(locks) < count and not waiting_is_over():
                for name in names:
                    if name not in locks and len(locks) < count and (lock := _try_lock(folder / name)) is not None:
                        locks[name] = lock
                if len(locks) < count:
                    time.sleep(POLL_S)
        finally:
            if gate is not None:
                os.close(gate)
        yield list(locks) if len(locks) == count else []
    finally:
        for lock in locks.values():
            os.close(lock)


def _wait_for_gate(folder: Path, names: Sequence[str], waiting_is_over: Callable[[], bool]) -> int | None:
    """One gate per kind of lock: who waits for GPUs does not hold up who waits for cores."""
    path = folder / f"gate-{names[0].partition('-')[0]}"
    while not waiting_is_over():
        if (gate := _try_lock(path)) is not None:
            return gate
        time.sleep(POLL_S)
    return None


def _try_lock(path: Path) -> int | None:
    try:
        # without O_CREAT first: in a shared directory kernels refuse it for a file that another user has made
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
