"""The traffic of tensor-parallel ranks that ``strategy.async_tp`` leaves beside the products of a layer. No torch.

torch cuts a product and the gather of its input, or the scatter of its result, into a piece for each rank. A rank has
its own piece, and while it computes one it copies another, so all pieces but one cover the traffic. Not covered are the
copy of the own piece for the other ranks and the sum of the pieces after a scatter, which take memory bandwidth
(``_pipelined_multi_all_gather_and_consume`` and ``_fused_matmul_reduce_scatter_impl`` in
torch/distributed/_symmetric_memory, torch 2.13). Pieces are taken to be as fast as the whole, since two streams compute
at once.

The compiler joins a scatter only with a product whose result it scatters (``_find_producer_matmul`` in
torch/_inductor/fx_passes/micro_pipeline_tp.py). In the backward of several products of one input their results are
added up before, so this scatter stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_train.config.extensions import LinearLayers

Pass = Literal["forward", "backward", "again"]


@dataclass(frozen=True)
class Traffic:
    """The collectives of a layer.

    Attributes:
        gather_s, scatter_s: the seconds of each.
        moved_s: the seconds in which memory reads or writes the whole hidden states once.
        ranks: of a tensor-parallel group.
    """

    gather_s: float
    scatter_s: float
    moved_s: float
    ranks: int

    def gathered(self, beside: float) -> float:
        """Returns the seconds of a gather that ``beside`` seconds of products leave."""
        return self._left(self.gather_s, beside) + 2 / self.ranks * self.moved_s

    def scattered(self, beside: float) -> float:
        """Returns the same of a scatter."""
        return self._left(self.scatter_s, beside) + (1 + 1 / self.ranks) * self.moved_s

    def _left(self, seconds: float, beside: float) -> float:
        return max(0.0, seconds - beside * (self.ranks - 1) / self.ranks)


def traffic_left(layers: Sequence[LinearLayers], products_s: float, of: Pass, traffic: Traffic) -> float:
    """Returns the seconds of the traffic of a layer in one pass that its products leave.

    Args:
        layers: the linear layers, in the order of the forward. Those whose input is gathered alternate with those whose
            result is scattered.
        products_s: the seconds of all of them in the forward, which the gradients of their inputs take as well.
        of: ``again`` is the forward that recomputation repeats, without the last scatter.
    """
    sizes = [group.inputs * sum(group.outputs) for group in layers]
    beside = [products_s * size / sum(sizes) for size in sizes]
    if of == "backward":
        return sum(_backward(layers, beside, traffic))
    parts = [traffic.scattered(each) if place % 2 else traffic.gathered(each) for place, each in enumerate(beside)]
    return sum(parts[:-1] if of == "again" else parts)


def _backward(layers: Sequence[LinearLayers], beside: Sequence[float], traffic: Traffic) -> Iterator[float]:
    for place, (group, seconds) in enumerate(zip(layers, beside, strict=True)):
        if place % 2:
            yield traffic.gathered(seconds)
        else:
            yield traffic.scattered(seconds) if len(group.names) == 1 else traffic.scatter_s
