"""Checks the health of a node quickly, for ``doctor --node --quiet``, a prolog or Slurm's HealthCheckProgram.

The module imports neither torch nor the config, and it never hangs. ``check_node`` returns findings as data.
``VENDORS`` has a function for each vendor of GPUs. Ports are judged by the counters of the InfiniBand specification
(PortCounters). Because the counters grow after the last reset, a port is faulty from ``MIN_ERRORS`` events on, the
default threshold of infiniband-diags, and at least one event per day since boot.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.machine.gpus import job_gpus
from hpc_train.machine.health.amd_health import amd_health
from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding, worst
from hpc_train.machine.health.gpu_health import HANGS, SUBJECT, GpuState, judge, read_gpus, read_nvml
from hpc_train.machine.health.kernel_log import GpuError, find_errors, judge_log, read_kernel_log
from hpc_train.machine.health.vendor import Paths, VendorHealth
from hpc_train.machine.sysfs import ACCELERATOR, nvidia_gpus, read_number, read_text
from hpc_train.schedulers.slurm.client import show_nodes
from hpc_train.schedulers.slurm.records import gpus_of
from hpc_train.units import counted

SLURM_S = 2.0
LONGEST = 240  # the most characters of the line, since Slurm truncates long reasons


@dataclass(frozen=True)
class NodeHealth:
    """Holds the result for one node: the findings, and the states on which they are based."""

    node: str
    findings: tuple[Finding, ...]
    gpus: tuple[GpuState, ...] = ()
    errors: tuple[GpuError, ...] = ()
    ports: tuple[PortState, ...] = ()

    @property
    def healthy(self) -> bool:
        return worst(self.findings) != ERROR

    @property
    def defects(self) -> tuple[GpuError, ...]:
        """Returns the errors in the kernel log that prove a defect of a GPU."""
        return tuple(error for error in self.errors if error.defect)

    @property
    def driver_hangs(self) -> bool:
        """Returns whether the driver hangs, so that another call would hang, too."""
        return any(finding.text.startswith(HANGS) for finding in self.findings)

    def line(self) -> str:
        """Returns the result as one line, which begins with the worst level."""
        bad = [finding for level in (ERROR, WARNING) for finding in self.findings if finding.level == level]
        if not bad:
            unread = "".join(f"; {finding.subject} {finding.text}" for finding in self.findings if finding.unknown)
            gpus = counted(len(self.gpus), "GPU", "GPUs")
            ports = counted(len(self.ports), "RDMA port", "RDMA ports")
            return f"ok: {gpus}, {ports}{unread}"[:LONGEST]
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        text = f"{bad[0].level}: {bad[0].subject}: {bad[0].text}"
        return (text if len(text) + len(more) <= LONGEST else f"{text[: LONGEST - len(more) - 3]}...") + more


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Returns Slurm's name of this node; outside of a job, the host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def check_node(node: str, quick: bool = True, gpus: int | None = None, paths: Paths | None = None) -> NodeHealth:
    """Checks the GPUs, the kernel log and the RDMA ports of this node.

    Args:
        quick: whether to prefer NVIDIA's library to ``nvidia-smi``, which is slower and reports slightly more.
        gpus: the number of GPUs that the node should have; None reads it from Slurm's configuration.
    """
    paths = paths or Paths()
    vendors = [check(node, quick, paths) for check in VENDORS]
    health = _combined(node, vendors)
    findings = [*health.findings]
    if not any(vendor.shared for vendor in vendors):
        present = sum(vendor.present for vendor in vendors)
        findings += check_count(present, configured_gpus(node) if gpus is None else gpus, node)
    ports = read_ports(paths.rdma)
    findings += judge_ports(ports, node, uptime(paths.proc))
    return replace(health, findings=tuple(findings), ports=ports)


def check_gpus(node: str, paths: Paths | None = None) -> NodeHealth:
    """Checks the GPUs of this node with their processes, and the kernel log, for example after a GPU error."""
    # NVML reports processes in the quick check, too; AMD's processes are read only in the full check
    return _combined(node, [check(node, check is nvidia_health, paths or Paths()) for check in VENDORS])


def _combined(node: str, vendors: Sequence[VendorHealth]) -> NodeHealth:
    return NodeHealth(
        node,
        findings=tuple(finding for vendor in vendors for finding in vendor.findings),
        gpus=tuple(state for vendor in vendors for state in vendor.gpus),
        errors=tuple(error for vendor in vendors for error in vendor.errors),
    )


def read_states() -> tuple[GpuState, ...]:
    """Returns the states of the GPUs of this node that respond, without further checks."""
    reading = read_nvml()
    if reading is None:
        return amd_health(node_name(), True, Paths()).gpus
    return reading.gpus


def nvidia_health(node: str, quick: bool, paths: Paths) -> VendorHealth:
    on_bus = len(nvidia_gpus(paths.pci, (ACCELERATOR,)))
    listed = {path.name for path in paths.driver.glob("*")}
    if not on_bus and not listed and not (paths.devices / "nvidiactl").exists():  # some containers hide the others
        return VendorHealth()
    reading = (read_nvml() if quick else None) or read_gpus()
    openable = job_gpus(paths.driver, paths.devices)
    findings = [*reading.findings]
    fix = f"cluster.exclude={node}; for the staff: drain and reboot the node, check the GPU's slot and power"
    if len(listed) < on_bus:
        text = f"the PCI bus shows {on_bus} NVIDIA GPUs, but the driver manages {len(listed) or 'none'}"
        findings.append(Finding(SUBJECT, ERROR, text, fix))
    elif not reading.findings and len(reading.gpus) < len(openable):
        findings.append(Finding(SUBJECT, ERROR, f"only {len(reading.gpus)} of {len(openable)} GPUs respond", fix))
    findings += judge(reading.gpus, node, fabric_manager_runs(paths))

    lines = read_kernel_log(paths.kmsg)
    foreign = sorted(listed.difference(openable))  # the GPUs of other jobs
    recovered = [gpu.pci for gpu in reading.gpus if gpu.pci and gpu.recovery == "None"]
    errors = None if lines is None else find_errors(lines, recovered, foreign)
    findings += judge_log(errors, node, "Xid or SXid error")
    return VendorHealth(
        present=max(len(listed), len(reading.gpus)),
        shared=any(gpu.mig for gpu in reading.gpus),
        gpus=reading.gpus,
        errors=errors or (),
        findings=tuple(findings),
    )


VENDORS: tuple[Callable[[str, bool, Paths], VendorHealth], ...] = (nvidia_health, amd_health)


def configured_gpus(node: str) -> int | None:
    """Returns the number of GPUs of the node in Slurm's configuration (``Gres``); None if Slurm does not know the
    node."""
    record = next(iter(show_nodes([node], SLURM_S)), None)
    if record is None or not record.gres:
        return None
    return sum(gpus_of(record.gres).values())


def check_count(present: int, configured: int | None, node: str) -> Iterator[Finding]:
    """Compares the number of GPUs of the node with Slurm's configuration."""
    if configured is None:
        return
    if present < configured:
        text = f"Slurm configures {configured} GPUs on this node, but {present or 'none'} can be found"
        fix = f"cluster.exclude={node}; for the staff: drain and reboot the node"
        yield Finding("GPU count", ERROR, text, fix)
    elif present > configured:
        text = f"the node has {present} GPUs, but Slurm configures {configured}"
        yield Finding("GPU count", WARNING, text, "for the staff: complete gres.conf and Gres= of the node")
    elif configured:
        yield Finding("GPU count", OK, f"{present}, as Slurm configures")


def fabric_manager_runs(paths: Paths) -> bool | None:
    """Returns whether a node with NVSwitches runs the fabric manager; None without switches or if it cannot be seen."""
    if not any(paths.devices.glob("nvidia-nvswitch[0-9]*")):
        return None
    if read_text(paths.proc / "1/comm") not in ("systemd", "init"):  # in a container, or /proc hides processes
        return None
    names = (read_text(process / "comm") for process in paths.proc.glob("[0-9]*"))
    return any(name.startswith("nv-fabricmanage") for name in names)  # the kernel keeps 15 characters


def uptime(proc: Path = Path("/proc")) -> float:
    """Returns the seconds since boot; 0 if unknown."""
    words = read_text(proc / "uptime").split()
    if words:
        return float(words[0])
    return 0.0


def metrics(health: NodeHealth, now: float | None = None) -> str:
    """Returns the result in the text format of Prometheus. It is also valid OpenMetrics, since all metrics are
    gauges."""
    gpus = [({"gpu": str(gpu.index), "pci": gpu.pci or ""}, gpu) for gpu in health.gpus]
    ports = [({"device": port.device, "port": str(port.number)}, port) for port in health.ports]
    families: dict[str, tuple[str, list[tuple[dict[str, str], float | None]]]] = {
        "healthy": ("Whether no check found an error.", [({}, health.healthy)]),
        "findings": (
            "Findings by level.",
            [
                ({"level": name}, sum(finding.level == name for finding in health.findings))
                for name in (OK, WARNING, ERROR)
            ],
        ),
        "check_time_seconds": ("Unix time of the check.", [({}, time.time() if now is None else now)]),
        "gpus": ("GPUs that respond.", [({}, len(health.gpus))]),
        "gpu_uncorrectable_errors": ("Uncorrectable ECC errors.", [(labels, gpu.uncorrected) for labels, gpu in gpus]),
        "gpu_rows_pending": ("Whether rows wait for remapping.", [(labels, gpu.rows_pending) for labels, gpu in gpus]),
        "gpu_rows_failed": ("Whether a remapping failed.", [(labels, gpu.rows_failed) for labels, gpu in gpus]),
        "gpu_slowed": ("Whether the clocks are reduced.", [(labels, bool(gpu.slowdowns)) for labels, gpu in gpus]),
        "gpu_pcie_lanes": ("Lanes of the PCIe link.", [(labels, gpu.pcie_width) for labels, gpu in gpus]),
        "gpu_nvlinks": ("Active NVLinks.", [(labels, gpu.links) for labels, gpu in gpus]),
        "gpu_xid": (
            "Xid errors since the driver was loaded.",
            [
                ({"pci": error.pci or "", "code": str(error.xid)}, error.count)
                for error in health.errors
                if error.xid is not None
            ],
        ),
        "port_symbol_errors": ("Symbol errors of the port.", [(labels, port.symbol_errors) for labels, port in ports]),
        "port_link_recoveries": ("Recoveries of the link.", [(labels, port.recoveries) for labels, port in ports]),
    }
    lines = []
    for name, (text, samples) in families.items():
        known_samples = [(labels, value) for labels, value in samples if value is not None]
        if known_samples:
            lines += [f"# HELP hpc_train_{name} {text}", f"# TYPE hpc_train_{name} gauge"]
        for labels, value in known_samples:
            inner = ",".join(f'{key}="{label}"' for key, label in labels.items())
            lines.append(f"hpc_train_{name}{'{' + inner + '}' if inner else ''} {value + 0:.15g}")
    return "\n".join([*lines, "# EOF"]) + "\n"


PORTS = "port health"
MIN_ERRORS = 10
DAY_S = 86400.0
MEMBER = 0x8000  # the bit of a partition key for full members; limited members cannot reach each other
BEST_ROCE_MTU = 4200  # bytes; the MTU of the interface that RoCE packets of 4096 bytes need


@dataclass(frozen=True)
class PortState:
    """Describes an active port. A value is None if the driver does not show it.

    Attributes:
        keys: its partition keys; NCCL uses the first (NCCL_IB_PKEY=0).
        mtu: the MTU in bytes of the network interface of a RoCE port.
    """

    device: str
    number: int
    layer: str = "InfiniBand"
    symbol_errors: int | None = None
    recoveries: int | None = None
    receive_errors: int | None = None
    keys: tuple[int, ...] = ()
    mtu: int | None = None

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


def read_ports(rdma: Path = Path("/sys/class/infiniband")) -> tuple[PortState, ...]:
    """Returns the active ports below ``rdma``, in the order of their names."""
    ports = sorted(rdma.glob("*/ports/*"), key=lambda path: (len(path.parts[-3]), path.parts[-3], path.name))
    return tuple(_port(path) for path in ports if "ACTIVE" in read_text(path / "state") and path.name.isdigit())


def _port(path: Path) -> PortState:
    layer = read_text(path / "link_layer")
    keys: list[int] = []
    while layer != "Ethernet" and (text := read_text(path / f"pkeys/{len(keys)}")):
        keys.append(int(text, 16))  # in the order of the index; 0 marks an empty entry
    mtus = [int(text) for text in map(read_text, path.parent.parent.glob("device/net/*/mtu")) if text.isdigit()]
    return PortState(
        device=path.parts[-3],
        number=int(path.name),
        layer=layer or "InfiniBand",
        symbol_errors=read_number(path / "counters/symbol_error"),
        recoveries=read_number(path / "counters/link_error_recovery"),
        receive_errors=read_number(path / "counters/port_rcv_errors"),
        keys=tuple(keys),
        mtu=max(mtus, default=None) if layer == "Ethernet" else None,
    )


def judge_ports(ports: Sequence[PortState], node: str, uptime_s: float) -> Iterator[Finding]:
    """Yields findings on the problems of ``ports``, or a finding that they are healthy."""
    findings = [finding for port in ports for finding in _judge_port(port, node, uptime_s)]
    if ports and not findings:
        keys = sorted({f"{port.keys[0]:#06x}" for port in ports if port.keys})
        text = f"{len(ports)} active ports without errors" + (f", partition key {', '.join(keys)}" if keys else "")
        findings = [Finding(PORTS, OK, text)]
    yield from findings


def _judge_port(port: PortState, node: str, uptime_s: float) -> Iterator[Finding]:
    counters = {"symbol errors": port.symbol_errors, "link recoveries": port.recoveries}
    if port.layer == "InfiniBand":
        counters["received packets with errors"] = port.receive_errors
    least = max(MIN_ERRORS, uptime_s / DAY_S)
    bad = [f"{count} {name}" for name, count in counters.items() if count is not None and count >= least]
    if bad:
        fix = (
            f"cluster.exclude={node}; for the staff: clean or replace the cable or transceiver, then reset the counters"
        )
        yield Finding(PORTS, WARNING, f"{port.name}: {', '.join(bad)} since its counters were reset", fix)

    member = next((index for index, key in enumerate(port.keys) if key & MEMBER), None)
    if port.keys and not port.keys[0]:
        fix = "ask the site" if member is None else f"set NCCL_IB_PKEY={member}, or ask the site"
        yield Finding(PORTS, ERROR, f"{port.name}: it has no partition key at index 0, which NCCL uses", fix)
    elif port.keys and not port.keys[0] & MEMBER:
        key = f"{port.keys[0]:#06x}"
        text = f"{port.name}: it is a limited member of its partition ({key}); two such nodes cannot connect"
        fix = "ask the site for full membership" if member is None else f"set NCCL_IB_PKEY={member}"
        yield Finding(PORTS, ERROR, text, fix)
    if port.mtu is not None and port.mtu < BEST_ROCE_MTU:
        text = f"{port.name}: the MTU of its interface is {port.mtu}, so RoCE packets are smaller than 4096 bytes"
        yield Finding(PORTS, WARNING, text, "ask the site for an MTU of 9000 on hosts and switches")
