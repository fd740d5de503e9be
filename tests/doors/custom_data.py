"""A user's dataset, for the tests of ``data=custom``: nothing of hpc_train's."""

from __future__ import annotations

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
