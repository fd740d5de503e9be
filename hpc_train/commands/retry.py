"""``python -m hpc_train retry --failed SWEEP``: submits the runs of a sweep that did not get to their end once more."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpc_train.launch.job_status import SlurmStatuses
from hpc_train.launch.lookup import find_runs, statuses_of
from hpc_train.launch.monitor import resubmit
from hpc_train.run.exits import Exit


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train retry", description=__doc__)
    parser.add_argument("--failed", required=True, metavar="SWEEP", help="failed, stopped or cancelled runs of a sweep")
    parser.add_argument("--detach", action="store_true", help="leave after submission")
    options = parser.parse_args(arguments)
    found = find_runs(options.failed)
    standings = statuses_of(found, SlurmStatuses())
    again = [item for item in found if item.view(standings).exit not in (None, Exit.DONE)]
    print(f"{len(again)} of {len(found)} runs are submitted again")
    if not again:
        return Exit.DONE
    sweep: Path = again[0].run.path if len(found) == 1 else again[0].run.path.parent
    return resubmit(again, sweep, detach=options.detach)
