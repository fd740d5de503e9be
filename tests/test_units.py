"""Bytes and durations as text."""

from __future__ import annotations

import pytest

from hpc_train.units import format_bytes, format_duration, format_metric, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1600, "1.56 KiB"),
        (1023 * 2**20, "1023 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (412e9, "384 GiB"),
        (5 * 2**50, "5120 TiB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 * 2**30), ("1.5 TiB", 1.5 * 2**40), ("500MB", 500e6), ("2KiB", 2048), ("8", None), ("8G", None)],
)
def test_sizes_are_read(text: str, count: float | None) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (61.4, "1:01"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_metrics_that_are_small_keep_their_digits() -> None:
    values = (1.34901, -0.25, 0.0, 7.63e-06, None)
    assert [format_metric(value) for value in values] == ["1.3490", "-0.2500", "0.0000", "7.63e-06", ""]
