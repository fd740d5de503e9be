"""``python -m hpc_train resume RUN`` continues a run with its frozen config from its newest checkpoint.

The run directory and the W&B run stay the same. To continue with other settings, start a new training with the same
``run.name``.
"""

from __future__ import annotations

import argparse

from hpc_train.launch.lookup import find_run
from hpc_train.launch.monitor import resubmit


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train resume", description=__doc__)
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    parser.add_argument("--detach", action="store_true", help="return after submission")
    options = parser.parse_args(arguments)
    found = find_run(options.target)
    return resubmit([found], found.run.path, detach=options.detach)
