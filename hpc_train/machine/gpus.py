"""Finds the GPUs that this process may use, their memory, and why it cannot use allocated GPUs, without torch or CUDA.

A CUDA call would create a context, after which the process could not fork. Training never silently falls back to the
CPU: if Slurm has allocated GPUs, or the node has NVIDIA or AMD Instinct GPUs, a process that cannot use them reports
the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.machine.amd_gpus import NO_DEVICES, NODES, PCI, AmdNode, amd_memory
from hpc_train.machine.sysfs import DISPLAY, nvidia_gpus, output_of, read_text

DRIVER = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
MIG_PREFIX = "MIG-"
UUID_PREFIXES = ("GPU-", MIG_PREFIX)


def visible_devices(environment: Mapping[str, str] = os.environ, machine: Machine | None = None) -> tuple[str, ...]:
    """Returns the visible GPUs as CUDA_VISIBLE_DEVICES names them: numbers, or the UUIDs in the variable. AMD GPUs are
    named as in ROCR_VISIBLE_DEVICES.

    As in CUDA, the list ends before the first device that does not exist, and it is empty if a device is listed twice.
    """
    machine = machine or Machine()
    if machine.amd is not None:
        return tuple(str(gpu.index) for gpu in machine.amd.visible(environment))
    present = _present(machine)
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return tuple(str(index) for index in range(present))
    parts = [part.strip() for part in chosen.split(",")]
    names: dict[str, str] = {}  # device -> name
    if not parts[0].startswith(UUID_PREFIXES):
        for part in parts:
            number = re.match(r"\d+", part)  # CUDA reads only the leading digits
            if number is None or int(number[0]) >= present:
                break
            device = str(int(number[0]))
            if device in names:
                return ()
            names[device] = device
        return tuple(names)
    uuids = _uuids(machine, any(part.startswith(MIG_PREFIX) for part in parts))
    for part in parts:
        if not part.startswith(UUID_PREFIXES):
            break
        matches = [uuid for uuid in uuids if uuid.startswith(part)]  # the name may be a prefix of a UUID
        if not uuids:  # the UUIDs are unknown, so any name is accepted
            matches = [part]
        if len(matches) != 1:
            break
        if matches[0] in names:
            return ()
        names[matches[0]] = part
    return tuple(names.values())


def _uuids(machine: Machine, with_slices: bool) -> list[str]:
    """Returns the UUIDs of the GPUs that this process may open, and of their MIG slices; [] if they are unknown."""
    addresses = job_gpus(machine.driver, machine.devices)
    texts = [read_text(machine.driver / address / "information") for address in addresses]
    matches = [re.search(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)$", text, re.MULTILINE) for text in texts]
    # the driver shows question marks until the GPU is initialized
    known_uuids = [match[1] for match in matches if match is not None]
    if known_uuids and len(known_uuids) == len(texts) and not with_slices:
        return known_uuids
    return re.findall(r"\(UUID: ((?:GPU|MIG)-[^)]+)\)", print_listing())


def job_gpus(driver: Path = DRIVER, devices: Path = DEVICES) -> tuple[str, ...]:
    """Returns the PCI addresses of the GPUs that the job's control group lets this process open, in CUDA's order.

    CUDA counts only these GPUs, while ``/proc`` and ``/sys`` also show the GPUs of other jobs on the node.
    """
    addresses = []
    for path in sorted(_entries(driver)):
        minor = re.search(r"^Device Minor:\s*(\d+)", read_text(path / "information"), re.MULTILINE)
        device = devices / f"nvidia{minor[1]}" if minor else None
        # access() respects the control group and does not wake the GPU
        if device is None or not device.exists() or os.access(device, os.R_OK | os.W_OK):
            addresses.append(path.name)
    return tuple(addresses)


def _present(machine: Machine) -> int:
    """Counts the NVIDIA GPUs that this process may open. The directory of the driver is empty in some containers."""
    if _entries(machine.driver):
        return len(job_gpus(machine.driver, machine.devices))
    return sum(line.startswith("GPU ") for line in print_listing().splitlines())


def print_listing() -> str:
    """Returns the output of ``nvidia-smi -L``; "" without the tool."""
    return output_of(["nvidia-smi", "-L"])


def gpu_names() -> frozenset[str]:
    """Returns the names of the NVIDIA GPUs of this machine; empty without a driver."""
    return frozenset(re.findall(r"^GPU \d+: (.+) \(UUID", print_listing(), re.MULTILINE))


KEY = "cluster.gpus_per_node"


class UnusableGpus(UserError):
    """Reports that this process cannot use the GPUs of its node. A job treats it as a fault of the node, unless all
    nodes report it. ``reason`` names the number of expected GPUs, the number of GPUs that this process can use, and the
    cause."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"cannot use the GPUs of this node: {reason}", where=KEY, fix=fix)
        self.reason = reason


@dataclass(frozen=True)
class Machine:
    """The paths at which a machine shows its GPUs. ``torch`` is the folder of the package; None if it is not
    installed."""

    driver: Path = DRIVER
    devices: Path = DEVICES
    pci: Path = PCI
    torch: Path | None = None
    kfd: Path = NODES

    @classmethod
    def this(cls) -> Machine:
        spec = find_spec("torch")  # does not import torch
        folders = (spec.submodule_search_locations or []) if spec is not None else []
        return cls(torch=Path(folders[0]) if folders else None)

    @cached_property
    def nvidia_gpus(self) -> int:
        """Returns the number of NVIDIA GPUs that the driver lists, or that have device files. Without a driver, it
        counts the GPUs on the PCI bus, except GPUs that drive a display with the kernel's driver.
        """
        files = sum(re.fullmatch(r"nvidia\d+", file.name) is not None for file in _entries(self.devices))
        if count := len(_entries(self.driver)) or files:
            return count
        displays = [d for d in nvidia_gpus(self.pci, (DISPLAY,)) if (d / "driver").resolve().name == "nouveau"]
        return len(nvidia_gpus(self.pci)) - len(displays)

    @cached_property
    def amd(self) -> AmdNode | None:
        """Returns the machine's AMD GPUs; None if it has NVIDIA's driver or no Instinct GPUs."""
        if self.driver.is_dir():
            return None
        return AmdNode.read(self.kfd, self.pci, self.devices)

    def gpus(self) -> int:
        """Returns the number of GPUs of the machine, including GPUs of other jobs."""
        amd = self.amd
        if amd is None:
            return self.nvidia_gpus
        return amd.installed

    def torch_without_gpus(self) -> str | None:
        """Returns the version of torch if it is built without CUDA, or without ROCm on a machine with AMD GPUs; None
        otherwise.
        """
        text = "" if self.torch is None else read_text(self.torch / "version.py")
        platform = "cuda" if self.amd is None else "hip"
        if not re.search(rf"^{platform}\b[^=\n]*=\s*None\s*$", text, re.MULTILINE):
            return None
        version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        if version:
            return version[1]
        return "(unknown version)"


def gpus_to_use(
    requested: int | str, environment: Mapping[str, str] = os.environ, machine: Machine | None = None
) -> int:
    """Returns the number of GPUs to use: ``requested``, or for ``auto`` the GPUs that Slurm has allocated, or else all
    visible GPUs. 0 means the CPU. Raises UserError if more GPUs are requested than Slurm has allocated, and
    UnusableGpus if this process cannot use this number of GPUs."""
    machine = machine or Machine.this()
    allocated = allocated_gpus(environment)
    if isinstance(requested, int) and 0 < allocated < requested:
        raise UserError(
            f"{requested} GPUs per node are requested, but Slurm has allocated {allocated}",
            where=KEY,
            fix=f"set {KEY}={allocated}, or request more from Slurm with --gpus-per-node={requested}",
        )
    visible = len(visible_devices(environment, machine))
    needed, claim = _needed(requested, allocated, visible, environment, machine)
    build = machine.torch_without_gpus()
    usable = 0 if build is not None else visible
    if usable >= needed:
        return needed
    if build is not None and machine.amd is not None:
        cause = f"torch {build} is built without ROCm, but the GPUs are from AMD"
        fix = "install a build of torch with ROCm: https://pytorch.org/get-started"
    elif build is not None:
        cause = f"torch {build} is built without CUDA"
        fix = "install a build of torch with CUDA"
    else:
        cause, fix = _why_not_visible(needed, allocated, visible, environment, machine)
    verb = "sees" if build is None else "can use"
    count = f"only {usable}" if usable else "none"
    raise UnusableGpus(f"{claim}, and the process {verb} {count}: {cause}", f"{fix}; {KEY}=0 trains on the CPU")


def allocated_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of GPUs of this node that Slurm has allocated to the step of this process, or to its job; 0 if
    there are none.
    """
    if _is_step_without_gpus(environment):
        return _count(environment.get("SLURM_JOB_GPUS", ""))  # srun passes on this variable of the batch host
    on_node = environment.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit():
        return int(on_node)
    return _count(environment.get("SLURM_STEP_GPUS") or environment.get("SLURM_JOB_GPUS", ""))


def _is_step_without_gpus(environment: Mapping[str, str]) -> bool:
    """Returns whether the step has none of the GPUs of its job: the job has them through ``--exclusive``, and srun
    requested none.
    """
    return "SLURM_STEP_NUM_NODES" in environment and not environment.keys() & {"SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE"}


def _needed(
    requested: int | str, allocated: int, visible: int, environment: Mapping[str, str], machine: Machine
) -> tuple[int, str]:
    """Returns the number of GPUs that this process should use, and the beginning of the error message if it cannot."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    amd = machine.amd
    if amd is not None:
        named = amd.named(environment)
    elif chosen is None:
        named = None
    else:
        named = _count(chosen)
    if isinstance(requested, int):
        return requested, f"{requested} GPUs per node are requested"
    if allocated:
        owner = "step" if "SLURM_STEP_GPUS" in environment else "job"
        # if several runs share the GPUs of a job, each has a subset
        return min(allocated, named or allocated), f"{allocated} are allocated to the {owner}"
    if named == 0 and chosen != NO_DEVICES:
        return 0, ""  # the user has hidden all GPUs
    if visible:
        return visible, f"{visible} are visible"
    installed = machine.gpus()
    return installed, f"the node has {installed}"


AVOID = "avoid the node with cluster.exclude=NODE and report it to the site's staff"


def _why_not_visible(
    needed: int, allocated: int, visible: int, environment: Mapping[str, str], machine: Machine
) -> tuple[str, str]:
    """Returns the cause and its fix."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if "SLURM_JOB_ID" in environment and not allocated and not visible and machine.gpus():
        return "the job did not request GPUs from Slurm", f"request them with sbatch or srun --gpus-per-node={needed}"
    if allocated and _is_step_without_gpus(environment):
        return "srun started the step without GPUs", f"start it with srun --gpus-per-node={allocated}"
    if (amd := machine.amd) is not None:
        return amd.why_not_visible(environment, AVOID if allocated else None)
    if chosen is not None and visible < _present(machine):
        return f"CUDA_VISIBLE_DEVICES={chosen!r} hides them", "unset CUDA_VISIBLE_DEVICES"
    return _fault_of_node(needed, allocated > 0, machine)


def _fault_of_node(needed: int, on_slurm: bool, machine: Machine) -> tuple[str, str]:
    """Returns the cause and its fix if the driver or the device files are faulty."""
    listed = len(_entries(machine.driver))
    openable = len(job_gpus(machine.driver, machine.devices))
    if not machine.driver.is_dir() and not machine.nvidia_gpus:
        return "the node has no NVIDIA GPU and no NVIDIA driver", "use nodes with NVIDIA GPUs"
    if not machine.driver.is_dir():
        cause = f"the NVIDIA driver is not loaded ({machine.driver} does not exist)"
        fix = "load the driver"
    elif openable < min(listed, needed):
        cause = f"it may open {openable} of the {listed} GPUs of the node"
        fix = "get access to /dev/nvidia*"
    else:
        cause = f"the NVIDIA driver lists {listed}"
        fix = f"set {KEY}={listed}" if listed else "check nvidia-smi"
    return cause, AVOID if on_slurm else fix


def _count(names: str) -> int:
    """Counts the names in a list of devices. Values of CUDA_VISIBLE_DEVICES that mean no device count as 0."""
    return sum(name not in ("", NO_DEVICES) and not name.startswith("-") for name in map(str.strip, names.split(",")))


def _entries(folder: Path) -> list[Path]:
    if folder.is_dir():
        return list(folder.iterdir())
    return []


# the memory of GPU models in bytes (from the vendors' data sheets); for models with several sizes, the most common one
KINDS = {
    "h200": 141e9,
    "gh200": 96e9,
    "gb200": 186e9,
    "h100": 80e9,
    "b200": 180e9,
    "a30": 24e9,
    "a40": 48e9,
    "a6000": 48e9,
    "l4": 24e9,
    "l40": 48e9,
    "l40s": 48e9,
    "t4": 16e9,
    "3090": 24e9,
    "4090": 24e9,
    "5090": 32e9,
}
_SIZE = re.compile(r"(?:\d+g\.)?(\d+)gb")  # 80gb, or 10gb of the MIG slice 1g.10gb
_GRACE = ("gh200", "gb200", "gb300")  # the size in their names is the memory of the CPU


def gpu_memory(kind: str | None) -> float | None:
    """Returns the memory in bytes of a GPU of GRES type ``kind``; None means the smallest GPU of this machine.

    The type is a short name (``h100``), or the name that Slurm's AutoDetect=nvml derives from NVML's name
    (``nvidia_h100_80gb_hbm3``). Returns None if the memory is unknown.
    """
    if kind is not None:
        words = re.split(r"[\s_-]+", kind.lower())
        sizes = [match[1] for word in words if (match := _SIZE.fullmatch(word))]
        if sizes and not set(words) & set(_GRACE):
            return float(sizes[0]) * 1e9
        if {"h100", "nvl"} <= set(words):
            return 94e9
        return next((KINDS[word] for word in words if word in KINDS), None) or amd_memory(kind)
    if (amd := Machine().amd) is not None:
        return min((gpu.memory for gpu in amd.gpus if gpu.compute and gpu.memory), default=None)
    listed = output_of(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
    return min((int(line) * 2.0**20 for line in listed.split() if line.isdigit()), default=None)
