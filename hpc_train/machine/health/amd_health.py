"""Reads the health of AMD Instinct GPUs from the kernel driver amdgpu: memory, PCIe, processes and the kernel log.

All values are read from ``/sys``, because ``rocm-smi`` hangs if the driver hangs. The formats of the error counters,
the bad pages and ``mem_info_vram_used`` are in the kernel's documentation (docs.kernel.org/gpu/amdgpu, Linux 6.8), the
processes are found as by ``rocm-smi --showpids``. The lines of the log are in the driver's sources (torvalds/linux and
ROCm/amdgpu, 2026-11). Reduced clocks are not read, because ``/sys`` shows them in a binary format that differs between
models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_train.machine.amd_gpus import VENDOR, AmdGpu, AmdNode, instinct_on_bus
from hpc_train.machine.health.finding import ERROR, OK, UNCHECKED, WARNING, Finding
from hpc_train.machine.health.gpu_health import (
    HANGS,
    LIMIT_S,
    SUBJECT,
    GpuProcess,
    GpuState,
    NoResponse,
    judge_speed,
    out_of_service,
    read_in_child,
)
from hpc_train.machine.health.kernel_log import GpuError, Kind, Line, judge_log, read_kernel_log
from hpc_train.machine.health.vendor import Paths, VendorHealth
from hpc_train.machine.sysfs import read_text
from hpc_train.units import counted

LINK = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
COUNTS = "_err_count"
BAD_PAGES = "ras/gpu_vram_bad_pages"
GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}  # by GT/s
WIDEST = 32  # lanes; the kernel shows 63 if the device does not respond, and 255 if the device has no link
LOST = "63"
RESET = "drain the node and reset the GPU (rocm-smi --gpureset), or reboot"

Texts = Mapping[str, str]  # the content of the files of one GPU, by name


def amd_health(node: str, quick: bool, paths: Paths) -> VendorHealth:
    """Checks the Instinct GPUs of this node (inside a job, only the GPUs of the job) and the kernel log. ``quick``
    states whether to skip the processes."""
    amd_node = AmdNode.read(paths.kfd / "topology/nodes", paths.pci, paths.devices)
    if amd_node is None:
        return VendorHealth()
    on_bus = instinct_on_bus(paths.pci)
    usable = [gpu for gpu in amd_node.gpus if gpu.compute]
    places: dict[str, list[AmdGpu]] = {}
    for gpu in usable:  # the driver numbers the partitions of one GPU as functions of its device
        place = gpu.pci if gpu.pci in on_bus else gpu.pci.partition(".")[0] + ".0"
        places.setdefault(place, []).append(gpu)
    foreign = []
    if amd_node.managed > len(usable):
        foreign = [place for place in on_bus if place not in places]
    findings = []
    if amd_node.managed < len(on_bus):
        managed = amd_node.managed or "none"
        text = f"the PCI bus shows {len(on_bus)} AMD Instinct GPUs, but the driver amdgpu manages {managed}"
        action = "reboot the node; `dmesg` shows why amdgpu does not initialize them"
        findings.append(Finding(SUBJECT, ERROR, text, out_of_service(node, action)))

    texts: dict[str, Texts] | None = {}
    try:
        texts = read_in_child(lambda: {place: read_texts(paths.pci / place) for place in places}, LIMIT_S)
    except NoResponse:
        text = f"{HANGS}: amdgpu did not respond within {LIMIT_S:g} s"
        findings.append(Finding(SUBJECT, ERROR, text, out_of_service(node, "reboot the node")))
    if texts is None:
        findings.append(Finding(SUBJECT, OK, f"{UNCHECKED}the files of amdgpu in {paths.pci} cannot be read"))
        texts = {}
    processes = {} if quick else read_processes(paths)
    gpus = []
    for place, parts in places.items():
        if place in texts:
            of_gpu = [process for part in parts for process in processes.get(part.node, ())]
            gpus.append(parse_gpu(parts[0], place, texts[place], of_gpu))
    findings += judge_amd([(gpu, texts[gpu.pci or ""]) for gpu in gpus], node)
    lines = read_kernel_log(paths.kmsg)
    errors = None if lines is None else find_events(lines, foreign)
    findings += judge_log(errors, node, "error of amdgpu")
    return VendorHealth(
        present=amd_node.managed,
        shared=0 < len(on_bus) < amd_node.managed,
        gpus=tuple(gpus),
        errors=errors or (),
        findings=tuple(findings),
    )


def read_texts(device: Path) -> dict[str, str]:
    """Reads the files of one GPU. The names ``link/…`` and ``slot/…`` refer to the two ends of the link to the slot.

    Like the driver, it skips the bridges inside a card, whose vendor is also AMD.
    """
    card = device.resolve()
    inside = [card]
    for parent in card.parents:
        if read_text(parent / "vendor") != VENDOR:
            break
        inside.append(parent)
    names = [*LINK, "mem_info_vram_used", "gpu_busy_percent", BAD_PAGES]
    names += [f"ras/{path.name}" for path in card.glob(f"ras/*{COUNTS}")]
    files = {name: card / name for name in names}
    files |= {f"link/{name}": inside[-1] / name for name in LINK}
    files |= {f"slot/{name}": inside[-1].parent / name for name in LINK}
    return {name: text for name, path in files.items() if (text := read_text(path))}


def read_processes(paths: Paths) -> dict[int, tuple[GpuProcess, ...]]:
    """Returns the processes that use memory of each GPU, by the GPU's number in the driver's topology."""
    processes: dict[int, tuple[GpuProcess, ...]] = {}
    for place in (paths.kfd / "topology/nodes").glob("[0-9]*"):
        name = f"vram_{read_text(place / 'gpu_id')}"
        used = [(int(path.parent.name), read_text(path)) for path in paths.kfd.glob(f"proc/[0-9]*/{name}")]
        processes[int(place.name)] = tuple(
            GpuProcess(pid, read_text(paths.proc / f"{pid}/comm") or "?", int(memory))
            for pid, memory in sorted(used)
            if memory.isdigit() and int(memory)
        )
    return processes


def parse_gpu(gpu: AmdGpu, place: str, texts: Texts, processes: Sequence[GpuProcess] = ()) -> GpuState:
    """Returns the state of a GPU from its files. If the GPU has fallen off the bus, its values are None."""
    named = GpuState(gpu.index, place, gpu.model, gpu.uuid, processes=tuple(processes))
    if texts.get("current_link_width") == LOST:
        return named
    counts = uncorrected(texts)
    pages = bad_pages(texts)
    memory = texts.get("mem_info_vram_used", "")
    width = _lanes(texts, "link/max_link_width")
    generation = _generation(texts, "link/max_link_speed")
    return replace(
        named,
        rows_failed=pages["F"] > 0,
        pages_pending=pages["P"] > 0,
        uncorrected=None if counts is None else sum(counts.values()),
        idle=texts.get("gpu_busy_percent", "0") == "0",
        pcie_width=_lanes(texts, "link/current_link_width"),
        pcie_max_width=width and min(width, _lanes(texts, "slot/max_link_width") or width),
        pcie_gen=_generation(texts, "link/current_link_speed"),
        pcie_max_gen=generation,
        pcie_best_gen=generation and min(generation, _generation(texts, "slot/max_link_speed") or generation),
        memory_used=int(memory) if memory.isdigit() else None,
    )


def _lanes(texts: Texts, name: str) -> int | None:
    text = texts.get(name, "")
    if text.isdigit() and 0 < int(text) <= WIDEST:
        return int(text)
    return None


def _generation(texts: Texts, name: str) -> int | None:
    """Returns the PCIe generation: 4 for ``16.0 GT/s PCIe``; None for ``Unknown``, which a device without a link
    shows."""
    return GENERATIONS.get(texts.get(name, "").partition(" ")[0])


def uncorrected(texts: Texts) -> dict[str, int] | None:
    """Returns the number of uncorrectable errors since the driver was loaded, by block such as ``umc`` (memory) or
    ``gfx``.

    Returns None if no block shows a count, as in virtual machines or while the GPU is being reset.
    """
    counts = {}
    for name, text in texts.items():
        if name.endswith(COUNTS) and (count := re.search(r"^ue: (\d+)$", text, re.MULTILINE)):
            counts[name.removeprefix("ras/").removesuffix(COUNTS)] = int(count[1])
    return counts or None


def bad_pages(texts: Texts) -> dict[str, int]:
    """Counts the bad pages: R reserved, so that nothing uses them; P pending; F could not be reserved."""
    flags = re.findall(r"^0x[0-9a-f]+ : 0x[0-9a-f]+ : ([RPF])$", texts.get(BAD_PAGES, ""), re.MULTILINE)
    return {flag: flags.count(flag) for flag in "RPF"}


def judge_amd(gpus: Sequence[tuple[GpuState, Texts]], node: str) -> Iterator[Finding]:
    """Yields findings on the problems of GPUs according to their files, or a finding that they are healthy."""
    findings = [finding for gpu, texts in gpus for finding in (*_memory(gpu, texts, node), *judge_speed(gpu, node))]
    unknown = [gpu.name for gpu, texts in gpus if gpu.uncorrected is None and texts.get("current_link_width") != LOST]
    if unknown:
        yield Finding(SUBJECT, OK, f"{UNCHECKED}amdgpu shows no error counts of {', '.join(unknown)}")
    yield from findings
    checked = [] if unknown else ["memory"]
    if all(gpu.pcie_width for gpu, _ in gpus):
        checked += ["PCIe links"]
    if gpus and checked and not findings:
        yield Finding(SUBJECT, OK, f"{counted(len(gpus), 'GPU', 'GPUs')} healthy: {', '.join(checked)}")


def _memory(gpu: GpuState, texts: Texts, node: str) -> Iterator[Finding]:
    if texts.get("current_link_width") == LOST:
        text = f"{gpu.name}: it has fallen off the bus, its PCI registers cannot be read"
        yield Finding(SUBJECT, ERROR, text, out_of_service(node, Kind.REBOOT.action))
    blocks = {block: count for block, count in (uncorrected(texts) or {}).items() if count and gpu.uncorrected}
    if blocks:
        listed = ", ".join(f"{block} {count}" for block, count in sorted(blocks.items()))
        text = f"{gpu.name}: {gpu.uncorrected} uncorrectable errors (RAS: {listed}) since the driver was loaded"
        action = "drain and reboot the node; replace the GPU if it happens again"
        yield Finding(SUBJECT, ERROR, text, out_of_service(node, action))
    pages = bad_pages(texts)
    if gpu.rows_failed:
        text = f"{gpu.name}: {pages['F']} bad memory pages could not be reserved, so programs may still use them"
        action = "drain and reboot the node, which reserves them; replace the GPU if they remain"
        yield Finding(SUBJECT, ERROR, text, out_of_service(node, action))
    if gpu.pages_pending:
        text = f"{gpu.name}: {pages['P']} bad memory pages wait to be reserved"
        yield Finding(SUBJECT, WARNING, text, out_of_service(node, RESET))


# a characteristic part of the line, its meaning, the required action, and whether it proves a defect of the hardware:
# hangs and resets, even failed ones, do not, because an error in a program may cause them
_EVENTS = tuple(
    (re.compile(pattern), meaning, kind, defect)
    for pattern, meaning, kind, defect in (
        (
            r"\b[1-9]\d* (?:new )?uncorrectable hardware errors detected in (\w+) block",
            "uncorrectable error in the block {}",
            Kind.RESET,
            True,
        ),
        (r"uncorrectable hardware error\((\w+)\) detected", "fatal hardware error ({})", Kind.RESET, True),
        (
            r"poison is consumed by client|RAS poison consumption",
            "a program used memory with an uncorrectable error (poison)",
            Kind.RESET,
            True,
        ),
        (r"[Pp]oison is created", "an uncorrectable error was found in unused memory (poison)", Kind.HANDLED, False),
        (
            r"RAS records:\d+ exceed threshold|Saved bad pages \d+ reach",
            "its memory has more bad pages than the driver's threshold",
            Kind.REPLACE,
            True,
        ),
        (r"device lost from bus|SMU: response:0xFFFFFFFF", "it has fallen off the bus", Kind.REBOOT, True),
        (r"Fatal error during GPU init", "the driver could not initialize it", Kind.REBOOT, True),
        (
            r"GPU reset\(\d+\) failed|GPU reset end with ret = -|GPU Recovery Failed",
            "its reset failed",
            Kind.REBOOT,
            False,
        ),
        (r"not done with your previous command", "its management unit (SMU) does not respond", Kind.REBOOT, False),
        (r"ring (\S+) timeout, but soft recovered", "the ring {} hung and recovered", Kind.HANDLED, False),
        (r"ring (\S+) timeout", "the ring {} hung", Kind.RESET, False),
        (r"fence wait loop timeout|cp might be in an unrecoverable state", "its queues hung", Kind.RESET, False),
        (r"GPU reset begin", "the driver has started to reset it", Kind.RESET, False),
        (r"retry page fault", "illegal memory access (page fault)", Kind.PROGRAM, False),
    )
)
_LINE = re.compile(
    r"\bamdgpu(?: ([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]))?: (.*)|\[drm:amdgpu_\S+ \[amdgpu\]\] \*ERROR\* (.*)"
)
_RESET_DONE = re.compile(r"GPU reset\(\d+\) succeeded")
_LOADED = "amdgpu kernel modesetting enabled"


def find_events(lines: Iterable[Line], foreign: Sequence[str] = ()) -> tuple[GpuError, ...]:
    """Returns the errors since the driver was last loaded; repetitions are counted.

    Errors of ``foreign`` GPUs, which belong to other jobs, are left out. A line without an address proves no defect if
    a GPU of the node is foreign.
    """
    events: dict[tuple[str | None, str], GpuError] = {}
    for line in lines:
        if _LOADED in line.text:
            events.clear()
        if (match := _LINE.search(line.text)) is None:
            continue
        pci = match[1]
        text = match[2] or match[3] or ""
        if _RESET_DONE.search(text):
            for key, event in events.items():
                if not event.defect and event.pci in (pci, None):
                    events[key] = replace(event, settled="the driver has reset it since")
            continue
        for pattern, words, kind, defect in _EVENTS:
            if error := pattern.search(text):
                meaning = words.format(*error.groups())
                count = events[pci, meaning].count + 1 if (pci, meaning) in events else 1
                gpu = f"the GPU at {pci}" if pci else "a GPU"
                events[pci, meaning] = GpuError(pci, f"{gpu}: {meaning}", kind, defect, count, line.age)
                break
    job_events = [event for event in events.values() if event.pci not in foreign]
    return tuple(replace(event, defect=event.defect and bool(event.pci or not foreign)) for event in job_events)
