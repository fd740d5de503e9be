"""Runs jobs as processes of this machine, through submitit's local executor.

submitit's executor ends a job after its time limit, assigns the same GPUs to several jobs, and leaves the job in the
session of the terminal, so that Ctrl-C reaches the workers. Here a job has a session of its own and no time limit, and
reserves its GPUs or cores before it starts, so that all jobs may be submitted at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from submitit.local.local import LocalExecutor, LocalJob

from hpc_train.config.schema import Config
from hpc_train.launch.executors.executor import RunAgent, Share, local_shape
from hpc_train.launch.job import Job
from hpc_train.launch.storage import check_room
from hpc_train.layout.layout import JobShape, Place
from hpc_train.machine.gpus import visible_gpus
from hpc_train.opening import open_to_append
from hpc_train.run.code import frozen_code
from hpc_train.runs.job_status import PRESENT, JobStatus
from hpc_train.units import counted


class ProcessExecutor:
    """Base of executors whose jobs are processes, which forward ``stop_signal`` to the agents."""

    stop_signal: signal.Signals

    def is_running(self, job_id: str) -> bool:
        """Returns whether the process of a submitted job is alive."""
        raise NotImplementedError

    def confirm(self, jobs: Sequence[Job], console: Console) -> None:
        """Asks nothing, since jobs on this machine cost nothing."""

    def plan(self, jobs: Sequence[Job], sweep: Path) -> list[tuple[str, str]]:
        return []

    def identity(self, job_id: str) -> dict[str, Any]:
        return {"pid": int(job_id)}

    def statuses(self, ids: Collection[str]) -> dict[str, JobStatus]:
        return {job_id: PRESENT for job_id in ids if self.is_running(job_id)}

    def stop(self, ids: Collection[str]) -> None:
        for job_id in self.statuses(ids):
            os.kill(int(job_id), self.stop_signal)

    def cancel(self, ids: Collection[str]) -> None:
        self.stop(ids)


CONTROLLER = Path(__file__).with_name("controller.py")
TEN_YEARS_S = 10 * 365 * 24 * 3600


class SessionExecutor(LocalExecutor):
    """submitit's local executor, with a session for each job and ``variables`` in its environment."""

    def __init__(self, folder: Path, variables: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        self.variables = dict(variables or {})

    def _submit_command(self, command: str) -> LocalJob[Any]:
        settings = {
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(TEN_YEARS_S),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        with open_to_append(self.folder / "controller.log", self.folder) as log, _sigterm_blocked():
            process = subprocess.Popen(
                [sys.executable, "-P", str(CONTROLLER), str(self.folder)],  # not the one of frozen code
                env=os.environ | settings | self.variables,
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
    """This machine."""

    name = "this machine"
    stop_signal = signal.SIGTERM  # submitit's controller forwards it to the agent

    def __init__(self) -> None:
        self._jobs: dict[str, LocalJob[Any]] = {}

    def shape(self, config: Config) -> JobShape:
        return local_shape(config, Place.MACHINE)

    def at_once(self, jobs: Sequence[Job]) -> int:
        return jobs_at_once(jobs, len(os.sched_getaffinity(0)), visible_gpus())

    def check(self, jobs: Sequence[Job]) -> list[str]:
        check_room(jobs)  # ``shape`` has refused what this machine does not have
        room = self.at_once(jobs)
        if room >= len(jobs):
            return []
        cores, gpus = len(os.sched_getaffinity(0)), visible_gpus()
        has = counted(gpus, "GPU", "GPUs") if jobs[0].gpus else counted(cores, "core", "cores")
        return [f"this machine ({has}) trains {counted(room, 'job', 'jobs')} at a time; the others wait"]

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        ids = []
        for job in jobs:
            call = RunAgent(str(job.run.path), _share(job, sweep, at_once), job.trust_owner)
            code = frozen_code(job.run)
            variables = {} if code is None else code.environment()
            submitted: Any = SessionExecutor(job.submitit_folder, variables).submit(call)
            self._jobs[submitted.job_id] = submitted
            ids.append(submitted.job_id)
        return ids

    def is_running(self, job_id: str) -> bool:
        return not self._jobs[job_id].done()

    def output(self, job: Job, job_id: str) -> Path:
        return job.submitit_folder / f"{job_id}_0_log.err"


def jobs_at_once(jobs: Sequence[Job], cores: int, gpus: int) -> int:
    """Returns how many of ``jobs`` may run at a time: the user's limit, or the number with a GPU or core per worker."""
    asked = jobs[0].config.launch.array_parallelism
    if isinstance(asked, int):
        return min(asked, len(jobs))
    smallest = min(_gpus(job) for job in jobs)
    if smallest:
        return max(1, min(len(jobs), gpus // smallest))
    return max(1, min(len(jobs), cores // max(job.layout.world_size for job in jobs)))


def _gpus(job: Job) -> int:
    """Returns the GPUs that a job reserves: as many as the user requests, or as the layout has ranks."""
    return job.gpus if isinstance(job.config.cluster.gpus_per_node, int) else min(job.gpus, job.layout.world_size)


def _share(job: Job, sweep: Path, at_once: int) -> Share:
    """Returns the GPUs of a job, or its equal share of the cores."""
    cores = max(1, len(os.sched_getaffinity(0)) // at_once)
    return Share(gpus=_gpus(job), cores=cores, sweep=str(sweep), at_once=at_once)
