"""``python -m hpc_train wait RUN|SWEEP`` waits until submitted runs end, and exits with the worst of their codes."""

from __future__ import annotations

import argparse
import json
import sys
import time

from rich.console import Console

from hpc_train.launch.job_status import SlurmStatuses
from hpc_train.launch.lookup import RunHandle, find_runs, statuses_of
from hpc_train.launch.monitor import POLL_S, JobTable, worst
from hpc_train.launch.watch import View
from hpc_train.run.exits import Exit


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train wait", description=__doc__)
    parser.add_argument("target", metavar="RUN|SWEEP", help="a run or sweep directory, or its name")
    parser.add_argument("--json", action="store_true", help="print only one JSON object per run at the end")
    options = parser.parse_args(arguments)
    found = find_runs(options.target)
    try:
        views = _until_the_end(found, None if options.json else Console())
    except KeyboardInterrupt:
        return Exit.DETACHED
    for item, view in zip(found, views, strict=True):
        if options.json:
            print(json.dumps({"run": str(item.run.path), "state": view.state, "exit_code": view.exit}))
        elif view.message:
            print(f"{item.run.path}: {view.message}", file=sys.stderr)
    return worst(views)


def _until_the_end(found: list[RunHandle], console: Console | None) -> list[View]:
    slurm = SlurmStatuses()
    table = None if console is None else JobTable(found, console)
    try:
        while True:
            statuses = statuses_of(found, slurm)
            views = [item.view(statuses) for item in found]
            if table is not None:
                table.show(views)
            if all(view.exit is not None or not item.submission for item, view in zip(found, views, strict=True)):
                return views
            time.sleep(POLL_S)
    finally:
        if table is not None:
            table.close()
