"""Whether a job that was stopped by its time limit or a preemption is to run again.

Slurm announces both by SIGUSR2 (``--signal``); SIGUSR1, SIGTERM and Ctrl-C are somebody's wish that it stops. The agent
of node 0 decides and leaves a marker; the batch script, which outlives the agents, asks Slurm (``launch/requeue.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.schema import Config
from hpc_train.run.events import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.job_end import JobEnd


def request(end: JobEnd, config: Config, events: EventLog, reason: str) -> Exit:
    """Leaves the marker for the batch script (75), or says why the job is given up (93)."""
    newest = CheckpointStore(end.run.checkpoints).newest()
    step, before = 0 if newest is None else newest.step, end.requeues()
    refusal = _refusal(config, step, before)
    if refusal is None:
        end.ask_for_requeue(step)
        events.write("requeued", step=step, requeues=len(before) + 1, reason=reason)
        return Exit.STOPPED
    message = f"given up, not requeued: {refusal}"
    events.write("gave_up", step=step, exit_code=int(Exit.GAVE_UP), message=message)
    print(message, file=sys.stderr)
    return Exit.GAVE_UP


def _refusal(config: Config, step: int, before: Sequence[dict[str, Any]]) -> str | None:
    if len(before) >= config.elastic.max_requeues:
        return f"it was requeued {len(before)} times (elastic.max_requeues)"
    if before and step <= before[-1]["step"]:
        return f"no step was saved since the requeue before, at step {before[-1]['step']}: the job does not get on"
    return None
