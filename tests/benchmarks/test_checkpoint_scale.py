"""The benchmark of a thousand nodes runs, with few ranks and without a delay."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checkpoint_scale import measure


def test_the_table_has_a_row_for_each_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(16, 3, 2, 0.0, tmp_path)
    text = capsys.readouterr().out
    assert "16 ranks, 3 tensors each, 2 replicas" in text
    for part in ("plan, later save", "later save", "removal of one checkpoint", "verification at a restart"):
        assert part in text
    assert list(tmp_path.iterdir()) == []
