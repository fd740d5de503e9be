"""What all ranks agree on once per step: to stop or not, to save or not, and how many targets the next batch has.

One tiny all-reduce on a CPU group beside the training collectives. It is posted before a step and read before the next,
so nobody waits for it, and all ranks see a stop request at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.parallel.mesh import Mesh


@dataclass(frozen=True)
class Agreement:
    """What the last posted messages of all ranks add up to."""

    stop: bool
    target_count: int  # targets that count in the global batch that the messages announced
    save: bool  # after the step that was announced


class Control:
    """Posts and reads the message of each step. Each ``post`` is followed by one ``read`` on every rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._group = mesh.control
        self._announces = mesh.pp_rank == 0 and mesh.tp_rank == 0  # one rank per data-parallel rank knows its targets
        self._pending: tuple[Tensor, dist.Work] | None = None

    def post(self, stop: bool, local_count: int, save: bool = False) -> None:
        """Starts the agreement; does not wait.

        Args:
            stop: whether this rank was asked to stop.
            local_count: targets that count in this data-parallel rank's next batch; 0 where there is none.
            save: whether this rank wants a checkpoint after that batch's step.
        """
        assert self._pending is None, "the message before was not read"
        message = torch.tensor([int(stop), local_count if self._announces else 0, int(save)])
        work = dist.all_reduce(message, group=self._group, async_op=True)
        assert work is not None
        self._pending = message, work

    def read(self) -> Agreement:
        """The sum of what all ranks posted; waits for the slowest rank's ``post``."""
        assert self._pending is not None, "nothing was posted"
        (message, work), self._pending = self._pending, None
        work.wait()
        stop, target_count, save = message.tolist()
        return Agreement(stop > 0, target_count, save > 0)
