"""Computes softmax and accuracy of logits whose words are spread over tensor-parallel ranks.

Each rank has the logits of its own words for all tokens. The largest logit, the sum of the exponentials and the logit
of the target are reduced over the ranks, which exchanges three numbers per token instead of the logits (Shoeybi et al.
2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from hpc_train.data.dataset import IGNORED


@dataclass(frozen=True)
class VocabularyShard:
    """The words of this rank.

    Attributes:
        group: the ranks that share the vocabulary.
        first: the first word of this rank.
        words: the number of words of this rank.
        vocabulary: the number of words of all ranks.
    """

    group: dist.ProcessGroup
    first: int
    words: int
    vocabulary: int

    def own_targets(self, targets: Tensor) -> Tensor:
        """Returns ``targets`` counted from the first word of this rank, and ``IGNORED`` for words of other ranks.

        A target that is no word stays what it is, so that a loss refuses it.
        """
        first, end = self.first, self.first + self.words
        words = (targets >= 0) & (targets < self.vocabulary)
        own = (targets >= first) & (targets < end)
        return torch.where(own, targets - first, torch.where(words, IGNORED, targets))

    def largest(self, values: Tensor) -> Tensor:
        """Returns the largest of the ranks' ``values``, in place. Collective."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of the ranks' ``values``, in place. Collective."""
        dist.all_reduce(values, group=self.group)
        return values

    def count_correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the number of ``targets`` ``[tokens]`` that have the largest logit. Collective.

        Of words with equal logits the first is predicted.

        Args:
            logits: ``[tokens, words]`` of the words of this rank.
        """
        own, word = logits.max(-1)
        largest = self.largest(own.clone())
        predicted = torch.where(own == largest, word + self.first, self.vocabulary)
        dist.all_reduce(predicted, dist.ReduceOp.MIN, group=self.group)
        return (predicted == targets).sum()


def shard_of(weight: DTensor) -> VocabularyShard:
    """Returns the words of this rank in ``weight`` ``[vocab, dim]``, whose rows are spread over a mesh of one dim."""
    mesh, vocabulary = weight.device_mesh, weight.shape[0]
    each = ceil(vocabulary / mesh.size())  # of all ranks but the last ones
    first = min(mesh.get_local_rank() * each, vocabulary)
    return VocabularyShard(mesh.get_group(), first, min(each, vocabulary - first), vocabulary)


def gather_sequence(hidden: DTensor) -> Tensor:
    """Returns hidden states ``[micro, seq, dim]`` for all tokens. Collective.

    The gradient of each rank holds the contributions of its words; the backward pass adds them up and returns to each
    rank those of its tokens (a reduce-scatter).
    """
    whole: Tensor = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return whole
