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
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Defect:
    """An error in the kernel log that proves a defect of the hardware.

    Attributes:
        pci: the address of the GPU, perhaps without the function; None if the line does not contain it.
        text: the description of the error.
        age: seconds since the error was last logged; None if unknown.
    """

    pci: str | None
    text: str
    age: float | None


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
    """An Xid of the GPU, or with ``switch`` an SXid of the NVSwitch, at the PCI address ``pci``. ``count`` states how
    often it was logged; ``age`` and ``text`` describe the last occurrence."""

    pci: str
    code: int
    text: str
    switch: bool = False
    count: int = 1
    age: float | None = None

    @property
    def meaning(self) -> str:
        if self.switch:
            return SXIDS.get(self.code, "NVSwitch error")
        if self.code != RECOVERY:
            return XIDS.get(self.code, (CATALOG, Kind.LOOK_UP))[0]
        return self.text

    @property
    def kind(self) -> Kind:
        if self.switch:
            if self.text.lower().startswith(("fatal", "always fatal")):
                return Kind.SWITCH
            return Kind.LOOK_UP
        if self.code == RECOVERY:  # GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
            action = self.text.rpartition(" to ")[2].lower()
            kinds = {"reboot": Kind.REBOOT, "reset": Kind.RESET, "drain": Kind.LINK}
            return next((kind for word, kind in kinds.items() if word in action), Kind.PROGRAM)
        if self.code in NVLINK_5 and re.search(r"non-?fatal", self.text, re.IGNORECASE):
            return Kind.WATCH
        return XIDS.get(self.code, ("", Kind.LOOK_UP))[1]

    @property
    def name(self) -> str:
        if self.switch:
            return f"SXid {self.code} of the NVSwitch"
        return f"Xid {self.code} of the GPU"

    @property
    def defect(self) -> Defect | None:
        if self.kind.level != ERROR:
            return None
        return Defect(self.pci, f"{self.name} at {self.pci}: {self.meaning}", self.age)


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


def find_errors(lines: Iterable[Line]) -> tuple[GpuError, ...]:
    """Returns the errors since the driver was last loaded, since loading resets the GPUs. Repeated errors are
    counted."""
    errors: dict[tuple[str, int, bool], GpuError] = {}
    for line in lines:
        if _LOADED in line.text:
            errors.clear()
            continue
        if match := _XID.search(line.text) or _SXID.search(line.text):
            error = GpuError(match[1].lower(), int(match[2]), match[3].strip(), match.re is _SXID, age=line.age)
        elif match := _LOST.search(line.text):
            error = GpuError(match[1].lower(), LOST, "GPU has fallen off the bus", age=line.age)
        else:
            continue
        key = (error.pci, error.code, error.switch)
        before = errors[key].count if key in errors else 0
        errors[key] = replace(error, count=before + 1)
    return tuple(errors.values())


def judge_log(
    lines: Sequence[Line] | None, node: str, recovered: Sequence[str] = (), foreign: Sequence[str] = ()
) -> Iterator[Finding]:
    """Yields findings on the errors in the log.

    Args:
        lines: the kernel log; None if it cannot be read.
        recovered: PCI addresses of GPUs for which the driver requests no action; their errors are warnings.
        foreign: PCI addresses of GPUs that belong to other jobs; their errors are left out.
    """
    if lines is None:
        text = f"{UNCHECKED}this user may read neither /dev/kmsg nor the journal, so Xid is unchecked"
        yield Finding(SUBJECT, OK, text)
        return
    errors = [error for error in find_errors(lines) if not any(address.startswith(error.pci) for address in foreign)]
    for error in errors:
        level = error.kind.level
        text = f"{error.name} at {error.pci}: {error.meaning}{occurrences(error.count, error.age)}"
        if level == OK:
            yield Finding(SUBJECT, OK, text)
            continue
        if level == ERROR and any(address.startswith(error.pci) for address in recovered):
            level = WARNING
            text += "; the driver requires no action now"
        yield Finding(SUBJECT, level, text, out_of_service(node, error.kind.action))
    if not errors:
        yield Finding(SUBJECT, OK, "no Xid or SXid error since the driver was loaded")


def occurrences(count: int, age: float | None) -> str:
    """Formats how often an error was logged and the time since it was last logged. ``age`` is in seconds; None if
    unknown."""
    times = f", {count} times" if count > 1 else ""
    if age is None:
        return times
    return f"{times}, {'last ' if count > 1 else ''}{format_duration(age)} ago"
