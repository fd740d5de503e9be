"""Whether a job that was stopped by its time limit or a preemption is to run again.

Slurm announces both by SIGUSR2 (``--signal``); SIGUSR1, SIGTERM and Ctrl-C are somebody's wish that it stops. The agent
of node 0 decides and leaves a marker; the batch script, which outlives the agents, asks Slurm (``launch/requeue.py``).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.schema import Config
from hpc_train.elastic.budget import over_budget
from hpc_train.elastic.nodes import NodeFailures
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.job_end import JobEnd
from hpc_train.run.ledger import read_ledger
from hpc_train.run.slurm_jobs import may_run_again

LEAST_USEFUL = 0.2
SAYS_MUCH_S = 600.0  # of a shorter job the start takes most of the time anyway


def request(end: JobEnd, config: Config, events: EventLog, reason: str) -> Exit:
    """Leaves the marker for the batch script (75), or says why the job is given up (93)."""
    newest = CheckpointStore(end.run.checkpoints).newest()
    step, before = 0 if newest is None else newest.step, end.requeues()
    refusal = _refusal(config, step, before) or over_budget(end.run, config) or _useless(end.run) or _once(end, config)
    if refusal is None:
        exclude = _excluded(end.run, config)
        end.ask_for_requeue(step, exclude)
        events.write("requeued", step=step, requeues=len(before) + 1, reason=reason, exclude=exclude)
        return Exit.STOPPED
    message = "; ".join(filter(None, (reason, f"given up, not requeued: {refusal}")))
    events.write("gave_up", step=step, exit_code=int(Exit.GAVE_UP), message=message)
    print(message, file=sys.stderr)
    return Exit.GAVE_UP


def _refusal(config: Config, step: int, before: Sequence[dict[str, Any]]) -> str | None:
    if len(before) >= config.elastic.max_requeues:
        return f"it was requeued {len(before)} times (elastic.max_requeues)"
    if before and step <= before[-1]["step"]:
        return f"no step was saved since the requeue before, at step {before[-1]['step']}: the job does not get on"
    return None


def _useless(run: RunDirectory) -> str | None:
    """Words for a run whose last two jobs have spent their time on other things than steps."""
    jobs = [job for job in read_ledger(run, time.time()).jobs if job.held_s >= SAYS_MUCH_S][-2:]
    if len(jobs) < 2 or any(job.useful_share >= LEAST_USEFUL for job in jobs):
        return None
    shares = " and ".join(f"{job.useful_share:.0%}" for job in jobs)
    return f"of its last two jobs only {shares} of the time went into steps that were kept"


def _once(end: JobEnd, config: Config) -> str | None:
    """Words for a job that Slurm runs only once; not for one of a chain, where the next job goes on."""
    in_job = os.environ.get("SLURM_JOB_ID") == end.job_id
    if not in_job or config.launch.chain > 1 or may_run_again(end.job_id):
        return None
    return (
        f"Slurm may not run job {end.job_id} again (Requeue=0). This goes on: python -m hpc_train resume {end.run.path}"
    )


def _excluded(run: RunDirectory, config: Config) -> list[str]:
    """The nodes that the user excludes and those that have failed too often lately; none where none of these have."""
    failing = sorted(NodeFailures(run, config.elastic.exclude_hours * 3600).too_often())
    return [*filter(None, [config.cluster.exclude]), *failing]
