"""A model that a test can disturb on one node while it trains; its weights are those of the undisturbed one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from tests.doors.faulty import Slow


class OnNode(Slow):
    """``fails``: the node on which it is killed at once. While the file ``pause`` is there it does not go on."""

    def __init__(self, fails: str = "", pause: str = "/nowhere", seconds: float = 0.1, vocab_size: int = 256) -> None:
        super().__init__(seconds, vocab_size)
        self.fails, self.pause = fails, Path(pause)

    def forward(self, inputs: Tensor) -> Tensor:
        if os.environ.get("SLURMD_NODENAME") == self.fails:
            os.kill(os.getpid(), signal.SIGKILL)
        while self.pause.exists():
            time.sleep(0.1)
        return super().forward(inputs)
