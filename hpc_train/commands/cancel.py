"""``python -m hpc_train cancel RUN|SWEEP`` cancels jobs. With ``--save`` they save a checkpoint first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hpc_train.launch.job_status import SlurmStatuses
from hpc_train.launch.lookup import RunHandle, find_runs, statuses_of, stop_runs
from hpc_train.run.exits import Exit
from hpc_train.slurm.client import cancel


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train cancel", description=__doc__)
    parser.add_argument("target", metavar="RUN|SWEEP", help="a run or sweep directory, or its name")
    parser.add_argument(
        "--save", action="store_true", help="wait until running jobs have saved a checkpoint, so that they can resume"
    )
    options = parser.parse_args(arguments)
    found = find_runs(options.target)
    count = cancel_runs(found, save=options.save)
    print(f"cancelling {count} of {len(found)} jobs; the others have already ended")
    return Exit.DONE


def cancel_runs(found: Sequence[RunHandle], *, save: bool) -> int:
    """Cancels the jobs of ``found`` and returns how many were waiting or running.

    Args:
        save: whether running Slurm jobs save a checkpoint first. A job on this machine always does.

    Raises:
        UserError: scancel failed.
    """
    slurm = SlurmStatuses()
    known = statuses_of(found, slurm)
    in_slurm = [item for item in found if item.job_id in known and known[item.job_id].present]
    local = [item for item in found if item.lives_here()]
    stop_runs(local)
    for clusters in {item.clusters for item in in_slurm}:
        ids = [job_id for item in in_slurm if item.clusters == clusters for job_id in item.job_ids]
        states = slurm.of(ids, clusters)
        running = [job_id for job_id in ids if save and job_id in states and states[job_id].is_running]
        cancel(running, signal="USR1", clusters=clusters)
        cancel([job_id for job_id in ids if job_id not in running], clusters=clusters)
    return len(in_slurm) + len(local)
