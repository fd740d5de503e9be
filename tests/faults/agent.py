"""The agent of a trial. It is the product's, in a hurry.

A save that hangs is found within seconds instead of minutes, a slow rank within a few seconds, and the surroundings of
``surroundings.py`` are entered.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

SHIFT = "HPC_TRAIN_TEST_CLOCK_SHIFT"  # seconds by which the clock of a node is ahead
SAVE_S = 8.0  # that take longer hang
ASKED_EVERY_S = 3.0  # at first, who is late; enough collectives for a verdict must have come in between


def shift_clock() -> None:
    """Of this process; the monotonic clock goes on as it does."""
    if shift := float(os.environ.get(SHIFT, "0")):
        right = time.time
        time.time = lambda: right() + shift


def main(run: str, entry: str) -> int:
    """Works on ``run``; its workers call ``entry``."""
    shift_clock()
    from hpc_train.elastic import hangs, watch
    from hpc_train.elastic.agent import run_agent
    from hpc_train.run.directory import RunDirectory
    from tests.faults.surroundings import enter_memory_group

    enter_memory_group()
    hangs.COLD_S = hangs.UNSEEN_S = SAVE_S
    watch.FIRST_S = ASKED_EVERY_S
    code = run_agent(RunDirectory(Path(run)), entry=entry)
    assert "torch" not in sys.modules
    return code
