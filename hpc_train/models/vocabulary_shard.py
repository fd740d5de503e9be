"""Computes embeddings, and softmax and accuracy of logits, of words that are spread over tensor-parallel ranks.

Each rank has the logits of its own words for all tokens. The largest logit, the sum of the exponentials and the logit
of the target are reduced over the ranks, which exchanges three numbers per token instead of the logits (Shoeybi et al.
2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
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

    def shard_targets(self, targets: Tensor) -> Tensor:
        """Returns ``targets`` counted from the first word of this rank, and ``IGNORED`` for words of other ranks.

        A target that is not a word stays what it is, so that a loss refuses it.
        """
        in_shard = self.is_local(targets)
        return torch.where(in_shard, targets - self.first, torch.where(self._is_word(targets), IGNORED, targets))

    def is_local(self, ids: Tensor) -> Tensor:
        """Returns which of ``ids`` are words of this rank."""
        return (ids >= self.first) & (ids < self.first + self.words)

    def _is_word(self, ids: Tensor) -> Tensor:
        return (ids >= 0) & (ids < self.vocabulary)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Returns the rows of ``table`` ``[words, dim]`` for ``ids``, and zeros for words of other ranks.

        Raises:
            IndexError: an id is not a word (on CPUs; on GPUs a kernel raises an assertion).
        """
        in_shard = self.is_local(ids)
        rows = torch.where(in_shard, ids - self.first, torch.where(self._is_word(ids), 0, self.vocabulary))
        return F.embedding(rows, table) * in_shard.unsqueeze(-1)

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
        maximum, word = logits.max(-1)
        largest = self.largest(maximum.clone())
        predicted = torch.where(maximum == largest, word + self.first, self.vocabulary)
        dist.all_reduce(predicted, dist.ReduceOp.MIN, group=self.group)
        return (predicted == targets).sum()


class WordEmbedding(nn.Embedding):
    """Looks up words. With tensor parallelism each rank looks up those of its shard, and the results are to be added.

    DTensors would compute the gradient of the whole table on every rank.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if not isinstance(weight, DTensor):
            return super().forward(input)
        ids = input.to_local() if isinstance(input, DTensor) else input
        rows = shard_of(weight).embed(ids, weight.to_local())
        return DTensor.from_local(rows, weight.device_mesh, [Partial()], run_check=False)


def shard_of(weight: DTensor) -> VocabularyShard:
    """Returns the words of this rank in ``weight`` ``[vocab, dim]``, whose rows are spread over a mesh of one dim."""
    mesh = weight.device_mesh
    vocabulary = weight.shape[0]
    share = ceil(vocabulary / mesh.size())  # of all ranks but the last ones
    first = min(mesh.get_local_rank() * share, vocabulary)
    return VocabularyShard(mesh.get_group(), first, min(share, vocabulary - first), vocabulary)


def gather_sequence(hidden: DTensor) -> Tensor:
    """Returns hidden states ``[micro, seq, dim]`` for all tokens. Collective.

    The gradient of each rank holds the contributions of its words; the backward pass adds them up and returns to each
    rank those of its tokens (a reduce-scatter).
    """
    gathered: Tensor = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return gathered
