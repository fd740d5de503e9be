"""Runs DualPipeV with each message sent as soon as it is computed.

Torch joins a forward and the backward after it into one action, so that a function of the user may compute both at
once. Without such a function it computes them one after the other on one stream, and sends the result of the forward
after the backward: the next rank gets it later by the time of a backward, twice that of a forward. Apart, they compute
the same in the same order, and no rank waits for a result that is done.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import ScheduleDualPipeV


class DualPipeV(ScheduleDualPipeV):
    """Torch's schedule without joined actions."""

    def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
        joined = super()._calculate_single_rank_operations(rank)
        return [part for action in joined if action is not None for part in action.sub_actions or (action,)]
