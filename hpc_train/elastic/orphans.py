"""What the agents do whose hub is gone: one of them asks Slurm to run the job again.

With ``--no-kill`` a job whose batch host is lost stays RUNNING on the other nodes, with nothing in it, until its time
limit: its batch script died with its host.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from hpc_train.cluster.allocation import Allocation
from hpc_train.config.schema import Config
from hpc_train.elastic.link import HubLost
from hpc_train.elastic.nodes import NodeFailures
from hpc_train.elastic.requeue import request
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.exits import Exit, Failure
from hpc_train.run.files import patiently
from hpc_train.run.job_end import JobEnd
from hpc_train.run.slurm_jobs import own_job

TIMEOUT_S = 30.0  # of one command
AGAIN_S = 5.0
REFUSALS = 3
PATIENCE_S = 600.0  # for a Slurm controller that is away


def after_the_hub(
    run: RunDirectory, config: Config, allocation: Allocation, end: JobEnd | None, lost: HubLost, times: int = 1
) -> Exit:
    """Called by every agent that is left, with no worker alive; returns its exit code.

    Args:
        times: as how many failures of the batch host this counts.
    """
    if end is not None and end.told():  # node 0 has decided, and took this node for lost
        return Exit.STOPPED
    print(f"{lost}: the job is to run again", file=sys.stderr)
    if end is None or not end.claim_succession():
        return Exit.STOPPED
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for Slurm's commands: with the requeue Slurm ends this job's tasks
    events = EventLog.open(run, f"agent-{allocation.node_name}", max(0, run.newest_attempt()))
    host = allocation.node_names[0]
    details: dict[str, Any] = {"class": Failure.NODE_LOST, "message": str(lost), "rank": None, "node": host}
    events.write("node_lost", **details)
    code = Exit.STOPPED
    try:
        NodeFailures(run, config.elastic.exclude_hours * 3600).note(host, Failure.NODE_LOST, times)
        code = patiently(lambda: request(end, config, events, "the batch host is lost"))
    except OSError as error:  # nobody else asks Slurm, and the job would go on empty
        print(f"why the job is to run again cannot be written: {error}", file=sys.stderr)
    events.close()
    _ask_slurm(_end_of_job(code, config))
    if code is Exit.STOPPED and end.exclude_file.exists():
        _call(["scontrol", "update", f"JobId={own_job()}", f"ExcNodeList={end.exclude_file.read_text()}"])
    with suppress(OSError):
        end.tell(code)  # at the end: the batch script has the step killed soon after that
    return code


def _end_of_job(code: Exit, config: Config) -> list[str]:
    """What ends the job, which is empty from now on."""
    if code is not Exit.STOPPED:
        return ["scancel", own_job()]
    if config.launch.chain > 1:  # the next job goes on: not where this one was cancelled, but where its time is up
        return ["scontrol", "update", f"JobId={own_job()}", "TimeLimit=1"]
    return ["scontrol", "requeue", "incomplete", own_job()]


def _ask_slurm(command: list[str]) -> None:
    """Until Slurm has taken it. Not where the job is being cancelled, is held, or is requeued by Slurm itself.

    What Slurm refuses again and again it is not asked for any longer: the job ends.
    """
    until, refused = time.monotonic() + PATIENCE_S, 0
    while time.monotonic() < until:
        state = _call(["squeue", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%T %Q"])
        if state is not None and (not state.startswith("RUNNING") or state.endswith(" 0")):
            return
        if state is not None and _call(command if refused < REFUSALS else ["scancel", own_job()]) is not None:
            return
        refused += state is not None
        time.sleep(AGAIN_S)
    print(f"Slurm does not answer; somebody has to call: {' '.join(command)}", file=sys.stderr)


def _call(command: list[str]) -> str | None:
    """What it prints; None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
