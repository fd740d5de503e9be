"""``bench step``: a strategy against its bare loop, and the advice on buckets and compression."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpc_train.bench.step import MEASURED, describe_advice, report
from hpc_train.bench.step_worker import SIZES_MB, StepBench, _utilization, advice, advised
from tests.doors.command import TINY, environment, hpc_train
from tests.parallel.cells import Cell
from tests.parallel.oracle import local_batch, mesh_of
from tests.ranks import run_on_world

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


@pytest.mark.long_form(10)
def test_a_strategy_without_bare_loop(tmp_path: Path) -> None:
    done = hpc_train("bench", "step", "+strategy=tp", *HERE, *FEW, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "communication" in done.stdout and "bare loop" not in done.stdout


def test_wrong_calls_are_refused(called: Callable[..., Any]) -> None:
    for arguments, words in (
        (["bench", "step", "+strategy=tp", *HERE, "--against", "raw"], "there is no bare loop"),
        (["bench", "step", *HERE, "--pairs", "0"], "must be at least 1"),
        (["bench", "step", "+strategy=dp,pp", *HERE], "one job"),
        (["bench", "stp"], "did you mean step?"),
        (["bench", "step", "model.no_such_key=1"], "no_such_key"),
    ):
        done = called(*arguments)
        assert done.returncode == 2, done
        assert words in done.stderr and "Traceback" not in done.stderr and not done.stdout


def test_a_technique_that_loses_more_must_win_by_a_margin() -> None:
    assert advised({"none": 1.0, "bf16": 0.9, "powersgd": 1.1, "topk": 2.0}) == "none"
    assert advised({"none": 1.0, "bf16": 0.5, "powersgd": 0.45, "topk": 0.4}) == "bf16"
    assert advised({"none": 9.0, "bf16": 4.5, "powersgd": 0.6, "topk": 0.3}) == "topk"


def utilization_of(rank: int, _: int, cell: Cell) -> dict[str, Any] | None:
    mesh = mesh_of(cell, rank)
    bench = SimpleNamespace(config=cell.config(), mesh=mesh, inputs_shape=lambda: (16,), dataset=None)
    return _utilization(cast(StepBench, bench), 10.0)


def test_the_utilization_is_relative_to_the_sum_of_the_peaks_that_the_ranks_measured() -> None:
    first, second = run_on_world(2, utilization_of, Cell(2, strategy={"dp": 2}))
    assert first == second and first is not None
    assert first["mfu"] == first["mfu_of_precision"] == first["flops_per_sample"] * 10.0 / first["peak_flops"]
    assert first["peak_source"] == "measured matrix product"


def advice_of(rank: int, _: int, cells: list[Cell]) -> list[dict[str, Any]]:
    results = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        results.append(advice(cell.config(), mesh, None, local_batch(cell, mesh.layout, mesh.dp_rank, 0)))
    return results


@pytest.mark.parametrize("kind", ["ddp", "allreduce"])
def test_the_advice_is_the_fastest_of_what_all_ranks_measured(kind: str) -> None:
    sharded = Cell(2, strategy={"dp": 2, "data_parallel": "zero2"})
    of_ranks = run_on_world(2, advice_of, [Cell(2, strategy={"dp": 2, "data_parallel": kind}), sharded])
    assert of_ranks[0] == of_ranks[1]
    found, of_zero = of_ranks[0]
    assert of_zero == {}, "ZeRO has no buckets"
    sizes = found["strategy.bucket_cap_mb"]
    assert min(sizes["seconds"].values()) == sizes["seconds"][f"{sizes['best']:g}"] > 0
    assert list(sizes["seconds"]) == [f"{SIZES_MB[0]:g}"], "the gradients of the test model fit in the first bucket"
    techniques = found["strategy.compression"]
    assert set(techniques["seconds"]) == {"none", "bf16", "powersgd", "topk"}
    assert techniques["best"] == advised(techniques["seconds"])
    lines = [describe_advice(key, measured) for key, measured in found.items()]
    assert [line.split()[1].partition("=")[0] for line in lines] == [*MEASURED]
