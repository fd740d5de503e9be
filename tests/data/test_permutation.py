from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.data.sampler import Permutation


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 2**40))
def test_every_element_once(size: int, seed: int, epoch: int) -> None:
    elements = Permutation(size, seed, epoch)(np.arange(size))
    assert sorted(elements.tolist()) == list(range(size))


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 10**15), seed=st.integers(0, 2**63), positions=st.lists(st.integers(0, 10**15), max_size=50))
def test_any_order_of_asking_gives_the_same(size: int, seed: int, positions: list[int]) -> None:
    permutation = Permutation(size, seed, 3)
    asked = np.array([position % size for position in positions], dtype=np.int64)
    together = permutation(asked)
    assert together.tolist() == [int(permutation(np.array([position]))[0]) for position in asked]
    assert len(set(together.tolist())) == len(set(asked.tolist()))
    assert ((together >= 0) & (together < size)).all()


@pytest.mark.long_form(8, cases=["4"])
@pytest.mark.parametrize("size", [3, 4])
def test_all_orders_of_few_elements_are_equally_likely(size: int) -> None:
    draws, orders = 240, math.factorial(size)
    seen = Counter(tuple(Permutation(size, 7, epoch)(np.arange(size)).tolist()) for epoch in range(draws))
    assert len(seen) == orders
    chi_square = sum((number - draws / orders) ** 2 / (draws / orders) for number in seen.values())
    assert (chi_square - (orders - 1)) / math.sqrt(2 * (orders - 1)) < 4


def test_places_and_elements_are_independent() -> None:
    size, cells, epochs = 1000, 20, 200
    table = np.zeros((cells, cells))
    places = np.arange(size)
    for epoch in range(epochs):
        np.add.at(table, (places * cells // size, Permutation(size, 1, epoch)(places) * cells // size), 1)
    expected = size * epochs / cells**2
    chi_square = ((table - expected) ** 2 / expected).sum()
    freedom = (cells - 1) ** 2
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def test_neighbors_are_scattered() -> None:
    elements = Permutation(100_000, 1, 0)(np.arange(100_000))
    assert abs(np.corrcoef(elements[:-1], elements[1:])[0, 1]) < 0.02


def test_seeds_and_epochs_differ() -> None:
    places = np.arange(1000)
    orders = [Permutation(1000, seed, epoch)(places).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    shared = sum(a == b for a, b in zip(orders[0], orders[1], strict=True))
    assert shared < 20  # one on average


def test_the_order_of_this_seed_is_fixed_for_good() -> None:
    """A run that is resumed by a later version must go on in the same order."""
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == [3, 4, 8, 0, 2, 1, 5, 9, 6, 7]
    assert Permutation(10**12, 42, 7)(np.arange(3)).tolist() == [225082737295, 150390469370, 562168081555]


def test_positions_outside_are_refused() -> None:
    with pytest.raises(IndexError):
        Permutation(10, 0, 0)(np.array([10]))
    with pytest.raises(IndexError):
        Permutation(10, 0, 0)(np.array([-1]))
