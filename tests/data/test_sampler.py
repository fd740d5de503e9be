from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.data.sampler import PADDING, Order, Permutation, Skipped
from hpc_train.errors import UserError
from tests.checkpoint.progress import LONG
from tests.data.layouts import replicas


def step_of_all_ranks(order: Order, step: int, dp: int, micro_batches: int) -> list[int]:
    """The samples of a step in the order of the ranks, without padding."""
    layout = replicas(dp, order.global_size, micro_batches)
    slots = np.concatenate([order.rank_batch(step, layout, rank).ravel() for rank in range(dp)])
    assert len(slots) == dp * layout.micro_batches * layout.micro_size
    return slots[slots != PADDING].tolist()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Order, int, int]:
    samples, global_size = draw(st.integers(1, 300)), draw(st.integers(1, 64))
    drop_last = draw(st.booleans()) and samples >= global_size
    dp = draw(st.integers(1, global_size))
    return Order(samples, global_size, drop_last, draw(st.integers(0, 99))), dp, draw(st.integers(1, 5))


@settings(deadline=None, max_examples=150 if LONG else 20)
@given(case=cases(), epoch=st.integers(0, 3))
def test_each_sample_once_per_epoch(case: tuple[Order, int, int], epoch: int) -> None:
    order, dp, micro_batches = case
    first = epoch * order.steps_per_epoch
    seen = Counter[int]()
    for step in range(first, first + order.steps_per_epoch):
        assert order.epoch_of(step) == epoch
        seen.update(step_of_all_ranks(order, step, dp, micro_batches))
    dropped = order.samples % order.global_size if order.drop_last else 0
    assert set(seen.values()) == {1}
    assert len(seen) == order.samples - dropped


@settings(deadline=None, max_examples=100 if LONG else 20)
@given(case=cases(), step=st.integers(0, 50))
def test_any_number_of_ranks_divides_the_same_sequence(case: tuple[Order, int, int], step: int) -> None:
    order, dp, micro_batches = case
    assert step_of_all_ranks(order, step, dp, micro_batches) == step_of_all_ranks(order, step, 1, 1)


def test_4_2_1_3_4_ranks_mid_epoch_go_on_in_the_same_order() -> None:
    order = Order(samples=1000, global_size=32, drop_last=True, seed=5)
    ranks = [4] * 3 + [2] * 4 + [1] * 2 + [3] * 30 + [4] * 25  # over the ends of two epochs
    changing = [step_of_all_ranks(order, step, dp, 2) for step, dp in enumerate(ranks)]
    assert changing == [step_of_all_ranks(order, step, 4, 2) for step in range(len(ranks))]
    first_epoch = [index for batch in changing[: order.steps_per_epoch] for index in batch]
    assert len(first_epoch) == len(set(first_epoch)) == 992


def test_a_rank_takes_its_positions() -> None:
    order = Order(samples=20, global_size=10, drop_last=True, seed=None)
    batches = [order.rank_batch(1, replicas(3, 10, 2), rank).tolist() for rank in range(3)]
    assert batches == [[[10, 11], [12, PADDING]], [[13, 14], [15, PADDING]], [[16, 17], [18, 19]]]


def test_the_end_of_an_epoch_is_padded() -> None:
    order = Order(samples=13, global_size=8, drop_last=False, seed=None)
    batches = [order.rank_batch(1, replicas(2, 8), rank).tolist() for rank in range(2)]
    assert batches == [[[8, 9, 10, 11]], [[12, PADDING, PADDING, PADDING]]]
    assert order.template(1) == 8


def test_epochs_are_shuffled_anew() -> None:
    order = Order(samples=64, global_size=64, drop_last=True, seed=0)
    epochs = [step_of_all_ranks(order, step, 1, 1) for step in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order.steps_per_epoch == 1


def test_a_billion_samples_cost_nothing() -> None:
    order = Order(samples=10**12, global_size=4096, drop_last=True, seed=0)
    assert len(set(order.slots(10**8, 0, 4096).tolist())) == 4096


def test_too_few_samples() -> None:
    with pytest.raises(UserError, match="31 samples do not fill one global batch of 32") as error:
        Order(31, 32, drop_last=True, seed=0)
    assert "drop_last=false" in error.value.fix
    assert Order(31, 32, drop_last=False, seed=0).steps_per_epoch == 1
    with pytest.raises(UserError, match="no samples"):
        Order(0, 32, drop_last=False, seed=0)


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
    orders = math.factorial(size)
    draws = 20 * orders
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


WINDOWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=6)


@given(windows=WINDOWS)
def test_every_other_position_is_taken_once_and_in_order(windows: list[tuple[int, int]]) -> None:
    """Each window is given in steps of the moment, as a run meets it; positions as a list would keep them."""
    skipped, positions = Skipped(), list(range(200))
    for first, length in windows:
        skipped = skipped.without(range(first, first + length))
        del positions[first : first + length]
    assert [skipped.position(step) for step in range(len(positions))] == positions
    assert Skipped.parse([list(window) for window in skipped.windows]) == skipped
