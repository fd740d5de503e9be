"""Finds Xid and SXid errors of NVIDIA's driver in the kernel log, with the class and the fix of each important code.

An Xid is an error of a GPU, an SXid is an error of an NVSwitch. The actions follow NVIDIA's Xid catalog
(https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, 2026-10). The user's program usually causes the
errors of the kind ``PROGRAM``. ``/dev/kmsg`` is read directly, without a tool; many sites reserve it for root.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hpc_train.machine.health.finding import ERROR, OK, UNCHECKED, WARNING, Finding
from hpc_train.machine.health.gpu_health import NoResponse, out_of_service, run_limited
from hpc_train.units import format_duration

SUBJECT = "kernel log"
KMSG = Path("/dev/kmsg")
JOURNAL = ("journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q")
JOURNAL_S = 5.0
RECORD = 8192  # bytes; the kernel's limit for a record
CATALOG = "see the code in NVIDIA's Xid catalog"
LOST = 79


class Kind(Enum):
    """The kind of an error: the level of its finding, and the action for the staff."""

    PROGRAM = (OK, "the program caused it; the GPU is healthy")
    HANDLED = (OK, "the driver has handled it")
    WATCH = (WARNING, "reset the GPU at the next opportunity")
    RESET = (ERROR, "drain the node and reset the GPU; replace the GPU if it happens again")
    LINK = (ERROR, "drain the node, check the NVLinks (nvidia-smi nvlink -e) and reset all GPUs")
    SWITCH = (ERROR, "drain the node, restart nvidia-fabricmanager and reset all GPUs, or reboot")
    REBOOT = (ERROR, "drain and reboot the node; check the PCIe link, the riser and the power cables of the GPU")
    FIRMWARE = (ERROR, "drain the node and reset the GPU; update the driver if it happens again")
    REPLACE = (ERROR, "drain the node and replace the GPU")
    LOOK_UP = (WARNING, CATALOG)

    @property
    def level(self) -> str:
        return self.value[0]

    @property
    def action(self) -> str:
        return self.value[1]


XIDS: Mapping[int, tuple[str, Kind]] = {
    8: ("the GPU stopped processing", Kind.PROGRAM),
    13: ("exception in a kernel", Kind.PROGRAM),
    31: ("illegal memory access (MMU fault)", Kind.PROGRAM),
    32: ("invalid or corrupted push buffer", Kind.PROGRAM),
    43: ("the program was stopped after its own fault", Kind.PROGRAM),
    45: ("the program's work was removed after an earlier error", Kind.PROGRAM),
    68: ("exception in the video decoder", Kind.PROGRAM),
    69: ("graphics engine class error", Kind.PROGRAM),
    137: ("illegal access to a peer's memory over NVLink", Kind.PROGRAM),
    46: ("the GPU stopped processing", Kind.RESET),
    48: ("uncorrectable memory error (double-bit ECC)", Kind.RESET),
    54: ("the auxiliary power cable is not connected", Kind.REBOOT),
    62: ("an internal micro-controller halted", Kind.RESET),
    63: ("a memory row or page was marked for replacement", Kind.WATCH),
    64: ("a memory row or page could not be replaced", Kind.RESET),
    74: ("NVLink error", Kind.LINK),
    LOST: ("the GPU has fallen off the bus", Kind.REBOOT),
    92: ("many correctable memory errors", Kind.WATCH),
    94: ("contained memory error: only its program was affected", Kind.WATCH),
    95: ("uncontained memory error", Kind.RESET),
    109: ("context switch timeout", Kind.RESET),
    110: ("security fault", Kind.REBOOT),
    119: ("the GPU's system processor (GSP) did not respond", Kind.FIRMWARE),
    120: ("error of the GPU's system processor (GSP)", Kind.FIRMWARE),
    121: ("corrected errors on the link to the Grace CPU", Kind.WATCH),
    136: ("an NVLink could not be trained", Kind.LINK),
    140: ("unrecovered memory error (ECC)", Kind.RESET),
    143: ("the GPU could not be initialized", Kind.RESET),
    **dict.fromkeys(range(144, 151), ("NVLink error", Kind.LINK)),
    155: ("an NVLink went down", Kind.WATCH),
    156: ("a resource of the GPU was retired", Kind.WATCH),
    157: ("no spare is left for a faulty resource", Kind.WATCH),
    158: ("fatal timeout", Kind.RESET),
    167: ("fatal PCIe timeout", Kind.REBOOT),
    169: ("an internal micro-controller halted", Kind.RESET),
    171: ("uncorrectable memory error in DRAM", Kind.RESET),
    172: ("uncorrectable memory error in SRAM", Kind.RESET),
}
RECOVERY = 154  # this code announces the action that other errors require
NVLINK_5 = range(144, 151)  # the lines with these codes state whether the error is fatal
SXIDS = {12028: "a GPU did not respond", 19084: "heartbeat timeout of a link", 20034: "a link went down"}


@dataclass(frozen=True)
class Line:
    """A line of the kernel log. ``age`` is its age in seconds; None if unknown."""

    text: str
    age: float | None = None


@dataclass(frozen=True)
class GpuError:
    """An error of a GPU or an NVSwitch in the kernel log.

    Attributes:
        pci: the address of the device, perhaps without the function; None if the line does not contain it.
        text: the device and the description of the error.
        defect: whether the error proves a defect of the hardware.
        count: how often it was logged.
        age: the seconds since it was last logged; None if unknown.
        xid: NVIDIA's code of an error of a GPU.
        settled: why the staff need not act now, such as "the driver has reset it since"; empty if they must.
    """

    pci: str | None
    text: str
    kind: Kind
    defect: bool
    count: int = 1
    age: float | None = None
    xid: int | None = None
    settled: str = ""


def read_kernel_log(kmsg: Path = KMSG) -> tuple[Line, ...] | None:
    """Returns the lines since boot that are still in the kernel's buffer or in the journal; None if this user may read
    neither."""
    with suppress(OSError):
        return tuple(_records(kmsg))
    try:
        code, output = run_limited(JOURNAL, JOURNAL_S)
    except (OSError, NoResponse):
        return None
    if code != 0 or not output.strip():
        return None
    now = time.monotonic()
    lines = []
    for line in output.splitlines():
        since_boot = re.match(r"\s*\[\s*(\d+\.\d+)\]", line)  # [ 1234.567890] node kernel: …
        age = None if since_boot is None else max(0.0, now - float(since_boot[1]))
        lines.append(Line(line, age))
    return tuple(lines)


def _records(kmsg: Path) -> Iterator[Line]:
    """Yields the records ``priority,number,microseconds,flags;text``, until the next read would block."""
    descriptor = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
    try:
        now = time.monotonic()
        while True:
            try:
                record = os.read(descriptor, RECORD)
            except BrokenPipeError:  # newer records have overwritten this one
                continue
            except BlockingIOError:
                return
            if not record:
                return
            head, _, text = record.decode(errors="replace").partition(";")
            stamp = head.split(",")[2:3]
            age = now - int(stamp[0]) / 1e6 if stamp and stamp[0].isdigit() else None
            yield Line(text.partition("\n")[0], age)
    finally:
        os.close(descriptor)


_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)(?:, )?(.*)")
_SXID = re.compile(r"SXid \(PCI:([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F.]+)\): (\d+), ((?:Always |Non-)?[Ff]atal\b.*)")
_LOST = re.compile(
    r"NVRM: GPU(?: at PCI:)? ?([0-9a-fA-F]{4,}:[0-9a-fA-F]+:[0-9a-fA-F]+)\S*: GPU has fallen off the bus"
)
_LOADED = "NVRM: loading NVIDIA UNIX"


def find_errors(
    lines: Iterable[Line], recovered: Sequence[str] = (), foreign: Sequence[str] = ()
) -> tuple[GpuError, ...]:
    """Returns the errors since the driver was last loaded, since loading resets the GPUs. Repeated errors are counted.

    Args:
        recovered: PCI addresses of GPUs for which the driver requests no action.
        foreign: PCI addresses of GPUs that belong to other jobs; their errors are left out.
    """
    errors: dict[tuple[str, str], GpuError] = {}
    for line in lines:
        if _LOADED in line.text:
            errors.clear()
            continue
        code = None
        if match := _XID.search(line.text):
            code = int(match[2])
            meaning, kind = _xid(code, match[3].strip())
        elif match := _LOST.search(line.text):
            code = LOST
            meaning, kind = XIDS[LOST]
        elif match := _SXID.search(line.text):
            meaning = SXIDS.get(int(match[2]), "NVSwitch error")
            kind = Kind.LOOK_UP if match[3].startswith("Non") else Kind.SWITCH
        else:
            continue
        name = f"SXid {match[2]} of the NVSwitch" if code is None else f"Xid {code} of the GPU"
        pci = match[1].lower()
        if any(address.startswith(pci) for address in foreign):
            continue
        count = errors[pci, name].count + 1 if (pci, name) in errors else 1
        settled = ""
        if any(address.startswith(pci) for address in recovered):
            settled = "the driver requires no action now"
        text = f"{name} at {pci}: {meaning}"
        errors[pci, name] = GpuError(pci, text, kind, kind.level == ERROR, count, line.age, code, settled)
    return tuple(errors.values())


def _xid(code: int, text: str) -> tuple[str, Kind]:
    """Returns the meaning and the kind of an Xid. ``text`` is the rest of the line."""
    if code == RECOVERY:  # GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
        action = text.rpartition(" to ")[2].lower()
        kinds = {"reboot": Kind.REBOOT, "reset": Kind.RESET, "drain": Kind.LINK}
        return text, next((kind for word, kind in kinds.items() if word in action), Kind.PROGRAM)
    meaning, kind = XIDS.get(code, (CATALOG, Kind.LOOK_UP))
    if code in NVLINK_5 and re.search(r"non-?fatal", text, re.IGNORECASE):
        return meaning, Kind.WATCH
    return meaning, kind


def judge_log(errors: Sequence[GpuError] | None, node: str, name: str) -> Iterator[Finding]:
    """Yields findings on the errors in the log. ``errors`` is None if the log cannot be read, and ``name`` names what
    was looked for, such as "error of amdgpu"."""
    if errors is None:
        text = f"{UNCHECKED}this user may read neither /dev/kmsg nor the journal, so an {name} would not be noticed"
        yield Finding(SUBJECT, OK, text)
        return
    for error in errors:
        level = error.kind.level
        text = error.text
        if error.count > 1:
            text += f", {error.count} times"
        if error.age is not None:
            text += f", {'last ' if error.count > 1 else ''}{format_duration(error.age)} ago"
        if level == OK:
            yield Finding(SUBJECT, OK, text)
            continue
        if level == ERROR and error.settled:
            level = WARNING
            text += f"; {error.settled}"
        yield Finding(SUBJECT, level, text, out_of_service(node, error.kind.action))
    if not errors:
        yield Finding(SUBJECT, OK, f"no {name} since the driver was loaded")
