"""Submits the jobs of one launch.

An executor without a queue (this machine) gets only as many jobs at a time as may run, so that a sweep of a thousand
jobs is not a thousand waiting processes. On detaching, all others are submitted too, and wait for each other's locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hpc_train.launch.executors.executor import Executor, Submitted
from hpc_train.launch.job import Job
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import concurrently
from hpc_train.run.lease import add_submission
from hpc_train.run.requests import record_stop_request
from hpc_train.runs.job_status import NOT_STARTED, View

ANNOUNCED_SINGLY = 20  # with more jobs only their number is printed
WAITING = View("waiting", {})


class JobQueue:
    """Submits frozen jobs in order and keeps a view of each."""

    def __init__(self, jobs: Sequence[Job], executor: Executor, sweep: Path, console: Console) -> None:
        self.jobs = list(jobs)
        self.executor = executor
        self._sweep = sweep
        self._console = console
        self._at_once = executor.at_once(jobs)
        self._waiting = list(jobs)
        self._submitted: dict[int, Submitted] = {}
        self._views: dict[int, View] = {}
        self.stopped = False  # by the user of this process

    @property
    def views(self) -> list[View]:
        """The views of the jobs, in order."""
        return [self._views.get(job.number, WAITING) for job in self.jobs]

    @property
    def over(self) -> bool:
        return not self._waiting and not self._open()

    @property
    def open_ids(self) -> list[str]:
        """The ids of the submitted jobs that have not ended."""
        return [item.job_id for item in self._open()]

    def advance(self) -> None:
        """Updates the views and submits as many jobs as may run."""
        statuses = self.executor.statuses(self.open_ids)
        for item in self._open():
            self._views[item.job.number] = item.view(statuses.get(item.job_id))
        room = self._at_once - len(self._open())
        self._submit(self._waiting[: max(0, room)])

    def submit_all(self) -> None:
        self._submit(self._waiting)

    def drop_waiting(self) -> None:
        """Gives up the jobs that were not submitted yet."""
        for job in self._waiting:
            self._views[job.number] = View(NOT_STARTED, {}, exit=None)
        self._waiting = []

    def stop_all(self, *, cancel: bool) -> None:
        """Drops the waiting jobs and stops the submitted ones; with ``cancel`` they need not save a checkpoint."""
        self.stopped = True
        self.drop_waiting()
        for item in self._open():
            record_stop_request(item.job.run)
        end = self.executor.cancel if cancel else self.executor.stop
        end(self.open_ids)

    def _open(self) -> list[Submitted]:
        views = self._views
        return [item for number, item in self._submitted.items() if number not in views or views[number].exit is None]

    def _submit(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        first_attempts = [job.run.newest_attempt() + 1 for job in jobs]
        ids = self.executor.submit(jobs, self._sweep, self._at_once)
        entries = list(map(Submitted, jobs, ids, first_attempts, map(self.executor.output, jobs, ids)))
        try:
            for _ in concurrently(self._record, entries):
                pass
        except BaseException:  # a job that its run does not record could start it again, and nothing would cancel it
            self.executor.cancel(ids)
            raise
        self._submitted |= {entry.job.number: entry for entry in entries}
        for job, job_id in zip(jobs, ids, strict=True):
            if len(jobs) <= ANNOUNCED_SINGLY:
                announce(job, self.executor, self._console, job_id)
        if len(jobs) > ANNOUNCED_SINGLY:
            where = f"{ids[0]} to {ids[-1]}: {self._sweep}"
            self._console.print(f"{len(jobs)} jobs to {self.executor.name}, {where}", markup=False, soft_wrap=True)
        self._waiting = self._waiting[len(jobs) :]

    def _record(self, submitted: Submitted) -> None:
        run, name, identity = submitted.job.run, self.executor.name, self.executor.identity(submitted.job_id)
        add_submission(run, name, first_attempt=submitted.first_attempt, **identity)
        events = EventLog.open(run, "submitter", submitted.first_attempt)
        events.write("submitted", job_id=submitted.job_id, executor=name, layout=str(submitted.job.layout))


def announce(job: Job, executor: Executor, console: Console, job_id: str | None = None) -> None:
    """Prints what ``job`` is and where it runs, with the id of a submitted job."""
    device = f"{job.gpus} GPUs per node" if job.gpus else "on CPUs"
    place = f"{executor.name}, job id {job_id}" if job_id else executor.name
    lines = [f"job {job.number}: {job.config.strategy.name}: {job.layout}, {device}; {place}", f"  {job.run.path}"]
    lines += [f"  note: {note}" for note in job.layout.notes]
    lines += [] if job.choice is None else [f"  {job.choice.lines[0]}; table: {job.run.plan}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
