"""The quick check of a node: counts, NVML in a child, ports, the line and the metrics."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from hpc_train.machine.health import gpu_health, health_check
from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.machine.health.gpu_health import GpuProcess, GpuReading, GpuState, read_in_child, read_nvml
from hpc_train.machine.health.health_check import (
    NodeHealth,
    PortState,
    check_count,
    check_gpus,
    check_node,
    configured_gpus,
    fabric_manager_runs,
    judge_ports,
    metrics,
    read_ports,
    read_states,
)
from hpc_train.machine.health.kernel_log import GpuError, Kind, Line
from hpc_train.machine.health.vendor import Paths
from hpc_train.schedulers.slurm.records import NodeRecord


def fill(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


def port(**files: str) -> dict[str, str]:
    healthy = {
        "state": "4: ACTIVE",
        "link_layer": "InfiniBand",
        "counters/symbol_error": "0",
        "counters/link_error_recovery": "0",
        "counters/port_rcv_errors": "0",
        "pkeys/0": "0xffff",
        "pkeys/1": "0x0000",
    }
    return {f"ports/1/{name}": text for name, text in (healthy | files).items()}


def test_ports_report_errors_keys_and_mtu(tmp_path: Path) -> None:
    kinds = {
        "mlx5_0": port(),
        "mlx5_1": port(state="1: DOWN"),
        "mlx5_2": port(**{"counters/symbol_error": "65535", "counters/link_error_recovery": "12"}),
        "mlx5_3": port(**{"pkeys/0": "0x7fff", "pkeys/1": "0x8001"}),
        "mlx5_10": port(link_layer="Ethernet") | {"device/net/eth2/mtu": "1500"},
    }
    for name, files in kinds.items():
        fill(tmp_path / name, files)
    ports = read_ports(tmp_path)
    assert [one.name for one in ports] == ["mlx5_0:1", "mlx5_2:1", "mlx5_3:1", "mlx5_10:1"]
    errors, limited, small = judge_ports(ports, "n1", uptime_s=3600.0)
    assert errors.level == WARNING and "65535 symbol errors, 12 link recoveries" in errors.text
    assert limited.level == ERROR and limited.fix == "set NCCL_IB_PKEY=1"
    assert small.level == WARNING and "is 1500" in small.text
    (fine,) = judge_ports(ports[:1], "n1", 0.0)
    assert fine.text == "1 active ports without errors, partition key 0xffff"
    old = judge_ports([PortState("mlx5_0", 1, symbol_errors=40)], "n1", uptime_s=100 * 86400.0)
    assert [finding.level for finding in old] == [OK]  # less than one a day
    (without,) = judge_ports([PortState("mlx5_0", 1, keys=(0,))], "n1", 0.0)
    assert without.level == ERROR and without.fix == "ask the site"


STATE = GpuState(0, "0000:18:00.0", "NVIDIA H100 80GB HBM3", "GPU-18", uncorrected=2, slowdowns=("too warm",), links=18)


def test_nvml_is_read_in_a_child_that_may_hang() -> None:
    other = replace(STATE, index=1, pci="0000:04:00.0")
    found = read_nvml(5.0, lambda: {"states": [asdict(STATE), asdict(other)], "lost": [3]})
    assert found is not None and found.gpus == (replace(other, index=0), replace(STATE, index=1))
    assert "GPU 3 is lost" in found.findings[0].text

    def hang() -> dict[str, Any]:
        time.sleep(60)
        return {}

    stuck = read_nvml(0.05, hang)
    assert stuck is not None and stuck.findings[0].level == ERROR and "NVML did not respond" in stuck.findings[0].text
    assert NodeHealth("n1", stuck.findings).driver_hangs and not NodeHealth("n1", found.findings).driver_hangs
    assert read_nvml(5.0) is None or Path("/proc/driver/nvidia").exists()  # without a driver


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_library_is_called_as_its_header_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libnvidia-ml.so"
    source = Path(__file__).with_name("nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    monkeypatch.setattr(pynvml, "nvmlLib", CDLL(str(library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    found = read_nvml()
    assert found is not None and "GPU 2 is lost" in found.findings[0].text
    assert found.gpus[0] == GpuState(
        0,
        "0000:99:00.0",
        "NVIDIA H100",
        "GPU-700000000001",
        rows_pending=True,
        uncorrected=5_000_000_000,
        recovery="Drain and Reset",
        slowdowns=("the hardware is too warm",),
        idle=False,
        pcie_width=8,
        pcie_max_width=16,
        fabric="In Progress",
        links=17,
        memory_used=3 << 30,
        processes=(GpuProcess(os.getpid(), found.gpus[0].processes[0].name, 1 << 30), GpuProcess(4194399, "?")),
        slices=("GPU-700000000011", "GPU-700000000031"),
        slices_used=(3 << 30, 3 << 30),
    )
    assert found.gpus[0].processes[0].name != "?" and found.gpus[1].slices == ()
    assert (gpu_health.Nvml().utilization("GPU-1a"), gpu_health.Nvml().utilization("GPU-1b")) == (0.97, None)


def test_slurm_configures_as_many_gpus_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = NodeRecord.read_all("NodeName=n1 Arch=x86_64 CPUTot=192 Gres=gpu:h100:8(S:0-1) CfgTRES=cpu=192,gres/gpu=8")
    monkeypatch.setattr(health_check, "show_nodes", lambda names, timeout_s: nodes)
    assert configured_gpus("n1") == 8
    monkeypatch.setattr(
        health_check, "show_nodes", lambda names, timeout_s: NodeRecord.read_all("NodeName=n1 Gres=(null)")
    )
    assert configured_gpus("n1") is None
    assert [one.level for one in check_count(8, 8, "n1")] == [OK]
    (fewer,) = check_count(7, 8, "n1")
    assert fewer.level == ERROR and fewer.text == "Slurm configures 8 GPUs on this node, but 7 can be found"
    assert [one.level for one in check_count(8, 4, "n1")] == [WARNING]
    assert list(check_count(8, None, "n1")) == list(check_count(0, 0, "n1")) == []


def machine(root: Path, on_bus: int, managed: int) -> Paths:
    for number in range(on_bus):
        fill(root / f"pci/0000:{number:02x}:00.0", {"vendor": "0x10de", "class": "0x030200"})
    fill(root / "pci/0000:ff:00.0", {"vendor": "0x10de", "class": "0x068000"})  # an NVSwitch
    for number in range(managed):
        fill(root / f"driver/0000:{number:02x}:00.0", {"information": f"Device Minor: \t {number}"})
    fill(root / "proc", {"uptime": "5000.0 1.0", "1/comm": "systemd", "77/comm": "nv-fabricmanage"})
    (root / "dev").mkdir()
    (root / "dev/nvidia-nvswitch0").touch()
    places = {name: root / name for name in ("pci", "driver", "proc", "rdma", "kmsg", "kfd")}
    return Paths(**places, devices=root / "dev")


def test_gpus_that_are_missing_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [replace(STATE, index=number, uncorrected=0, slowdowns=()) for number in range(3)]

    def readings(*gpus: GpuState) -> None:
        monkeypatch.setattr(health_check, "read_nvml", lambda: GpuReading(gpus))

    def errors(paths: Paths, gpus: int) -> Sequence[str]:
        return [one.text for one in check_node("n1", gpus=gpus, paths=paths).findings if one.level == ERROR]

    readings(*states)
    healthy = machine(tmp_path / "a", 3, 3)
    assert errors(healthy, 3) == []
    assert errors(healthy, 4) == ["Slurm configures 4 GPUs on this node, but 3 can be found"]
    readings(*states[:2])
    assert errors(healthy, 3) == ["only 2 of 3 GPUs respond"]
    assert errors(machine(tmp_path / "b", 3, 2), 2) == ["the PCI bus shows 3 NVIDIA GPUs, but the driver manages 2"]
    bare = machine(tmp_path / "c", 0, 0)
    assert errors(bare, 0) == []  # a node without GPUs
    readings(replace(states[0], uncorrected=3))
    assert check_gpus("n1", bare).gpus == ()
    (bare.devices / "nvidiactl").touch()  # a container that hides /proc and /sys
    (found,) = check_gpus("n1", bare).gpus
    assert found.uncorrected == 3 and "3 uncorrectable memory errors" in check_gpus("n1", bare).findings[0].text
    assert read_states() == (found,)


def test_the_fabric_manager_is_looked_for_where_processes_can_be_seen(tmp_path: Path) -> None:
    paths = machine(tmp_path, 1, 1)
    assert fabric_manager_runs(paths) is True
    (tmp_path / "proc/77/comm").write_text("bash\n")
    assert fabric_manager_runs(paths) is False
    (tmp_path / "proc/1/comm").write_text("tini\n")
    assert fabric_manager_runs(paths) is None  # a container
    (tmp_path / "dev/nvidia-nvswitch0").unlink()
    assert fabric_manager_runs(paths) is None


def test_the_line_and_the_metrics() -> None:
    health = NodeHealth("n1", (Finding("GPU count", OK, "8"),), (STATE,), ports=(PortState("mlx5_0", 1, recoveries=4),))
    assert health.healthy and health.line() == "ok: 1 GPU, 1 RDMA port"
    unread = replace(health, findings=(Finding("kernel log", OK, "not known: x"),))
    assert unread.line() == "ok: 1 GPU, 1 RDMA port; kernel log not known: x"
    bad = (Finding("port health", WARNING, "slow"), Finding("kernel log", ERROR, "Xid 79 " + 300 * "x"))
    sick = replace(health, findings=bad, errors=(GpuError("0000:18:00", "Xid 79", Kind.REBOOT, True, count=2, xid=79),))
    assert sick.line().startswith("error: kernel log: Xid 79 xxx") and sick.line().endswith("... (and 1 more)")
    assert len(sick.line()) == 240 and not sick.healthy
    assert replace(sick, findings=bad[:1]).line() == "warning: port health: slow"
    text = metrics(sick, now=1.5e9)
    gpu = 'gpu="0",pci="0000:18:00.0"'
    for line in (
        "hpc_train_healthy 0",
        'hpc_train_findings{level="error"} 1',
        "hpc_train_check_time_seconds 1500000000",
        f"hpc_train_gpu_uncorrectable_errors{{{gpu}}} 2",
        f"hpc_train_gpu_slowed{{{gpu}}} 1",
        'hpc_train_gpu_xid{pci="0000:18:00",code="79"} 2',
        'hpc_train_port_link_recoveries{device="mlx5_0",port="1"} 4',
    ):
        assert line in text.splitlines()
    assert text.endswith("# EOF\n") and "port_symbol_errors" not in text
    assert text.count("# TYPE") == len({line for line in text.splitlines() if line.startswith("# TYPE")})


def test_errors_of_gpus_of_other_jobs_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = machine(tmp_path, 2, 2)
    monkeypatch.setattr(health_check, "read_nvml", lambda: GpuReading((replace(STATE, pci="0000:01:00.0"),)))
    monkeypatch.setattr(health_check, "job_gpus", lambda driver, devices: ("0000:01:00.0",))
    xids = [Line(f"NVRM: Xid (PCI:0000:{bus:02x}:00): 79, GPU has fallen off the bus.", 1.0) for bus in (0, 1)]
    monkeypatch.setattr(health_check, "read_kernel_log", lambda kmsg: tuple(xids))
    assert [error.pci for error in check_gpus("n1", paths).errors] == ["0000:01:00"]


def test_a_child_that_may_hang_holds_no_connection_open() -> None:
    """The end of a connection shows its peer that this process is gone."""
    with socket.socketpair()[0] as held:
        assert read_in_child(lambda: Path(f"/proc/self/fd/{held.fileno()}").exists(), 5.0) is False
