"""Jobs on Slurm, through submitit's executor: one task per node, the agent; an array for the jobs of one shape."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpc_train.cluster.allocation import workers_per_node
from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import ClusterConfig
from hpc_train.launch.job import Job, RunAgent


class SlurmSubmitter:
    """The Slurm cluster that ``sbatch`` on this machine belongs to."""

    name = "Slurm"

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}

    def shape(self, cluster: ClusterConfig) -> tuple[int, int, int]:
        """What is asked for; the GPUs of a login node say nothing, so ``auto`` asks for none."""
        asked = cluster.gpus_per_node
        return (cluster.nodes, *workers_per_node(cluster, visible=asked if isinstance(asked, int) else 0))

    def at_once(self, jobs: Sequence[Job]) -> int:
        """All: Slurm queues them, and keeps to ``launch.array_parallelism``."""
        return len(jobs)

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        ids: dict[int, str] = {}
        resources = {job.number: _resources(job, sweep.name) for job in jobs}
        by_shape = sorted(jobs, key=lambda job: (str(resources[job.number]), job.number))
        for _, group in groupby(by_shape, key=lambda job: str(resources[job.number])):
            same = list(group)
            folder = same[0].submitit_folder
            submitted = _submit(folder, resources[same[0].number], same)
            for job, job_id in zip(same, submitted, strict=True):
                ids[job.number] = job_id
                self._folders[job_id] = folder
        return [ids[job.number] for job in jobs]

    def identity(self, job_id: str) -> dict[str, Any]:
        return {"job_id": job_id}

    def present(self, ids: Collection[str]) -> set[str]:
        if not ids:
            return set()
        command = ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={','.join(sorted(ids))}"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if listed.returncode and "Invalid job id" not in listed.stderr:
            return set(ids)  # the controller does not answer: no news is no end
        return set(listed.stdout.split()) & set(ids)

    def stop(self, ids: Collection[str]) -> None:
        subprocess.run(["scancel", "--signal=USR2", *sorted(ids)], check=False, timeout=60)

    def stop_command(self, ids: Collection[str]) -> str:
        return "scancel --signal=USR2 " + " ".join(sorted(ids))

    def output(self, job: Job, job_id: str) -> Path:
        return self._folders[job_id] / f"{job_id}_0_log.err"


def _resources(job: Job, name: str) -> dict[str, Any]:
    cluster = job.config.cluster
    asked: dict[str, Any] = {
        "job_name": f"hpc_train-{name}",
        "nodes": cluster.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": job.gpus or None,
        "cpus_per_task": job.workers,  # without it a task gets one core, whatever the node has
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": cluster.time,
        "srun_args": ["--kill-on-bad-exit=1"],  # a node whose agent failed takes the others with it
        "signal_delay_s": int(job.config.elastic.stop_grace_s),
    }
    cap = job.config.launch.array_parallelism
    if isinstance(cap, int):
        asked["array_parallelism"] = cap
    return {key: value for key, value in asked.items() if value is not None}


def _submit(folder: Path, resources: dict[str, Any], jobs: Sequence[Job]) -> list[str]:
    executor = SlurmExecutor(folder)
    executor.update_parameters(**resources)
    try:
        submitted = executor.submit_array([RunAgent(str(job.run.path)) for job in jobs])
    except (FailedJobError, FailedSubmissionError) as error:
        raise ConfigError(
            f"sbatch refused the job: {str(error).strip().splitlines()[-1]}",
            where="cluster",
            mend="cluster.partition, account, qos, time, nodes, gpus_per_node as this cluster allows them",
        ) from error
    return [job.job_id for job in submitted]
