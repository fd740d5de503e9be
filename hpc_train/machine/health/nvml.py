"""Reads the GPUs with NVIDIA's management library itself, which takes a fraction of the time of ``nvidia-smi``.

The library is part of the driver (``libnvidia-ml.so.1``); NVIDIA's package nvidia-ml-py calls it. A call may hang in
the kernel where no signal ends it, so a forked child makes the calls; only a worker samples the utilization of its own
GPU directly. In a container or a job's control group the library shows only the GPUs that the process may use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import byref
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpc_train.machine.health.finding import ERROR, Finding
from hpc_train.machine.health.gpu_health import (
    HANGS,
    LIMIT_S,
    SLOWDOWNS,
    SUBJECT,
    GpuProcess,
    GpuReading,
    GpuState,
    NoResponse,
)
from hpc_train.machine.health.vendor import read_in_child

BITS = {"hw_slowdown": 0x08, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80}
IDLE = 0x01
FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}
RECOVERIES = {0: "None", 1: "Reset", 2: "Reboot", 3: "Drain P2P", 4: "Drain and Reset"}


class Nvml:
    """The initialized library, with calls that return None where the model or the driver does not support them.

    Raises:
        OSError: nvidia-ml-py, the library or the driver is missing.
    """

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
        reasons = self.get("CurrentClocksThrottleReasons", device) or 0
        held = {name for name, bit in BITS.items() if reasons & bit}
        pci = self.get("PciInfo", device)
        mig = self.get("MigMode", device)
        rows = self.get("RemappedRows", device)  # corrected and uncorrected ones, whether any is pending or has failed
        slices = self._slices(device)
        return GpuState(
            index=index,
            pci=pci and f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0",
            model=self.get("Name", device),
            uuid=self.get("UUID", device),
            mig=bool(mig) and mig[0] == 1,
            rows_pending=bool(rows) and rows[2] == 1,
            rows_failed=bool(rows) and rows[3] == 1,
            pages_pending=self.get("RetiredPagesPendingStatus", device) == 1,
            uncorrected=self.get(
                "TotalEccErrors",
                device,
                self.library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                self.library.NVML_VOLATILE_ECC,
            ),
            recovery=self._recovery(device),
            slowdowns=tuple(words for name, words in SLOWDOWNS.items() if name in held - _summary(held)),
            idle=bool(reasons & IDLE),
            pcie_width=self.get("CurrPcieLinkWidth", device),
            pcie_max_width=self.get("MaxPcieLinkWidth", device),
            pcie_gen=self.get("CurrPcieLinkGeneration", device),
            pcie_max_gen=self.get("MaxPcieLinkGeneration", device),
            fabric=self._fabric(device),
            links=self._links(device),
            memory_used=self._memory_used(device),
            processes=self._processes(device),
            slices=tuple(slices),
            slices_used=tuple(slices.values()),
        )

    def utilization(self, uuid: str) -> float | None:
        """Returns the share of the last sampling period (1/6 to 1 s) in which a kernel ran on the GPU, in [0, 1]."""
        device = self.get("HandleByUUID", uuid)
        rates = None if device is None else self.get("UtilizationRates", device)
        return None if rates is None else rates.gpu / 100

    def _memory_used(self, device: Any) -> int | None:
        """Returns the bytes in use, without those that the driver reserves."""
        memory = self.get("MemoryInfo", device, self.library.nvmlMemory_v2)
        return memory and int(memory.used)

    def _processes(self, device: Any) -> tuple[GpuProcess, ...]:
        """Returns the processes with a compute context, also those of other users."""
        processes = self.get("ComputeRunningProcesses", device) or ()
        return tuple(GpuProcess(each.pid, _name(each.pid), each.usedGpuMemory or 0) for each in processes)

    def _slices(self, device: Any) -> dict[str, int | None]:
        """Returns the UUID of each MIG slice and the bytes in use of it."""
        used = {}
        for number in range(self.get("MaxMigDeviceCount", device) or 0):
            part = self.get("MigDeviceHandleByIndex", device, number)
            uuid = None if part is None else self.get("UUID", part)
            if uuid:  # a place may be empty
                used[uuid] = self._memory_used(part)
        return used

    def _recovery(self, device: Any) -> str | None:
        fields = self.get("FieldValues", device, [self.library.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        if fields is None or fields[0].nvmlReturn != self.library.NVML_SUCCESS:
            return None
        return RECOVERIES.get(fields[0].value.uiVal)

    def _fabric(self, device: Any) -> str | None:
        fabric = self.library.c_nvmlGpuFabricInfo_t()
        done = self.get("GpuFabricInfo", device, byref(fabric))
        return None if done is None else FABRIC_STATES.get(fabric.state)

    def _links(self, device: Any) -> int | None:
        states = [self.get("NvLinkState", device, link) for link in range(self.library.NVML_NVLINK_MAX_LINKS)]
        known = [state for state in states if state is not None]
        return sum(state == 1 for state in known) if known else None


def _name(pid: int) -> str:
    """Returns the command of a process; ``?`` if it is hidden, e.g. outside of this container."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "?"


def _summary(held: set[str]) -> set[str]:
    return {"hw_slowdown"} if len(held) > 1 else set()


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

    A library that does not respond within ``limit_s`` seconds is a finding.
    """
    try:
        found = read_in_child(read, limit_s)
    except NoResponse:
        problem = f"{HANGS}: NVML did not respond within {limit_s:g} s"
        return GpuReading(findings=(Finding(SUBJECT, ERROR, problem, "reboot the node"),))
    return None if found is None else _parse(found)


def _parse(found: Mapping[str, Any]) -> GpuReading:
    states = [_state(state) for state in found["states"]]
    ordered = [replace(state, index=index) for index, state in enumerate(sorted(states, key=lambda one: one.pci or ""))]
    lost = tuple(
        Finding(SUBJECT, ERROR, f"NVML's GPU {number} is lost", "reboot the node; check the PCIe link of the GPU")
        for number in found["lost"]
    )
    return GpuReading(tuple(ordered), lost)


def _state(values: Mapping[str, Any]) -> GpuState:
    processes = tuple(GpuProcess(**process) for process in values["processes"])
    tuples = {name: tuple(values[name]) for name in ("slowdowns", "slices", "slices_used")}
    return GpuState(**{**values, **tuples, "processes": processes})
