"""What is logged and written about the nodes of an attempt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.config.schema import Config
from hpc_train.elastic.attempts import report_placement
from hpc_train.elastic.fabric import Fabric
from hpc_train.elastic.nodes import Node, have_been_checked
from hpc_train.elastic.rendezvous.messages import Start
from hpc_train.layout.layout import Layout
from hpc_train.machine.network.facts import UNLIMITED, Gpu, Nic, NodeFacts, NodeLimits, Setting
from hpc_train.preflight.bandwidth import read_fabric
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import read_json


def test_what_is_wrong_with_a_node_is_told_once(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    good = NodeFacts(
        "n1", (Gpu(0),), (Nic("mlx5_0", "mellanox"),), limits=NodeLimits(UNLIMITED, 1024), gpu_direct="DMA-BUF"
    )
    worn = replace(
        good, node="n2", gpus=(Gpu(0, problems=("its PCIe link has 8 of 16 lanes",)),), limits=NodeLimits(8 << 20, 1024)
    )
    nodes = tuple(Node(i, f"n{i + 1}", "", None, 1, 1, facts) for i, facts in enumerate((good, worn)))
    start = Start(nodes, Layout(2, 1, 1, 1, "ddp", "1f1b", 1, 1, 1))
    fabric, events = Fabric(run, Config(), []), EventLog.open(run, "agent-n1", 0)
    for _ in range(2):
        fabric.decide(start, events)
    reported = read_json(run.fabric)["warnings"]
    assert reported == [
        "n2: GPU0: its PCIe link has 8 of 16 lanes",
        "n2: at most 8388608 bytes may be locked (ulimit -l): RDMA NICs cannot register their buffers",
    ]
    assert capsys.readouterr().out.count(reported[0]) == 1
    assert read_fabric(run) == (good, worn), "limits and all else"


@pytest.mark.parametrize(
    ("gpus", "own", "is_set"),
    [
        (1, None, True),
        (0, None, False),
        (1, "TORCH_FR_DUMP_TEMP_FILE", False),
        (1, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", False),
    ],
)
def test_the_dumps_of_nccl_go_to_the_run_directory(run: RunDirectory, gpus: int, own: str | None, is_set: bool) -> None:
    settings = () if own is None else (Setting(own, "/scratch/trace-", "the environment"),)
    facts = NodeFacts("n1", (Gpu(0),) * gpus, settings=settings)
    start = Start((Node(0, "n1", "", None, gpus, 2, facts),), Layout(2, 1, 1, 1, "ddp", "1f1b", 1, 1, 1))
    environment = Fabric(run, Config(), []).decide(start, EventLog.open(run, "agent-n1", 3))
    if not is_set:
        assert "TORCH_FR_DUMP_TEMP_FILE" not in environment
        return
    prefix = Path(environment["TORCH_FR_DUMP_TEMP_FILE"])
    assert prefix == run.logs / "stacks" / "nccl-003-rank-"
    assert prefix.parent.is_dir(), "torch does not make it"


def test_groups_that_straddle_switches_are_reported(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = tuple(
        Node(number, f"n{number}", "", f"spine.{rack}.n{number}", 0, 2) for number, rack in enumerate("aabbbb")
    )
    events = EventLog.open(run, "agent-n0", 0)
    report_placement(Start(nodes, Layout(6, 2, 1, 1, "ddp", "1f1b", 1, 4, 1)), None, events)
    printed = capsys.readouterr()
    assert "n0 (spine.a.n0): ranks 0-1: pp 0, dp 0-1" in printed.out
    assert "group of pipeline rank 0 (3 nodes) straddles a and b" in printed.err
    assert "+cluster.extra.switches=1@" in printed.err
    (warning,) = run.read_events()
    assert "straddles" in warning["message"]
    report_placement(Start(nodes[2:], Layout(4, 2, 1, 1, "ddp", "1f1b", 1, 4, 1)), None, events)
    assert capsys.readouterr().err == "", "one switch"


def test_nodes_are_looked_at_once_per_start_of_a_job(run: RunDirectory) -> None:
    """Not after a restart in place or with fewer of them; again with another node, in the next start, and after wrong
    numbers."""
    events = EventLog.open(run, "rank-0000", 0, 0)
    events.write("preflight", launch="7.0.0", nodes=["n1", "n2", "n3"])
    assert have_been_checked(run, "7.0.0", ["n1", "n2", "n3"]) and have_been_checked(run, "7.0.0", ["n3", "n1"])
    assert not have_been_checked(run, "7.0.0", ["n1", "n2", "n4"])
    assert not have_been_checked(run, "7.0.1", ["n1", "n2", "n3"])
    events.write("corruption", message="wrong", first=0, steps=1)
    assert not have_been_checked(run, "7.0.0", ["n1", "n2", "n3"])
