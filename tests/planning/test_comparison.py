"""The prediction of a step's time against sources to which nothing was fitted."""

from __future__ import annotations

from statistics import fmean

import pytest

from tests.planning.comparison import compared, rows


@pytest.mark.parametrize(
    ("source", "most"), [("torchtitan-a100", 0.06), ("fms-fsdp", 0.06), ("aleph-alpha-layouts", 0.18)]
)
def test_the_time_of_a_step_is_as_close_as_the_page_about_plan_says(source: str, most: float) -> None:
    found = [compared(row) for row in rows("published") if row["source"] == source]
    errors = [abs(each.time) for each in found if each is not None and each.time is not None]
    assert len(errors) >= 8
    assert fmean(errors) <= most
