"""Measures how well a rank uses its device: FLOPs utilization (MFU, HFU), GPU utilization and peak memory.

MFU = FLOP per sample x samples/s / (GPUs x peak), with the operations of one forward and backward pass (Chowdhery et
al. 2022, PaLM, arXiv:2204.02311, appendix B) and, in every precision, the peak rate in bf16. HFU also counts the
forward that activation checkpointing and a loss in chunks recompute, a third of forward plus backward (Narayanan et al.
2021, Megatron-LM, arXiv:2104.04473, section 5.1). Values under two other conventions are reported for comparison with
publications.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from hpc_train.config.schema import PrecisionConfig
from hpc_train.config.values import Recomputation
from hpc_train.data.dataset import Dataset
from hpc_train.data.tokens import PackedDataset
from hpc_train.layout.loss_chunks import LossForm
from hpc_train.machine.amd_gpus import NODES, PCI, AmdNode
from hpc_train.machine.gpus import DEVICES
from hpc_train.machine.health.gpu_health import Nvml
from hpc_train.models.model import Model
from hpc_train.train.watch.peak_rates import peak_flops

FORMULA = (
    "MFU = FLOP per sample x samples/s / peak in bf16, PaLM appendix B: 6 per parameter and token without the embedding"
    " table, attention not halved for the causal mask; HFU adds the recomputed forward"
)


@dataclass(frozen=True)
class Peak:
    """Holds peak rates in FLOP/s.

    Attributes:
        flops: the rate in bf16; without units for bf16, the rate in the precision of the run.
        of_precision: the rate in the precision of the run.
    """

    flops: float
    of_precision: float

    def times(self, devices: float) -> Peak:
        """Returns the rates of several devices together, or of a share of them."""
        return Peak(self.flops * devices, self.of_precision * devices)


@dataclass(frozen=True)
class FlopCount:
    """Holds the floating-point operations for one sample; None if the model does not define them.

    Attributes:
        model: forward and backward; matrix products without the embedding table, and full attention.
        recomputed: the forward that is recomputed in the backward pass.
        causal: ``model`` with only the half of the attention that a causal mask needs.
        with_embeddings: ``model`` plus 6 per token and parameter of the embedding table.
    """

    model: float
    recomputed: float | None
    causal: float | None
    with_embeddings: float | None

    @property
    def hardware(self) -> float | None:
        return None if self.recomputed is None else self.model + self.recomputed

    def plus(self, other: FlopCount, times: float) -> FlopCount:
        """Returns the sum with ``times`` the operations of ``other``; what one of them does not know is None."""

        def total(mine: float | None, others: float | None) -> float | None:
            return None if mine is None or others is None else mine + times * others

        return FlopCount(
            self.model + times * other.model,
            total(self.recomputed, other.recomputed),
            total(self.causal, other.causal),
            total(self.with_embeddings, other.with_embeddings),
        )

    def utilization(self, samples_per_s: float, peak: Peak) -> dict[str, float]:
        """Returns ``mfu``, ``mfu_of_precision`` and, if known, ``hfu``, ``mfu_causal`` and ``mfu_with_embeddings``."""
        counts = {
            "mfu": self.model,
            "hfu": self.hardware,
            "mfu_causal": self.causal,
            "mfu_with_embeddings": self.with_embeddings,
        }
        shares = {name: count * samples_per_s / peak.flops for name, count in counts.items() if count is not None}
        return shares | {"mfu_of_precision": self.model * samples_per_s / peak.of_precision}


def count_mean_flops(
    model: Model, dataset: Dataset, shape: tuple[int, ...], recomputation: Recomputation, loss: LossForm
) -> FlopCount:
    """Counts the operations of the mean sample of ``dataset``, whose inputs have ``shape``.

    Attention stays inside of packed documents, so a sequence counts as its documents: their squared lengths add up.
    """
    if not isinstance(dataset, PackedDataset):
        return count_flops(model, torch.empty((1, *shape), device="meta"), recomputation, loss)
    total = FlopCount(0.0, 0.0, 0.0, 0.0)
    for length, number in dataset.documents_per_sequence.items():
        total = total.plus(count_flops(model, torch.empty((1, length), device="meta"), recomputation, loss), number)
    return total


def count_flops(model: Model, inputs: Tensor, recomputation: Recomputation, loss: LossForm) -> FlopCount:
    """Counts the FLOPs of the complete model. ``inputs`` is a micro-batch of which only the shape is read."""
    recomputed: float | None = 0.0
    if recomputation.recomputes or loss.recomputes:
        recomputed = None
        blocks = model.forward_flops(inputs)
        if blocks is not None:  # layers that keep their products recompute nothing that PaLM's formula counts
            _, *layers, head = blocks
            recomputed = sum(flops for layer, flops in enumerate(layers) if recomputation.mode(layer) == "full")
            if loss.recomputes:
                recomputed += head
    total = model.flops_per_sample(inputs)
    causal = with_embeddings = None
    terms = model.flop_terms(inputs)
    if terms is not None:
        with_embeddings = total + terms.embedding
        if terms.masked is not None:
            causal = total - terms.masked
    return FlopCount(total, recomputed, causal, with_embeddings)


def describe_utilization(count: FlopCount, peak: Peak, source: str) -> dict[str, Any]:
    """Returns the terms of MFU and HFU for ``run.json`` and reports."""
    return {
        "flops_per_sample": count.model,
        "hardware_flops_per_sample": count.hardware,
        "peak_flops": peak.flops,
        "peak_flops_of_precision": peak.of_precision,
        "peak_source": source,
        "formula": FORMULA,
    }


def device_peak(device: torch.device, precision: str, tf32: bool) -> Peak | None:
    """Returns the peak rates of a GPU, or of a partition its share, according to the data sheet; None if unknown."""
    properties = torch.cuda.get_device_properties(device)
    units = properties.multi_processor_count
    of_precision = peak_flops(properties.name, precision, tf32, units)
    if of_precision is None:
        return None
    return Peak(peak_flops(properties.name, "bf16", units=units) or of_precision, of_precision)


def precision_notes(precision: PrecisionConfig, device: torch.device) -> list[str]:
    """Returns a note if a GPU that computes in bf16 computes matrix products in fp32 without TF32."""
    if device.type != "cuda" or precision.name != "fp32" or precision.tf32 or not torch.cuda.is_bf16_supported(False):
        return []
    peak = device_peak(device, precision.name, precision.tf32)
    rates = "several times more slowly than precision=bf16"
    if peak is not None:
        rates = f"at up to {peak.of_precision / 1e12:.0f} TFLOP/s; precision=bf16 reaches {peak.flops / 1e12:.0f}"
    return [f"precision=fp32 without TF32 computes matrix products {rates}; precision.tf32=true lies between"]


def peak_host_memory() -> int:
    """Returns the peak resident set in bytes (VmHWM). Unlike ``ru_maxrss``, it does not include the peak of the
    parent."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    kilobytes = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert kilobytes is not None, "the kernel always reports it for a living process"
    return 1024 * int(kilobytes[1])


def peak_device_memory(device: torch.device) -> int | None:
    """Returns the peak bytes that torch's allocator held on a GPU; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def device_memory(device: torch.device) -> int:
    """Returns the memory of a GPU in bytes; on the CPU, the memory of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


EVERY_S = 1.0  # seconds; NVML averages over up to a second


class GpuUtilization:
    """Samples the GPU utilization, the share of time in which a kernel ran, at most once a second.

    NVIDIA's driver reports it (NVML), or amdgpu in ``/sys``; there are no samples on the CPU or on a MIG slice.
    """

    def __init__(self, device: torch.device) -> None:
        self._read = _reader(device) if device.type == "cuda" else None
        self._shares: list[float] = []
        self._next = 0.0

    def look(self) -> None:
        """Takes a sample if one is due. The call is cheap enough for each step."""
        if self._read is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + EVERY_S
        share = self._read()
        if share is None:
            self._read = None
        else:
            self._shares.append(share)

    def take(self) -> float | None:
        """Returns the mean since the last ``take``, in [0, 1]; None without samples."""
        shares = self._shares
        self._shares = []
        return fmean(shares) if shares else None


def _reader(device: torch.device) -> Callable[[], float | None] | None:
    """Returns the function that reads the utilization of ``device``; None if the driver does not report it."""
    if torch.version.hip is not None:
        node = AmdNode.read(NODES, PCI, DEVICES)
        visible = node.visible(os.environ) if node is not None else ()
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= len(visible):
            return None
        return partial(busy_share, PCI / visible[index].pci)
    try:
        library = Nvml()
    except OSError:
        return None
    return partial(library.utilization, f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def busy_share(device: Path) -> float | None:
    """Returns ``gpu_busy_percent`` of an AMD GPU's directory in ``/sys``, in [0, 1]; None if it is missing."""
    try:
        return int((device / "gpu_busy_percent").read_text()) / 100
    except (OSError, ValueError):
        return None
