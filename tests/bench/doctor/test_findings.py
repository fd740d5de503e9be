"""What the doctor finds, and that each finding that is not ok has its fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.bench.doctor.node import (
    NodeReport,
    check_gpus,
    check_gpus_of_job,
    check_locked_memory,
    check_open_files,
    check_ports,
    check_route,
    check_shared_memory,
    check_skew,
    check_software,
)
from hpc_train.bench.doctor.nodes import compare
from hpc_train.machine.health.finding import ERROR, OK, WARNING, worst
from hpc_train.machine.network.facts import UNLIMITED, Gpu, Nic, NodeFacts, NodeLimits, Port, Setting
from tests.doors.command import environment

SMALL_AND_FULL = """
mount -t tmpfs -o size=16m tmpfs /dev/shm &&
mount -t tmpfs -o size=64k tmpfs "$ROOT" && head -c 64k /dev/zero > "$ROOT/file"
exec "$0" -m hpc_train doctor --json cluster=local "run.root=$ROOT/runs"
"""


def report(node: str, skew: float = 0.0, torch: str = "2.13.0", python: str = "/env/python") -> NodeReport:
    facts = NodeFacts(node=node, versions=(("torch", torch),))
    return NodeReport(facts, (), (("python", python),), skew)


def test_nodes_that_differ_are_named_with_the_fix() -> None:
    alike = [report("n1"), report("n2", skew=0.03)]
    assert worst(compare(alike)) == OK
    others = [*alike, report("n3", torch="2.12.0"), report("n4", skew=2.5), report("n5", python="/usr/bin/python")]
    found = {finding.subject: finding for finding in compare(others)}
    assert "2.12.0 on n3" in found["versions"].text
    assert "/usr/bin/python on n5" in found["nodes"].text
    assert "n4 are 2.50 s apart" in found["clock"].text
    assert all(finding.level == ERROR and finding.fix for finding in found.values())
    late = [report("n1"), report("n2", skew=0.4)]
    assert [finding.level for finding in compare(late)] == [WARNING]
    setting = replace(report("n6").facts, settings=(Setting("NCCL_DEBUG", "INFO", "/etc/nccl.conf"),))
    assert "NCCL_DEBUG" in next(compare([report("n1"), replace(report("n6"), facts=setting)])).text


def test_a_report_goes_through_json() -> None:
    own = replace(report("n1"), findings=(check_skew(0.5),))
    assert NodeReport.from_json(json.loads(json.dumps(own.to_json()))) == own


def test_clocks_and_shared_memory(tmp_path: Path) -> None:
    assert [check_skew(skew).level for skew in (0.0, -0.05, 0.5, -2.0)] == [OK, OK, WARNING, ERROR]
    assert "0.50 s behind" in check_skew(0.5).text
    assert check_shared_memory(1, tmp_path).level == OK
    missing = check_shared_memory(1, tmp_path / "shm")
    assert missing.level == ERROR and "No such file" in missing.text and missing.fix
    assert check_shared_memory(10**9, tmp_path).level == ERROR


def test_limits_of_a_process() -> None:
    assert check_locked_memory(NodeLimits(locked_memory=UNLIMITED), rdma=True).level == OK
    small = check_locked_memory(NodeLimits(locked_memory=8 << 20), rdma=True)
    assert small.level == ERROR and "RDMA NICs cannot register" in small.text and "LimitMEMLOCK" in small.fix
    assert check_locked_memory(NodeLimits(locked_memory=8 << 20), rdma=False).level == OK
    few = check_open_files(NodeLimits(open_files=256, most_open_files=4096), 2)
    assert few.level == WARNING and "ulimit -n 4096" in few.fix
    assert "ulimit -n 2048" in check_open_files(NodeLimits(open_files=256, most_open_files=256), 2).fix
    assert check_open_files(NodeLimits(open_files=UNLIMITED), 2).level == OK
    for unknown in (check_locked_memory(NodeLimits(), rdma=True), check_open_files(NodeLimits(), 2)):
        assert unknown.level == WARNING and unknown.fix


def test_gpus_ports_and_versions() -> None:
    port = Port(1, "ACTIVE", "LINKUP", "InfiniBand", 200.0)
    down = Nic("mlx5_1", "mellanox", "MT4129", ports=(Port(1, "INIT", "LINKUP", "InfiniBand", 10.0),))
    facts = NodeFacts(
        gpus=(Gpu(0, model="H100"), Gpu(1, model="H200")),
        nics=(Nic("mlx5_0", "mellanox", "MT4129", ports=(port,)), down),
        visible=("0", "1"),
        versions=(("torch", "2.13.0+cpu"),),
    )
    assert "the slowest sets the pace" in next(check_gpus(facts, "auto")).text
    assert next(check_gpus(NodeFacts(), 8)).level == ERROR
    assert next(check_gpus(NodeFacts(), "auto")).level == OK
    reported = [finding.text for finding in check_ports(facts)]
    assert "mlx5_0:1 200 Gb/s InfiniBand: used, it is active" in reported
    assert any("runs at 200 Gb/s, but its NIC supports 400" in text for text in reported)
    assert any("no subnet manager" in text for text in reported)
    assert "200 Gb/s between nodes in each direction" in reported
    (without,) = (one for one in check_ports(replace(facts, gpu_direct="none")) if "cannot read GPU" in one.text)
    assert without.level == WARNING and "nvidia_peermem" in without.fix
    amd = replace(facts, gpus=(Gpu(0, model="AMD Instinct MI250X"),), gpu_direct="none")
    fixes = {one.text.partition(":")[0]: one.fix for one in check_ports(amd) if one.level == WARNING}
    (staged,) = (fix for text, fix in fixes.items() if "cannot read GPU" in text)
    assert staged.startswith("set NCCL_DMABUF_ENABLE=1") and "nvidia" not in "".join(fixes.values())
    assert any("rocm-smi --showtopo" in fix for fix in fixes.values())
    assert any("with DMA-BUF" in finding.text for finding in check_ports(replace(facts, gpu_direct="DMA-BUF")))
    assert [finding.level for finding in check_software(facts)] == [OK, ERROR]
    assert [finding.level for finding in check_software(NodeFacts())] == [OK, ERROR]


@pytest.mark.parametrize(
    ("driver", "cuda", "fix"),
    [
        ("535.129.03", "13.0", "580.65.06 or newer, or install a build of torch for CUDA 12"),
        ("470.57", "12.8", "ask the site for driver 525.60.13 or newer"),
        ("535.129.03", "12.8", None),
        ("580.65.06", "13.0", None),
        ("580.65.06", "14.0", None),  # a version that the table does not have
    ],
)
def test_a_driver_that_is_too_old_for_torch_is_an_error(driver: str, cuda: str, fix: str | None) -> None:
    versions = (("torch", "2.13.0"), ("nccl", "2.28.3"), ("driver", driver), ("cuda_of_torch", cuda))
    found = [one for one in check_software(NodeFacts(gpus=(Gpu(0),), versions=versions)) if one.level != OK]
    assert [one.level for one in found] == ([] if fix is None else [ERROR])
    if fix is not None:
        assert f"the driver {driver} is too old for torch with CUDA {cuda}" in found[0].text
        assert fix in found[0].fix


@pytest.mark.skipif(os.getuid() != 0, reason="mounting small file systems needs root")
def test_a_full_disk_and_a_small_shared_memory_are_errors(tmp_path: Path) -> None:
    command = ["unshare", "--mount", "bash", "-c", SMALL_AND_FULL, sys.executable]
    done = subprocess.run(
        command, env=environment(ROOT=str(tmp_path)), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    node = next(iter(found["nodes"].values()))
    errors = {
        finding["subject"]: finding for finding in found["findings"] + node["findings"] if finding["level"] == ERROR
    }
    assert set(errors) == {"job", "shared memory", "space", "run directory"}
    assert all(finding["fix"] for finding in errors.values())
    assert "No space left" in errors["run directory"]["text"]


def test_gpus_that_an_agent_could_not_use_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four are allocated on a node without a driver; the doctor must not say that it would train on the CPU."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = check_gpus_of_job(NodeFacts(), "auto", "n1")
    assert found.level == ERROR and "4 are allocated to the job" in found.text and "trains on the CPU" in found.fix
    assert check_gpus_of_job(NodeFacts(), "auto", None) == []  # of one node, the check of the job reports it
    monkeypatch.delenv("SLURM_JOB_ID")
    assert [finding.level for finding in check_gpus_of_job(NodeFacts(), "auto", None)] == [OK]


def test_the_route_to_the_first_node() -> None:
    facts = NodeFacts(node="n2", route="ib0", automatic="eth0")
    (route,) = check_route(facts, "n1")
    assert route.level == OK and route.text == "ib0 leads to n1, where the ranks meet; the host name belongs to eth0"
    (none,) = check_route(NodeFacts(node="n2"), "n1")
    assert none.level == ERROR and "no route leads to n1" in none.text and none.fix
    assert list(check_route(facts, None)) == []


def test_nodes_in_other_partitions_cannot_connect() -> None:
    keys = (("the partition key of InfiniBand", "0x8001"),)
    one, other = replace(report("n1"), must_match=keys), replace(report("n2"), must_match=((keys[0][0], "0x8002"),))
    (found,) = [finding for finding in compare([one, other]) if finding.subject == "nodes"]
    assert "the partition key of InfiniBand differs" in found.text and "ask the site" in found.fix
