"""``python -m hpc_train bench step`` as a person calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.bench.step import report
from tests.checkpoint.progress import LONG
from tests.doors.command import TINY, environment, hpc_train

HERE = ["cluster=local", "cluster.cpu_workers=2", "cluster.gpus_per_node=0", *TINY]
FEW = ["--steps", "2", "--pairs", "3"]


@pytest.mark.long_form(15)
@pytest.mark.parametrize("strategy", ["dp", "pp"])
def test_a_strategy_against_its_bare_loop(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / ("tmp" * 30)  # longer than the name of a socket may be
    folder.mkdir()
    call = ("bench", "step", f"+strategy={strategy}", *HERE, *FEW, "--against", "raw", "--json")
    done = hpc_train(*call, cwd=tmp_path, env=environment(TMPDIR=str(folder)))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["world_size"] == 2 and result["blocks"] == 3 and result["against"]["loop"] == strategy
    for rates in (result, result["against"]):
        assert rates["tokens_per_s"]["median"] == pytest.approx(16 * rates["samples_per_s"]["median"])
        assert rates["step_s"]["p05"] <= rates["step_s"]["median"] <= rates["step_s"]["p95"]
    assert result["against"]["ci95_low"] <= result["against"]["ratio"] <= result["against"]["ci95_high"]
    assert len(result["memory"]["host_peak_bytes"]) == 2
    assert min(result["memory"]["host_peak_bytes"]) > 50 * 2**20
    cost = result["measurement"]
    assert cost["timed_intervals_per_step"] >= 1
    assert cost["share"] == pytest.approx(cost["seconds_per_step"] / result["step_s"]["median"])
    mfu = result["mfu"]
    expected = mfu["flops_per_sample"] * result["samples_per_s"]["median"] / mfu["peak_flops"]
    assert mfu["value"] == mfu["hfu"] == pytest.approx(expected)
    assert mfu["mfu_causal"] < mfu["mfu"] < mfu["mfu_with_embeddings"]
    for share, there in (("bubble_share", strategy == "pp"), ("communication_share", strategy == "dp")):
        assert (result[share] is not None) == there
        assert not there or all(0 < value < 1 for value in result[share])
    assert result["ideal_bubble_share"] == (pytest.approx(1 / 9) if strategy == "pp" else None)
    assert list(tmp_path.iterdir()) == [folder] and not list(folder.glob("hpc_train-bench-*"))
    words = report(result)
    for word in ("tokens/s", "communication" if strategy == "dp" else "bubble", "MFU", "VmHWM", "bare loop"):
        assert word in words
    assert "measured matrix product" in words and "bare loop" not in report(result | {"against": None})


@pytest.mark.skipif(not LONG, reason="another bench of a strategy: HPC_TRAIN_LONG=1")
def test_a_strategy_without_bare_loop(tmp_path: Path) -> None:
    done = hpc_train("bench", "step", "+strategy=tp", *HERE, *FEW, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "communication" in done.stdout and "bare loop" not in done.stdout


def test_a_bare_loop_that_there_is_not(called: Callable[..., Any]) -> None:
    refused = called("bench", "step", "+strategy=tp", *HERE, "--against", "raw")
    assert refused.returncode == 2 and "there is no bare loop" in refused.stderr and not refused.stdout


def test_wrong_calls_are_refused(called: Callable[..., Any]) -> None:
    for arguments, words in (
        (["bench", "step", *HERE, "--pairs", "0"], "must be at least 1"),
        (["bench", "step", "+strategy=dp,pp", *HERE], "one job"),
        (["bench", "stp"], "invalid choice"),
        (["bench", "step", "model.no_such_key=1"], "no_such_key"),
    ):
        done = called(*arguments)
        assert done.returncode == 2, done
        assert words in done.stderr and "Traceback" not in done.stderr
