"""Measures how well a rank uses its device: FLOPs utilisation (MFU, HFU), GPU utilisation and peak memory.

MFU = FLOP per sample x samples/s / (GPUs x peak), with the operations of one forward and backward pass (Chowdhery et
al. 2022, PaLM, arXiv:2204.02311, appendix B). HFU also counts the forward that activation checkpointing and a chunked
loss recompute, a third of forward and backward (Narayanan et al. 2021, Megatron-LM, arXiv:2104.04473, section 5.1).
Two other conventions are reported for comparison with other publications.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from hpc_train.config.schema import TrainConfig
from hpc_train.config.values import parse_recomputation
from hpc_train.models.model import Model

FORMULA = (
    "MFU = FLOP per sample x samples/s / peak, PaLM appendix B: 6 per parameter and token without the embedding table, "
    "attention not halved for the causal mask; HFU adds the recomputed forward"
)


@dataclass(frozen=True)
class FlopCount:
    """Holds the floating-point operations for one sample; None if the model does not define them.

    Attributes:
        model: forward and backward; matrix products without the embedding table, and full attention.
        recomputed: the forward that is recomputed in the backward pass.
        causal: ``model`` with only the half of the attention that a causal mask needs.
        with_embeddings: ``model`` plus 6 for each parameter of the embedding table and token.
    """

    model: float
    recomputed: float | None
    causal: float | None
    with_embeddings: float | None

    @property
    def hardware(self) -> float | None:
        return None if self.recomputed is None else self.model + self.recomputed

    def utilisation(self, samples_per_s: float, peak_flops: float) -> dict[str, float]:
        """Returns ``mfu`` and, if known, ``hfu``, ``mfu_causal`` and ``mfu_with_embeddings``."""
        counts = {
            "mfu": self.model,
            "hfu": self.hardware,
            "mfu_causal": self.causal,
            "mfu_with_embeddings": self.with_embeddings,
        }
        return {name: count * samples_per_s / peak_flops for name, count in counts.items() if count is not None}


def count_flops(model: Model, inputs: Tensor, train: TrainConfig) -> FlopCount:
    """Counts the operations of the unsplit model; only the shape of ``inputs``, a micro-batch, is read."""
    total = model.flops_per_sample(inputs)
    terms = model.flop_terms(inputs)
    return FlopCount(
        model=total,
        recomputed=_recomputed(model.block_flops(inputs), train),
        causal=total - terms.attention / 2 if terms is not None and terms.causal else None,
        with_embeddings=total + terms.embedding if terms is not None else None,
    )


def _recomputed(blocks: tuple[float, ...] | None, train: TrainConfig) -> float | None:
    """Returns the recomputed FLOPs, a third of forward and backward; kept products leave nothing that PaLM counts."""
    recomputation = parse_recomputation(train.activation_checkpointing)
    in_layers = recomputation.every > 0 and not recomputation.keep_products
    if not in_layers and train.loss_chunks == 1:
        return 0.0
    if blocks is None:
        return None
    _, *layers, head = blocks
    recomputed = [flops for layer, flops in enumerate(layers) if in_layers and recomputation.applies_to(layer)]
    return (sum(recomputed) + (head if train.loss_chunks > 1 else 0.0)) / 3


def describe_utilisation(count: FlopCount, peak_flops: float, source: str) -> dict[str, Any]:
    """Returns the terms of MFU and HFU for ``run.json`` and reports."""
    return {
        "flops_per_sample": count.model,
        "hardware_flops_per_sample": count.hardware,
        "peak_flops": peak_flops,
        "peak_source": source,
        "formula": FORMULA,
    }


# Dense peak rates from NVIDIA's and AMD's data sheets: part of the device's name, FLOP/s on tensor cores in bf16 and
# fp16, FLOP/s without tensor cores in fp32 and in fp64. The first match wins, so longer names come first. AMD's matrix
# cores compute fp32 and fp64 in full precision and count there, too; one device is half of an MI250 or MI250X.
_RATES: tuple[tuple[str, float, float, float], ...] = (
    ("GB200", 2500e12, 80e12, 40e12),
    ("B200", 2250e12, 80e12, 40e12),
    ("GH200", 989.4e12, 66.9e12, 66.9e12),
    ("H200", 989.4e12, 66.9e12, 66.9e12),
    ("H100 NVL", 835.5e12, 60e12, 60e12),
    ("H100 PCIe", 756e12, 51e12, 51e12),
    ("H100", 989.4e12, 66.9e12, 66.9e12),
    ("H800", 989.4e12, 66.9e12, 1e12),
    ("A100", 312e12, 19.5e12, 19.5e12),
    ("A800", 312e12, 19.5e12, 19.5e12),
    ("A40", 149.7e12, 37.4e12, 0.58e12),
    ("A30", 165e12, 10.3e12, 10.3e12),
    ("A10G", 70e12, 35e12, 0.55e12),
    ("A10", 125e12, 31.2e12, 0.49e12),
    ("L40S", 362e12, 91.6e12, 1.43e12),
    ("L40", 181e12, 90.5e12, 1.41e12),
    ("L4", 121e12, 30.3e12, 0.47e12),
    ("V100", 125e12, 15.7e12, 7.8e12),
    ("T4", 65e12, 8.1e12, 0.25e12),
    ("MI355X", 2516.6e12, 157.3e12, 78.6e12),
    ("MI350X", 2306.9e12, 144.2e12, 72.1e12),
    ("MI325X", 1307.4e12, 163.4e12, 163.4e12),
    ("MI300X", 1307.4e12, 163.4e12, 163.4e12),
    ("MI300A", 980.6e12, 122.6e12, 122.6e12),
    ("MI250X", 191.5e12, 47.9e12, 47.9e12),
    ("MI250", 181e12, 45.3e12, 45.3e12),
    ("MI210", 181e12, 45.3e12, 45.3e12),
)
_WITHOUT_TF32 = ("V100", "T4", "MI2")


def peak_flops(device_name: str, precision: str, tf32: bool = False) -> float | None:
    """Returns the peak FLOP/s of one device under a precision of the config; None if unknown.

    Args:
        device_name: the name that ``torch.cuda.get_device_name`` returns.
        tf32: whether fp32 uses TF32, whose rate is half that of bf16 where it exists.
    """
    for name, half, single, double in _RATES:
        if name in device_name:
            fp32 = half / 2 if tf32 and not name.startswith(_WITHOUT_TF32) else single
            return {"bf16": half, "fp16": half, "fp32": fp32, "fp64": double}.get(precision)
    return None


def peak_host_memory() -> int:
    """Returns the peak resident set in bytes (VmHWM), which unlike ``ru_maxrss`` does not include the parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None, "the kernel always reports it for a living process"
    return 1024 * int(found.group(1))


def peak_device_memory(device: torch.device) -> int | None:
    """Returns the peak bytes that torch's allocator held on a GPU; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


EVERY_S = 1.0  # seconds; NVML averages over up to a second
LIBRARY = "pynvml" if torch.version.hip is None else "amdsmi"  # which torch uses


class GpuUtilisation:
    """Samples the GPU utilisation, the share of time in which a kernel ran, at most once a second.

    There are no samples without a GPU, without NVML (AMD: amdsmi), or on a MIG slice.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" and find_spec(LIBRARY) is not None else None
        self._shares: list[float] = []
        self._next = 0.0

    def look(self) -> None:
        """Takes a sample if one is due; cheap enough to be called in each step."""
        if self._device is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_S
        try:
            self._shares.append(torch.cuda.utilization(self._device) / 100)
        except Exception as error:  # NVML's errors have no common base class
            print(f"cannot measure GPU utilisation: {type(error).__name__}: {error}")
            self._device = None

    def take(self) -> float | None:
        """Returns the mean since the last ``take``, in [0, 1]; None without samples."""
        shares = self._shares
        self._shares = []
        return fmean(shares) if shares else None
