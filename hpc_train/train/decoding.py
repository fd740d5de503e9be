"""Generates tokens one at a time, with one forward pass of the full model for each token.

Keys and values are not cached: the forward pass for a token computes all previous tokens again. All ranks call the loop
together, since their parameters may be sharded. The first rank chooses each token and sends it to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_train.checkpoint.agreement import from_rank
from hpc_train.errors import UserError
from hpc_train.models.model import Model
from hpc_train.parallel.engine import Engine, stream_seed
from hpc_train.parallel.mesh import Mesh
from hpc_train.train.prompts import Sampling

GREEDY = Sampling()


@dataclass(frozen=True)
class Decoder:
    """Continues rows of token ids.

    Attributes:
        width: None runs each row separately and without padding, so that its tokens do not depend on other rows. A
            number runs all rows in one forward pass over their last ``width`` tokens, always with the same shape;
            shorter rows have padding at their end, which does not affect a causal model.
    """

    engine: Engine
    mesh: Mesh
    width: int | None = None

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        sampling: Sampling = GREEDY,
        ends: Collection[int] = (),
        proceed: Callable[[int], bool] = lambda done: True,
    ) -> list[list[int]] | None:
        """Returns the new tokens of each prompt. Collective.

        Args:
            prompts: lists of at least one token each.
            new_tokens: the maximum number of new tokens per prompt.
            ends: tokens that end a row. Such a token is the last token of the row.
            proceed: called after each round with the number of new tokens per row so far; returns False to stop. The
                result must be the same on all ranks.

        Returns:
            The new tokens, or None if ``proceed`` stopped the loop.

        Raises:
            UserError: the outputs of the model are not logits, or the model is split into pipeline stages.
        """
        rows = [list(prompt) for prompt in prompts]
        seeds = [stream_seed("generate", sampling.seed, index) for index in range(len(rows))]
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        open_rows = list(range(len(rows)))
        for done in range(1, new_tokens + 1):
            groups = [[index] for index in open_rows]
            if self.width is not None:
                groups = [open_rows]
            for group in groups:
                logits = self._logits([rows[index] for index in group])
                tokens = [choose(row, sampling, streams[index]) for row, index in zip(logits, group, strict=True)]
                if self.mesh.layout.world_size > 1:
                    tokens = from_rank(0, tokens, self.mesh.control)
                for index, token in zip(group, tokens, strict=True):
                    rows[index].append(token)
            if not proceed(done):
                return None
            open_rows = [index for index in open_rows if rows[index][-1] not in ends]
            if not open_rows:
                break
        return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]

    def _logits(self, rows: list[list[int]]) -> Tensor:
        """Returns the logits ``[rows, vocab]`` of the next token of each row. Collective."""
        width = self.width
        if width is None:
            part = self.engine.parts[0]
            shards = part.sequence_shards * part.token_shares.unit if isinstance(part, Model) else 1
            width = -(-max(map(len, rows)) // shards) * shards  # rounded up
        windows = [row[-width:] for row in rows]
        inputs = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, window in enumerate(windows):
            inputs[index, : len(window)] = torch.tensor(window)
        outputs = self.engine.outputs(inputs.to(self.mesh.device))
        if not isinstance(outputs, Tensor) or outputs.ndim != 3 or outputs.shape[:2] != inputs.shape:
            shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise UserError(
                f"the model returns {shape} for {list(inputs.shape)} tokens, but text needs logits [rows, tokens, "
                "vocab]",
                where="model",
                fix="a language model that returns the logits of the next token at each position",
            )
        last = torch.tensor([len(window) - 1 for window in windows], device=outputs.device)
        return outputs[torch.arange(len(rows), device=outputs.device), last]


def choose(logits: Tensor, sampling: Sampling, stream: torch.Generator) -> int:
    """Returns the next token for ``logits`` ``[vocab]``; the draw is made on the CPU in fp64."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores = logits.to("cpu", torch.float64) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        best = scores.topk(sampling.top_k).indices
        scores = torch.full_like(scores, -torch.inf).index_copy_(0, best, scores[best])
    probabilities = scores.softmax(dim=0)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(dim=0) - ordered
        probabilities[order[before >= sampling.top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=stream))
