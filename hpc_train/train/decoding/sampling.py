"""Defines how the next token is chosen; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """Describes how tokens are drawn from the distribution of the model.

    The logits are divided by ``temperature``, then ``top_k`` and then ``top_p`` exclude tokens.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: only the k most likely tokens are drawn; None draws any.
        top_p: only the fewest most likely tokens whose probabilities add up to at least p are drawn (nucleus sampling,
            Holtzman et al. 2020, arXiv:1904.09751).
        seed: each prompt draws from a random stream of its own, which depends on the seed and the number of the prompt.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raises UserError if a value is out of its range, or has no effect."""
        if not 0 <= self.temperature < float("inf"):
            raise _out_of_range("--temperature", self.temperature, "at least 0", "--temperature 1")
        if self.top_k is not None and self.top_k < 1:
            raise _out_of_range("--top-k", self.top_k, "at least 1", "--top-k 50")
        if not 0 < self.top_p <= 1:
            raise _out_of_range("--top-p", self.top_p, "above 0 and at most 1", "--top-p 0.9")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise UserError(
                "--top-k and --top-p have no effect at temperature 0, which takes the most likely token",
                where="--top-k, --top-p",
                fix="--temperature 1, or leave them out",
            )


def _out_of_range(option: str, value: float, allowed: str, fix: str) -> UserError:
    return UserError(f"{option} is {value}, but must be {allowed}", where=option, fix=fix)
