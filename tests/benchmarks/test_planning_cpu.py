"""The table of ``planning_cpu``, and that it goes on after an interruption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning_cpu
from benchmarks.planning_cpu import LAYOUTS, Compared, measure, rank_correlation, table, wrong_pairs


def test_errors_and_order() -> None:
    found = [Compared("m", f"layout {i}", predicted, i + 1.0) for i, predicted in enumerate((1.1, 1.8, 4.0, 3.0))]
    assert wrong_pairs(found) == (1, 6) and rank_correlation(found) == pytest.approx(0.8)
    text = table(found)
    assert "| m | layout 0 | 1100.0 ms | 1000.0 ms | +10% |" in text
    assert "| m | 19.6% | 33% | 0.80 | 1 of 6 |" in text


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def seconds_in_turns(layouts: Mapping[str, Sequence[str]], *sizes: int) -> dict[str, list[float]]:
        asked.append(sizes)
        return {name: [2.0, 1.0, 9.0] for name in layouts}

    monkeypatch.setattr(planning_cpu, "seconds_in_turns", seconds_in_turns)
    for _ in range(2):
        assert measure("tiny", 3, tmp_path / "measured.jsonl") == dict.fromkeys(LAYOUTS, 2.0)
    assert asked == [(planning_cpu.WORKERS, 3, planning_cpu.STEPS)]
