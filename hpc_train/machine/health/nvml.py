"""Reads the GPUs with NVIDIA's management library itself, which takes a fraction of the time of ``nvidia-smi``.

The library is part of the driver (``libnvidia-ml.so.1``); no Python package is needed. A call may hang in the kernel
where no signal ends it, so a forked child makes the calls; only a worker samples the utilization of its own GPU
directly. In a container or a job's control group the library shows only the GPUs that the process may use. Names,
values and structures are those of nvml.h (nvidia-ml-py 13.615).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
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

LIBRARY = "libnvidia-ml.so.1"
SUCCESS, INSUFFICIENT_SIZE, LOST = 0, 7, 15
UNCORRECTED, VOLATILE = 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t
BITS = {"hw_slowdown": 0x08, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40, "hw_power_brake_slowdown": 0x80}
IDLE = 0x01
FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}
RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
RECOVERIES = {0: "None", 1: "Reset", 2: "Reboot", 3: "Drain P2P", 4: "Drain and Reset"}
MAX_LINKS = 36
MEMORY_VERSION = 2 << 24  # nvmlMemory_v2, added to the size of the structure
NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Fabric(ctypes.Structure):
    _fields_ = (
        ("cluster", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


class _Field(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint32),
        ("scope", ctypes.c_uint32),
        ("timestamp", ctypes.c_int64),
        ("latency", ctypes.c_int64),
        ("type", ctypes.c_uint),
        ("result", ctypes.c_uint),
        ("value", ctypes.c_uint64),
    )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Nvml:
    """The initialized library, with calls that return None where the model or the driver does not support them.

    Raises:
        OSError: the library or the driver is missing.
    """

    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        if self.call("nvmlInit_v2") != SUCCESS:
            raise OSError("no driver")

    def call(self, name: str, *arguments: Any) -> int:
        function: Callable[..., int] | None = getattr(self.library, name, None)
        return -1 if function is None else function(*arguments)

    def number(self, name: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
        value = kind()
        return int(value.value) if self.call(name, *arguments, ctypes.byref(value)) == SUCCESS else None

    def text(self, name: str, device: ctypes.c_void_p) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        done = self.call(name, device, buffer, ctypes.c_uint(96)) == SUCCESS
        return buffer.value.decode(errors="replace") if done else None

    def state(self, index: int, device: ctypes.c_void_p) -> GpuState:
        def number(name: str, *arguments: Any) -> int | None:
            return self.number(f"nvmlDeviceGet{name}", device, *arguments)

        reasons = self.number("nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=ctypes.c_ulonglong) or 0
        held = {name for name, bit in BITS.items() if reasons & bit}
        pending, failed = self._rows(device)
        slices = self._slices(device)
        return GpuState(
            index=index,
            pci=self._pci(device),
            model=self.text("nvmlDeviceGetName", device),
            uuid=self.text("nvmlDeviceGetUUID", device),
            mig=self._mig(device),
            rows_pending=pending,
            rows_failed=failed,
            pages_pending=number("RetiredPagesPendingStatus") == 1,
            uncorrected=self.number(
                "nvmlDeviceGetTotalEccErrors", device, UNCORRECTED, VOLATILE, kind=ctypes.c_ulonglong
            ),
            recovery=self._recovery(device),
            slowdowns=tuple(words for name, words in SLOWDOWNS.items() if name in held - _summary(held)),
            idle=bool(reasons & IDLE),
            pcie_width=number("CurrPcieLinkWidth"),
            pcie_max_width=number("MaxPcieLinkWidth"),
            pcie_gen=number("CurrPcieLinkGeneration"),
            pcie_max_gen=number("MaxPcieLinkGeneration"),
            fabric=self._fabric(device),
            links=self._links(device),
            memory_used=self._memory_used(device),
            processes=self._processes(device),
            slices=tuple(slices),
            slices_used=tuple(slices.values()),
        )

    def utilization(self, uuid: str) -> float | None:
        """Returns the share of the last sampling period (1/6 to 1 s) in which a kernel ran on the GPU, in [0, 1]."""
        device, found = ctypes.c_void_p(), _Utilization()
        if self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device)) != SUCCESS:
            return None
        done = self.call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(found)) == SUCCESS
        return found.gpu / 100 if done else None

    def _memory_used(self, device: ctypes.c_void_p) -> int | None:
        """Returns the bytes in use, without those that the driver reserves."""
        found = _Memory(version=MEMORY_VERSION | ctypes.sizeof(_Memory))
        done = self.call("nvmlDeviceGetMemoryInfo_v2", device, ctypes.byref(found)) == SUCCESS
        return int(found.used) if done else None

    def _processes(self, device: ctypes.c_void_p) -> tuple[GpuProcess, ...]:
        """Returns the processes with a compute context, also those of other users."""
        count, room = ctypes.c_uint(), 0
        while True:
            found = (_Process * room)()
            count.value = room
            result = self.call("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), found)
            if result != INSUFFICIENT_SIZE:
                break
            room = count.value + 8  # more may have started since
        processes = found[: count.value] if result == SUCCESS else ()
        return tuple(
            GpuProcess(one.pid, _name(one.pid), 0 if one.memory == NOT_AVAILABLE else one.memory) for one in processes
        )

    def _slices(self, device: ctypes.c_void_p) -> dict[str, int | None]:
        """Returns the UUID of each MIG slice and the bytes in use of it."""
        found = {}
        for number in range(self.number("nvmlDeviceGetMaxMigDeviceCount", device) or 0):
            part = ctypes.c_void_p()
            done = self.call("nvmlDeviceGetMigDeviceHandleByIndex", device, ctypes.c_uint(number), ctypes.byref(part))
            if done == SUCCESS and (uuid := self.text("nvmlDeviceGetUUID", part)):  # a place may be empty
                found[uuid] = self._memory_used(part)
        return found

    def _pci(self, device: ctypes.c_void_p) -> str | None:
        found = _Pci()
        if self.call("nvmlDeviceGetPciInfo_v3", device, ctypes.byref(found)) != SUCCESS:
            return None
        return f"{found.domain:04x}:{found.bus:02x}:{found.device:02x}.0"

    def _rows(self, device: ctypes.c_void_p) -> tuple[bool, bool]:
        """Returns whether rows wait for remapping, and whether a remapping has failed."""
        values = [ctypes.c_uint() for _ in range(4)]
        if self.call("nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, values)) != SUCCESS:
            return False, False
        return values[2].value == 1, values[3].value == 1

    def _mig(self, device: ctypes.c_void_p) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        done = self.call("nvmlDeviceGetMigMode", device, ctypes.byref(current), ctypes.byref(pending))
        return done == SUCCESS and current.value == 1

    def _recovery(self, device: ctypes.c_void_p) -> str | None:
        field = _Field(id=RECOVERY_FIELD)
        if self.call("nvmlDeviceGetFieldValues", device, ctypes.c_int(1), ctypes.byref(field)) != SUCCESS:
            return None
        return RECOVERIES.get(field.value & 0xFFFFFFFF) if field.result == SUCCESS else None

    def _fabric(self, device: ctypes.c_void_p) -> str | None:
        found = _Fabric()
        done = self.call("nvmlDeviceGetGpuFabricInfo", device, ctypes.byref(found))
        return FABRIC_STATES.get(found.state) if done == SUCCESS else None

    def _links(self, device: ctypes.c_void_p) -> int | None:
        states = [self.number("nvmlDeviceGetNvLinkState", device, ctypes.c_uint(link)) for link in range(MAX_LINKS)]
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
    library = Nvml()
    states, lost = [], []
    for number in range(library.number("nvmlDeviceGetCount_v2") or 0):
        device = ctypes.c_void_p()
        result = library.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(device))
        if result == SUCCESS:
            states.append(asdict(library.state(number, device)))
        elif result == LOST:
            lost.append(number)
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
