"""Data that a run passes over."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpc_train.data.sampler import Skipped

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
