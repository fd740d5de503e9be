"""Runs a script, and kills the process of rank 1 after a step of the first attempt: killed_once.py STEP SCRIPT."""

import os
import runpy
import signal
import sys
from itertools import count

from torch.optim.optimizer import register_optimizer_step_post_hook

STEP, SCRIPT = int(sys.argv[1]), sys.argv[2]
DISTURBED = (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0")
steps = count(1)


def kill(*_: object) -> None:
    if next(steps) == STEP and DISTURBED:
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_post_hook(kill)
sys.argv = [SCRIPT]
runpy.run_path(SCRIPT, run_name="__main__")
