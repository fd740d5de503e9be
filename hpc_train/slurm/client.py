"""What Slurm says of one job, in one call."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

ENDED = "ENDED"  # Slurm answers and has forgotten it


def job_state(job_id: str, clusters: str | None = None) -> str | None:
    """The state by Slurm's name, ``ENDED``, or None where Slurm does not answer.

    ``clusters`` are others than this machine's, where the same id may be another person's.
    """
    where = [f"--clusters={clusters}", "--me"] if clusters else []
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", "%T", *where]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if asked.returncode != 0:
        return ENDED if "Invalid job id" in asked.stderr else None
    states = [line.strip() for line in asked.stdout.splitlines() if not line.startswith("CLUSTER:")]
    return next(filter(None, states), ENDED)


def own_job(environment: Mapping[str, str] = os.environ) -> str:
    """The job of this process, as Slurm's commands want it: a task of an array by the array's id and its number."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}" if array else environment["SLURM_JOB_ID"]


def is_suspended() -> bool:
    """Whether the job of this process is suspended, by a person or by gang scheduling; False where nobody answers."""
    return job_state(own_job()) == "SUSPENDED"


def may_run_again(job_id: str) -> bool:
    """Whether Slurm would requeue the job; True also where it does not say, as in a container without its commands."""
    try:
        asked = subprocess.run(
            ["scontrol", "show", "job", job_id], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return "Requeue=0" not in asked.stdout.split()
