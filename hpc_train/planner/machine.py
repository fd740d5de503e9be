"""Describes a machine by a file: how fast its devices compute and its links move bytes, and the source of each number.

A file is JSON: ``{"name": ..., "device": ..., "figures": {NAME: {"value": ..., "kind": ..., "source": ...}}}``. The
kind ``table`` marks a number of a data sheet or a publication, ``measured`` one of this machine, and ``assumed`` a
number without such a source. ``python -m hpc_train bench machine`` writes such a file. ``cluster.machine=auto`` finds
the file of a job by the types of its GPUs, as Slurm or the driver names them.

A file of CPUs states ``cores``. The ranks of a node share its cores, its memory and their rates; the numbers of the
file are the share of a rank if a node has ``devices_per_node`` ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from hpc_train.errors import UserError, nearest
from hpc_train.train.watch.peak_rates import words_of

Kind = Literal["measured", "table", "assumed"]
SHIPPED = Path(__file__).parent / "machines"
_WHERE = "--machine"


@dataclass(frozen=True)
class Figure:
    """Holds a number of a machine file, its kind, and its source."""

    value: float
    kind: Kind
    source: str


@dataclass(frozen=True)
class Rates:
    """Holds the numbers of a machine. FLOP/s are operations per second.

    Attributes:
        devices_per_node: GPUs of a node, or ranks of a node of CPUs. memory_bytes: the memory of a device.
        reserved_bytes: the part of it that the context and the libraries take, without communicators.
        allocator_share: what the allocator reserves beyond the bytes in use, as a share of them. bf16_flops: the peak
        of a device in bf16; 0 if it has no units for it. fp16_flops: the same in fp16. fp32_flops: the same in fp32
        without TF32. fp64_flops: the same in fp64. matmul_share: the share of the peak that large matrix products
        reach. attention_share: the same for attention, whose operations are not halved for a causal mask.
        half_rate_flops: the operations of a product that runs at half of that rate. memory_bytes_per_s: the rate of a
        device's memory. launch_s: the time of the host to start one kernel. node_bytes_per_s: the bandwidth of a device
        to the others of its node, as nccl-tests defines the bus bandwidth. node_latency_s: the time of a small
        collective of two devices of a node. fabric_bytes_per_s: the bandwidth of a device to other nodes if all devices
        of its node send. fabric_latency_s: the time of a small message between nodes. host_bytes_per_s: the bandwidth
        between a device and the host's memory. overlap_share: how much a collective slows concurrent computation, as a
        share of the collective's time: it takes multiprocessors and memory bandwidth. Optional. cores: the cores of a
        node that its ranks share; 0 for GPUs, which share nothing. Optional. scatter_share: the bandwidth of a
        reduce-scatter, as a share of the bandwidth of the other collectives. Optional. In gloo, it is an all-reduce of
        which each rank keeps a part. fp8_flops: the peak of a device in fp8, without sparsity; 0 if it has no units for
        it. Optional. fp8_share: the share of this peak that large products reach, as a share of what they reach in
        bf16. Optional. tp_matmul_share: the rate of products that tensor-parallel ranks share, as a share of the rate
        of whole ones. Optional. tp_launches: how many times as long as for a whole layer the host takes to start the
        kernels of a tensor-parallel layer that is not compiled. Optional. grouped_share: the rate of the grouped
        products of experts, as a share of the rate of other products. Optional.
    """

    devices_per_node: float
    memory_bytes: float
    reserved_bytes: float
    allocator_share: float
    bf16_flops: float
    fp16_flops: float
    fp32_flops: float
    fp64_flops: float
    matmul_share: float
    attention_share: float
    half_rate_flops: float
    memory_bytes_per_s: float
    launch_s: float
    node_bytes_per_s: float
    node_latency_s: float
    fabric_bytes_per_s: float
    fabric_latency_s: float
    host_bytes_per_s: float
    overlap_share: float = 0.0
    cores: float = 0.0
    scatter_share: float = 1.0
    fp8_flops: float = 0.0
    fp8_share: float = 1.0
    tp_matmul_share: float = 1.0
    tp_launches: float = 1.0
    grouped_share: float = 1.0


NAMES = tuple(field.name for field in fields(Rates))
OPTIONAL = {
    "overlap_share": Figure(0.0, "assumed", "collectives do not slow concurrent computation"),
    "cores": Figure(0.0, "assumed", "a machine of GPUs"),
    "scatter_share": Figure(1.0, "assumed", "NCCL's algorithms reach the same bandwidth"),
    "fp8_flops": Figure(0.0, "assumed", "no units for fp8, or their rate is unknown"),
    "fp8_share": Figure(1.0, "assumed", "products in fp8 reach the same share of the peak as those in bf16"),
    "tp_matmul_share": Figure(1.0, "assumed", "products that ranks share are as fast as whole ones of their size"),
    "tp_launches": Figure(8.0, "assumed", "DTensor's operations on a CPU, by bench machine with torch 2.13"),
    "grouped_share": Figure(
        0.55,
        "assumed",
        "fitted to published steps of gpt-oss on H100 and B200 (docs/measurements/plan.md); torch's grouped_mm alone "
        "reaches 0.60 to 0.69 on a B200: https://github.com/pytorch/ao/pull/3174",
    ),
}
# what the ranks of a node of CPUs share; and the bandwidths, since the cores move all bytes
_SHARED = (
    "memory_bytes", "bf16_flops", "fp16_flops", "fp32_flops", "fp64_flops", "memory_bytes_per_s", "node_bytes_per_s",
    "fabric_bytes_per_s", "host_bytes_per_s",
)  # fmt: skip
_HOST_TIMES = ("launch_s", "node_latency_s", "fabric_latency_s")
_MAY_BE_ZERO = {
    *_HOST_TIMES, "reserved_bytes", "allocator_share", "overlap_share", "cores",
    "bf16_flops", "fp16_flops", "fp32_flops", "fp64_flops", "fp8_flops", "half_rate_flops",
}  # fmt: skip
_EARLIER = ("watts",)  # figures of files of earlier versions, which are not read
_OF_PEAK = ("matmul_share", "attention_share")


@dataclass(frozen=True)
class Machine:
    name: str
    device: str
    figures: Mapping[str, Figure]

    @cached_property
    def rates(self) -> Rates:
        return Rates(**{name: self.figures[name].value for name in NAMES})

    def peak(self, precision: str) -> float:
        """Returns the peak FLOP/s of a device for a precision of the config; raises UserError if the device has no
        units for the precision."""
        flops = float(getattr(self.rates, f"{precision}_flops"))
        if not flops:
            raise UserError(
                f"the devices of {self.name} ({self.device}) do not compute in {precision}",
                where="precision",
                fix="precision=fp16 or fp32",
            )
        return flops

    @property
    def devices_per_node(self) -> int:
        return int(self.rates.devices_per_node)

    def with_devices(self, per_node: int) -> Machine:
        """Returns the machine with ``per_node`` GPUs, or ranks on CPUs, per node."""
        if self.rates.cores:
            return self.shared_by(per_node)
        figure = replace(self.figures["devices_per_node"], value=float(per_node))
        return replace(self, figures={**self.figures, "devices_per_node": figure})

    def shared_by(self, ranks: int) -> Machine:
        """Returns the machine as each of ``ranks`` ranks of a node sees it; GPUs do not depend on their number.

        Fewer ranks get larger shares. While there are more ranks than cores, the time of the host grows with them.
        """
        cores = self.rates.cores
        before = self.devices_per_node
        if not cores or ranks == before:
            return self
        slower = max(1.0, ranks / cores) / max(1.0, before / cores)
        factors = dict.fromkeys(_SHARED, before / ranks) | dict.fromkeys(_HOST_TIMES, slower)
        figures = {
            name: replace(figure, value=figure.value * factors.get(name, 1.0)) for name, figure in self.figures.items()
        }
        return replace(self, figures=figures | {"devices_per_node": replace(figures["devices_per_node"], value=ranks)})


def shipped() -> tuple[str, ...]:
    """Returns the names of the machine files that are part of hpc_train."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def read_machine(name: str) -> Machine:
    """Returns the machine that ``name`` selects: the name of a shipped file, or the path of a user's file, which ends
    in ``.json``. Raises UserError if there is no such file, or a number is missing or wrong."""
    is_path = name.endswith(".json")
    if not is_path and name not in shipped():
        raise UserError(
            f"no machine is called {name!r}",
            where=_WHERE,
            fix=f"{nearest(name, shipped())}, or the path of a machine file, which ends in .json",
        )
    path = Path(name) if is_path else SHIPPED / f"{name}.json"
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"the machine file {path} cannot be read: {error}", where=_WHERE, fix="a JSON file") from error
    return parse_machine(content, str(path))


def parse_machine(content: Any, where: str) -> Machine:
    """Returns the machine that ``content`` describes; raises UserError if a number is missing, unknown or wrong."""
    if not isinstance(content, dict) or not isinstance(figures := content.get("figures"), dict):
        raise UserError("the machine file has no figures", where=where, fix='{"name": ..., "figures": {...}}')
    figures = {name: asdict(figure) for name, figure in OPTIONAL.items()} | figures
    missing = [name for name in NAMES if name not in figures]
    if missing:
        raise UserError(
            f"the machine file lacks {', '.join(missing)}",
            where=where,
            fix=f"add {missing[0]}; see Rates in hpc_train/planner/machine.py",
        )
    for name in figures:
        if name not in (*NAMES, *_EARLIER):
            raise UserError(f"{name} is not a number of a machine", where=where, fix=nearest(name, NAMES))
    parsed = {name: _figure(figures[name], name, where) for name in NAMES}
    return Machine(str(content.get("name", where)), str(content.get("device", "unknown")), parsed)


def _figure(content: Any, name: str, where: str) -> Figure:
    try:
        if isinstance(content["value"], bool):
            raise TypeError("a truth value is not a number")
        figure = Figure(float(content["value"]), content["kind"], str(content["source"]))
    except (KeyError, TypeError, ValueError) as error:
        fix = '{"value": a number, "kind": "measured", "source": "..."}'
        raise UserError(f"{name} is {content!r}", where=where, fix=fix) from error
    check_figure(name, figure.value, where)
    if figure.kind not in get_args(Kind):
        raise UserError(f"the kind of {name} is {figure.kind!r}", where=where, fix=" or ".join(get_args(Kind)))
    return figure


def check_figure(name: str, value: float, where: str) -> None:
    """Raises UserError if the number ``name`` of a machine cannot be ``value``."""
    may_be_zero = name in _MAY_BE_ZERO
    if not 0 <= value < float("inf") or (value == 0 and not may_be_zero):
        fix = "a finite number of at least 0" if may_be_zero else "a finite number above 0"
        raise UserError(f"{name} is {value:g}", where=where, fix=fix)
    if value > 1 and name in _OF_PEAK:
        raise UserError(f"{name} is {value:g}", where=where, fix="a share of the peak, at most 1")
    if name == "devices_per_node" and value != int(value):
        raise UserError(f"{name} is {value:g}", where=where, fix="a whole number")


KEY = "cluster.machine"
OF_CPUS = "cpu"
OTHER_CARDS = ("pcie", "nvl")  # have other links and lower rates than the cards of the machine files


def machine_of_job(setting: str, gpus: int, types: Collection[str]) -> Machine:
    """Returns the machine file that ``cluster.machine`` names; for ``auto``, the file of the GPUs or, without GPUs, of
    the CPUs.

    Args:
        gpus: GPUs per node.
        types: the types of GPUs that the job may get; empty if they are unknown.

    Raises:
        UserError: no file, or more than one, describes them.
    """
    name = setting if setting != "auto" else _machine_of_types(gpus, types)
    try:
        return read_machine(name)
    except UserError as error:
        raise UserError(error.what, where=KEY, fix=error.fix) from error


def _machine_of_types(gpus: int, types: Collection[str]) -> str:
    if not gpus:
        return OF_CPUS
    if not types:
        raise UserError(
            "strategy=auto needs the type of the GPUs, which neither the config nor Slurm names",
            where=f"{KEY}, cluster.gpu_type",
            fix=f"{KEY}=NAME with {_listed(_of_gpus())}, or the path of your machine file",
        )
    files = sorted({name for gpu_type in types for name in files_of(gpu_type)})
    if len(files) == 1 and all(map(files_of, types)):
        return files[0]
    seen = _listed(sorted(types))
    if not files:
        raise UserError(
            f"no machine file describes the GPU type {seen}",
            where=KEY,
            fix=f"{KEY}=NAME with the nearest of {_listed(_of_gpus())}, or the path of your machine file",
        )
    raise UserError(
        f"the GPU type {seen} does not decide which machine file describes the job: {_listed(files)}",
        where=f"{KEY}, cluster.gpu_type",
        fix=" or ".join(f"{KEY}={name}" for name in files),
    )


def files_of(gpu_type: str) -> list[str]:
    """Returns the shipped files that describe a type such as ``a100`` or ``nvidia_a100-sxm4-80gb``."""
    words = set(re.split(r"[^a-z0-9]+", gpu_type.lower()))
    if words & {*OTHER_CARDS}:
        return []
    sizes = {match[1] for word in words if (match := re.fullmatch(r"(\d+)(?:gb?)?", word))}
    files = []
    for name in _of_gpus():
        model, _, size = name.partition("-")
        if words & {model, model.removesuffix("x")} and (not size or not sizes or size in sizes):
            files.append(name)
    return files


def _of_gpus() -> list[str]:
    return [name for name in shipped() if not name.startswith(OF_CPUS)]


def _listed(names: Collection[str]) -> str:
    *most, last = names
    if not most:
        return last
    return f"{', '.join(most)} or {last}"


def recognized(gpu: str) -> Machine | None:
    """Returns the shipped machine whose device is called ``gpu``; None if there is none.

    Variants of a chip have different rates and count as different devices: ``NVIDIA H100 PCIe`` is not ``NVIDIA H100
    80GB HBM3``.
    """
    words = words_of(gpu)
    machines = (read_machine(name) for name in shipped())
    return next((machine for machine in machines if words_of(machine.device) == words), None)
