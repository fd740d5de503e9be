"""``train.activation_checkpointing``: what of a forward is computed again in the backward, and in which layers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.errors import UserError

KEY = "train.activation_checkpointing"
MODES = ("none", "full", "selective", "ops")
SELECTIVE_EVERY = 2  # layers, where ``selective`` says no number


@dataclass(frozen=True)
class Recomputation:
    """Which layers compute their forward again in the backward: every ``every``-th one by global number; 0: none.

    Attributes:
        keep_products: results of matrix products and attention are kept, and only the rest is computed again.
    """

    every: int = 0
    keep_products: bool = False

    def applies_to(self, layer: int) -> bool:
        return self.every > 0 and layer % self.every == 0


def parse_recomputation(text: str) -> Recomputation:
    """
    Raises:
        UserError: it is none of ``MODES``, nor ``selective:N``.
    """
    selective = re.fullmatch(r"selective(?::([1-9]\d*))?", text)
    if selective:
        return Recomputation(int(selective[1] or SELECTIVE_EVERY))
    if text in MODES:
        return Recomputation(0 if text == "none" else 1, keep_products=text == "ops")
    raise UserError(
        f"activation checkpointing {text!r} is unknown",
        where=KEY,
        fix="none, full, selective (every second layer), selective:N (every N-th) or ops (all but matrix products "
        "and attention)",
    )
