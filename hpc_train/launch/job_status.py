"""How jobs stand in the eyes of what took them; of Slurm, asked rarely and once for all jobs together.

Only ``squeue`` is asked: it answers on sites without accounting too, and still knows a job minutes after its end.
"""

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
    """One job: its ``state`` in the scheduler's words, and why and until when it waits."""

    state: str = ""
    reason: str = ""
    starts: str = ""  # 2026-01-31T12:00:00, empty where nobody knows
    comment: str = ""
    part: str = ""  # which job of a chain: "job 18, 2 of 3"

    @property
    def present(self) -> bool:
        """Whether it waits or runs."""
        return state_of(self.state).is_alive

    @property
    def is_pending(self) -> bool:
        """Whether it waits for nodes; False where no scheduler knows a state of it."""
        return bool(self.state) and state_of(self.state).phase is Phase.PENDING

    @property
    def is_running(self) -> bool:
        """Whether a scheduler says that it runs."""
        return bool(self.state) and state_of(self.state).phase is Phase.RUNNING

    @property
    def words(self) -> str:
        """For people: "pending (Priority), starts about 01-31 12:00"."""
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
    """Standings of Slurm jobs, at most every 30 s asked for anew (every 60 s for many jobs)."""

    def __init__(self) -> None:
        self._known: dict[str | None, dict[str, JobStatus]] = {}
        self._asked_at: dict[str | None, float] = {}

    def of(self, ids: Collection[str], clusters: str | None = None) -> dict[str, JobStatus]:
        """Those of ``ids`` that Slurm knows; where it has not been asked yet or does not answer, they are present.

        Args:
            clusters: where the jobs went (``cluster.clusters``); None for the cluster of this machine.
        """
        pause = ASK_MANY_EVERY_S if len(ids) > MANY else ASK_EVERY_S
        known = self._known.get(clusters, {})
        new = {job_id: PRESENT for job_id in ids if status_of(job_id, known) is None}
        if ids and time.monotonic() - self._asked_at.get(clusters, float("-inf")) >= pause:
            self._asked_at[clusters] = time.monotonic()
            jobs = sorted({job_id.partition("_")[0] for job_id in ids})
            # an id may be another person's on another cluster
            found = ask([f"--jobs={','.join(jobs)}", *on_clusters(clusters), *(["--me"] if clusters else [])])
            if found is not None:
                self._known[clusters], known, new = found, found, {}
        standings = {job_id: new.get(job_id) or status_of(job_id, known) for job_id in ids}
        return {job_id: standing for job_id, standing in standings.items() if standing is not None}


def status_of(job_id: str, known: Mapping[str, JobStatus]) -> JobStatus | None:
    """That of a job in squeue's answer; None where it is not there.

    The tasks of an array that were cancelled before they started stand there as one, under the id of the array.
    """
    return known.get(job_id) or known.get(job_id.partition("_")[0])


def ask(selection: Sequence[str]) -> dict[str, JobStatus] | None:
    """The jobs that ``squeue``'s options ``selection`` select, by id (``12`` or ``12_3``); None without an answer."""
    jobs = list_jobs(selection)
    if jobs is None:
        return None
    return {job.job_id: JobStatus(job.state, job.reason, job.starts, job.comment) for job in jobs}


def folded(chains: Mapping[str, Sequence[str]], known: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
    """``known``, with that of a whole chain under the id of its first job."""
    whole = {first: standing for first, ids in chains.items() if (standing := _of_chain(ids, known)) is not None}
    return {**known, **whole}


def _of_chain(ids: Sequence[str], known: Mapping[str, JobStatus]) -> JobStatus | None:
    """Of the job that runs, else of the next to run, else of the last that has ended by itself."""
    present = [job_id for job_id in ids if job_id in known and known[job_id].present]
    running = [job_id for job_id in present if not known[job_id].is_pending]
    ended = [job_id for job_id in ids if job_id in known and job_id not in present]
    by_themselves = [job_id for job_id in ended if known[job_id].state != "CANCELLED"]
    current = next(iter([*running, *present, *reversed(by_themselves), *ended]), None)
    if current is None:
        return None
    return replace(known[current], part=f"job {current}, {ids.index(current) + 1} of {len(ids)}")
