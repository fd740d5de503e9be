"""The jobs of one launch, from waiting to ended.

On a place that does not queue (this machine) only as many are started as may run, the next when one ends, so that a
sweep of a thousand jobs is not a thousand waiting processes. Who leaves early hands over all the rest at once: they
then wait for each other by the locks of ``slots.py``.

From a composed config to a checked job, and what is said of it before it is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from hpc_train.config.compose import typed
from hpc_train.config.values import fewest_nodes
from hpc_train.launch.executors.executor import Executor, Job
from hpc_train.launch.executors.select import select_executor
from hpc_train.launch.watch import Submitted, View
from hpc_train.plan.validate import validate
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.lease import add_submission

TOLD_ONE_BY_ONE = 20  # jobs; of more only their number is told
WAITING = View("waiting", {})


class JobQueue:
    """Submits frozen jobs in their order and keeps how each stands."""

    def __init__(self, jobs: Sequence[Job], submitter: Executor, sweep: Path, console: Console) -> None:
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
            add_submission(job.run, self.submitter.name, first_attempt=attempt, **identity)
            events = EventLog.open(job.run, "submitter", attempt)
            events.write("submitted", job_id=job_id, place=self.submitter.name, layout=str(job.layout))
            self._submitted[job.number] = Submitted(job, job_id, attempt, self.submitter.output(job, job_id))
            if len(jobs) <= TOLD_ONE_BY_ONE:
                announce(job, self.submitter, self._console, job_id)
        if len(jobs) > TOLD_ONE_BY_ONE:
            where = f"{ids[0]} to {ids[-1]}: {self._sweep}"
            self._console.print(f"{len(jobs)} jobs to {self.submitter.name}, {where}", markup=False, soft_wrap=True)
        self._waiting = self._waiting[len(jobs) :]


def prepare(node: DictConfig, run: RunDirectory, number: int = 0, overrides: Sequence[str] = ()) -> Job:
    """The job that ``node`` describes; writes nothing.

    Raises:
        UserError: it is wrong, or cannot run where it would go.
    """
    config = typed(node)
    nodes, gpus, workers = select_executor(config.cluster).shape(config.cluster)
    layout = validate(config, nodes, workers)
    fewest = fewest_nodes(config)
    if fewest < nodes:
        validate(config, fewest, workers)  # what it gets, or is left with, must do in any case
    return Job(number, tuple(overrides), config, layout, gpus, workers, run)


def announce(job: Job, submitter: Executor, console: Console, job_id: str | None = None) -> None:
    """Says what ``job`` is and where it goes, or has gone under ``job_id``."""
    device = f"{job.gpus} GPUs per node" if job.gpus else "on CPUs"
    place = f"{submitter.name}, job id {job_id}" if job_id else submitter.name
    lines = [f"job {job.number}: {job.config.strategy.name}: {job.layout}, {device}; {place}", f"  {job.run.path}"]
    lines += [f"  note: {note}" for note in job.layout.notes]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
