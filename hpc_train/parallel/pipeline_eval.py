"""The forward pass of a pipeline, for evaluation: our own, because torch's fails for schedules placed in a V.

Stage s computes micro-batch m in tick s + m, so all stages work at once. Every message has a place in one order that
holds on all ranks, (tick, stage), and each rank issues its sends and receives in that order: of the messages that are
not through, the first in order has both its ends waiting for nothing else, so there is no deadlock, whatever the
placement and even where a send waits for its receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.data.batch import Batch
from hpc_train.parallel.schedules import Part

Sums = tuple[Tensor, Tensor, Tensor | None]  # of one micro-batch: losses, targets that count, right predictions


def forward_order(stages: Sequence[int], placement: Sequence[int], micro_batches: int) -> list[tuple[str, int, int]]:
    """What a rank does in a forward pass: ``("receive" | "compute", stage, micro-batch)`` in the order of all ranks.

    A receive is of the input of ``stage``; a compute is followed by sending its output to the next stage's rank. Both
    stand where the message stands: the output of stage s for micro-batch m at (s + m, s).

    Args:
        stages: those of this rank.
        placement: the pp rank of every stage.
    """
    events = []
    for stage in stages:
        for micro in range(micro_batches):
            events.append(((stage + micro, stage), ("compute", stage, micro)))
            if stage > 0 and placement[stage - 1] != placement[stage]:
                events.append(((stage - 1 + micro, stage - 1), ("receive", stage, micro)))
    return [event for _, event in sorted(events)]


class ForwardPass:
    """Runs micro-batches through the stages of all ranks.

    Args:
        parts: the stages of this rank.
        placement: the pp rank of every stage.
        group: the ranks of this pipeline.
    """

    def __init__(self, parts: Sequence[Part], placement: Sequence[int], group: dist.ProcessGroup) -> None:
        self._parts = {part.stage: part for part in parts}
        self._placement = placement
        self._group = group

    @torch.no_grad()
    def run(self, micro_batches: Sequence[Batch]) -> list[Sums]:
        """The sums of each micro-batch, where this rank holds the last stage; nothing elsewhere.

        Micro-batches may differ in shape; every rank of the pipeline passes the same.
        """
        last = len(self._placement) - 1
        arriving: dict[tuple[int, int], tuple[Tensor, dist.Work | None]] = {}
        sending: deque[tuple[Tensor, dist.Work]] = deque()
        results: list[Sums] = []
        for action, stage, micro in forward_order(list(self._parts), self._placement, len(micro_batches)):
            batch, part = micro_batches[micro], self._parts[stage]
            if action == "receive":
                arriving[stage, micro] = self._receive(part, batch)
                continue
            hidden = batch.inputs if stage == 0 else _arrived(*arriving.pop((stage, micro)))
            if stage == last:
                results.append(part.forward(hidden, batch.context, batch.targets))
                continue
            output = part.forward(hidden, batch.context)
            if self._placement[stage + 1] == self._placement[stage]:
                arriving[stage + 1, micro] = (output, None)
            else:
                sending.append((output, self._send(stage, output)))
            while len(sending) > last:  # bounds the memory; what was sent a whole pipeline ago has long arrived
                sending.popleft()[1].wait()
        for _, work in sending:
            work.wait()
        return results

    def _receive(self, part: Part, batch: Batch) -> tuple[Tensor, dist.Work | None]:
        hidden = torch.empty(part.hidden_shape(batch.inputs), dtype=part.dtype, device=batch.inputs.device)
        return hidden, dist.irecv(hidden, group=self._group, group_src=self._placement[part.stage - 1])

    def _send(self, stage: int, output: Tensor) -> dist.Work:
        work = dist.isend(output, group=self._group, group_dst=self._placement[stage + 1])
        assert work is not None  # None is for ranks outside of the group
        return work


def _arrived(hidden: Tensor, work: dist.Work | None) -> Tensor:
    if work is not None:
        work.wait()
    return hidden
