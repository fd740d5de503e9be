"""Collectives measured on real ranks, and the tables and refusals of ``python -m hpc_train bench collectives``."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpc_train.bench import collectives
from hpc_train.bench.collectives import parse_sizes, size_text
from hpc_train.bench.request import CollectivesRequest
from hpc_train.commands import doctor
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.machine.network.discovery import read_tree
from hpc_train.machine.network.facts import GpuLink, NodeFacts
from hpc_train.preflight.bandwidth import OPERATIONS, ExpectedBandwidths, Rate, expected_bandwidths
from hpc_train.preflight.measure import Ranks, measure
from hpc_train.run.exits import Exit
from tests.doors.command import hpc_train
from tests.machine.network.machines import hgx
from tests.ranks import run_ranks

HERE = ["cluster=local", "cluster.cpu_workers=2", "cluster.gpus_per_node=0"]


def rates(rank: int, world_size: int, sizes: list[int]) -> tuple[list[Rate], int]:
    """Returns the rates, and the wrong elements of an all-reduce that loses an element on the last rank."""
    world = Ranks(dist.group.WORLD, torch.device("cpu"))
    right = [measure(operation, size, world, 0.01) for operation in OPERATIONS for size in sizes]
    plain = dist.all_reduce

    def losing(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        plain(tensor, *args, **options)
        if rank == world_size - 1 and len(tensor) > 1:
            tensor[5] = 0

    dist.all_reduce = losing
    return right, measure("all_reduce", 400, world, 0.01).wrong


def test_every_operation_is_right_on_every_rank_and_has_one_time() -> None:
    """Also at sizes that the ranks do not divide, and of a single element."""
    by_rank = run_ranks(3, rates, [4, 1000, 100_000])
    assert by_rank[0] == by_rank[1] == by_rank[2]
    right, wrong = by_rank[0]
    assert [rate.operation for rate in right][::3] == list(OPERATIONS)
    assert {rate.bytes for rate in right} == {12, 1008, 100_008}
    assert all(rate.wrong == 0 and rate.seconds > 0 for rate in right)
    assert wrong == 1


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """Factors of doc/PERFORMANCE.md, at 8 ranks and 1 GB in 1 s."""
    bus = {operation: Rate(operation, 8, 10**9, 1.0, 1, 0).bus for operation in OPERATIONS}
    assert bus == {
        "all_reduce": 1.75e9, "reduce_scatter": 0.875e9, "all_gather": 0.875e9, "all_to_all": 0.875e9,
        "broadcast": 1e9, "send_recv": 1e9,
    }  # fmt: skip


def test_sizes_as_a_person_writes_them() -> None:
    assert parse_sizes("1K-1M") == (1024, 4096, 16384, 65536, 262144, 1048576)
    assert parse_sizes("100,4k,2MB") == (100, 4096, 2 << 20)
    assert [size_text(size) for size in (1000, 1024, 3 << 20, 1 << 30)] == ["1000", "1K", "3M", "1G"]
    for wrong in ("", "1T", "0", "1M-1K", "big"):
        with pytest.raises(UserError):
            parse_sizes(wrong)


def with_nvlink(facts: NodeFacts, way: str) -> NodeFacts:
    names = [gpu.name for gpu in facts.gpus]
    pairs = [GpuLink(a, b, way) for a in names for b in names if a < b]
    return replace(facts, links=(*pairs, *(link for link in facts.links if not link.b.startswith("GPU"))))


def test_what_a_fabric_should_give(tmp_path: Path) -> None:
    """Eight rails of 400 Gb/s are 400 GB/s; storage ports do not count; what is not known stays unknown."""
    root = hgx(tmp_path).root
    facts = with_nvlink(read_tree(root / "sys", root / "proc"), "NV18")
    two = expected_bandwidths([facts, facts], 8)
    assert two.node is not None and two.node.bus == 460e9
    assert two.world is not None and two.world.bus == pytest.approx(368e9)
    assert two.rail is not None and two.rail.bus == pytest.approx(46e9)
    slow = replace(facts.nics[0], ports=(replace(facts.nics[0].ports[0], rate_gbps=None),))
    unknown = replace(facts, nics=(slow, *facts.nics[1:]))
    assert expected_bandwidths([facts, unknown], 8).world is None
    assert expected_bandwidths([with_nvlink(facts, "NV4")] * 2, 8).node is None
    assert expected_bandwidths([facts, facts], 4) == ExpectedBandwidths()
    assert expected_bandwidths([], 8) == ExpectedBandwidths()


@pytest.mark.long_form(8)  # the operations above
def test_the_command(tmp_path: Path) -> None:
    call = ["bench", "collectives", *HERE, "--sizes", "1K,64K", "--csv", "rates.csv", "--plot", "rates.svg", "--json"]
    done = hpc_train(*call, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["world_size"] == 2 and result["backend"] == "gloo" and result["expected"] is None
    with (tmp_path / "rates.csv").open() as file:
        table = [(row["operation"], int(row["bytes"]), float(row["bus_gb_per_s"])) for row in csv.DictReader(file)]
    assert table == [(row["operation"], row["bytes"], row["bus_gb_per_s"]) for row in result["rates"]]
    assert len(table) == 2 * len(OPERATIONS)
    assert "<svg" in (tmp_path / "rates.svg").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rates.csv", "rates.svg"]


def test_each_algorithm_is_compared_with_the_choice_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are a stand-in, since NCCL needs GPUs."""
    by_name = {None: (5.0, 100.0), "Ring": (2.0, 101.0), "Tree": (7.0, 80.0), "NVLSTree": (5.1, 99.0)}
    parts: list[str | None] = []

    def measured(config: Config, request: CollectivesRequest, entry: str, **options: Any) -> tuple[int, Any]:
        assert request.operations == ("all_reduce",) and config.elastic.max_restarts == 0
        parts.append(options.get("part"))
        name = os.environ.get("NCCL_ALGO")
        if name not in by_name:
            return Exit.FAILED, None
        rows = [
            {"group": "world", "ranks": 8, "bytes": size, "bus_gb_per_s": rate}
            for size, rate in zip(request.sizes, by_name[name], strict=True)
        ]
        return Exit.DONE, {"rates": rows}

    monkeypatch.setattr(collectives, "run_benchmark", measured)
    request = CollectivesRequest((1 << 20, 64 << 20), 0.1, ("all_reduce",))
    code, result = collectives.run_algorithms(Config(), request)
    assert code == Exit.DONE and result is not None and result["algorithms"]["NVLS"] is None
    assert parts == [None, "-Ring", "-Tree", "-NVLS", "-NVLSTree"] and "NCCL_ALGO" not in os.environ
    report = collectives.algorithms_report(result)
    assert "world (8)          1M             5         2         7       5.1  Tree, 1.40 times" in report
    assert "world (8)         64M           100       101        80        99  NCCL's choice" in report
    assert "NCCL refuses NVLS on these GPUs" in report and "by more than 5 %: Tree at 1M in world." in report
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    with pytest.raises(UserError, match="NCCL_ALGO=Ring is set"):
        collectives.check_algorithms(8)


@pytest.mark.long_form(12)  # the operations above
def test_the_groups_of_divided_experts(tmp_path: Path) -> None:
    split = ["+strategy=zero1", "model=moe_tiny", "strategy.ep=2", "cluster.cpu_workers=4", "batch.global_size=4"]
    done = hpc_train("bench", "collectives", *HERE, *split, "--sizes", "4K", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout)["rates"]
    assert {(row["group"], row["ranks"]) for row in rates} == {("world", 4), ("ep", 2), ("expert_shard", 2)}
    assert not any(row["wrong"] for row in rates)


def test_wrong_calls_are_refused(called: Callable[..., Any]) -> None:
    for arguments, words in (
        (["--plot", "rates.txt"], "ends in .png"),
        (["cluster.cpu_workers=1"], "needs at least 2 ranks"),
        (["--algorithms"], "ranks on CPUs use gloo"),
    ):
        done = called("bench", "collectives", *HERE, *arguments)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done


@pytest.mark.long_form(6)
def test_the_doctor_measures_this_machine(tmp_path: Path) -> None:
    done = hpc_train("doctor", "--measure", *HERE, "cluster.preflight=off", cwd=tmp_path)
    assert "GB/s (bus bandwidth)" in done.stdout and "TFLOP/s per rank" in done.stdout, done.stdout + done.stderr
    assert done.returncode in (0, 1) and not list(tmp_path.iterdir())


SRUN = """#!/bin/sh
echo "$SLURM_JOB_ID:$SLURM_STEP_ID" "$@" > {folder}/srun
exit 3
"""


def test_the_doctor_measures_on_every_node_of_an_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text(SRUN.format(folder=tmp_path / "called"))
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "called").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_ID": "0", "SLURM_GPUS_ON_NODE": "4"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert doctor.main(["--measure", "--json", "cluster.nodes=2"]) == 3, "the exit code of srun"
    called = (tmp_path / "called" / "srun").read_text().split()
    assert called[0] == "7:", "the step inherits no options of the surrounding one"
    assert {"--nodes=2", "--ntasks-per-node=1", "--overlap", "--gpus-per-node=4"} <= set(called)
    assert called[-7:] == ["-m", "hpc_train", "doctor", "--task", "--json", "--measure", "cluster.nodes=2"]
