"""What made-up trees of ``/sys`` and lines of the kernel log say about the health of AMD GPUs. No AMD node was used."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.gpu_errors import GpuErrors
from hpc_train.machine.health import amd_health as module
from hpc_train.machine.health import health_check
from hpc_train.machine.health.amd_health import amd_health, find_events
from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.machine.health.gpu_health import HANGS, judge_processes
from hpc_train.machine.health.health_check import check_gpus, check_node
from hpc_train.machine.health.kernel_log import Line, judge_log
from hpc_train.machine.health.vendor import Paths, VendorHealth
from hpc_train.machine.network.facts import Gpu, NodeFacts
from hpc_train.run.exits import Failure
from tests.machine.amd_nodes import LUMI, MI250X, MI300X, NAVI31, AmdMachine, lumi

FILES = {
    "current_link_width": "16",
    "max_link_width": "16",
    "current_link_speed": "16.0 GT/s PCIe",
    "max_link_speed": "16.0 GT/s PCIe",
    "mem_info_vram_used": "10960896",
    "gpu_busy_percent": "97",
    "ras/umc_err_count": "ue: 0\nce: 3\nde: 0",
    "ras/gfx_err_count": "ue: 0\nce: 0",
    "ras/features": "feature mask: 0x7fff",
    "ras/gpu_vram_bad_pages": "0x00000001 : 0x00001000 : R",
}


def paths(machine: AmdMachine) -> Paths:
    (machine.root / "kmsg").touch()
    root = machine.root
    return Paths(
        pci=root / "sys/bus/pci/devices",
        driver=root / "proc/driver/nvidia/gpus",
        devices=root / "dev",
        proc=root / "proc",
        rdma=root / "rdma",
        kmsg=root / "kmsg",
        kfd=root / "sys/class/kfd/kfd",
    )


def fill(machine: AmdMachine, bus: int, **changes: str) -> None:
    """Writes the files of the healthy GPU at ``bus`` with ``changes``, and its slot."""
    for name, text in (FILES | changes).items():
        machine.write(f"sys/bus/pci/devices/0000:{bus:02x}:00.0/{name}", text)
    slot = (machine.root / f"sys/bus/pci/devices/0000:{bus:02x}:00.0").resolve().parent
    (slot / "max_link_width").write_text("16\n")
    (slot / "max_link_speed").write_text("32.0 GT/s PCIe\n")


def node(root: Path, **changes: str) -> AmdMachine:
    """Builds a node like LUMI-G's whose third GPU has the files ``changes``."""
    machine = lumi(root)
    for number, (bus, _) in enumerate(LUMI):
        fill(machine, bus, **(changes if number == 2 else {}))
    return machine


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> AmdMachine:
    """A node without a defect, for tests that leave it as it is."""
    return node(tmp_path_factory.mktemp("healthy"))


@contextmanager
def third_gpu(machine: AmdMachine, **changes: str) -> Iterator[None]:
    """Gives the third GPU of ``machine`` the files ``changes``."""
    fill(machine, LUMI[2][0], **changes)
    try:
        yield
    finally:
        fill(machine, LUMI[2][0])


def check(machine: AmdMachine, quick: bool = True) -> VendorHealth:
    return amd_health("n1", quick, paths(machine))


def bad(health: VendorHealth) -> list[Finding]:
    return [finding for finding in health.findings if finding.level != OK]


def test_healthy_gpus_are_one_line(healthy: AmdMachine) -> None:
    health = check(healthy)
    assert (health.present, health.shared, len(health.gpus)) == (8, False, 8)
    first = health.gpus[0]
    assert (first.pci, first.pcie_width, first.pcie_gen, first.pcie_best_gen) == ("0000:c1:00.0", 16, 4, 4)
    assert (first.uncorrected, first.memory_used, first.idle) == (0, 10960896, False)
    assert [finding.text for finding in health.findings] == [
        "8 GPUs healthy: memory, PCIe links",
        "no error of amdgpu since the driver was loaded",
    ]


@pytest.mark.parametrize(
    ("name", "content", "level", "text"),
    [
        ("ras/umc_err_count", "ue: 2\nce: 0\nde: 1", ERROR, "2 uncorrectable errors (RAS: umc 2) since"),
        ("ras/gpu_vram_bad_pages", "0x1 : 0x1000 : R\n0x2 : 0x1000 : P", WARNING, "1 bad memory pages wait"),
        ("ras/gpu_vram_bad_pages", "0x1 : 0x1000 : F\n0x2 : 0x1000 : F", ERROR, "2 bad memory pages could not"),
        ("current_link_width", "8", WARNING, "its PCIe link has 8 of 16 lanes"),
        ("current_link_width", "63", ERROR, "it has fallen off the bus"),
        ("current_link_speed", "8.0 GT/s PCIe", WARNING, "its PCIe link runs at generation 3 of 4"),
    ],
)
def test_what_is_wrong_has_its_level_and_fix(
    healthy: AmdMachine, name: str, content: str, level: str, text: str
) -> None:
    with third_gpu(healthy, **{name: content}):
        (found,) = bad(check(healthy))
    assert found.level == level and found.text.startswith("GPU2 (0000:c9:00.0): ") and text in found.text
    assert found.fix.startswith("cluster.exclude=n1; for the staff: ") and "nvidia" not in found.fix


def test_an_idle_gpu_may_lower_its_link(healthy: AmdMachine) -> None:
    with third_gpu(healthy, current_link_speed="2.5 GT/s PCIe", gpu_busy_percent="0"):
        assert not bad(check(healthy))


def test_the_link_to_the_slot_counts_and_not_the_one_inside_of_a_card(tmp_path: Path) -> None:
    machine = node(tmp_path)
    card = machine.root / "sys/bus/pci/devices/0000:c9:00.0"
    bridge = card.resolve().parent
    for name, text in {"vendor": "0x1002", **FILES, "current_link_width": "4"}.items():
        if "/" not in name:
            (bridge / name).write_text(text + "\n")
    (found,) = bad(check(machine))
    assert "its PCIe link has 4 of 16 lanes" in found.text


def test_counts_that_cannot_be_read_are_not_known(healthy: AmdMachine) -> None:
    resetting = "Query currently inaccessible"  # as the driver prints
    with third_gpu(healthy, **{"ras/umc_err_count": resetting, "ras/gfx_err_count": resetting}):
        health = check(healthy)
    assert not bad(health) and health.gpus[2].uncorrected is None
    unknown, fine, _ = health.findings
    assert unknown.unknown and "GPU2 (0000:c9:00.0)" in unknown.text
    assert fine.text == "8 GPUs healthy: PCIe links"


def test_gpus_are_counted_on_the_bus_in_the_driver_and_in_slurm(healthy: AmdMachine, tmp_path: Path) -> None:
    machine = node(tmp_path)
    machine.on_bus(MI250X, 0xE1)
    places = paths(machine)
    found = [one for one in check_node("n1", gpus=9, paths=places).findings if one.level == ERROR]
    assert [one.text for one in found] == [
        "the PCI bus shows 9 AMD Instinct GPUs, but the driver amdgpu manages 8",
        "Slurm configures 9 GPUs on this node, but 8 can be found",
    ]
    whole = check_node("n1", gpus=8, paths=paths(healthy))
    assert whole.healthy and whole.line() == "ok: 8 GPUs, 0 RDMA ports"
    without = AmdMachine(tmp_path / "without")
    without.on_bus(MI300X, 0x05)
    assert ["the driver amdgpu manages none" in one.text for one in bad(check(without))] == [True]


def test_nodes_without_instinct_gpus_have_no_findings(tmp_path: Path) -> None:
    machine = AmdMachine(tmp_path)
    machine.gpu(NAVI31, 0x03)
    assert check(machine) == VendorHealth()
    assert amd_health in health_check.VENDORS


def test_only_the_gpus_of_the_job_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = lumi(tmp_path)
    for number, (bus, _) in enumerate(LUMI):
        fill(machine, bus, **({} if number < 4 else {"ras/umc_err_count": "ue: 5\nce: 0"}))
    for number in range(4, 8):
        machine.of_another_job(machine.nodes / str(4 + number))
    log = [Line(f"amdgpu 0000:{bus:02x}:00.0: amdgpu: ring sdma0 timeout, signaled seq=1") for bus in (0xC1, 0xDE)]
    monkeypatch.setattr(module, "read_kernel_log", lambda kmsg: tuple(log))
    health = check(machine)
    assert (health.present, len(health.gpus)) == (8, 4)
    assert [one.text for one in bad(health)] == ["the GPU at 0000:c1:00.0: the ring sdma0 hung"]


def test_the_partitions_of_a_gpu_are_judged_once(tmp_path: Path) -> None:
    machine = AmdMachine(tmp_path)
    folders = [machine.gpu(MI300X, 0x05)]
    for number in range(1, 8):  # the driver numbers partitions as functions of one device
        folder = machine.nodes / str(number)
        text = (folders[0] / "properties").read_text().replace(f"location_id {0x500}", f"location_id {0x500 + number}")
        machine.write(f"sys/class/kfd/kfd/topology/nodes/{number}/properties", text)
        folders.append(folder)
    fill(machine, 0x05)
    for number, folder in enumerate(folders):
        (folder / "gpu_id").write_text(f"{1000 + number}\n")
    machine.write("sys/class/kfd/kfd/proc/42/vram_1003", str(9 << 30))
    health = check(machine, quick=False)
    assert (health.present, health.shared, len(health.gpus)) == (8, True, 1)
    assert [one.pid for one in health.gpus[0].processes] == [42]


def test_processes_and_leftover_memory(tmp_path: Path) -> None:
    machine = node(tmp_path, mem_info_vram_used=str(9 << 30))
    for number in range(8):
        machine.write(f"sys/class/kfd/kfd/topology/nodes/{4 + number}/gpu_id", str(1000 + number))
    machine.write("sys/class/kfd/kfd/proc/1896/vram_1000", str(3 << 30))
    machine.write("sys/class/kfd/kfd/proc/1896/vram_1001", "0")
    machine.write("proc/1896/comm", "python")
    other, leftover = judge_processes(check(machine, quick=False).gpus, frozenset())
    assert other.text == "GPU0 (0000:c1:00.0): 1 other processes use it: python (pid 1896, 3 GiB)"
    assert leftover.text.startswith("GPU2 (0000:c9:00.0): 9 GiB of its memory are in use without")
    assert not any(gpu.processes for gpu in check(machine).gpus)


def test_a_driver_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = node(tmp_path)
    held = machine.root / "sys/bus/pci/devices/0000:c9:00.0/ras/umc_err_count"
    held.unlink()
    os.mkfifo(held)  # opening it blocks, as a read does if the driver waits for the GPU
    monkeypatch.setattr(module, "LIMIT_S", 0.1)
    (found,) = bad(check(machine))
    assert found.level == ERROR and found.text.startswith(HANGS) and "reboot the node" in found.fix


# the forms of Linux 5.4 to 6.x and of ROCm's driver; with addresses, process names and times changed
LOG = """\
[    9.0] amdgpu 0000:c1:00.0: amdgpu: ring sdma0 timeout, signaled seq=75, emitted seq=77
[   10.0] [drm] amdgpu kernel modesetting enabled.
[  100.0] amdgpu 0000:c1:00.0: amdgpu: [gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:8 pasid:32769)
[  200.0] amdgpu 0000:c6:00.0: amdgpu: Poison is created, no user action is needed.
[  201.0] amdgpu 0000:c6:00.0: amdgpu: poison is consumed by client 27, kick off gpu reset flow
[  202.0] amdgpu 0000:c6:00.0: amdgpu: GPU reset for gfx RAS poison consumption is issued!
[  203.0] amdgpu 0000:c6:00.0: {1}socket: 1, die: 0, 2 new uncorrectable hardware errors detected in umc block
[  204.0] amdgpu 0000:c6:00.0: {1}socket: 1, die: 0, 2 uncorrectable hardware errors detected in total in umc block
[  205.0] amdgpu 0000:c6:00.0: amdgpu: socket: 0, die: 0, 7 new correctable hardware errors detected in umc block
[  206.0] amdgpu 0000:c6:00.0: amdgpu: GPU reset begin!. Source:  3
[  207.0] amdgpu 0000:c6:00.0: amdgpu: GPU reset(1) succeeded!
[  300.0] amdgpu 0000:c9:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!
[  301.0] amdgpu 0000:c9:00.0: amdgpu: GPU reset begin!
[  302.0] amdgpu 0000:c9:00.0: amdgpu: GPU reset end with ret = -62
[  400.0] amdgpu 0000:ce:00.0: amdgpu: RAS records:700 exceed threshold:655
[  401.0] amdgpu 0000:d1:00.0: amdgpu: SMU: I'm not done with your previous command: SMN_C2PMSG_66:0x0000002B
[  402.0] amdgpu 0000:d6:00.0: amdgpu: device lost from bus!
[  500.0] amdgpu: qcm fence wait loop timeout expired
[  501.0] [drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring comp_1.0.0 timeout, signaled seq=9089, emitted seq=9090
[  502.0] [drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma1 timeout, but soft recovered
[  503.0] amdgpu 0000:d9:00.0: amdgpu: Fatal error during GPU init
"""


def test_the_kernel_log_is_judged_by_what_the_lines_mean() -> None:
    found = {one.text: one for one in judge_log(find_events(map(Line, LOG.splitlines())), "n1", "error")}
    assert {text: one.level for text, one in found.items()} == {
        "the GPU at 0000:c1:00.0: illegal memory access (page fault)": OK,
        "the GPU at 0000:c6:00.0: an uncorrectable error was found in unused memory (poison)": OK,
        "the GPU at 0000:c6:00.0: a program used memory with an uncorrectable error (poison), 2 times": ERROR,
        "the GPU at 0000:c6:00.0: uncorrectable error in the block umc": ERROR,
        "the GPU at 0000:c6:00.0: the driver has started to reset it; the driver has reset it since": WARNING,
        "the GPU at 0000:c9:00.0: fatal hardware error (ERREVENT_ATHUB_INTERRUPT)": ERROR,
        "the GPU at 0000:c9:00.0: the driver has started to reset it": ERROR,
        "the GPU at 0000:c9:00.0: its reset failed": ERROR,
        "the GPU at 0000:ce:00.0: its memory has more bad pages than the driver's threshold": ERROR,
        "the GPU at 0000:d1:00.0: its management unit (SMU) does not respond": ERROR,
        "the GPU at 0000:d6:00.0: it has fallen off the bus": ERROR,
        "a GPU: its queues hung": ERROR,
        "a GPU: the ring comp_1.0.0 hung": ERROR,
        "a GPU: the ring sdma1 hung and recovered": OK,
        "the GPU at 0000:d9:00.0: the driver could not initialize it": ERROR,
    }
    assert all(one.fix.startswith("cluster.exclude=n1; ") for one in found.values() if one.level != OK)
    bad_pages = "the GPU at 0000:ce:00.0: its memory has more bad pages than the driver's threshold"
    assert "replace the GPU" in found[bad_pages].fix


def test_only_errors_of_the_hardware_prove_a_defect() -> None:
    lines = [Line(text, age=9.0) for text in LOG.splitlines()]
    assert [(one.text, one.age) for one in find_events(lines) if one.defect] == [
        ("the GPU at 0000:c6:00.0: a program used memory with an uncorrectable error (poison)", 9.0),
        ("the GPU at 0000:c6:00.0: uncorrectable error in the block umc", 9.0),
        ("the GPU at 0000:c9:00.0: fatal hardware error (ERREVENT_ATHUB_INTERRUPT)", 9.0),
        ("the GPU at 0000:ce:00.0: its memory has more bad pages than the driver's threshold", 9.0),
        ("the GPU at 0000:d6:00.0: it has fallen off the bus", 9.0),
        ("the GPU at 0000:d9:00.0: the driver could not initialize it", 9.0),
    ]
    assert {one.pci for one in find_events(lines, foreign=("0000:c6:00.0", "0000:d6:00.0")) if one.defect} == {
        "0000:c9:00.0",
        "0000:ce:00.0",
        "0000:d9:00.0",
    }
    unnamed = Line("[drm:amdgpu_ras_poison [amdgpu]] *ERROR* RAS poison consumption", age=9.0)
    assert find_events([unnamed])[0].defect
    assert not find_events([unnamed], foreign=("0000:c6:00.0",))[0].defect, "it may be the GPU of another job"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("poison is consumed by client 27, kick off gpu reset flow", Failure.DEVICE),
        ("socket: 1, die: 0, 2 new uncorrectable hardware errors detected in umc block", Failure.DEVICE),
        ("socket: 0, die: 0, 7 new correctable hardware errors detected in umc block", Failure.KERNEL),
        ("[gfxhub0] no-retry page fault (src_id:0 ring:24 vmid:8 pasid:32769)", Failure.KERNEL),
        ("ring sdma0 timeout, signaled seq=75, emitted seq=77", Failure.KERNEL),
    ],
)
def test_a_logged_defect_makes_an_error_of_hip_the_nodes_fault(
    healthy: AmdMachine, tmp_path: Path, line: str, expected: Failure
) -> None:
    places = replace(paths(healthy), kmsg=tmp_path / "kmsg")
    places.kmsg.write_text(f"3,1,{int((time.monotonic() - 5) * 1e6)},-;amdgpu 0000:c9:00.0: amdgpu: {line}\n")
    gpus = tuple(Gpu(number, f"0000:{bus:02x}:00.0", "AMD Instinct MI250X") for number, (bus, _) in enumerate(LUMI))
    facts = NodeFacts("n1", gpus, visible=tuple(str(number) for number in range(8)))
    failed = WorkerFailure(2, Failure.KERNEL, "HIP error: an illegal memory access was encountered", "", 0.0)
    errors = GpuErrors(facts, 8, check=lambda name: check_gpus(name, places))
    assert errors.examine(failed, 2, attempt_s=60.0).failure is expected
    assert errors.examine(failed, 2, attempt_s=1.0).failure is Failure.KERNEL, "older than the attempt"


def test_a_hang_after_a_reset_counts_again() -> None:
    hang = "amdgpu 0000:c1:00.0: amdgpu: ring sdma0 timeout, signaled seq=75, emitted seq=77"
    reset = "amdgpu 0000:c1:00.0: amdgpu: GPU reset(1) succeeded!"

    def levels(*lines: str) -> list[str]:
        return [one.level for one in judge_log(find_events(map(Line, lines)), "n1", "error")]

    assert levels(hang, reset) == [WARNING]
    assert levels(hang, reset, hang) == [ERROR]
    assert levels(hang, reset.replace("c1", "c6")) == [ERROR]
    assert levels("usb 1-1: new device") == [OK]
    (unread,) = judge_log(None, "n1", "error")
    assert unread.unknown
