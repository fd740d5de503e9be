"""What Slurm knows about submitted jobs and about the job of this process."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpc_train.schedulers.scheduler import CurrentJob, JobStatus, Reason, SubmittedJobs, TimeLimit
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.client import BRIEF_S, CLOCKS_S, PATIENT_S, SlurmError, on_clusters
from hpc_train.schedulers.slurm.reasons import NODES_START, explain
from hpc_train.schedulers.slurm.records import JobRecord
from hpc_train.schedulers.states import FORGOTTEN, JobState, Phase, state_of


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
        return NODES_START if status.is_starting else explain(status.reason)


def status_of(job_id: str, jobs: Mapping[str, JobStatus]) -> JobStatus | None:
    """Returns the status of a job in the output of ``squeue``; None if it is not listed.

    Tasks of an array that were cancelled before they started are listed as one job, under the id of the array.
    """
    return jobs.get(job_id) or jobs.get(job_id.partition("_")[0])


def ask(selection: Sequence[str], timeout_s: float = PATIENT_S) -> dict[str, JobStatus] | None:
    """Returns the jobs that ``squeue`` selects with ``selection``, by id (12 or 12_3); None if it does not respond."""
    jobs = client.list_jobs(selection, timeout_s)
    return None if jobs is None else {job.job_id: job for job in jobs}


def _component_sizes() -> list[int]:
    """Returns the number of nodes of each component of the heterogeneous job of this process."""
    components = range(int(os.environ["SLURM_HET_SIZE"]))
    return [int(os.environ[f"SLURM_JOB_NUM_NODES_HET_GROUP_{component}"]) for component in components]


NO_SHRINK = "disable_job_shrink"
RELEASE_S = 30.0
RELEASE_AGAIN_S = 2.0


@dataclass(frozen=True)
class SlurmJob(CurrentJob):
    """The Slurm job of this process. Where Slurm does not respond, the answers are those of ``CurrentJob``.

    Attributes:
        task: the job as Slurm's commands name it: ``12``, or ``12_3`` for a task of an array.
    """

    scheduler = "Slurm"
    agents_ask = False

    task: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> SlurmJob:
        return cls(
            job_id=environment["SLURM_JOB_ID"],
            restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
            node_rank=int(environment.get("SLURM_NODEID", "0")),
            step_id=environment.get("SLURM_STEP_ID"),
            task=client.own_job(environment),
        )

    @property
    def name(self) -> str:
        return self.task or self.job_id

    def _record(self) -> JobRecord:
        return client.show_job(self.name, timeout_s=BRIEF_S)

    def why_no_requeue(self) -> str | None:
        if client.show_job(self.job_id, timeout_s=BRIEF_S).may_requeue:
            return None
        return f"Slurm may not requeue job {self.job_id} (Requeue=0)"

    def requeue_command(self, chained: bool) -> Sequence[str]:
        if chained:  # the next job continues a run whose job has reached its limit, not a cancelled one
            return ["scontrol", "update", f"JobId={self.name}", "TimeLimit=1"]
        return ["scontrol", "requeue", "incomplete", self.name]

    def cancel_command(self) -> Sequence[str]:
        return ["scancel", self.name]

    def ask(self, command: Sequence[str], exclude: str = "") -> bool:
        return client.query(command, PATIENT_S) is not None

    def is_running(self) -> bool | None:
        text = client.query(["squeue", "--noheader", f"--jobs={self.name}", "--format=%T %Q"])
        if text is None:
            return None
        state, priority = [*text.split(), FORGOTTEN, "0"][:2]
        return state_of(state).phase is Phase.RUNNING and int(priority) > 0  # the priority of a held job is 0

    def limit(self) -> TimeLimit:
        record = self._record()
        return TimeLimit(record.limit_s, record.run_s, record.is_preempted)

    def exclude(self, names: str) -> None:
        client.query(["scontrol", "update", f"JobId={self.name}", f"ExcNodeList={names}"], PATIENT_S)

    def is_current_start(self) -> bool | None:
        record = self._record()
        if not record.state or record.restarts is None:
            return None
        return state_of(record.state).phase in (Phase.RUNNING, Phase.STOPPED) and record.restarts <= self.restart

    def is_suspended(self) -> bool:
        state = client.job_state(self.name)
        return state is not None and state.phase is Phase.STOPPED

    def was_suspended(self, since: float) -> bool:
        suspended_at = self._record().suspended_at  # the clock of the controller may be a minute off
        return suspended_at is not None and suspended_at > since - CLOCKS_S

    def unavailable_nodes(self, names: Sequence[str]) -> dict[str, str]:
        nodes = client.node_states([f"--nodes={','.join(names)}"])
        down = [node for node in nodes if node.state.startswith("down")]
        return {node.node: f"{node.state.rstrip('*')} ({node.reason or 'none'})" for node in down}

    def may_start_without(self, excluded: Collection[str], needed: int) -> bool | None:
        sizes: Counter[str] = Counter()
        if "SLURM_HET_SIZE" in os.environ:  # SLURM_JOB_PARTITION is that of one component
            for component, count in enumerate(_component_sizes()):
                sizes[os.environ[f"SLURM_JOB_PARTITION_HET_GROUP_{component}"]] += count
        elif "SLURM_JOB_PARTITION" in os.environ:
            sizes[os.environ["SLURM_JOB_PARTITION"]] = needed
        for partition, count in sizes.items():
            nodes = client.node_states([f"--partition={partition}"])
            if not nodes:
                return None
            if len({node.node for node in nodes if node.is_usable}.difference(excluded)) < count:
                return False
        return True if sizes else None

    def nodes(self) -> int | None:
        if "SLURM_HET_SIZE" in os.environ:
            return sum(_component_sizes())
        return int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 0) or None

    def why_no_release(self) -> str | None:
        if int(os.environ.get("SLURM_STEP_NUM_NODES", "1")) == 1:
            return "the agents run in no step of several nodes"
        settings = client.query(["scontrol", "show", "config"], BRIEF_S) or ""
        if NO_SHRINK in settings:
            return f"the site forbids it (SchedulerParameters={NO_SHRINK})"
        job = client.query(["scontrol", "show", "job", self.name], BRIEF_S) or ""
        if "accounting_storage/none" in settings and "ResizeTime=" in job:
            return "Slurm without accounting changes the nodes of a job only once"
        return None

    def why_no_joiner(self) -> None:
        return None

    def release(self, names: Collection[str], job_id: str | None = None) -> str | None:
        """Updates the list of nodes of the job. Slurm keeps the step, whose tasks on these nodes have ended, and a
        requeued job gets as many nodes as are left. For seconds after one change it refuses the next.
        """
        job = job_id or self.name
        until = time.monotonic() + RELEASE_S
        while True:
            try:
                held = client.run(["squeue", "--noheader", f"--jobs={job}", "--format=%N"]).strip()
                hosts = client.run(["scontrol", "show", "hostnames", held]).split()
                left = [name for name in hosts if name not in names]
                if len(left) < len(hosts):  # a joiner may have started without these nodes
                    client.run(["scontrol", "update", f"JobId={job}", f"NodeList={','.join(left)}"])
                return None
            except SlurmError as error:
                if time.monotonic() > until:
                    return error.said
            time.sleep(RELEASE_AGAIN_S)

    def note(self, text: str, replaced: re.Pattern[str]) -> None:
        jobs = client.list_jobs([f"--jobs={self.name}"], BRIEF_S)
        if jobs:
            comment = f"{replaced.sub('', jobs[0].comment)} {text}".strip()
            client.query(["scontrol", "update", f"JobId={self.name}", f"Comment={comment}"], BRIEF_S)
