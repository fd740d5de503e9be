"""Runs the agent of a trial, which is the agent of the product with shorter time bounds.

It detects a save that hangs within seconds instead of minutes and a slow rank within a few seconds, and it enters the
memory group of ``surroundings.py``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

SHIFT = "HPC_TRAIN_TEST_CLOCK_SHIFT"  # seconds by which the clock of a node is ahead
PATIENCE = "HPC_TRAIN_TEST_PATIENCE"  # the minimum bound of a hang, as on GPUs
SECOND_LOOK_S = 15.0
SAVE_S = 8.0  # a save that takes longer counts as a hang
ASKED_EVERY_S = 3.0  # initial pause between two straggler queries, in which enough collectives must occur


def shift_clock() -> None:
    """Shifts the wall clock of this process; the monotonic clock is unchanged."""
    if shift := float(os.environ.get(SHIFT, "0")):
        right = time.time
        time.time = lambda: right() + shift


def main(run: str, entry: str) -> int:
    """Runs the agent on ``run``; its workers call ``entry``."""
    shift_clock()
    from hpc_train.elastic import hang_bounds, watch
    from hpc_train.elastic.agent import AgentOptions, run_agent
    from hpc_train.run.directory import RunDirectory
    from tests.faults.surroundings import enter_memory_group
    from tests.warm_parents.sitecustomize import SOCKET, count_start

    if SOCKET not in os.environ:  # sitecustomize counts the others
        count_start()
    enter_memory_group()
    hang_bounds.COLD_S = hang_bounds.UNSEEN_S = SAVE_S
    hang_bounds.SECOND_LOOK_S = SECOND_LOOK_S
    hang_bounds.PATIENCE_S["one CPU node"] = float(os.environ.get(PATIENCE, "0"))
    watch.FIRST_S = ASKED_EVERY_S
    code = run_agent(RunDirectory(Path(run)), AgentOptions(entry))
    assert "torch" not in sys.modules
    return code
