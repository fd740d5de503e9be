"""A model that a test can disturb on one node while it trains; its weights are those of the undisturbed one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from tests.doors.faulty import Slow


class OnNode(Slow):
    """Fails at once on the node ``fails``, takes its time on ``slow``, and waits while the file ``pause`` is there."""

    def __init__(
        self, fails: str = "", slow: str = "", pause: str = "/nowhere", seconds: float = 0.1, vocab_size: int = 256
    ) -> None:
        super().__init__(seconds, vocab_size)
        self.fails, self.slow, self.pause = fails, slow, Path(pause)

    def forward(self, inputs: Tensor) -> Tensor:
        if os.environ.get("SLURMD_NODENAME") == self.fails:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("SLURMD_NODENAME") == self.slow:
            time.sleep(0.4)
        while self.pause.exists():
            time.sleep(0.1)
        return super().forward(inputs)
