"""Sums over a fixed binary tree: the same bits however many ranks share the leaves.

Floating-point addition is not associative, and an ordinary all-reduce adds in an order that depends on the number of
ranks. Here the leaves are the logical micro-batches of a step and who is added to whom is fixed. Each rank sums the
largest sub-trees whose leaves it holds; an all-to-all brings to every rank its share of the elements of all of them,
it adds these up to the root, and an all-gather spreads the result. Where the ranks hold one sub-tree each (a power of
two of both), a rank sends what a ring all-reduce sends, 2 (N - 1) / N times the bytes; up to 2 log2(V) times as much
in the first half where it holds several. Nothing overlaps with the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.parallel import whole_tensors
from hpc_train.parallel.mesh import Mesh

_all_to_all = dist.all_to_all_single


def halves(node: range) -> tuple[range, range]:
    """The two children of a node, which is the range of its leaves."""
    middle = node.start + (len(node) + 1) // 2
    return range(node.start, middle), range(middle, node.stop)


def cover(node: range, held: range) -> list[range]:
    """The largest nodes at and below ``node`` whose leaves are all in ``held``, from left to right."""
    if node.stop <= held.start or held.stop <= node.start:
        return []
    if held.start <= node.start and node.stop <= held.stop:
        return [node]
    left, right = halves(node)
    return cover(left, held) + cover(right, held)


def tree_sum(node: range, known: Callable[[range], Tensor | None]) -> Tensor:
    """The sum over the leaves of ``node``, from the sums that are ``known``, which it may overwrite."""
    found = known(node)
    if found is not None:
        return found
    left, right = halves(node)
    return tree_sum(left, known).add_(tree_sum(right, known))


class TreeReduction:
    """Sums vectors over the logical micro-batches of all dp ranks of ``mesh``.

    Attributes:
        nodes: the sub-trees that this rank sums before it calls ``reduce``.
    """

    def __init__(self, mesh: Mesh) -> None:
        layout = mesh.layout
        self._root = range(layout.logical_micro_batches)
        self._of_ranks = [cover(self._root, layout.logical_of(rank)) for rank in range(layout.dp)]
        self._group = mesh.group("dp")
        self.nodes = self._of_ranks[mesh.dp_rank]

    def reduce(self, sums: list[Tensor]) -> Tensor:
        """Collective.

        Args:
            sums: ``[size]`` for each of ``nodes``.

        Returns:
            ``[size]``: the sum over all leaves, the same bits on every rank and for every number of ranks.
        """
        ranks, size = len(self._of_ranks), sums[0].numel()
        if ranks == 1:
            return sums[0]
        share = math.ceil(size / ranks)
        sent = sums[0].new_zeros(ranks, len(sums), share)  # to each rank its share of each sum
        for index, own in enumerate(sums):
            padded = torch.nn.functional.pad(own, (0, ranks * share - size))
            sent[:, index] = padded.view(ranks, share)
        known = self._exchange(sent)
        whole = sums[0].new_empty(ranks * share)
        whole_tensors.all_gather(whole, tree_sum(self._root, known.get), group=self._group)
        return whole[:size]

    def _exchange(self, sent: Tensor) -> dict[range, Tensor]:
        """This rank's share of the sum of every node, from all ranks."""
        ranks, own, share = sent.shape
        counts = [len(nodes) for nodes in self._of_ranks]
        received = sent.new_empty(sum(counts), share)
        _all_to_all(received, sent.view(ranks * own, share), counts, [own] * ranks, group=self._group)
        return dict(zip((node for nodes in self._of_ranks for node in nodes), received, strict=True))
