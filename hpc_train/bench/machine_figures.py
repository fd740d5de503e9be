"""Makes the figures of a machine file from what ``bench machine`` measured. No torch.

What was not measured, such as the power, the rate of fp8 and with one node the fabric, keeps the number of the shipped
file of the same GPU; without such a file it is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_train.planner.machine import NAMES, OPTIONAL, Figure, Machine, read_machine, shipped
from hpc_train.train.watch.peak_rates import chip, peak_flops

PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
_FP8 = ("fp8_flops", "fp8_share")
ALIKE = 0.15  # relative difference of the memory of devices that are the same
_ASSUMED = {
    "fabric_bytes_per_s": (1.25e9, "10 Gbit/s Ethernet, which the ranks of a node share"),
    "fabric_latency_s": (5e-5, "an estimate for Ethernet"),
    "node_bytes_per_s": (10e9, "an estimate; the node has one device"),
    "node_latency_s": (2e-5, "an estimate; the node has one device"),
    "allocator_share": (0.05, "an estimate; it depends on the training"),
    "overlap_share": (0.3, "that of the A100 and the H100; on CPUs nothing overlaps"),
}


def fit_rate(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the rate R and the operations H in ``seconds = (operations + H) / R``: H run at half of the rate.

    This is the least-squares fit of the relative errors; a negative H becomes 0.

    Args:
        times: the operations and the seconds of at least two products of different sizes.
    """
    rows = [(flops / seconds, 1 / seconds) for flops, seconds in times]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
    per_flop, fixed = (a * bb - b * ab) / (aa * bb - ab * ab), (b * aa - a * ab) / (aa * bb - ab * ab)
    if fixed < 0 or per_flop <= 0:
        return aa / a, 0.0
    return 1 / per_flop, fixed / per_flop


def same_device(device: str, memory_bytes: float) -> Machine | None:
    """Returns the shipped machine with the GPU ``device``, which has about ``memory_bytes``; None if there is none."""
    for name in shipped():
        machine = read_machine(name)
        alike = abs(machine.rates.memory_bytes / memory_bytes - 1) < ALIKE
        if alike and chip(machine.device) == chip(device) and not machine.rates.cores:
            return machine
    return None


def machine_of(result: Mapping[str, Any], cores: int, name: str, source: str) -> Machine:
    """Returns the machine that ``result`` describes.

    Args:
        result: what ``hpc_train.bench.machine_worker`` wrote.
        cores: the cores of a node without GPUs, and 0 with GPUs.
        source: the host, the date and the software of the measurement.
    """
    rates: dict[str, float] = dict(result["figures"])
    peaks = _peaks(result, rates, source)
    peak = peaks[f"{result['precision']}_flops"].value
    measured = {key: value for key, value in rates.items() if key in NAMES and key not in peaks} | {
        "devices_per_node": result["ranks_per_node"],
        "matmul_share": min(1.0, rates["product_flops"] / peak),
        "attention_share": min(1.0, rates["attention_flops"] / peak),
        "cores": cores,
    }
    like = None if cores else same_device(result["device"], rates["memory_bytes"])
    figures = {**OPTIONAL, **_not_measured(like), **peaks}
    figures |= {key: Figure(float(value), "measured", source) for key, value in measured.items()}
    return Machine(name, f"{cores} CPU cores" if cores else str(result["device"]), {key: figures[key] for key in NAMES})


def _peaks(result: Mapping[str, Any], rates: Mapping[str, float], source: str) -> dict[str, Figure]:
    """Returns the peak by precision: that of the data sheet, or without one the rate of the largest product."""
    peaks = {}
    for precision in PRECISIONS:
        name = f"{precision}_flops"
        sheet = peak_flops(str(result["device"]), precision, units=result["units"])
        if sheet is None:
            peaks[name] = Figure(rates[name], "measured", f"{source}; the largest matrix product")
        else:
            peaks[name] = Figure(sheet, "table", "data sheet, without sparsity (hpc_train/train/watch/peak_rates.py)")
    return peaks


def _not_measured(like: Machine | None) -> dict[str, Figure]:
    assumed = {name: Figure(value, "assumed", source) for name, (value, source) in _ASSUMED.items()}
    if like is None:
        return assumed
    return assumed | {name: like.figures[name] for name in (*_ASSUMED, *_FP8)}
