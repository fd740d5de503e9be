"""Models that fail on purpose, for the tests of failure reports."""

from __future__ import annotations

import os
import shutil
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Faulty(nn.Module):
    """Next-token logits from one table; ``rank`` fails in its ``call``-th training step, as ``how`` says."""

    def __init__(self, how: str = "raise", rank: int = 1, call: int = 3, vocab_size: int = 256) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        self.how, self.rank, self.call, self.calls = how, rank, call, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training  # the check of the loss before the first step is in evaluation mode
        if self.training and self.calls == self.call and dist.get_rank() == self.rank:
            self.fail()
        return self.table(inputs)

    def fail(self) -> None:
        if self.how == "raise":
            raise ArithmeticError("the model of the test fails on purpose")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            os._exit(0)
        if self.how == "purge":
            shutil.rmtree("outputs/run/checkpoints")
            os._exit(0)


class Slow(Faulty):
    """Takes ``seconds`` for each forward pass, so that a test has time to interrupt it."""

    def __init__(self, seconds: float = 0.2, vocab_size: int = 256) -> None:
        super().__init__(how="never", vocab_size=vocab_size)
        self.seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return super().forward(inputs) + torch.zeros(())


class Erring(Faulty):
    """Gives a wrong number on ``node`` in training pass ``once``, and in all passes from pass ``since`` on."""

    def __init__(self, node: str = "n2", once: int = 5, since: int = 12, vocab_size: int = 256) -> None:
        super().__init__(how="never", vocab_size=vocab_size)
        self.node, self.once, self.since = node, once, since

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = super().forward(inputs)
        errs = self.training and (self.calls == self.once or self.calls >= self.since)
        if not errs or os.environ.get("SLURMD_NODENAME") != self.node:
            return logits
        wrong = torch.zeros_like(logits)
        wrong.view(-1)[0] = 0.125
        return logits + wrong


def paced(step: int, seconds: float) -> float:
    """Returns a constant factor of the learning rate. One of several ranks first waits ``seconds``, so that a fast
    machine does not take more steps.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        time.sleep(seconds)
    return 1.0
