"""Logs at every evaluation how a language model continues prompts with the most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.data.documents import BYTES
from hpc_train.train.decoding import Decoder
from hpc_train.train.hooks import Hook, HookContext
from hpc_train.train.prompts import ByteCodec, Codec, FileCodec


class Samples(Hook):
    """Generates ``new_tokens`` tokens after each prompt and logs the text.

    Every rank takes part, because parameters may be sharded. Each token takes one forward pass over the last
    ``data.sequence_length`` tokens of all prompts. The shape is always the same: shorter rows have padding at their
    end, which does not affect a causal model.

    Args:
        prompts: texts, or lists of token ids. Text prompts are continued as text.
        new_tokens: the number of tokens to generate.
        tokenizer: the path of the ``tokenizer.json`` of the data; ``bytes`` selects the tokenizer of ``data=text``.
    """

    def __init__(self, prompts: Sequence[str | Sequence[int]], new_tokens: int = 32, tokenizer: str = BYTES) -> None:
        self._prompts = list(prompts)
        self._new_tokens = new_tokens
        self._codec: Codec = ByteCodec() if tokenizer == BYTES else FileCodec(tokenizer)

    def evaluation(self, context: HookContext) -> None:
        decoder = Decoder(context.engine, context.mesh, context.config.data.sequence_length)
        prompts = [self._codec.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in self._prompts]
        continued = decoder.run(prompts, self._new_tokens)
        assert continued is not None, "nothing stops the loop"
        texts = []
        for prompt, tokens, new in zip(self._prompts, prompts, continued, strict=True):
            if isinstance(prompt, str):
                texts.append(self._codec.decode([*tokens, *new]))
            else:
                texts.append(f"{tokens} -> {new}")
        context.log_text("samples", "\n".join(texts))
