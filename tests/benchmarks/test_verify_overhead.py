"""The table of the time that verification takes."""

from __future__ import annotations

from benchmarks.verify_overhead import OFF, table


def test_a_ratio_is_of_measurements_in_the_same_round() -> None:
    seconds = {OFF: [1.0, 2.0, 4.0], "5": [1.5, 3.0, 6.0]}
    assert table("dp", seconds).splitlines()[2:] == [
        "| off | 2000.0 ms | 1.000 (1.000 to 1.000) |",
        "| 5 | 3000.0 ms | 1.500 (1.500 to 1.500) |",
    ]
