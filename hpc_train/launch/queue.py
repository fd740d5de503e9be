"""The jobs of one launch, from waiting to ended.

On a place that does not queue (this machine) only as many are started as may run, the next when one ends, so that a
sweep of a thousand jobs is not a thousand waiting processes. Who leaves early hands over all the rest at once: they
then wait for each other by the locks of ``slots.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hpc_train.launch.job import Job
from hpc_train.launch.prepare import announce
from hpc_train.launch.submitter import Submitter
from hpc_train.launch.watch import Submitted, View
from hpc_train.run import submissions
from hpc_train.run.events import EventLog

TOLD_ONE_BY_ONE = 20  # jobs; of more only their number is told
WAITING = View("waiting", {})


class JobQueue:
    """Submits frozen jobs in their order and keeps how each stands."""

    def __init__(self, jobs: Sequence[Job], submitter: Submitter, sweep: Path, console: Console) -> None:
        self.jobs = list(jobs)
        self.submitter = submitter
        self._sweep = sweep
        self._console = console
        self._at_once = submitter.at_once(jobs)
        self._waiting = list(jobs)
        self._submitted: dict[int, Submitted] = {}
        self._views: dict[int, View] = {}

    @property
    def views(self) -> list[View]:
        """How the jobs stand, in their order."""
        return [self._views.get(job.number, WAITING) for job in self.jobs]

    @property
    def over(self) -> bool:
        return not self._waiting and not self._open()

    @property
    def open_ids(self) -> list[str]:
        """The ids of the jobs that were submitted and have not ended."""
        return [item.job_id for item in self._open()]

    def advance(self) -> None:
        """Looks how the jobs stand and submits as many as there is room for."""
        standings = self.submitter.standings(self.open_ids)
        for item in self._open():
            self._views[item.job.number] = item.view(standings.get(item.job_id))
        room = self._at_once - len(self._open())
        self._submit(self._waiting[: max(0, room)])

    def submit_all(self) -> None:
        self._submit(self._waiting)

    def drop_waiting(self) -> None:
        """Jobs that were not submitted will not be."""
        for job in self._waiting:
            self._views[job.number] = View("not started", {}, exit=None)
        self._waiting = []

    def _open(self) -> list[Submitted]:
        views = self._views
        return [item for number, item in self._submitted.items() if number not in views or views[number].exit is None]

    def _submit(self, jobs: Sequence[Job]) -> None:
        if not jobs:
            return
        first_attempts = [job.run.newest_attempt() + 1 for job in jobs]
        ids = self.submitter.submit(jobs, self._sweep, self._at_once)
        for job, job_id, attempt in zip(jobs, ids, first_attempts, strict=True):
            identity = self.submitter.identity(job_id)
            submissions.add(job.run, self.submitter.name, first_attempt=attempt, **identity)
            events = EventLog.open(job.run, "submitter", attempt)
            events.write("submitted", job_id=job_id, place=self.submitter.name, layout=str(job.layout))
            self._submitted[job.number] = Submitted(job, job_id, attempt, self.submitter.output(job, job_id))
            if len(jobs) <= TOLD_ONE_BY_ONE:
                announce(job, self.submitter, self._console, job_id)
        if len(jobs) > TOLD_ONE_BY_ONE:
            where = f"{ids[0]} to {ids[-1]}: {self._sweep}"
            self._console.print(f"{len(jobs)} jobs to {self.submitter.name}, {where}", markup=False, soft_wrap=True)
        self._waiting = self._waiting[len(jobs) :]
