"""The status of submitted jobs as their scheduler reports it. Slurm is queried rarely, once for all jobs together."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_train.slurm.client import list_jobs, on_clusters
from hpc_train.slurm.states import Phase, state_of

ASK_EVERY_S = 30.0
ASK_MANY_EVERY_S = 60.0  # with more than MANY jobs
MANY = 100


@dataclass(frozen=True)
class JobStatus:
    """The status of one job: its ``state`` as Slurm names it, empty outside of Slurm, and why it is pending."""

    state: str = ""
    reason: str = ""
    starts: str = ""  # the expected start, 2026-01-31T12:00:00; empty if unknown
    comment: str = ""
    part: str = ""  # which job of a chain: "job 18, 2 of 3"

    @property
    def present(self) -> bool:
        """Whether the job is pending or running."""
        return state_of(self.state).is_alive

    @property
    def is_pending(self) -> bool:
        """Whether the job waits for nodes; False if its state is unknown."""
        return bool(self.state) and state_of(self.state).phase is Phase.PENDING

    @property
    def is_running(self) -> bool:
        """Whether the job runs; False if its state is unknown."""
        return bool(self.state) and state_of(self.state).phase is Phase.RUNNING

    @property
    def words(self) -> str:
        """One phrase for users: "pending (Priority), starts about 01-31 12:00"."""
        text = self.state.lower() or "waiting"
        if self.part:
            text = f"{self.part}, {text}"
        if not self.is_pending:
            return text
        if self.reason not in ("", "None"):
            text += f" ({self.reason})"
        if self.starts:
            text += f", starts about {self.starts[5:16].replace('T', ' ')}"
        return text


PRESENT = JobStatus()


class SlurmStatuses:
    """The status of Slurm jobs, queried at most every 30 s (every 60 s for many jobs)."""

    def __init__(self) -> None:
        self._known: dict[str | None, dict[str, JobStatus]] = {}
        self._asked_at: dict[str | None, float] = {}

    def of(self, ids: Collection[str], clusters: str | None = None) -> dict[str, JobStatus]:
        """The status of those of ``ids`` that Slurm knows; all count as present as long as it has not responded.

        Args:
            clusters: the clusters that the jobs were submitted to; None for that of this machine.
        """
        pause = ASK_MANY_EVERY_S if len(ids) > MANY else ASK_EVERY_S
        known = self._known.get(clusters, {})
        new = {job_id: PRESENT for job_id in ids if status_of(job_id, known) is None}
        if ids and time.monotonic() - self._asked_at.get(clusters, float("-inf")) >= pause:
            self._asked_at[clusters] = time.monotonic()
            jobs = sorted({job_id.partition("_")[0] for job_id in ids})
            # on another cluster, an id may belong to another user's job
            found = ask([f"--jobs={','.join(jobs)}", *on_clusters(clusters), *(["--me"] if clusters else [])])
            if found is not None:
                self._known[clusters], known, new = found, found, {}
        statuses = {job_id: new.get(job_id) or status_of(job_id, known) for job_id in ids}
        return {job_id: status for job_id, status in statuses.items() if status is not None}


def status_of(job_id: str, known: Mapping[str, JobStatus]) -> JobStatus | None:
    """The status of a job in the output of ``squeue``; None if it is not listed.

    Tasks of an array that were cancelled before they started are listed as one job, under the id of the array.
    """
    return known.get(job_id) or known.get(job_id.partition("_")[0])


def ask(selection: Sequence[str]) -> dict[str, JobStatus] | None:
    """The jobs that ``squeue``'s options ``selection`` select, by id (``12`` or ``12_3``); None without an answer."""
    jobs = list_jobs(selection)
    if jobs is None:
        return None
    return {job.job_id: JobStatus(job.state, job.reason, job.starts, job.comment) for job in jobs}


def folded(chains: Mapping[str, Sequence[str]], known: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
    """``known``, where the status of each chain is added under the id of its first job."""
    whole = {first: status for first, ids in chains.items() if (status := _of_chain(ids, known)) is not None}
    return {**known, **whole}


def _of_chain(ids: Sequence[str], known: Mapping[str, JobStatus]) -> JobStatus | None:
    """The status of the job that runs, else of the next one, else of the last one that was not cancelled."""
    present = [job_id for job_id in ids if job_id in known and known[job_id].present]
    running = [job_id for job_id in present if not known[job_id].is_pending]
    ended = [job_id for job_id in ids if job_id in known and job_id not in present]
    by_themselves = [job_id for job_id in ended if known[job_id].state != "CANCELLED"]
    current = next(iter([*running, *present, *reversed(by_themselves), *ended]), None)
    if current is None:
        return None
    return replace(known[current], part=f"job {current}, {ids.index(current) + 1} of {len(ids)}")
