"""The interface of executors, which run jobs on this machine or on Slurm, and the reservation of GPUs and cores.

On one machine, each GPU and each core is a lock file in a directory that all users share. A job holds the locks of what
it uses until its process ends, when the kernel releases them. Jobs queue at a gate, so that small jobs cannot starve a
large one.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
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
from hpc_train.layout.shape import JobShape, Place
from hpc_train.machine.allocation import workers_per_node
from hpc_train.machine.amd_gpus import restrict_to
from hpc_train.machine.gpus import Machine, visible_devices
from hpc_train.registration import RUN_ENDED, registered
from hpc_train.run.access import open_run
from hpc_train.run.code import reexec_from_snapshot
from hpc_train.run.code_copies import check_copy
from hpc_train.run.directory import RunDirectory
from hpc_train.run.requests import StopRequests
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


GATE_S = 30.0  # a holder of the gate takes what is free within POLL_S


class UnusableSlots(Exception):
    """Reports that lock files cannot be used, because another user has made them unreadable or something else."""


def shared_directory() -> Path:
    """Returns the directory of the lock files, the same for all users of this machine."""
    path = Path(tempfile.gettempdir()) / "hpc_train-slots"
    if not os.path.lexists(path):
        new = Path(tempfile.mkdtemp(prefix="hpc_train-slots-", dir=path.parent))
        new.chmod(0o1777)
        try:
            new.rename(path)  # so that nobody sees it before it is open to all
        except OSError:  # another process was first
            new.rmdir()
    return path


@contextmanager
def reserve(share: Share, waiting_is_over: Callable[[], bool], machine: Path | None = None) -> Iterator[None]:
    """Reserves the share of a job inside the ``with`` block, and restricts this process to it.

    Waits until the share is free, or until ``waiting_is_over`` returns True; then nothing is reserved. If other users
    have made the lock files of the machine unusable, the jobs of the sweep reserve their shares among themselves.
    """
    slots = [f"slot-{number}" for number in range(share.at_once)]
    own = Path(share.sweep) / ".slots"
    own.mkdir(exist_ok=True)
    with take(own, slots, 1, waiting_is_over), ExitStack() as stack:
        machine = machine or shared_directory()
        names = _devices_or_cores(share)
        count = share.gpus or share.cores
        try:
            _check_directory(machine)
            held = stack.enter_context(take(machine, names, count, waiting_is_over))
        except UnusableSlots as error:
            _warn_of_others(machine, error)
            held = stack.enter_context(take(own, names, count, waiting_is_over))
        if held:
            _restrict([name.partition("-")[2] for name in held], share)
        yield


def _check_directory(machine: Path) -> None:
    """Raises UnusableSlots if other users may remove the lock files of this one."""
    try:
        status = machine.lstat()
    except OSError as error:
        raise UnusableSlots(f"{machine} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise UnusableSlots(f"{machine} is not a directory")
    if status.st_uid not in (0, os.geteuid()) and not status.st_mode & stat.S_ISVTX:
        raise UnusableSlots(f"{machine} belongs to another user and has no sticky bit")


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


def _warn_of_others(machine: Path, error: UnusableSlots) -> None:
    print(
        f"warning: {error}. Only the jobs of this sweep are kept apart; others may use the same GPUs and cores\n"
        f"  fix:    its owner or root removes it: rm -r {machine}",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def take(folder: Path, names: Sequence[str], count: int, waiting_is_over: Callable[[], bool]) -> Iterator[list[str]]:
    """Holds ``count`` of the locks ``names`` in ``folder``; none if ``waiting_is_over`` before they are free.

    Raises:
        UnusableSlots: the locks cannot be used by this user.
    """
    locks: dict[str, int] = {}
    gate = None
    try:
        gate = _wait_for_gate(folder, names, count, waiting_is_over)
        while len(locks) < count and not waiting_is_over():
            _lock_free(folder, names, count, locks)
            if len(locks) < count:
                time.sleep(POLL_S)
        _close(gate)
        gate = None
        yield list(locks) if len(locks) == count else []
    finally:
        _close(gate, *locks.values())


def _lock_free(folder: Path, names: Sequence[str], count: int, locks: dict[str, int]) -> None:
    """Adds free locks to ``locks``, up to ``count`` in all."""
    for name in names:
        if name not in locks and len(locks) < count and (lock := _try_lock(folder / name)) is not None:
            locks[name] = lock


def _close(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _wait_for_gate(folder: Path, names: Sequence[str], count: int, waiting_is_over: Callable[[], bool]) -> int | None:
    """Waits at the gate of one kind of lock, so that jobs waiting for GPUs do not block jobs waiting for cores.

    Passes a gate that is held although ``count`` locks have been free for ``GATE_S`` seconds: a job that holds it would
    have taken them.
    """
    path = folder / f"gate-{names[0].partition('-')[0]}"
    free_since: float | None = None
    while not waiting_is_over():
        if (gate := _try_lock(path)) is not None:
            return gate
        if not _are_free(folder, names, count):
            free_since = None
        elif free_since is None:
            free_since = time.monotonic()
        elif time.monotonic() - free_since >= GATE_S:
            print(f"warning: a process holds {path} and takes nothing; continuing without it", file=sys.stderr)
            return None
        time.sleep(POLL_S)
    return None


def _are_free(folder: Path, names: Sequence[str], count: int) -> bool:
    locks: dict[str, int] = {}
    try:
        _lock_free(folder, names, count, locks)
        return len(locks) == count
    finally:
        _close(*locks.values())


def _try_lock(path: Path) -> int | None:
    """Returns the descriptor of the lock file, or None if another process holds the lock.

    Raises:
        UnusableSlots: this user cannot open it, or it is not a file.
    """
    try:
        descriptor = _open_lock(path)
    except OSError as error:
        raise UnusableSlots(f"the lock file {path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnusableSlots(f"{path} is not a lock file")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open_lock(path: Path) -> int:
    """Opens a lock file, or creates it so that all users can lock it; follows no link and waits for no pipe."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        with suppress(FileNotFoundError):
            # without O_CREAT first: in a shared directory, kernels refuse it for another user's file
            return os.open(path, flags)
        with suppress(FileExistsError):
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
            os.fchmod(descriptor, 0o644)  # whatever the umask
            return descriptor
