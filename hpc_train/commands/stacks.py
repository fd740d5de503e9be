"""``python -m hpc_train stacks RUN`` prints the Python stack of every rank of a live run without stopping it."""

from __future__ import annotations

import argparse
import sys
import time

from hpc_train.errors import UserError
from hpc_train.launch.lookup import find_run
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.files import read_json
from hpc_train.run.lease import is_live
from hpc_train.run.requests import request_stacks, stacks_answers

POLL_S = 0.2


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train stacks", description=__doc__)
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    parser.add_argument(
        "--wait", type=float, default=30, metavar="SECONDS", help="wait this long for the answers (default: 30)"
    )
    options = parser.parse_args(arguments)
    run = find_run(options.target).run
    nodes = _live_nodes(run)
    number = request_stacks(run)
    until = time.monotonic() + options.wait
    while len(found := stacks_answers(run, number)) < nodes and time.monotonic() < until:
        time.sleep(POLL_S)
    for path in found:
        print(path.read_text())
    if len(found) < nodes:
        print(f"{nodes - len(found)} of {nodes} nodes did not answer within {options.wait:g} s", file=sys.stderr)
        return Exit.FAILED
    return Exit.DONE


def _live_nodes(run: RunDirectory) -> int:
    """Returns the number of nodes that work on the run.

    Raises:
        UserError: the run is not live.
    """
    attempt = run.attempts / f"{run.newest_attempt():03d}.json"
    if not is_live(run) or not attempt.exists() or not attempt.stat().st_size:
        raise UserError(
            f"the run in {run.path} has no live workers",
            where="RUN",
            fix="name a live run; `python -m hpc_train status` lists yours",
        )
    return int(read_json(attempt)["nodes"])
