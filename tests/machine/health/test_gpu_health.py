"""What recorded outputs of ``nvidia-smi`` and the kernel log say about the health of GPUs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.machine.health.gpu_health import (
    GpuState,
    NoResponse,
    judge,
    judge_processes,
    parse_query,
    read_gpus,
    run_limited,
    with_links,
)
from hpc_train.machine.health.kernel_log import XIDS, Kind, Line, find_errors, judge_log, read_kernel_log
from tests.machine.health.recorded import KERNEL_LOG, V100, nvlink_status, query

STATE = "<state>Completed</state>"


def one(text: str, links: str = "") -> Finding:
    """Returns the only finding."""
    (found,) = judge(with_links(parse_query(text), links), "n1")
    return found


def test_healthy_gpus_are_one_line() -> None:
    found = one(query(), nvlink_status(18, 18, 18, 18))
    assert (found.level, found.text) == (OK, "4 GPUs: memory, clocks and PCIe links are healthy, 18 NVLinks each")
    assert parse_query(query())[1].pci == "0000:2a:00.0"


@pytest.mark.parametrize(
    ("change", "level", "text"),
    [
        (("failure>No", "failure>Yes"), ERROR, "memory rows could not be remapped"),
        (("pending>No", "pending>Yes"), WARNING, "memory rows wait to be remapped"),
        (("<dram_uncorrectable>0", "<dram_uncorrectable>3"), ERROR, "3 uncorrectable memory errors"),
        (("parity>0", "parity>1"), ERROR, "1 uncorrectable memory errors"),
        (("exceeded>No", "exceeded>Yes"), ERROR, "SRAM exceed the driver's threshold"),
        (("action>None", "action>Drain and Reset"), ERROR, "the driver requests: Drain and Reset"),
        (("brake_slowdown>Not Active", "brake_slowdown>Active"), WARNING, "the power supply requests it"),
        (("<current_link_width>16x", "<current_link_width>8x"), WARNING, "8 of 16 lanes"),
        (("<current_link_gen>5", "<current_link_gen>1"), WARNING, "generation 1 of 5"),
        (("<max_link_gen>5", "<max_link_gen>4"), None, ""),  # under load, the current generation counts
        ((STATE, "<state>In Progress</state>"), ERROR, "'In Progress': CUDA fails to initialize"),
        (("<bandwidth>N/A", "<bandwidth>Degraded"), ERROR, "the NVLink fabric is unhealthy: degraded bandwidth"),
    ],
)
def test_what_is_wrong_has_its_level_and_fix(change: tuple[str, str], level: str | None, text: str) -> None:
    found = one(query(bus_3a=change))
    if level is None:
        assert found.level == OK
        return
    assert found.level == level and text in found.text and "GPU2 (0000:3a:00.0)" in found.text
    assert found.fix.startswith("cluster.exclude=n1; for the staff: ")


def test_nvlinks_are_compared_with_those_of_other_gpus() -> None:
    dead = one(query(), nvlink_status(18, 0, 18, 18))
    assert dead.level == ERROR and "GPU1 (0000:2a:00.0): 0 NVLinks are active, other GPUs have 18" in dead.text
    assert "17 NVLinks are active" in one(query(), nvlink_status(18, 18, 18, 17)).text
    assert one(query(), nvlink_status(0, 0, 0, 0)).level == OK  # cards without bridges
    assert one(query(), nvlink_status(12, 12, 12, 12)).level == OK  # the board has no more
    mig = ("current_mig>Disabled", "current_mig>Enabled")
    assert one(query(bus_18=mig), nvlink_status(0, 18, 18, 18)).level == OK  # MIG turns NVLink off


def test_switches_need_the_fabric_manager() -> None:
    a100 = [GpuState(0, model="A100"), GpuState(1, model="A100")]  # they do not report the fabric
    (found,) = judge(a100, "n1", fabric_manager=False)
    assert found.level == ERROR and "nv-fabricmanager does not run" in found.text
    assert [finding.level for finding in judge(a100, "n1", fabric_manager=None)] == [OK]


def test_older_drivers_use_other_names() -> None:
    (gpu,) = parse_query(V100)
    assert (gpu.uncorrected, gpu.pages_pending, gpu.idle, gpu.pcie_gen) == (1, True, True, 1)
    assert gpu.slowdowns == ("the hardware is too warm",)
    found = list(judge([gpu], "n1"))
    assert [finding.level for finding in found] == [ERROR, WARNING, WARNING, WARNING]
    assert not any("generation" in finding.text for finding in found)  # an idle GPU saves power
    assert parse_query("NVIDIA-SMI has failed") == () == parse_query(query()[:900])


def test_other_processes_and_leftover_memory() -> None:
    process = "<process_info><pid>{}</pid><type>{}</type><process_name>python</process_name>"
    process += "<used_memory>2026 MiB</used_memory></process_info>"
    both = process.format(7, "C") + process.format(8, "G")
    gpus = parse_query(query(bus_18=("<processes>", f"<processes>{both}"), bus_5d=("<used>1 MiB", "<used>9000 MiB")))
    other, leftover = judge_processes(gpus, frozenset())
    assert "GPU0 (0000:18:00.0): 1 other processes use it: python (pid 7, 1.98 GiB)" in other.text
    assert "GPU3 (0000:5d:00.0): 8.79 GiB of its memory are in use without a visible process" in leftover.text
    assert [finding.text for finding in judge_processes(gpus, frozenset({7}))] == [leftover.text]


def tool(folder: Path, body: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_a_tool_that_hangs_fails_or_is_missing_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (missing,) = read_gpus().findings
    assert missing.level == WARNING and "nvidia-smi is not installed" in missing.text
    tool(tmp_path, "exec /bin/sleep 60")
    (hangs,) = read_gpus(limit_s=0.1).findings
    assert hangs.level == ERROR and "the driver hangs: nvidia-smi -q -x did not end within 0.1 s" in hangs.text
    tool(tmp_path, "echo 'Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error'; exit 255")
    (lost,) = read_gpus().findings
    assert lost.level == ERROR and "255: Unable to determine the device handle for GPU0000:CB:00.0" in lost.text
    (tmp_path / "query").write_text(query())
    (tmp_path / "links").write_text(nvlink_status(18, 18, 18, 0))
    tool(tmp_path, f'case $1 in -q) file=query;; *) file=links;; esac; exec /bin/cat "{tmp_path}/$file"')
    found = read_gpus()
    assert [gpu.links for gpu in found.gpus] == [18, 18, 18, 0] and found.findings == ()
    with pytest.raises(NoResponse):
        run_limited(["/bin/sleep", "60"], 0.05)


def lines(text: str) -> list[Line]:
    return [Line(line, 60.0) for line in text.splitlines()]


def test_xid_and_sxid_have_a_class_and_a_fix() -> None:
    errors = find_errors(lines(KERNEL_LOG))
    found = {" ".join(error.text.split()[:2]): error for error in errors}
    assert {name: error.kind for name, error in found.items()} == {
        "Xid 31": Kind.PROGRAM,
        "Xid 43": Kind.PROGRAM,
        "Xid 63": Kind.WATCH,
        "Xid 94": Kind.WATCH,
        "Xid 79": Kind.REBOOT,
        "Xid 154": Kind.REBOOT,
        "SXid 20034": Kind.SWITCH,
        "SXid 19084": Kind.LOOK_UP,
        "Xid 149": Kind.WATCH,
        "Xid 999": Kind.LOOK_UP,
    }
    assert found["Xid 79"].count == 2 and found["SXid 20034"].pci == "0000:06:00.0"
    reported = list(judge_log(errors, "n1", "error"))
    (bus,) = [finding for finding in reported if "Xid 79" in finding.text]
    assert bus.level == ERROR and "at 0000:3a:00: the GPU has fallen off the bus, 2 times, last 1:00 ago" in bus.text
    assert bus.fix.startswith("cluster.exclude=n1; for the staff: drain and reboot")
    assert [finding.level for finding in reported].count(ERROR) == 3
    assert all(finding.fix for finding in reported if finding.level != OK)
    assert all(kind.action for _, kind in XIDS.values())


def test_a_driver_that_was_loaded_again_or_needs_no_action_has_recovered() -> None:
    bad = "NVRM: Xid (PCI:0000:18:00): 95, pid=1, name=python, Uncontained: LTC TAG"
    assert [finding.level for finding in judge_log(find_errors(lines(bad)), "n1", "error")] == [ERROR]
    (past,) = judge_log(find_errors(lines(bad), recovered=["0000:18:00.0"]), "n1", "error")
    assert past.level == WARNING and "the driver requires no action now" in past.text
    assert not find_errors(lines(f"{bad}\n{KERNEL_LOG.splitlines()[0]}"))
    assert not find_errors(lines(bad), foreign=["0000:18:00.0"])  # the GPU of another job
    (none,) = judge_log((), "n1", "error")
    assert none.level == OK and "no error since" in none.text
    (unknown,) = judge_log(None, "n1", "error")
    assert unknown.level == OK and unknown.text.startswith("not known")


def test_the_kernel_log_is_read_from_kmsg_or_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kmsg = tmp_path / "kmsg"
    os.mkfifo(kmsg)
    keeper = os.open(kmsg, os.O_RDWR | os.O_NONBLOCK)  # a reader then finds an empty pipe instead of its end
    stamp = int((time.monotonic() - 30) * 1e6)
    os.write(keeper, f"4,812,{stamp},-;NVRM: Xid (PCI:0000:18:00): 48, pid=1, DBE\n SUBSYSTEM=pci\n".encode())
    (line,) = read_kernel_log(kmsg) or ()
    os.close(keeper)
    assert line.text == "NVRM: Xid (PCI:0000:18:00): 48, pid=1, DBE" and 29 < (line.age or 0) < 3600
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_kernel_log(tmp_path / "missing") is None
    (tmp_path / "journalctl").write_text(
        "#!/bin/sh\necho '[   12.500000] n1 kernel: NVRM: Xid (PCI:0000:18:00): 48, x'\n"
    )
    (tmp_path / "journalctl").chmod(0o755)
    (found,) = find_errors(read_kernel_log(tmp_path / "missing") or ())
    assert found.xid == 48 and found.age is not None
