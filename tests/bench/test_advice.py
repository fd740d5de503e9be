"""``bench step`` measures bucket sizes and gradient compression, and advises the fastest."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_train.bench.step import MEASURED, describe_advice
from hpc_train.bench.step_worker import SIZES_MB, advice, advised
from tests.parallel.cells import Cell
from tests.parallel.oracle import local_batch, mesh_of
from tests.ranks import run_on_world


def test_a_technique_that_loses_more_must_win_by_a_margin() -> None:
    assert advised({"none": 1.0, "bf16": 0.9, "powersgd": 1.1, "topk": 2.0}) == "none"
    assert advised({"none": 1.0, "bf16": 0.5, "powersgd": 0.45, "topk": 0.4}) == "bf16"
    assert advised({"none": 9.0, "bf16": 4.5, "powersgd": 0.6, "topk": 0.3}) == "topk"


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
