"""Who works on a run: the submissions in ``run.json``, and whether one of them is still alive.

Processes are looked up on their own host; Slurm is asked about Slurm's jobs.
"""

from __future__ import annotations

import os
import time
from typing import Any

from hpc_train.config.errors import ConfigError
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory
from hpc_train.run.processes import lives, process
from hpc_train.run.slurm_jobs import job_state

PENDING_OR_RUNNING = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STOPPED")


def add(run: RunDirectory, door: str, *, pid: int | None = None, job_id: str | None = None, **details: Any) -> None:
    """Appends a submission to ``run.json``: a Slurm ``job_id``, or the ``pid`` of a process on this host."""
    entry: dict[str, Any] = {"door": door, "time": time.time(), "job_id": job_id}
    if pid is not None:
        entry |= process(pid)
    run.update_record(submissions=[*run.record().get("submissions", []), entry | details])


def refuse_live(run: RunDirectory) -> None:
    """Raises ConfigError where another process or job works on ``run`` or waits to."""
    live = find_live(run)
    if live is not None:
        raise ConfigError(
            f"the run in {run.path} is live: {live}",
            where="run.name",
            mend="wait for it, stop it, or take another run.name",
        )


def find_live(run: RunDirectory) -> str | None:
    """Words for what works on ``run`` or waits to; None where nothing does. This process itself does not count."""
    record = run.record()
    claims = [*record.get("submissions", []), record.get("claimed_by", {})]
    for claim in claims:
        if lives(claim) and claim["pid"] != os.getpid():
            return f"process {claim['pid']} on {claim['host']}"
    for job_id, clusters in {job_id: claim.get("clusters") for claim in claims for job_id in job_ids(claim)}.items():
        state = None if job_id in _own_jobs() else job_state(job_id, clusters)
        if state in PENDING_OR_RUNNING:
            return f"Slurm job {job_id} is {state}"
    return "its agent is at work" if lease.is_live(run) else None


def job_ids(claim: dict[str, Any]) -> list[str]:
    """Of a submission to Slurm: one, or those of a chain."""
    return claim.get("chain") or [job_id for job_id in [claim.get("job_id")] if job_id]


def _own_jobs() -> set[str]:
    environment = os.environ
    own = {environment.get("SLURM_JOB_ID", "")}
    if "SLURM_ARRAY_JOB_ID" in environment:
        own.add(f"{environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '')}")
    return own
