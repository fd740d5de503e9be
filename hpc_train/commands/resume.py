"""``python -m hpc_train resume RUN``: goes on with a run as it was frozen, from its newest checkpoint.

It is the same run: the same directory, the same W&B run. A new command with its
``run.name`` goes on with other settings.
"""

from __future__ import annotations

import argparse

from hpc_train.launch.lookup import find_run
from hpc_train.launch.monitor import resubmit


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train resume", description=__doc__)
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    parser.add_argument("--detach", action="store_true", help="leave after submission")
    options = parser.parse_args(arguments)
    found = find_run(options.target)
    return resubmit([found], found.run.path, detach=options.detach)
