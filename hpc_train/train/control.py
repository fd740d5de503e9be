"""Lets all ranks agree once per step on a stop, a save, and the number of targets in the next batch.

The agreement is a small asynchronous all-reduce on a CPU group. It is posted before a step and read before the next
one, so no rank waits for it, and all ranks see a stop request at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.parallel.mesh import Mesh


@dataclass(frozen=True)
class Agreement:
    """Holds the combined messages of all ranks.

    Attributes:
        stop: whether any rank was asked to stop.
        target_count: targets that count in the announced global batch.
        save: whether to save a checkpoint after the announced step.
    """

    stop: bool
    target_count: int
    save: bool


class Control:
    """Posts and reads the message of each step. Each ``post`` is followed by one ``read`` on every rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._group = mesh.control
        self._counts = mesh.pp_rank == 0 and mesh.tp_rank == 0  # one rank per replica reports its targets
        self._pending: tuple[Tensor, dist.Work] | None = None

    def post(self, stop: bool, local_count: int, save: bool = False) -> None:
        """Starts the agreement without blocking.

        Args:
            stop: whether this rank was asked to stop.
            local_count: targets that count in this data-parallel rank's next batch; 0 without a next batch.
            save: whether this rank wants a checkpoint after the step of that batch.
        """
        assert self._pending is None, "the previous message was not read"
        message = torch.tensor([int(stop), local_count if self._counts else 0, int(save)])
        work = dist.all_reduce(message, group=self._group, async_op=True)
        assert work is not None
        self._pending = message, work

    def read(self) -> Agreement:
        """Returns the agreement; waits for the slowest rank's ``post``."""
        assert self._pending is not None, "nothing was posted"
        message, work = self._pending
        self._pending = None
        work.wait()
        stop, target_count, save = message.tolist()
        return Agreement(stop > 0, target_count, save > 0)
