"""Defines a model that a test can disturb on one node during training; its weights equal the undisturbed run's."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from torch import Tensor

from tests.doors.faulty import Slow


class OnNode(Slow):
    """Kills its process on node ``fails``, is slow on node ``slow``, and waits while the file ``pause`` exists."""

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
