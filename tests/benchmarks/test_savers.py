"""``savers`` shows a row with the bare loop, the whole error of a failed row, and ends with its budget."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import savers
from benchmarks.savers import AS_IT_STANDS, ROWS, Row, measure, measured, text_of

RESULT: dict[str, Any] = {
    "tokens_per_s": {"median": 1000.0},
    "memory": {"device_peak_bytes": [2**30], "host_peak_bytes": [2**31]},
    "mfu": {"value": 0.5},
    "against": None,
    "gap": None,
}


def test_a_row_is_shown_with_the_bare_loop() -> None:
    bare = {"tokens_per_s": {"median": 1250.0}, "ratio": 0.8}
    gap = {"losses": [{"kind": "optimizer", "seconds": 0.02}]}
    rows = [
        Row(AS_IT_STANDS, (), 1.0, RESULT | {"against": bare, "gap": gap}, gpu={"clocks.sm": 1980.0}),
        Row("slower", ("a=b",), 1.0, RESULT | {"tokens_per_s": {"median": 500.0}}),
        Row("failed", (), 1.0, None, "Traceback\nthe cause"),
    ]
    first, second, third = (text_of(row, 1000.0) for row in rows)
    assert first.split("\n")[1].split()[-2:] == ["1,250", "1.250"]
    assert "1980" in first
    assert first.endswith("20.0 ms lost to optimizer")
    assert second.split()[1:5] == ["500", "0.500", "50.0", "%"]
    assert third.endswith("Traceback\nthe cause")


def test_a_row_that_fails_has_its_whole_output(tmp_path: Path) -> None:
    row = measure("wrong", (), ["train.nonsense=1"], 60, tmp_path)
    assert row.result is None
    assert "nonsense" in row.error
    assert "fix:" in row.error
    assert row.error.endswith("exit code 2")


@pytest.mark.long_form(8)
def test_a_row_that_exceeds_the_budget_is_stopped(tmp_path: Path) -> None:
    begin = time.monotonic()
    row = measure("endless", (), ["+strategy=single", "--pairs", "1000000"], 2, tmp_path)
    assert time.monotonic() - begin < 60
    assert row.result is None
    assert row.late
    assert "at the end of the budget" in row.error


def test_what_the_budget_leaves_no_time_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fake(name: str, changes: tuple[str, ...], arguments: list[str], limit_s: float, cache: Path) -> Row:
        asked.append(arguments)
        now[0] += 30
        return Row(name, changes, 30.0, RESULT)

    now = [0.0]
    monkeypatch.setattr(savers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(savers, "measure", fake)
    found = [*measured(dict([*ROWS.items()][:4]), ["+experiment=x"], ["--pairs", "3"], 75)]
    assert [isinstance(row, Row) for row in found] == [True, True, False, False]
    assert "not measured: 15 s" in str(found[2])
    assert asked[0] == ["+experiment=x", "--pairs", "3", "--against", "raw", "--profile-gap"]
    assert "--against" not in asked[1]
