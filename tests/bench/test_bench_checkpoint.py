"""``python -m hpc_train bench checkpoint`` as a person calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.bench.checkpoint import checkpoint_report
from tests.doors.command import TINY, hpc_train

HERE = ["cluster=local", "cluster.cpu_workers=2", "cluster.gpus_per_node=0", *TINY]


@pytest.mark.long_form(12)
def test_saves_and_loads_against_plain_dcp(tmp_path: Path) -> None:
    arguments = ["bench", "checkpoint", "+strategy=zero3", *HERE, "--pairs", "3", "run.root=here", "--json"]
    done = hpc_train(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["world_size"] == 2 and result["rounds"] == 3 and result["bytes"] > 10_000
    assert result["seconds"].keys() == result["gb_per_s"].keys()
    for name, seconds in result["seconds"].items():
        assert 0 < seconds["p05"] <= seconds["median"] <= seconds["p95"], name
    assert result["seconds"]["stall"]["median"] < result["seconds"]["durable"]["median"]
    rate = result["bytes"] / result["seconds"]["save"]["median"] / 1e9
    assert result["gb_per_s"]["save"]["median"] == pytest.approx(rate)
    assert not list((tmp_path / "here").iterdir())
    report = checkpoint_report(result)
    for words in ("plain dcp.save", "stall / memcpy", "xxh3-128", str(tmp_path / "here")):
        assert words in report


def test_wrong_calls_are_refused(called: Callable[..., Any]) -> None:
    refused = called("bench", "checkpoint", *HERE, "--against", "raw")
    assert refused.returncode == 2 and "unrecognized arguments: --against" in refused.stderr
