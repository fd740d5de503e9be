"""A custom dataset: anything with a length and samples by index.

python -m hpc_train +strategy=dp data=custom data._target_=examples.own_data.Additions model.vocab_size=16
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DIGITS, PLUS, EQUALS = 10, 10, 11  # tokens 0 to 9 are the digits


class Additions:
    """Sums of two numbers as token sequences, e.g. ``3 + 4 = 7``; only the result is learnt.

    Args:
        split: ``train`` or ``validation``; hpc_train passes it.
        samples: the length of the train split.
        digits: digits of each number.
    """

    def __init__(self, split: str, samples: int = 2048, digits: int = 3) -> None:
        self.first = 0 if split == "train" else samples  # the splits do not overlap
        self.samples = samples if split == "train" else 64
        self.digits = digits

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        generator = np.random.default_rng(self.first + index)  # a sample depends on its index only
        left, right = generator.integers(10**self.digits, size=2)
        question = [*self._digits(left), PLUS, *self._digits(right), EQUALS]
        tokens = np.array([*question, *self._digits(left + right, more=1)])
        targets = tokens[1:].copy()
        targets[: len(question) - 1] = -100  # not part of the loss
        return tokens[:-1], targets

    def _digits(self, number: int, more: int = 0) -> list[int]:
        return [int(digit) for digit in f"{number:0{self.digits + more}d}"]
