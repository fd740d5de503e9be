"""Datasets and collate functions of a user, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

CALLS = count()


class Ragged:
    """Item i has 1 + i % 4 tokens, all of them i."""

    def __init__(self, split: str, keys: str = "tokens,labels", how: str = "") -> None:
        self.keys, self.how = keys.split(","), how

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.how == "raises":
            return {"tokens": [1, 2][index + 2]}
        return {self.keys[0]: torch.full((1 + index % 4,), index), self.keys[1]: index, "noise": np.random.random()}


class Pairs:
    """What a user's dataset returns by mistake."""

    def __init__(self, split: str, how: str) -> None:
        self.item: Any = {
            "one": (torch.zeros(2),),
            "names": {"image": torch.zeros(2), "label": 1},
            "words": ("a picture", 1),
            "ragged": ([[1, 2], [3]], 1),
            "none": None,
            "object": (object(), 1),
        }[how]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.item


def padded(items: list[dict[str, Any]]) -> dict[str, Any]:
    longest = max(len(item["tokens"]) for item in items)
    tokens = torch.stack([torch.cat((item["tokens"], torch.zeros(longest - len(item["tokens"])))) for item in items])
    noise = np.array([item["noise"] for item in items])
    return {"tokens": {"ids": tokens, "longest": np.full(len(items), longest)}, "labels": labels(items), "noise": noise}


def drawing(items: list[dict[str, Any]], random: list[np.random.Generator]) -> tuple[Any, Any]:
    """Returns the first number of the own generators, of the global generator, and of that of the item."""
    drawn = [(own.random(), np.random.random(), item["noise"]) for own, item in zip(random, items, strict=True)]
    return np.array(drawn), labels(items)


def labels(items: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([item["labels"] for item in items], dtype=torch.int32)


def negatives(items: list[dict[str, Any]], random: Sequence[np.random.Generator]) -> Any:
    drawn = np.stack([each.integers(0, 1000, 3) for each in random])
    return drawn, labels(items), {"chance": torch.rand(len(items)).double()}


def heads(items: list[dict[str, Any]]) -> Any:
    value = labels(items)
    return value.float(), {"kind": value, "box": value[:, None].expand(-1, 4).float()}


def unseeded(items: list[dict[str, Any]]) -> Any:
    return np.random.default_rng().random(len(items)), labels(items)


def counting(items: list[dict[str, Any]]) -> Any:
    return np.full(len(items), next(CALLS)), labels(items)


def short(items: list[dict[str, Any]]) -> Any:
    return labels(items)[1:], labels(items)


def scalar(items: list[dict[str, Any]]) -> Any:
    return {"tokens": {"ids": labels(items), "scale": 2.0}, "labels": labels(items)}


def words(items: list[dict[str, Any]]) -> Any:
    return ["a", "b"], labels(items)


def text(items: list[dict[str, Any]]) -> Any:
    return "a batch"


def other_keys(items: list[dict[str, Any]]) -> Any:
    return {"x": labels(items), "y": labels(items)}


def failing(items: list[dict[str, Any]]) -> Any:
    return items[0]["color"]
