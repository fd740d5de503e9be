"""Batches of your own: purchase histories of different lengths, padded together, with products that were not bought.

    python -m hpc_train +strategy=dp data=custom data._target_=examples.own_collate.Purchases \
        data.collate=examples.own_collate.with_negatives model=custom model._target_=examples.own_collate.Recommender
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PRODUCTS, NEGATIVES = 200, 4


class Purchases:
    """Item i: a customer's earlier purchases, 1 to 8 products, and the next one, which is of the same kind."""

    def __init__(self, split: str, customers: int = 2048) -> None:
        self.first = 0 if split == "train" else customers  # the splits do not overlap
        self.customers = customers if split == "train" else 128

    def __len__(self) -> int:
        return self.customers

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = np.random.default_rng(self.first + index)
        kind = generator.integers(10)
        products = kind + 10 * generator.integers(PRODUCTS // 10, size=2 + generator.integers(8))
        return {"history": products[:-1], "next": products[-1]}


def with_negatives(items: list[dict[str, Any]], random: list[np.random.Generator]) -> tuple[Any, Any]:
    """Returns the inputs, a dict, and the targets of one micro-batch.

    Args:
        random: one generator per item. It depends on seed, epoch and index, so an item gets the same products under
            any number of GPUs and after a restart.
    """
    longest = max(len(item["history"]) for item in items)
    history = np.stack([np.pad(item["history"] + 1, (0, longest - len(item["history"]))) for item in items])
    others = np.stack([generator.integers(PRODUCTS, size=NEGATIVES) for generator in random])
    candidates = np.concatenate([np.array([[item["next"]] for item in items]), others], axis=1)
    return {"history": history, "candidates": candidates}, np.zeros(len(items), np.int64)


class Recommender(nn.Module):
    """Scores candidates by their similarity to the mean of the history."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.history = nn.Embedding(PRODUCTS + 1, width, padding_idx=0)
        self.product = nn.Embedding(PRODUCTS, width)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Maps the histories ``[micro, longest]`` to scores ``[micro, 1 + NEGATIVES]``; the first should be highest."""
        held = inputs["history"] > 0
        mean = self.history(inputs["history"]).sum(1) / held.sum(1, keepdim=True)
        return torch.einsum("mw,mcw->mc", mean, self.product(inputs["candidates"]))
