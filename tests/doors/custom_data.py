"""A user's dataset, stream and collate, for tests: nothing of hpc_train's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


class Counting:
    """Sequences that count up modulo ``vocab_size``."""

    def __init__(self, split: str, length: int = 64, vocab_size: int = 16) -> None:
        self.length = length if split == "train" else 8
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        numbers = (index + np.arange(17)) % self.vocab_size
        return numbers[:-1], numbers[1:]


class Counted(Counting):
    """The same as a stream: shard K of N has every N-th sequence."""

    def __init__(self, split: str, shard: int, shards: int) -> None:
        super().__init__(split)
        self.shard, self.shards = shard, shards

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self[index] for index in range(self.shard, self.length, self.shards))


def stacked(items: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    inputs, targets = zip(*items, strict=True)
    return np.stack(inputs), np.stack(targets)
