"""Reads the health of NVIDIA GPUs from ``nvidia-smi`` or NVML: memory, clocks, PCIe, NVLink, fabric manager, processes.

Reading never hangs: if the driver does not respond, this is a finding, too. ``judge`` turns states into findings. An
``error`` means that the node should not run jobs: as in NVIDIA's guide to GPU memory errors, AzureHPC NHC (2026-05) and
Meta's gcm (2025-12), uncorrectable errors and a failed remapping take a node out of service.

NVML is part of the driver (``libnvidia-ml.so.1``). NVIDIA's package nvidia-ml-py calls it, which takes a fraction of
the time of ``nvidia-smi``. A call may hang in the kernel, where no signal can end it, so a forked child makes the
calls; only a worker samples the utilization of its GPU directly. In a container or a job's control group, the library
shows only the GPUs that the process may use.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ctypes import byref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from hpc_train.machine.health.finding import ERROR, OK, UNCHECKED, WARNING, Finding
from hpc_train.machine.sysfs import read_text
from hpc_train.units import counted, format_bytes

LIMIT_S = 10.0
QUERY = ("nvidia-smi", "-q", "-x")
LINKS = ("nvidia-smi", "nvlink", "--status")
SUBJECT = "GPU health"
HANGS = "the driver hangs"  # the beginning of a finding
MEMORY_LEFT = 2 << 30  # bytes; the driver alone never uses as much, so without a process it is a leftover
SLOWDOWNS = {  # the last part of the XML tag -> the reason; a power cap is omitted, since it is normal under load
    "hw_thermal_slowdown": "the hardware is too warm",
    "hw_power_brake_slowdown": "the power supply requests it",
    "sw_thermal_slowdown": "the driver finds it too warm",
    "hw_slowdown": "the hardware requests it",
}


@dataclass(frozen=True)
class GpuProcess:
    """A process with a compute context on a GPU, and its memory in bytes."""

    pid: int
    name: str
    memory: int = 0


@dataclass(frozen=True)
class GpuState:
    """Describes the state of one GPU. A value is None if it is unknown or the model does not have it.

    Attributes:
        uncorrected: uncorrectable ECC errors since the driver was loaded.
        sram_exceeded: whether the driver recommends a replacement because of errors in SRAM.
        recovery: the action that the driver requests (``None``, ``Reset``, ``Reboot`` …), from driver 555 on.
        slowdowns: the reasons for reduced clocks, as text.
        pcie_best_gen: the generation that both the GPU and its slot support.
        fabric: the registration with the fabric manager: ``Completed``, ``In Progress``, ``Not Started``.
        fabric_fault: the driver's report on an unhealthy NVLink fabric.
        links: the number of active NVLinks.
        memory_used: bytes in use, without the bytes that the driver reserves.
        slices: the UUIDs of its MIG slices.
        slices_used: the bytes in use on each of ``slices``.
    """

    index: int
    pci: str | None = None
    model: str | None = None
    uuid: str | None = None
    mig: bool = False
    rows_pending: bool = False
    rows_failed: bool = False
    pages_pending: bool = False
    uncorrected: int | None = None
    sram_exceeded: bool = False
    recovery: str | None = None
    slowdowns: tuple[str, ...] = ()
    idle: bool = True
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_gen: int | None = None
    pcie_max_gen: int | None = None
    pcie_best_gen: int | None = None
    fabric: str | None = None
    fabric_fault: str | None = None
    links: int | None = None
    memory_used: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    slices: tuple[str, ...] = ()
    slices_used: tuple[int | None, ...] = ()

    @property
    def name(self) -> str:
        return f"GPU{self.index}" + (f" ({self.pci})" if self.pci else "")


@dataclass(frozen=True)
class GpuReading:
    """The GPUs that responded, and findings about reading them."""

    gpus: tuple[GpuState, ...] = ()
    findings: tuple[Finding, ...] = ()


class NoResponse(Exception):
    """Reports that a command did not end within its limit."""


def run_limited(command: Sequence[str], limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Returns the exit code and the output of ``command``. A process that hangs in the kernel is left running. Raises
    NoResponse if the command takes longer than ``limit_s`` seconds, and OSError if the command cannot be started."""
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        output, _ = started.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        started.kill()
        with suppress(subprocess.TimeoutExpired):
            started.wait(timeout=0.2)  # subprocess.run would wait forever for a process in uninterruptible sleep
        raise NoResponse(f"{' '.join(command)} did not end within {limit_s:g} s") from None
    return started.returncode, output


def read_in_child(read: Callable[[], Any], limit_s: float = LIMIT_S) -> Any | None:
    """Calls ``read`` in a forked child and returns its result, which passes through JSON; None if it raises.

    A driver may hang in the kernel, where no signal can end the call; such a child is left running. Raises NoResponse
    if the call takes longer than ``limit_s`` seconds."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            # a child that hangs must not hold the caller's connections open
            for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if descriptor > 2 and descriptor != target:
                    with suppress(OSError):
                        os.close(descriptor)
            with os.fdopen(target, "w") as file:
                json.dump(read(), file)
        os._exit(0)
    os.close(target)
    until = time.monotonic() + limit_s
    text = b""
    with os.fdopen(source, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            part = pipe.read(1 << 16)
            if not part:
                os.waitpid(child, 0)
                return json.loads(text) if text else None
            text += part
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, os.WNOHANG)  # it may hang in the kernel; init inherits it
    raise NoResponse(f"no response within {limit_s:g} s")


def read_gpus(limit_s: float = LIMIT_S) -> GpuReading:
    """Reads the NVIDIA GPUs of this node with ``nvidia-smi``, which in a job's control group shows only the GPUs of the
    job. A missing tool is a finding."""
    try:
        code, output = run_limited(QUERY, limit_s)
    except NoResponse as error:
        fix = "reboot the node; `dmesg` shows where the driver hangs"
        return GpuReading(findings=(Finding(SUBJECT, ERROR, f"{HANGS}: {error}", fix),))
    except OSError:
        missing = Finding(SUBJECT, WARNING, f"{UNCHECKED}nvidia-smi is not installed here", "put nvidia-smi on PATH")
        return GpuReading(findings=(missing,))
    gpus = parse_query(output)
    findings = []
    if code:  # e.g. because a GPU has fallen off the bus
        lines = [line.strip() for line in output.splitlines() if line.strip() and not line.lstrip().startswith("<")]
        text = ": ".join([f"nvidia-smi failed with exit code {code}", *lines[:1]])
        fix = "reboot the node; if it happens again, the GPU or the driver needs service"
        findings.append(Finding(SUBJECT, ERROR, text, fix))
    if len(gpus) > 1 or (gpus and gpus[0].fabric):
        try:
            gpus = with_links(gpus, run_limited(LINKS, limit_s)[1])
        except (NoResponse, OSError) as error:
            findings.append(Finding(SUBJECT, ERROR, f"the state of NVLink is not known: {error}", "reboot the node"))
    return GpuReading(gpus, tuple(findings))


def parse_query(text: str) -> tuple[GpuState, ...]:
    """Returns the GPUs in the output of ``nvidia-smi -q -x``; () if it contains no complete XML document."""
    start, end = text.find("<nvidia_smi_log"), text.rfind("</nvidia_smi_log>")
    if start < 0 or end < 0:
        return ()
    try:
        root = ElementTree.fromstring(text[start : end + len("</nvidia_smi_log>")])
    except ElementTree.ParseError:
        return ()
    return tuple(_gpu(index, element) for index, element in enumerate(root.findall("gpu")))


def _gpu(index: int, gpu: ElementTree.Element) -> GpuState:
    link = "pci/pci_gpu_link_info"
    generations = [_number(gpu, f"{link}/pcie_gen/{name}") for name in ("max_device_link_gen", "max_host_link_gen")]
    known_generations = [generation for generation in generations if generation is not None]
    domain, _, address = (gpu.get("id") or _text(gpu, "pci/pci_bus_id") or "").lower().partition(":")
    pci = None
    if address and re.fullmatch("[0-9a-f]+", domain):
        pci = f"{int(domain, 16):04x}:{address}"  # as the kernel writes 00000000:01:00.0
    recovery = _text(gpu, "gpu_recovery_action")
    if recovery is None and _text(gpu, "gpu_reset_status/reset_required") == "Yes":
        recovery = "Reset"
    slowdowns = {reason: words for reason, words in SLOWDOWNS.items() if any(_active(gpu, reason))}
    if len(slowdowns) > 1:
        slowdowns.pop("hw_slowdown", None)  # it only summarizes the other reasons of the hardware
    processes = []
    for element in gpu.findall("processes/process_info"):
        pid = _number(element, "pid")
        if pid is not None and "C" in (_text(element, "type") or ""):
            memory = _bytes(element, "used_memory") or 0
            processes.append(GpuProcess(pid, _text(element, "process_name") or "?", memory))
    return GpuState(
        index=index,
        pci=pci,
        model=_text(gpu, "product_name"),
        uuid=_text(gpu, "uuid"),
        mig=_text(gpu, "mig_mode/current_mig") == "Enabled",
        rows_pending=_text(gpu, "remapped_rows/remapped_row_pending") == "Yes",
        rows_failed=_text(gpu, "remapped_rows/remapped_row_failure") == "Yes",
        pages_pending=_text(gpu, "retired_pages/pending_retirement") == "Yes",
        uncorrected=_uncorrected(gpu),
        sram_exceeded=_text(gpu, "ecc_errors/aggregate/sram_threshold_exceeded") == "Yes",
        recovery=recovery,
        slowdowns=tuple(slowdowns.values()),
        idle=any(_active(gpu, "gpu_idle")),
        pcie_width=_number(gpu, f"{link}/link_widths/current_link_width"),
        pcie_max_width=_number(gpu, f"{link}/link_widths/max_link_width"),
        pcie_gen=_number(gpu, f"{link}/pcie_gen/current_link_gen"),
        pcie_max_gen=_number(gpu, f"{link}/pcie_gen/max_link_gen"),
        pcie_best_gen=min(known_generations) if len(known_generations) == len(generations) else None,
        fabric=_text(gpu, "fabric/state"),
        fabric_fault=_fabric_fault(gpu),
        memory_used=_bytes(gpu, "fb_memory_usage/used"),
        processes=tuple(processes),
    )


def _text(gpu: ElementTree.Element, path: str) -> str | None:
    """Returns the text at ``path``; None if it is missing, ``N/A``, not supported or deprecated."""
    text = (gpu.findtext(path) or "").strip()
    if text.startswith(("N/A", "[N/A", "Not Supported", "Requested functionality", "Unknown", "ERR")):
        return None
    return text or None


def _number(gpu: ElementTree.Element, path: str) -> int | None:
    match = re.match(r"\d+", _text(gpu, path) or "")
    if match:
        return int(match[0])
    return None


def _bytes(gpu: ElementTree.Element, path: str) -> int | None:
    mebibytes = _number(gpu, path)
    return None if mebibytes is None else mebibytes << 20  # nvidia-smi prints MiB


def _uncorrected(gpu: ElementTree.Element) -> int | None:
    """Sums the uncorrectable errors of all memories; old drivers call them double-bit errors."""
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return None
    paths = [counter.tag for counter in volatile if "uncorrectable" in counter.tag] or ["double_bit/total"]
    counts = [count for path in paths if (count := _number(volatile, path)) is not None]
    if counts:
        return sum(counts)
    return None


def _active(gpu: ElementTree.Element, reason: str) -> Iterator[bool]:
    """Yields whether ``reason`` reduces the clocks; older drivers call the section throttle reasons."""
    for name in ("event", "throttle"):
        text = _text(gpu, f"clocks_{name}_reasons/clocks_{name}_reason_{reason}")
        if text is not None:
            yield text == "Active"


def _fabric_fault(gpu: ElementTree.Element) -> str | None:
    status = _text(gpu, "fabric/status")
    if _text(gpu, "fabric/state") == "Completed" and status not in (None, "Success"):
        return f"status {status}"
    if _text(gpu, "fabric/health/bandwidth") == "Degraded":
        return "degraded bandwidth"
    for name in ("route_unhealthy", "access_timeout_recovery"):
        if _text(gpu, f"fabric/health/{name}") in ("True", "Yes"):
            return name.replace("_", " ")
    return None


_HEADING = re.compile(r"^GPU (\d+): .*?(?:\(UUID: ([^)]+)\))?\s*$")
_LINK = re.compile(r"^\s*Link \d+: (?:([\d.]+) GB/s|<inactive>)")


def with_links(gpus: Sequence[GpuState], status: str) -> tuple[GpuState, ...]:
    """Returns ``gpus`` with the number of active links in the output of ``nvidia-smi nvlink --status``."""
    counts: dict[str, int] = {}
    names: tuple[str, ...] = ()
    for line in status.splitlines():
        if match := _HEADING.match(line):
            names = tuple(name for name in match.groups() if name)
        elif match := _LINK.match(line):
            active = bool(match[1]) and float(match[1]) > 0
            counts |= {name: counts.get(name, 0) + active for name in names}
        elif "all links are inactive" in line.lower():
            counts |= dict.fromkeys(names, 0)
    return tuple(replace(gpu, links=counts.get(gpu.uuid or "", counts.get(str(gpu.index)))) for gpu in gpus)


def judge(gpus: Sequence[GpuState], node: str, fabric_manager: bool | None = None) -> Iterator[Finding]:
    """Yields findings on the problems of ``gpus``, or a finding that they are healthy. ``fabric_manager`` states
    whether a node with NVSwitches runs the fabric manager; None on other nodes or if unknown."""
    findings = [finding for gpu in gpus for finding in (*_memory(gpu, node), *judge_speed(gpu, node))]
    findings += [*_links(gpus, node), *_fabric(gpus, node, fabric_manager)]
    if gpus and not findings:
        links = {gpu.links for gpu in gpus if gpu.links}
        text = f"{counted(len(gpus), 'GPU', 'GPUs')}: memory, clocks and PCIe links are healthy"
        findings = [Finding(SUBJECT, OK, text + (f", {min(links)} NVLinks each" if links else ""))]
    yield from findings


def problems(gpu: GpuState) -> tuple[str, ...]:
    findings = (*_memory(gpu, ""), *judge_speed(gpu, ""))
    return tuple(finding.text.removeprefix(f"{gpu.name}: ") for finding in findings)


def out_of_service(node: str, action: str) -> str:
    """Returns the fix for a defect: the setting for the user, and the action for the staff."""
    return f"cluster.exclude={node}; for the staff: {action}"


def _memory(gpu: GpuState, node: str) -> Iterator[Finding]:
    reset = f"drain the node and reset the GPU (nvidia-smi -r -i {gpu.pci or gpu.index})"
    if gpu.rows_failed:
        text = f"{gpu.name}: memory rows could not be remapped"
        yield Finding(SUBJECT, ERROR, text, out_of_service(node, "replace the GPU"))
    if gpu.sram_exceeded:
        text = f"{gpu.name}: uncorrectable errors in SRAM exceed the driver's threshold"
        yield Finding(
            SUBJECT, ERROR, text, out_of_service(node, "run the field diagnostics; the GPU qualifies for replacement")
        )
    if gpu.uncorrected:
        text = f"{gpu.name}: {gpu.uncorrected} uncorrectable memory errors (ECC) since the driver was loaded"
        yield Finding(SUBJECT, ERROR, text, out_of_service(node, reset))
    if gpu.recovery not in (None, "None"):
        action = "reboot the node" if "reboot" in (gpu.recovery or "").lower() else reset
        yield Finding(SUBJECT, ERROR, f"{gpu.name}: the driver requests: {gpu.recovery}", out_of_service(node, action))
    if gpu.rows_pending or gpu.pages_pending:
        what = "memory pages wait to be retired"
        if gpu.rows_pending:
            what = "memory rows wait to be remapped"
        yield Finding(SUBJECT, WARNING, f"{gpu.name}: {what}", out_of_service(node, reset))


def judge_speed(gpu: GpuState, node: str) -> Iterator[Finding]:
    """Yields findings on reduced clocks, and on a PCIe link with fewer lanes or a lower generation than possible."""
    if gpu.slowdowns:
        text = f"{gpu.name}: its clocks are reduced: {' and '.join(gpu.slowdowns)}"
        yield Finding(SUBJECT, WARNING, text, out_of_service(node, "check cooling and power"))
    slot = out_of_service(node, "reseat the GPU or its riser, check the BIOS settings of the slot")
    if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width:
        text = f"{gpu.name}: its PCIe link has {gpu.pcie_width} of {gpu.pcie_max_width} lanes"
        yield Finding(SUBJECT, WARNING, text, slot)
    best = gpu.pcie_best_gen or gpu.pcie_max_gen
    # an idle GPU lowers the generation of its link to save power
    now = gpu.pcie_max_gen if gpu.idle else gpu.pcie_gen
    if best and now and now < best:
        yield Finding(SUBJECT, WARNING, f"{gpu.name}: its PCIe link runs at generation {now} of {best}", slot)


def _links(gpus: Sequence[GpuState], node: str) -> Iterator[Finding]:
    """Compares the number of NVLinks of GPUs of the same model. Links that no GPU uses are not wired; MIG disables
    links."""
    for model in dict.fromkeys(gpu.model for gpu in gpus):
        alike = [gpu for gpu in gpus if gpu.model == model and gpu.links is not None and not gpu.mig]
        most = max((gpu.links or 0 for gpu in alike), default=0)
        for gpu in alike:
            if (gpu.links or 0) < most:
                text = f"{gpu.name}: {gpu.links} NVLinks are active, other GPUs have {most}"
                action = "drain the node, restart nvidia-fabricmanager and reset all GPUs, or reboot"
                yield Finding(SUBJECT, ERROR, text, out_of_service(node, action))


def _fabric(gpus: Sequence[GpuState], node: str, fabric_manager: bool | None) -> Iterator[Finding]:
    restart = out_of_service(node, "systemctl restart nvidia-fabricmanager; its version must equal the driver's")
    waiting = [gpu for gpu in gpus if gpu.fabric not in (None, "Completed") and not gpu.mig]
    if waiting:
        text = f"{waiting[0].name}: its registration with the fabric manager is {waiting[0].fabric!r}"
        others = f" (the same for {len(waiting) - 1} more)" if len(waiting) > 1 else ""
        yield Finding(SUBJECT, ERROR, f"{text}{others}: CUDA fails to initialize", restart)
    elif fabric_manager is False and all(gpu.fabric is None for gpu in gpus):
        yield Finding(SUBJECT, ERROR, "the node has NVSwitches, but nv-fabricmanager does not run", restart)
    for gpu in gpus:
        if gpu.fabric_fault:
            text = f"{gpu.name}: the NVLink fabric is unhealthy: {gpu.fabric_fault}"
            yield Finding(
                SUBJECT, ERROR, text, out_of_service(node, "check the NVSwitches and the fabric manager's log")
            )


def judge_processes(gpus: Sequence[GpuState], job_pids: frozenset[int]) -> Iterator[Finding]:
    """Yields findings on processes other than ``job_pids`` and on memory without a process on the GPUs."""
    fix = "end them, or use another node; ask the staff to end a process that survived its job"
    for gpu in gpus:
        others = [process for process in gpu.processes if process.pid not in job_pids]
        if others:
            shown = ", ".join(
                f"{process.name} (pid {process.pid}, {format_bytes(process.memory)})" for process in others[:3]
            )
            text = f"{gpu.name}: {len(others)} other processes use it: {shown}"
            yield Finding(SUBJECT, WARNING, text, fix)
        elif not gpu.processes and (gpu.memory_used or 0) > MEMORY_LEFT:
            text = (
                f"{gpu.name}: {format_bytes(gpu.memory_used or 0)} of its memory are in use without a visible process"
            )
            yield Finding(SUBJECT, WARNING, text, fix)


BITS = {"hw_slowdown": 0x08, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80}
IDLE = 0x01
FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}
RECOVERIES = {0: "None", 1: "Reset", 2: "Reboot", 3: "Drain P2P", 4: "Drain and Reset"}


class Nvml:
    """The initialized NVML library. Calls return None if the model or the driver does not support them. Raises OSError
    if nvidia-ml-py, the library or the driver is missing."""

    def __init__(self) -> None:
        try:
            import pynvml  # takes 0.1 s

            pynvml.nvmlInit()
        except ImportError as error:
            raise OSError("nvidia-ml-py is not installed") from error
        except pynvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error
        self.library: Any = pynvml

    def get(self, name: str, *arguments: Any) -> Any:
        """Returns the result of ``nvmlDeviceGet{name}``; None if the device or the driver does not support it."""
        try:
            return getattr(self.library, f"nvmlDeviceGet{name}")(*arguments)
        except self.library.NVMLError:
            return None

    def state(self, index: int, device: Any) -> GpuState:
        library = self.library
        pci = self.get("PciInfo", device)
        mig = self.get("MigMode", device)
        rows = self.get("RemappedRows", device)  # corrected, uncorrected, whether one is pending, whether one failed
        uncorrected = (library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC)
        reasons = self.get("CurrentClocksThrottleReasons", device) or 0
        slowed = {name for name, bit in BITS.items() if reasons & bit}
        if len(slowed) > 1:
            slowed.discard("hw_slowdown")  # it only summarizes the other reasons of the hardware

        recovery = None
        fields = self.get("FieldValues", device, [library.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if fields is not None and fields[0].nvmlReturn == library.NVML_SUCCESS:
            recovery = RECOVERIES.get(fields[0].value.uiVal)

        fabric = library.c_nvmlGpuFabricInfo_t()
        has_fabric = self.get("GpuFabricInfo", device, byref(fabric)) is not None
        link_states = [self.get("NvLinkState", device, link) for link in range(library.NVML_NVLINK_MAX_LINKS)]
        links = [state == 1 for state in link_states if state is not None]

        slices = {}  # UUID -> bytes in use
        for number in range(self.get("MaxMigDeviceCount", device) or 0):
            part = self.get("MigDeviceHandleByIndex", device, number)
            uuid = None if part is None else self.get("UUID", part)
            if uuid:  # a number may have no slice
                slices[uuid] = self._memory_used(part)

        processes = self.get("ComputeRunningProcesses", device) or ()  # including processes of other users
        return GpuState(
            index=index,
            pci=pci and f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0",
            model=self.get("Name", device),
            uuid=self.get("UUID", device),
            mig=bool(mig) and mig[0] == 1,
            rows_pending=bool(rows) and rows[2] == 1,
            rows_failed=bool(rows) and rows[3] == 1,
            pages_pending=self.get("RetiredPagesPendingStatus", device) == 1,
            uncorrected=self.get("TotalEccErrors", device, *uncorrected),
            recovery=recovery,
            slowdowns=tuple(words for name, words in SLOWDOWNS.items() if name in slowed),
            idle=bool(reasons & IDLE),
            pcie_width=self.get("CurrPcieLinkWidth", device),
            pcie_max_width=self.get("MaxPcieLinkWidth", device),
            pcie_gen=self.get("CurrPcieLinkGeneration", device),
            pcie_max_gen=self.get("MaxPcieLinkGeneration", device),
            fabric=FABRIC_STATES.get(fabric.state) if has_fabric else None,
            links=sum(links) if links else None,
            memory_used=self._memory_used(device),
            # names of processes outside of this container are hidden
            processes=tuple(
                GpuProcess(each.pid, read_text(Path(f"/proc/{each.pid}/comm")) or "?", each.usedGpuMemory or 0)
                for each in processes
            ),
            slices=tuple(slices),
            slices_used=tuple(slices.values()),
        )

    def utilization(self, uuid: str) -> float | None:
        """Returns the share of the last sampling period (1/6 to 1 s) in which a kernel ran on the GPU, in [0, 1]."""
        device = self.get("HandleByUUID", uuid)
        rates = None if device is None else self.get("UtilizationRates", device)
        return None if rates is None else rates.gpu / 100

    def _memory_used(self, device: Any) -> int | None:
        """Returns the bytes in use, without the bytes that the driver reserves."""
        memory = self.get("MemoryInfo", device, self.library.nvmlMemory_v2)
        return memory and int(memory.used)


def _read() -> dict[str, Any]:
    """Returns the states and the numbers of lost GPUs, as JSON. GPUs of other jobs are skipped."""
    nvml = Nvml()
    states, lost = [], []
    for number in range(nvml.library.nvmlDeviceGetCount()):
        try:
            device = nvml.library.nvmlDeviceGetHandleByIndex(number)
        except nvml.library.NVMLError_GpuIsLost:
            lost.append(number)
        except nvml.library.NVMLError:
            continue
        else:
            states.append(asdict(nvml.state(number, device)))
    return {"states": states, "lost": lost}


def read_nvml(limit_s: float = LIMIT_S, read: Callable[[], dict[str, Any]] = _read) -> GpuReading | None:
    """Reads the GPUs in a forked child; None without the library or a driver.

    If the library does not respond within ``limit_s`` seconds, this is a finding.
    """
    try:
        reading = read_in_child(read, limit_s)
    except NoResponse:
        problem = f"{HANGS}: NVML did not respond within {limit_s:g} s"
        return GpuReading(findings=(Finding(SUBJECT, ERROR, problem, "reboot the node"),))
    if reading is None:
        return None
    gpus = []
    for index, values in enumerate(sorted(reading["states"], key=lambda state: state["pci"] or "")):
        tuples = {name: tuple(values[name]) for name in ("slowdowns", "slices", "slices_used")}
        processes = tuple(GpuProcess(**process) for process in values["processes"])
        gpus.append(GpuState(**values | tuples | {"processes": processes, "index": index}))
    lost = tuple(
        Finding(SUBJECT, ERROR, f"NVML's GPU {number} is lost", "reboot the node; check the PCIe link of the GPU")
        for number in reading["lost"]
    )
    return GpuReading(tuple(gpus), lost)
