"""``python -m hpc_train cancel RUN|SWEEP``: ends jobs for good. With ``--save`` they save first and can be resumed."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence

from hpc_train.errors import UserError
from hpc_train.launch.job_status import PATIENCE_S, SlurmStatuses, on_clusters
from hpc_train.launch.lookup import RunHandle, find_runs, statuses_of, stop_runs
from hpc_train.run.exits import Exit


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train cancel", description=__doc__)
    parser.add_argument("target", metavar="RUN|SWEEP", help="a directory, or its name")
    parser.add_argument("--save", action="store_true", help="let running jobs save a checkpoint first, however long")
    options = parser.parse_args(arguments)
    found = find_runs(options.target)
    ended = cancel_runs(found, save=options.save)
    print(f"{ended} of {len(found)} jobs were there to be cancelled")
    return Exit.DONE


def cancel_runs(found: Sequence[RunHandle], *, save: bool) -> int:
    """Ends the jobs of ``found``; returns how many were waiting or running.

    Args:
        save: let running Slurm jobs save a checkpoint first. A job on this machine always does.

    Raises:
        UserError: scancel failed.
    """
    slurm = SlurmStatuses()
    known = statuses_of(found, slurm)
    in_slurm = [item for item in found if item.job_id in known and known[item.job_id].present]
    here = [item for item in found if item.lives_here()]
    stop_runs(here)
    for clusters in {item.clusters for item in in_slurm}:
        ids = [job_id for item in in_slurm if item.clusters == clusters for job_id in item.job_ids]
        states = slurm.of(ids, clusters)
        running = [job_id for job_id in ids if save and job_id in states and states[job_id].state == "RUNNING"]
        _scancel([*on_clusters(clusters), "--signal=USR1"], running)
        _scancel(on_clusters(clusters), [job_id for job_id in ids if job_id not in running])
    return len(in_slurm) + len(here)


def _scancel(options: list[str], ids: list[str]) -> None:
    if not ids:
        return
    done = subprocess.run(["scancel", *options, *ids], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise UserError(f"scancel failed: {done.stderr.strip()}", where="scancel", fix="try again in a minute")
