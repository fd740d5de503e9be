"""Submitting frozen runs once more: they go on from their newest checkpoints, as the same runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hpc_train.launch.found import Found
from hpc_train.launch.place import choose
from hpc_train.launch.queue import JobQueue
from hpc_train.launch.waiting import hand_over, report, wait
from hpc_train.launch.watch import attempt_end
from hpc_train.run import processes, submissions
from hpc_train.run.exits import Exit

LEAVING_S = 30.0  # a job whose agents have ended is in Slurm for a few seconds more
LOOK_EVERY_S = 3.0


def submit_again(found: Sequence[Found], sweep: Path, *, detach: bool) -> int:
    """Submits the runs to where their configs say; returns the exit code of all of them, 0 when detached.

    Raises:
        ConfigError: one of them is live, or is refused where it would go; nothing was submitted then.
    """
    console = Console()
    until = time.monotonic() + LEAVING_S
    for item in found:
        while time.monotonic() < until and submissions.find_live(item.run) and _has_ended(item):
            time.sleep(LOOK_EVERY_S)
        submissions.refuse_live(item.run)
    jobs = [item.job() for item in found]
    submitter = choose(jobs[0].config.cluster)
    for line in submitter.check(jobs):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    submitter.confirm(jobs, console)
    for job in jobs:
        job.run.update_record(claimed_by=processes.this_process())
    queue = JobQueue(jobs, submitter, sweep, console)
    if detach:
        hand_over(queue, console)
        return Exit.DONE
    wait(queue, console)
    return report(queue, console)


def _has_ended(item: Found) -> bool:
    end = attempt_end(item.run, item.run.newest_attempt())
    return end is not None and end.final
