"""``python -m hpc_train retry --failed SWEEP`` resubmits the runs of a sweep that failed or were stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpc_train.launch.job_status import SlurmStatuses
from hpc_train.launch.lookup import find_runs, statuses_of
from hpc_train.launch.monitor import resubmit
from hpc_train.run.exits import Exit


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train retry", description=__doc__)
    parser.add_argument(
        "--failed", required=True, metavar="SWEEP", help="resubmit the failed, stopped and cancelled runs"
    )
    parser.add_argument("--detach", action="store_true", help="return after submission")
    options = parser.parse_args(arguments)
    found = find_runs(options.failed)
    statuses = statuses_of(found, SlurmStatuses())
    unfinished = [item for item in found if item.view(statuses).exit not in (None, Exit.DONE)]
    print(f"resubmitting {len(unfinished)} of {len(found)} runs")
    if not unfinished:
        return Exit.DONE
    sweep: Path = unfinished[0].run.path if len(found) == 1 else unfinished[0].run.path.parent
    return resubmit(unfinished, sweep, detach=options.detach)
