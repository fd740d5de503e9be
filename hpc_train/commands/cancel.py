"""``python -m hpc_train cancel RUN|SWEEP`` cancels jobs. With ``--save`` they save a checkpoint first."""

from __future__ import annotations

import argparse
import subprocess

from hpc_train.errors import UserError
from hpc_train.launch.job_status import PATIENCE_S, SlurmStatuses, on_clusters
from hpc_train.launch.lookup import find_runs, statuses_of, stop_runs
from hpc_train.run.exits import Exit


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train cancel", description=__doc__)
    parser.add_argument("target", metavar="RUN|SWEEP", help="a run or sweep directory, or its name")
    parser.add_argument(
        "--save", action="store_true", help="wait until running jobs have saved a checkpoint, so that they can resume"
    )
    options = parser.parse_args(arguments)
    found = find_runs(options.target)
    slurm = SlurmStatuses()
    known = statuses_of(found, slurm)
    in_slurm = [item for item in found if item.job_id in known and known[item.job_id].present]
    local = [item for item in found if item.lives_here()]
    stop_runs(local)  # local runs always save when they are stopped
    for clusters in {item.clusters for item in in_slurm}:
        ids = [job_id for item in in_slurm if item.clusters == clusters for job_id in item.job_ids]
        states = slurm.of(ids, clusters)
        running = [job_id for job_id in ids if options.save and job_id in states and states[job_id].state == "RUNNING"]
        _scancel([*on_clusters(clusters), "--signal=USR1"], running)
        _scancel(on_clusters(clusters), [job_id for job_id in ids if job_id not in running])
    print(f"cancelling {len(in_slurm) + len(local)} of {len(found)} jobs; the others have already ended")
    return Exit.DONE


def _scancel(options: list[str], ids: list[str]) -> None:
    if not ids:
        return
    done = subprocess.run(["scancel", *options, *ids], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise UserError(f"scancel failed: {done.stderr.strip()}", where="scancel", fix="try again in a minute")
