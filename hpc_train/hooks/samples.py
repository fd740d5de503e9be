"""Shows at every evaluation how a language model continues prompts, by the most likely token each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpc_train.data.documents import BYTES, open_tokenizer
from hpc_train.hooks.hook import Hook, HookContext


class Samples(Hook):
    """Generates ``new_tokens`` tokens after each prompt and logs the text.

    Every rank takes part, because parameters may be sharded. Each token is one forward pass over the last
    ``data.sequence_length`` tokens of all prompts, whose shape never changes: tokens after the last one are padding,
    which a causal model does not see.

    Args:
        prompts: texts, or lists of token ids. Prompts in text are continued in text.
        new_tokens: the number of tokens to generate.
        tokenizer: the path of the ``tokenizer.json`` of the data; ``bytes`` is that of ``data=text``.
    """

    def __init__(self, prompts: Sequence[str | Sequence[int]], new_tokens: int = 32, tokenizer: str = BYTES) -> None:
        self._prompts = list(prompts)
        self._new_tokens = new_tokens
        self._tokenizer: Any = None if tokenizer == BYTES else open_tokenizer(tokenizer)

    def evaluation(self, context: HookContext) -> None:
        rows = [self._encode(prompt) for prompt in self._prompts]
        for _ in range(self._new_tokens):
            for row, token in zip(rows, self._next(rows, context), strict=True):
                row.append(token)
        texts = [self._decode(row, prompt) for row, prompt in zip(rows, self._prompts, strict=True)]
        context.log_text("samples", "\n".join(texts))

    def _next(self, rows: list[list[int]], context: HookContext) -> list[int]:
        """Returns the most likely next token of each row. Collective."""
        width = context.config.data.sequence_length
        inputs = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, row in enumerate(rows):
            window = row[-width:]
            inputs[index, : len(window)] = torch.tensor(window)
        logits = context.engine.outputs(inputs.to(context.device))
        last = torch.tensor([min(len(row), width) - 1 for row in rows], device=logits.device)
        found: list[int] = logits[torch.arange(len(rows), device=logits.device), last].argmax(dim=-1).tolist()
        return found

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        return [*prompt.encode()] if self._tokenizer is None else list(self._tokenizer.encode(prompt).ids)

    def _decode(self, tokens: list[int], prompt: str | Sequence[int]) -> str:
        if not isinstance(prompt, str):
            return f"{tokens[: len(prompt)]} -> {tokens[len(prompt) :]}"
        if self._tokenizer is None:
            return bytes(token % 256 for token in tokens).decode("utf-8", "replace")
        return str(self._tokenizer.decode(tokens))
