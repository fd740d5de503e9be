"""``bench machine``: the arithmetic of its figures, its ranks on CPUs, and the file that ``plan`` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_train.bench.machine import fit_rate, machine_of
from hpc_train.bench.machine_worker import _MachineBench
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import reserved_bytes
from hpc_train.planner.machine import read_machine
from tests.doors.command import hpc_train
from tests.ranks import run_ranks

HERE = ["cluster=local", "cluster.cpu_workers=2", "cluster.gpus_per_node=0"]


def test_the_fit_returns_the_rate_and_the_operations_of_half_of_it() -> None:
    def seconds(flops: float) -> float:
        return (flops + 2e9) / 5e14

    sizes = [1e9, 4e10, 3e12]
    assert fit_rate([(size, seconds(size)) for size in sizes]) == pytest.approx((5e14, 2e9))
    assert fit_rate([(1e9, 2e-6), (4e9, 9e-6)])[1] == 0, "smaller products are not faster per operation"


FIGURES = {
    "memory_bytes": 84e9, "reserved_bytes": 3e9, "bf16_flops": 7e14, "fp16_flops": 7e14, "fp32_flops": 5e13,
    "fp64_flops": 5e13, "product_flops": 6e14, "half_rate_flops": 1e9, "attention_flops": 3e14,
    "memory_bytes_per_s": 3e12, "host_bytes_per_s": 5e10, "launch_s": 5e-6, "node_latency_s": 1e-5,
    "node_bytes_per_s": 4e11,
}  # fmt: skip


def result(device: str, **more: float) -> dict[str, Any]:
    figures = FIGURES | more
    return {"device": device, "units": 132, "nodes": 1, "ranks_per_node": 8, "precision": "bf16", "figures": figures}


def test_what_one_node_does_not_show_is_that_of_the_same_gpu() -> None:
    known, shipped = machine_of(result("NVIDIA H100 80GB HBM3"), 0, "mine", "here"), read_machine("h100")
    for name in ("fabric_bytes_per_s", "fabric_latency_s", "allocator_share", "fp8_flops", "fp8_share"):
        assert known.figures[name] == shipped.figures[name]
    assert known.figures["bf16_flops"].kind == "table" and known.rates.matmul_share == pytest.approx(6e14 / 989.4e12)
    assert known.figures["launch_s"].kind == "measured" and known.figures["launch_s"].source == "here"
    two = machine_of(result("NVIDIA H100 80GB HBM3", fabric_bytes_per_s=4e10, fabric_latency_s=3e-5), 0, "mine", "here")
    assert two.figures["fabric_bytes_per_s"].kind == "measured" and two.rates.fabric_bytes_per_s == 4e10


def test_an_unknown_gpu_has_measured_peaks_and_assumes_the_rest() -> None:
    machine = machine_of(result("NVIDIA X1000"), 0, "mine", "here")
    assert machine.peak("bf16") == 7e14 and machine.figures["bf16_flops"].kind == "measured"
    assert machine.rates.matmul_share == pytest.approx(6 / 7)
    assert machine.figures["fabric_bytes_per_s"].kind == "assumed"


def test_the_communicator_of_all_ranks_counts_once() -> None:
    machine = machine_of(result("NVIDIA H100 80GB HBM3"), 0, "mine", "here")
    assert reserved_bytes(Layout(8, 1, 1, 1, "ddp", "1f1b", 1, 1, 1), machine.rates.reserved_bytes) == 3e9
    single = result("NVIDIA H100 80GB HBM3") | {"ranks_per_node": 1}
    assert machine_of(single, 0, "mine", "here").rates.reserved_bytes == 3e9, "it has none"


def links(rank: int, world_size: int) -> dict[str, float]:
    mesh = SimpleNamespace(rank=rank, device=torch.device("cpu"), control=None)
    mesh.layout = SimpleNamespace(world_size=world_size)
    bench = _MachineBench(None, mesh, SimpleNamespace(local_world_size=2, nodes=2), 0.01)  # type: ignore[arg-type]
    return {**bench.inside(), **bench.between()}


def test_ranks_of_two_nodes_measure_both_scopes() -> None:
    for found in run_ranks(4, links):
        for scope in ("node", "fabric"):
            assert 1e-6 < found[f"{scope}_latency_s"] < 1 and 1e5 < found[f"{scope}_bytes_per_s"] < 1e12


@pytest.mark.long_form(15)
def test_the_command_writes_a_file_that_plan_reads(tmp_path: Path, called: Callable[..., Any]) -> None:
    done = hpc_train("bench", "machine", *HERE, "--seconds", "0.02", "--out", "own.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    machine = read_machine(str(tmp_path / "own.json"))
    assert machine.name == "own" and machine.devices_per_node == 2 and machine.rates.cores >= 1
    others = {name for name, figure in machine.figures.items() if figure.kind != "measured"}
    of_gpus = {"fp8_flops", "fp8_share", "grouped_share", "overlap_share", "tp_matmul_share"}
    assert others == {"allocator_share", "fabric_bytes_per_s", "fabric_latency_s", *of_gpus}
    assert f"not measured here: {', '.join(name for name in machine.figures if name in others)}" in done.stdout
    assert "torch" in machine.figures["launch_s"].source
    assert [path.name for path in tmp_path.iterdir()] == ["own.json"]
    tiny = ["model=gpt_tiny", "data=synthetic", "batch.global_size=16"]
    planned = called("plan", *tiny, "--machine", str(tmp_path / "own.json"), "--gpus", "2", "--json")
    rows = json.loads(planned.stdout)
    assert rows and all(row["step_s"] > 0 for row in rows)


def test_wrong_calls_are_refused(called: Callable[..., Any]) -> None:
    for arguments, words in ((["--out", "x.txt"], ".json"), (["--seconds", "0"], "--seconds is 0")):
        done = called("bench", "machine", *HERE, *arguments)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done
