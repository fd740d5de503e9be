"""``strategy.compression=auto`` measures once per layout; it compresses where that pays, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_train.parallel.compression.build import CANDIDATES, decide
from tests.checkpoint.tensors import read_tensors
from tests.train.runs import frozen, run_attempt


def test_a_technique_that_loses_more_must_win_by_a_margin() -> None:
    assert decide({"none": 1.0, "bf16": 0.9, "powersgd": 1.1, "topk": 2.0}) == "none"
    assert decide({"none": 1.0, "bf16": 0.5, "powersgd": 0.45, "topk": 0.4}) == "bf16"
    assert decide({"none": 9.0, "bf16": 4.5, "powersgd": 0.6, "topk": 0.3}) == "topk"


def test_a_layout_keeps_what_was_chosen_for_it(tmp_path: Path) -> None:
    auto = ["+strategy=dp", "strategy.compression=auto", "telemetry.log_every=1"]
    run = frozen(tmp_path / "run", *auto, "train.steps=2")
    assert run_attempt(run, 2) == [0, 0]
    (first,) = chosen(run.read_events())
    assert first["technique"] in CANDIDATES
    assert first["seconds"].keys() == set(CANDIDATES)
    assert all(seconds > 0 for seconds in first["seconds"].values())
    other = "topk" if first["technique"] != "topk" else "powersgd"
    run.update_record(compression=run.record()["compression"] | {"technique": other})
    frozen(run.path, *auto, "train.steps=4")
    assert run_attempt(run, 2) == [0, 0]
    assert len(chosen(run.read_events())) == 1, "the same layout is not measured again"
    newest = run.checkpoints / "step-00000004"
    assert any(".residual." in name for name in read_tensors(newest)), "and trains with what is in the record"
    frozen(run.path, *auto, "train.steps=5")
    assert run_attempt(run, 3) == [0, 0, 0]
    assert len(chosen(run.read_events())) == 2


def chosen(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "compression_chosen"]
