"""Finds the job of this process, and the scheduler of a submission."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_train.errors import UserError
from hpc_train.schedulers.environment import NODES, EnvironmentJob
from hpc_train.schedulers.kubernetes.manifest import REFERENCE
from hpc_train.schedulers.scheduler import CurrentJob, SubmittedJobs, TimeLimit, load_scheduler
from hpc_train.schedulers.slurm.jobs import SlurmJob, SlurmJobs


@dataclass(frozen=True)
class NoJob(CurrentJob):
    """Stands for the job of a process outside of jobs."""

    scheduler = "Slurm"

    job_id: str = ""
    restart: int = 0
    node_rank: int = 0

    def why_no_requeue(self) -> str | None:
        return None

    def requeue_command(self, chained: bool) -> Sequence[str]:
        return ()

    def ask(self, command: Sequence[str], exclude: str = "") -> bool:
        return False

    def why_no_release(self) -> str:
        return "it does not run in a job"

    def why_no_joiner(self) -> str:
        return self.why_no_release()


@dataclass(frozen=True)
class KubernetesJob(EnvironmentJob):
    """The Job of Kubernetes in whose pod this process runs. Its controller replaces the pods that end with the exit
    code of a requeue. ``reference`` is what commands name the Job by."""

    scheduler = "Kubernetes"
    replaces_nodes = True

    reference: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> KubernetesJob:
        described = super().of(environment)
        assert isinstance(described, KubernetesJob)
        return replace(described, reference=environment[REFERENCE])

    @property
    def name(self) -> str:
        return self.reference

    def limit(self) -> TimeLimit:
        """Returns that SIGTERM announces a preemption: the kubelet sends it when a pod is evicted or deleted."""
        return TimeLimit(is_preempted=True)


def current_job(environment: Mapping[str, str] = os.environ) -> CurrentJob:
    """Returns the job of this process, with an empty id outside of a job.

    Raises UserError if a variable of the job is wrong.
    """
    if environment.get(NODES):
        kind = KubernetesJob if REFERENCE in environment else EnvironmentJob
        return kind.of(environment)
    if "SLURM_JOB_ID" in environment:
        return SlurmJob.of(environment)
    return NoJob()


ENVIRONMENT = "environment"  # the scheduler of a submission that only the job itself has described


@dataclass(frozen=True)
class OtherJobs(SubmittedJobs):
    """Jobs of a scheduler that hpc_train cannot ask: a batch script has described them by variables."""

    name = "other"

    def statuses(self, ids: Collection[str]) -> None:
        return None

    def cancel(self, ids: Collection[str], *, save: bool = False) -> None:
        if ids:
            raise UserError(
                f"hpc_train did not submit job {', '.join(ids)} and cannot cancel it",
                where="RUN",
                fix="use the command of its scheduler: qdel, bkill or flux cancel; SIGUSR1 to an agent saves first",
            )


def jobs_of(submission: Mapping[str, Any]) -> SubmittedJobs:
    """Returns the scheduler that knows the job of an entry of ``submissions`` in ``run.json``.

    Raises UserError if a user's scheduler cannot be loaded.
    """
    path = submission.get("scheduler")
    if path == ENVIRONMENT:
        return OtherJobs()
    if path is None:
        return SlurmJobs(submission.get("clusters"))
    return load_scheduler(str(path))
