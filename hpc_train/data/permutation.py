"""A random permutation that is computed, not stored: the element at a position, in O(1) memory.

A Feistel network is a bijection of the numbers of b bits whatever its round function is. Applied again and again until
the value falls below n ("cycle walking"), it is a bijection of [0, n). See Black and Rogaway, "Ciphers with Arbitrary
Finite Domains" (2002). A billion samples cost no more than ten.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDS = 12  # even, so that the halves end where they began; small domains need more than a cipher's four
_LEAST_BITS = 6  # halves of two bits are visibly uneven (chi-square over all orders of 4), of three not
_MASK_64 = (1 << 64) - 1


def mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): 64 bits in, 64 well mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Permutation:
    """The permutation of [0, ``size``) that belongs to (``seed``, ``epoch``)."""

    size: int
    seed: int
    epoch: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The elements at ``positions`` (each in [0, size)), in the same shape.

        Raises:
            IndexError: a position outside of [0, size).
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size == 0:
            return positions.copy()
        if positions.min() < 0 or positions.max() >= self.size:
            raise IndexError(f"positions {positions.min()}..{positions.max()} outside of [0, {self.size})")
        keys = [self._key(number) for number in range(ROUNDS)]
        values = self._feistel(positions.astype(np.uint64).ravel(), keys)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            walked = self._feistel(values[outside], keys)
            values[outside] = walked
            outside = outside[walked >= self.size]
        return values.astype(np.int64).reshape(positions.shape)

    def _feistel(self, values: NDArray[np.uint64], keys: list[np.uint64]) -> NDArray[np.uint64]:
        bits = max(_LEAST_BITS, (self.size - 1).bit_length())
        right_bits = bits // 2
        left_bits = bits - right_bits
        left, right = values >> np.uint64(right_bits), values & _mask(right_bits)
        for key in keys:
            left, right = right, left ^ (_scramble(right, key) & _mask(left_bits))
            left_bits, right_bits = right_bits, left_bits
        return (left << np.uint64(right_bits)) | right

    def _key(self, number: int) -> np.uint64:
        return np.uint64(mix(mix(mix(self.seed & _MASK_64) ^ self.epoch) ^ number))


def _mask(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _scramble(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """``mix`` of ``values ^ key``, over an array; unsigned arithmetic wraps."""
    values = values ^ key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
