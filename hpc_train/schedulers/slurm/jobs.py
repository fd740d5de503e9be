"""Answers questions about submitted jobs of Slurm."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpc_train.schedulers.scheduler import JobStatus, Reason, SubmittedJobs
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.client import PATIENT_S, on_clusters
from hpc_train.schedulers.slurm.reasons import explain
from hpc_train.schedulers.states import JobState


@dataclass(frozen=True)
class SlurmJobs(SubmittedJobs):
    """The jobs of the Slurm cluster of this machine, or of the ``clusters`` that they were submitted to."""

    name = "Slurm"

    clusters: str | None = None

    def statuses(self, ids: Collection[str]) -> dict[str, JobStatus] | None:
        selection = [f"--jobs={','.join(sorted({job_id.partition('_')[0] for job_id in ids}))}"]
        if self.clusters:  # where an id may belong to another user's job
            selection.append("--me")
        listed = ask([*selection, *on_clusters(self.clusters)])
        if listed is None:
            return None
        statuses = {job_id: status_of(job_id, listed) for job_id in ids}
        return {job_id: status for job_id, status in statuses.items() if status is not None}

    def cancel(self, ids: Collection[str], *, save: bool = False) -> None:
        client.cancel(ids, signal="USR1" if save else None, clusters=self.clusters)

    def state(self, job_id: str) -> JobState | None:
        return client.job_state(job_id, self.clusters)

    def explain(self, status: JobStatus) -> Reason:
        return explain(status.reason)


def status_of(job_id: str, jobs: Mapping[str, JobStatus]) -> JobStatus | None:
    """Returns the status of a job in the output of ``squeue``; None if it is not listed.

    Tasks of an array that were cancelled before they started are listed as one job, under the id of the array.
    """
    return jobs.get(job_id) or jobs.get(job_id.partition("_")[0])


def ask(selection: Sequence[str], timeout_s: float = PATIENT_S) -> dict[str, JobStatus] | None:
    """Returns the jobs that ``squeue`` selects with ``selection``, by id (12 or 12_3); None if it does not respond."""
    now = time.time()
    jobs = client.list_jobs(selection, timeout_s)
    if jobs is None:
        return None
    return {job.job_id: JobStatus(job.state, job.reason, job.starts, job.comment, queried=now) for job in jobs}
