"""The interface of executors, which run jobs on this machine or on Slurm, and the shares of a sweep on this machine."""

from __future__ import annotations

import fcntl
import os
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from hpc_train.config.schema import Config
from hpc_train.config.values import fewest_nodes, node_range, runs_own_code
from hpc_train.errors import UserError
from hpc_train.launch.gpus import depends_on_gpu_types, gpu_types_here
from hpc_train.launch.job import Job
from hpc_train.layout.layout import JobShape, Place
from hpc_train.machine.allocation import workers_per_node
from hpc_train.machine.amd_gpus import restrict_to
from hpc_train.machine.gpus import Machine, visible_devices
from hpc_train.registration import RUN_ENDED, registered
from hpc_train.run.code import reexec_from_snapshot
from hpc_train.run.directory import RunDirectory
from hpc_train.run.owner import open_run
from hpc_train.run.requests import StopRequests
from hpc_train.run.snapshot import check_copy
from hpc_train.runs.job_status import JobStatus, View, view_of
from hpc_train.schedulers.slurm.here import in_allocation


class Executor(Protocol):
    """Submits jobs, reports their status, and stops or cancels them."""

    name: str

    def shape(self, config: Config) -> JobShape:
        """Returns the shape of a job with this config, with the maximum of a range of nodes.

        Raises:
            UserError: the requested resources do not exist here, or ``elastic.min_nodes`` is larger than their number.
        """

    def at_once(self, jobs: Sequence[Job]) -> int:
        """Returns how many of ``jobs`` are submitted at the same time."""

    def check(self, jobs: Sequence[Job]) -> list[str]:
        """Checks ``jobs`` and returns lines with their resources and maximum cost. Writes nothing.

        Raises:
            UserError: one of them would be refused, or would never start.
        """

    def confirm(self, jobs: Sequence[Job], console: Console) -> None:
        """Asks the user for confirmation if ``jobs`` may cost much.

        Raises:
            UserError: the user declines.
        """

    def plan(self, jobs: Sequence[Job], sweep: Path) -> list[tuple[str, str]]:
        """Returns the command line and batch script of each submission; empty if the executor submits no scripts."""

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        """Submits ``jobs``, whose runs are frozen; returns their ids in order.

        ``at_once`` limits all jobs of the directory ``sweep`` together.

        Raises:
            UserError: the scheduler refuses them.
        """

    def identity(self, job_id: str) -> dict[str, Any]:
        """Returns the fields of a job in the run's record of submissions, by which a live run is recognized."""

    def statuses(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """Returns the status of the jobs ``ids``, without those that are no longer known."""

    def stop(self, ids: Collection[str]) -> None:
        """Signals jobs to save a checkpoint and stop."""

    def cancel(self, ids: Collection[str]) -> None:
        """Cancels jobs; on this machine they save a checkpoint first."""

    def output(self, job: Job, job_id: str) -> Path:
        """Returns the file with the output of the agent of the job."""


def local_shape(config: Config, place: Place) -> JobShape:
    """Returns the shape of a job on this machine.

    Raises:
        UserError: more nodes or GPUs are requested than this machine has.
    """
    cluster = config.cluster
    if node_range(cluster) != (1, 1):
        raise UserError(
            f"{cluster.nodes} nodes are requested, but jobs here run on this machine only",
            where="cluster.nodes",
            fix="cluster.nodes=1, or submit to Slurm from a login node",
        )
    gpus, workers = workers_per_node(cluster)
    return JobShape(
        nodes=1,
        fewest_nodes=fewest_nodes(config),
        gpus=gpus,
        workers=workers,
        place=place,
        in_job=in_allocation(),
        gpu_types=gpu_types_here(cluster) if depends_on_gpu_types(config, gpus) else frozenset(),
    )


@dataclass(frozen=True)
class Submitted:
    """A submitted job. Attempts before ``first_attempt`` belong to earlier submissions of the same run."""

    job: Job
    job_id: str
    first_attempt: int
    agent_output: Path

    def view(self, status: JobStatus | None) -> View:
        """Returns a snapshot of the job. ``status`` is what its scheduler reports; None if it does not know the job."""
        config = self.job.config
        steps = None if runs_own_code(config) else config.train.steps  # otherwise the run records them
        return view_of(self.job.run, self.first_attempt, status, self.agent_output, steps)


@dataclass(frozen=True)
class RunAgent:
    """Runs the agent of a frozen run and exits with its code. Pickled, so it holds only plain values."""

    path: str
    share: Share | None = None
    trust_owner: bool = False

    def __call__(self) -> None:
        run = RunDirectory(Path(self.path))
        open_run(run, "agent", self.trust_owner)
        check_copy(run)
        reexec_from_snapshot(run)
        from hpc_train.elastic.agent import run_agent  # the submitter does not need the modules of the agent

        reserved = None if self.share is None else partial(_reserve, self.share)
        code = run_agent(run, reserve=reserved)
        registered(RUN_ENDED)(run)
        sys.exit(code)  # instead of returning, so that a failed run is a failed job


def _reserve(share: Share, stop: StopRequests) -> AbstractContextManager[None]:
    return reserve(share, lambda: stop.requested)


POLL_S = 0.2


@dataclass(frozen=True)
class Share:
    """The GPUs or cores of this machine that a job uses.

    ``sweep`` is the directory of the jobs submitted together, of which ``at_once`` may run at the same time.
    """

    gpus: int
    cores: int
    sweep: str
    at_once: int


@contextmanager
def reserve(share: Share, waiting_is_over: Callable[[], bool]) -> Iterator[None]:
    """Reserves the share of a job inside the ``with`` block, and restricts this process to it.

    The directory ``.slots`` of the sweep has a lock file for each job that may run at the same time, and for each GPU
    or core. When the process of a job ends, the kernel releases its locks. Jobs of other sweeps are not waited for.

    Waits until the share is free, or until ``waiting_is_over`` returns True; then nothing is reserved.
    """
    folder = Path(share.sweep) / ".slots"
    turns = [f"slot-{number}" for number in range(share.at_once)]
    count = share.gpus or share.cores
    names: list[str] = []
    with ExitStack() as held:
        try:
            folder.mkdir(exist_ok=True)
            held.enter_context(take(folder, turns, 1, waiting_is_over))
            names = held.enter_context(take(folder, _devices_or_cores(share), count, waiting_is_over))
        except OSError as error:  # such as files of another user, or a full disk
            print(f"warning: this job does not wait for others of its sweep: {error}", file=sys.stderr)
        if names:
            _restrict([name.partition("-")[2] for name in names], share)
        yield


def _devices_or_cores(share: Share) -> list[str]:
    if share.gpus:
        return [f"gpu-{device}" for device in visible_devices()]
    return [f"core-{core}" for core in sorted(os.sched_getaffinity(0))]


def _restrict(names: Sequence[str], share: Share) -> None:
    if not share.gpus:
        os.sched_setaffinity(0, {int(name) for name in names})
    elif Machine.this().amd() is not None:
        restrict_to(list(names))
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


@contextmanager
def take(folder: Path, names: Sequence[str], count: int, waiting_is_over: Callable[[], bool]) -> Iterator[list[str]]:
    """Holds ``count`` of the locks ``names`` in ``folder``; none if ``waiting_is_over`` before they are free."""
    locks = _free_locks(folder, names, count)
    while len(locks) < count and not waiting_is_over():
        _close(locks)  # jobs that each hold a part of what they need would wait for each other
        time.sleep(POLL_S * random.uniform(0.5, 1.5))
        locks = _free_locks(folder, names, count)
    try:
        yield list(locks) if len(locks) == count else []
    finally:
        _close(locks)


def _free_locks(folder: Path, names: Sequence[str], count: int) -> dict[str, int]:
    """Takes up to ``count`` free locks; returns their descriptors by name."""
    locks: dict[str, int] = {}
    for name in names:
        if len(locks) == count:
            break
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:
            _close(locks)
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            locks[name] = descriptor
    return locks


def _close(locks: dict[str, int]) -> None:
    for descriptor in locks.values():
        os.close(descriptor)
