"""Runs jobs as processes of this machine, through submitit's local executor.

submitit's executor ends a job after its time limit, assigns the same GPUs to several jobs, and leaves the job in the
session of the terminal, so that Ctrl-C reaches the workers. With the executor of this module, a job has a separate
session and no time limit, and it reserves its GPUs or cores before it starts, so that all jobs may be submitted at
once.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from submitit.core.job_environment import JobEnvironment
from submitit.local.local import LocalExecutor, LocalJob

from hpc_train.config.schema import Config
from hpc_train.launch.job import Job, local_shape
from hpc_train.launch.storage import check_room
from hpc_train.layout.layout import JobShape, Place
from hpc_train.machine.amd_gpus import restrict_to
from hpc_train.machine.gpus import Machine, visible_devices
from hpc_train.opening import open_to_append
from hpc_train.registration import RUN_ENDED, registered
from hpc_train.run.code import frozen_code, reexec_from_snapshot
from hpc_train.run.directory import RunDirectory
from hpc_train.run.owner import open_run
from hpc_train.run.requests import StopRequests
from hpc_train.run.snapshot import check_copy
from hpc_train.schedulers.scheduler import PRESENT, JobStatus
from hpc_train.units import counted


class ProcessExecutor:
    """Base class of executors whose jobs are processes that forward ``stop_signal`` to the agents."""

    stop_signal: signal.Signals

    def is_running(self, job_id: str) -> bool:
        """Returns whether the process of a submitted job is alive."""
        raise NotImplementedError

    def earlier_starts(self, job: Job) -> list[str]:
        return []

    def confirm(self, jobs: Sequence[Job], console: Console) -> None:
        """Asks nothing, since jobs on this machine cost nothing."""

    def plan(self, jobs: Sequence[Job], sweep: Path) -> list[tuple[str, str]]:
        return []

    def identity(self, job_id: str) -> dict[str, Any]:
        return {"pid": int(job_id)}

    def statuses(self, ids: Collection[str]) -> dict[str, JobStatus]:
        return {job_id: PRESENT for job_id in ids if self.is_running(job_id)}

    def cancel(self, ids: Collection[str], *, save: bool = False) -> None:
        for job_id in self.statuses(ids):
            os.kill(int(job_id), self.stop_signal)


CONTROLLER = Path(__file__).with_name("controller.py")
CONTROLLER_LOG = "controller.log"  # the controller removes it if it is empty
TEN_YEARS_S = 10 * 365 * 24 * 3600


class SessionExecutor(LocalExecutor):
    """submitit's local executor, with a session for each job and ``variables`` in its environment."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        super().__init__(folder)
        self.variables = variables

    def _submit_command(self, command: str) -> LocalJob[Any]:
        settings = {
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(TEN_YEARS_S),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        with open_to_append(self.folder / CONTROLLER_LOG, self.folder) as log, _sigterm_blocked():
            process = subprocess.Popen(
                [sys.executable, "-P", str(CONTROLLER), str(self.folder)],  # not the controller of the frozen code
                env={**os.environ, **settings, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])


@contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Blocks SIGTERM for the processes that this thread starts; see ``controller``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalJobExecutor(ProcessExecutor):
    """Runs jobs as processes of this machine."""

    name = "this machine"
    stop_signal = signal.SIGTERM  # submitit's controller forwards it to the agent

    def __init__(self) -> None:
        self._jobs: dict[str, LocalJob[Any]] = {}

    def shape(self, config: Config) -> JobShape:
        return local_shape(config, Place.MACHINE)

    def at_once(self, jobs: Sequence[Job]) -> int:
        return jobs_at_once(jobs, len(os.sched_getaffinity(0)), len(visible_devices()))

    def check(self, jobs: Sequence[Job]) -> list[str]:
        check_room(jobs)  # ``shape`` has refused what this machine does not have
        room = self.at_once(jobs)
        if room >= len(jobs):
            return []
        resources = counted(len(os.sched_getaffinity(0)), "core", "cores")
        if jobs[0].gpus:
            resources = counted(len(visible_devices()), "GPU", "GPUs")
        return [f"this machine ({resources}) trains {counted(room, 'job', 'jobs')} at a time; the others wait"]

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        ids = []
        cores = max(1, len(os.sched_getaffinity(0)) // at_once)
        for job in jobs:
            share = None
            if job.run.path != sweep:  # other jobs of the sweep may run at the same time
                share = Share(gpus=_gpus(job), cores=cores, sweep=str(sweep), at_once=at_once)
            call = RunAgent(str(job.run.path), share, job.trust_owner)
            code = frozen_code(job.run)
            variables = {} if code is None else code.environment()
            submitted: Any = SessionExecutor(job.run.logs, variables).submit(call)
            self._jobs[submitted.job_id] = submitted
            ids.append(submitted.job_id)
        return ids

    def is_running(self, job_id: str) -> bool:
        return not self._jobs[job_id].done()

    def output(self, job: Job, job_id: str) -> Path:
        return job.run.logs / f"{job_id}_0_log.out"


def jobs_at_once(jobs: Sequence[Job], cores: int, gpus: int) -> int:
    """Returns how many of ``jobs`` may run at a time: the user's limit, or as many as have a GPU or core per worker."""
    limit = jobs[0].config.launch.array_parallelism
    if isinstance(limit, int):
        return min(limit, len(jobs))
    smallest = min(_gpus(job) for job in jobs)
    if smallest:
        return max(1, min(len(jobs), gpus // smallest))
    return max(1, min(len(jobs), cores // max(job.layout.world_size for job in jobs)))


def _gpus(job: Job) -> int:
    """Returns the number of GPUs that a job reserves: the number that the user requests, or the number of ranks of the
    layout."""
    return job.gpus if isinstance(job.config.cluster.gpus_per_node, int) else min(job.gpus, job.layout.world_size)


@dataclass(frozen=True)
class RunAgent:
    """Runs the agent of a frozen run and exits with its exit code. submitit pickles it, so it holds only plain
    values."""

    path: str
    share: Share | None = None
    trust_owner: bool = False

    def __call__(self) -> None:
        run = RunDirectory(Path(self.path))
        open_run(run, "agent", self.trust_owner)
        check_copy(run)
        reexec_from_snapshot(run)
        JobEnvironment().paths.submitted_pickle.unlink(missing_ok=True)  # this process was the last to read it
        from hpc_train.elastic.agent import run_agent  # the submitter does not need the modules of the agent

        def reserved(stop: StopRequests) -> AbstractContextManager[None]:
            return nullcontext() if self.share is None else reserve(self.share, lambda: stop.requested)

        code = run_agent(run, reserve=reserved)
        registered(RUN_ENDED)(run)
        sys.exit(code)  # instead of returning, so that a failed run is a failed job


POLL_S = 0.2


@dataclass(frozen=True)
class Share:
    """The GPUs or cores of this machine that a job uses.

    ``sweep`` is the directory of the jobs that are submitted together; ``at_once`` of them may run at the same time.
    """

    gpus: int
    cores: int
    sweep: str
    at_once: int


@contextmanager
def reserve(share: Share, waiting_is_over: Callable[[], bool]) -> Iterator[None]:
    """Reserves the share of a job inside the ``with`` block, and restricts this process to it.

    The directory ``.slots`` of the sweep has a lock file for each job that may run at the same time, and for each GPU
    or core. When the process of a job ends, the kernel releases its locks. The job does not wait for jobs of other
    sweeps.

    Waits until the share is free, or until ``waiting_is_over`` returns True. In the latter case nothing is reserved.
    """
    folder = Path(share.sweep) / ".slots"
    turns = [f"slot-{number}" for number in range(share.at_once)]
    if share.gpus:
        resources = [f"gpu-{device}" for device in visible_devices()]
    else:
        resources = [f"core-{core}" for core in sorted(os.sched_getaffinity(0))]
    names: list[str] = []
    with ExitStack() as locks:
        try:
            folder.mkdir(exist_ok=True)
            locks.enter_context(take(folder, turns, 1, waiting_is_over))
            names = locks.enter_context(take(folder, resources, share.gpus or share.cores, waiting_is_over))
        except OSError as error:  # for example, files of another user or a full disk
            print(f"warning: this job does not wait for others of its sweep: {error}", file=sys.stderr)
        numbers = [name.partition("-")[2] for name in names]
        if numbers and not share.gpus:
            os.sched_setaffinity(0, map(int, numbers))
        elif numbers and Machine.this().amd is not None:
            restrict_to(numbers)
        elif numbers:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)
        yield


@contextmanager
def take(folder: Path, names: Sequence[str], count: int, waiting_is_over: Callable[[], bool]) -> Iterator[list[str]]:
    """Holds ``count`` of the locks ``names`` in ``folder``; none if ``waiting_is_over`` returns True before they are
    free."""
    with ExitStack() as locks:
        taken = _take_free(locks, folder, names, count)
        while len(taken) < count and not waiting_is_over():
            locks.close()  # jobs that hold only a part of what they need would wait for each other (deadlock)
            time.sleep(POLL_S * random.uniform(0.5, 1.5))
            taken = _take_free(locks, folder, names, count)
        yield taken if len(taken) == count else []


def _take_free(locks: ExitStack, folder: Path, names: Sequence[str], count: int) -> list[str]:
    """Takes up to ``count`` free locks, until ``locks`` is closed; returns their names."""
    taken: list[str] = []
    for name in names:
        if len(taken) == count:
            break
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        locks.callback(os.close, descriptor)
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken.append(name)
    return taken
