"""``python -m hpc_train cancel RUN|SWEEP``: ends jobs for good. With ``--save`` they save first and can be resumed."""

from __future__ import annotations

import argparse

from hpc_train.launch.job_status import SlurmStatuses
from hpc_train.launch.lookup import find_runs, statuses_of, stop_runs
from hpc_train.run.exits import Exit
from hpc_train.slurm.client import cancel


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train cancel", description=__doc__)
    parser.add_argument("target", metavar="RUN|SWEEP", help="a directory, or its name")
    parser.add_argument("--save", action="store_true", help="let running jobs save a checkpoint first, however long")
    options = parser.parse_args(arguments)
    found = find_runs(options.target)
    slurm = SlurmStatuses()
    known = statuses_of(found, slurm)
    in_slurm = [item for item in found if item.job_id in known and known[item.job_id].present]
    here = [item for item in found if item.lives_here()]
    stop_runs(here)  # on this machine a stop request always saves
    for clusters in {item.clusters for item in in_slurm}:
        ids = [job_id for item in in_slurm if item.clusters == clusters for job_id in item.job_ids]
        states = slurm.of(ids, clusters)
        running = [job_id for job_id in ids if options.save and job_id in states and states[job_id].is_running]
        cancel(running, signal="USR1", clusters=clusters)
        cancel([job_id for job_id in ids if job_id not in running], clusters=clusters)
    print(f"{len(in_slurm) + len(here)} of {len(found)} jobs were there to be cancelled")
    return Exit.DONE
