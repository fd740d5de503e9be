"""Lists the peak FLOP/s of GPUs by the names that ``torch.cuda.get_device_name``, ``nvidia-smi`` and HIP report.

The rates are from the vendors' data sheets, without sparsity. For bf16 and fp16, they are the rates of the tensor
(matrix) cores with accumulation in fp32, as in torch; for fp32, the rates without TF32, whose rate is half the rate of
bf16; for fp64, the rates of the fastest units. If a sheet gives only rates with sparsity, the table has half of them. A
name that is not in the table has no rate: variants with the same number differ by up to half (``H100 PCIe``, ``RTX 4090
Laptop GPU``), and a MIG slice or a vGPU is a part of a card. A partition of an MI300 (DPX, TPX, QPX or CPX mode) has
the name of the full GPU; the number of its compute units determines its share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class PeakRates:
    """The peak rates of one device in 1e12 FLOP/s. None means that the device does not support the type, or no sheet
    states the rate."""

    bf16: float | None
    fp16: float | None
    fp32: float
    fp64: float
    has_tf32: bool = True


def _tensor(half: float, fp32: float, fp64: float) -> PeakRates:
    return PeakRates(half, half, fp32, fp64)


def _without_bf16(fp16: float, fp32: float, fp64: float) -> PeakRates:
    return PeakRates(None, fp16, fp32, fp64, has_tf32=False)


def _without_tf32(half: float, fp32: float, fp64: float) -> PeakRates:
    return PeakRates(half, half, fp32, fp64, has_tf32=False)


# the keys are the words of the name that distinguish models (see words_of)
RATES: dict[str, PeakRates | None] = {
    # nvidia.com/data-center/gb300-nvl72, gb200-nvl72: 72 GPUs; hgx: HGX B300 and HGX B200, 8 GPUs (2026)
    "GB300": _tensor(2500, 80, 1.39),
    "GB200": _tensor(2500, 80, 40),
    "B300": _tensor(2250, 75, 1.25),
    "B200": _tensor(2250, 75, 37),
    # data sheets of the GH200 (2024), H200 (2024), H100 (2023) and H100 NVL; the H800 differs in fp64 and NVLink
    "GH200": _tensor(989.4, 66.9, 66.9),
    "H200": _tensor(989.4, 66.9, 66.9),
    "H200 NVL": _tensor(835.5, 60, 60),
    "H100": _tensor(989.4, 66.9, 66.9),
    "H100 PCIE": _tensor(756, 51, 51),
    "H100 NVL": _tensor(835.5, 60, 60),
    "H100 64GB": None,  # built for one site; no data sheet
    "H800": _tensor(989.4, 66.9, 1),
    # data sheets of the A100 (2022), A800, A40, A30, A16, A10 and A2; AWS for the A10G
    "A100": _tensor(312, 19.5, 19.5),
    "A100 PCIE": _tensor(312, 19.5, 19.5),
    "A100 64GB": None,  # built for one site, with more cores
    "A800": _tensor(312, 19.5, 19.5),
    "A800 PCIE": _tensor(312, 19.5, 19.5),
    "A40": _tensor(149.7, 37.4, 0.58),
    "A30": _tensor(165, 10.3, 10.3),
    "A16": _tensor(17.9, 4.5, 0.07),  # one of the four GPUs of the card
    "A10": _tensor(125, 31.2, 0.49),
    "A10G": _tensor(70, 35, 0.55),
    "A2": _tensor(18, 4.5, 0.07),
    # data sheets of the L40S, L40 and L4 (2023)
    "L40S": _tensor(362, 91.6, 1.43),
    "L40": _tensor(181, 90.5, 1.41),
    "L4": _tensor(121, 30.3, 0.47),
    # data sheets of the V100 (2020), V100S and T4, Turing whitepaper for the Quadro RTX; none computes in bf16
    "V100": _without_bf16(125, 15.7, 7.8),
    "V100 PCIE": _without_bf16(112, 14, 7),
    "V100S PCIE": _without_bf16(130, 16.4, 8.2),
    "T4": _without_bf16(65, 8.1, 0.25),
    "QUADRO RTX 8000": _without_bf16(130.5, 16.3, 0.51),
    "QUADRO RTX 6000": _without_bf16(130.5, 16.3, 0.51),
    # data sheets of the workstation cards: tensor rates with sparsity in fp4 (RTX PRO), fp8 (Ada) and fp16 (RTX A)
    "RTX PRO 6000 BLACKWELL WORKSTATION EDITION": _tensor(500, 125, 1.95),
    "RTX PRO 6000 BLACKWELL SERVER EDITION": _tensor(500, 120, 1.88),
    "RTX PRO 6000 BLACKWELL MAX-Q WORKSTATION EDITION": _tensor(438.9, 110, 1.72),
    "RTX 6000 ADA": _tensor(364.2, 91.1, 1.42),
    "RTX 5000 ADA": _tensor(261.1, 65.3, 1.02),
    "RTX 4500 ADA": _tensor(158.5, 39.6, 0.62),
    "RTX 4000 ADA": _tensor(106.9, 26.7, 0.42),
    "RTX 2000 ADA": _tensor(48, 12, 0.19),
    "RTX A6000": _tensor(154.8, 38.7, 0.6),
    "RTX A5500": _tensor(136.4, 34.1, 0.53),
    "RTX A5000": _tensor(111.1, 27.8, 0.43),
    "RTX A4500": _tensor(94.6, 23.7, 0.37),
    "RTX A4000": _tensor(76.7, 19.2, 0.3),
    "RTX A2000": _tensor(31.9, 8, 0.12),
    "RTX A1000": _tensor(26.9, 6.7, 0.1),
    "RTX A400": _tensor(10.8, 2.7, 0.04),
    # whitepapers of RTX Blackwell, Ada and GA102: with accumulation in fp32, half of the rate that is advertised
    "RTX 5090": _tensor(209.5, 104.8, 1.64),
    "RTX 4090": _tensor(165.2, 82.6, 1.29),
    "RTX 3090": _tensor(71, 35.6, 0.56),
    # AMD's data sheets; the matrix cores compute fp32 and fp64 in full precision. MI250 and MI250X are two devices.
    "MI355X": _without_tf32(2516.6, 157.3, 78.6),
    "MI350X": _without_tf32(2306.9, 144.2, 72.1),
    "MI325X": _tensor(1307.4, 163.4, 163.4),
    "MI300X": _tensor(1307.4, 163.4, 163.4),
    "MI300A": _tensor(980.6, 122.6, 122.6),
    "MI250X": _without_tf32(191.5, 47.9, 47.9),
    "MI250X / MI250": _without_tf32(191.5, 47.9, 47.9),
    "MI250": _without_tf32(181, 45.3, 45.3),
    "MI210": _without_tf32(181, 45.3, 45.3),
    "MI100": PeakRates(92.3, 184.6, 46.1, 11.5, has_tf32=False),
}
# the number of compute units of the GPUs that can be partitioned, from the same data sheets
UNITS = {"MI300A": 228, "MI300X": 304, "MI325X": 304, "MI350X": 256, "MI355X": 256}
# words that do not distinguish models: vendor, family, socket, kind of memory, air-cooled or virtual variant
_SAME = re.compile(r"NVIDIA|AMD|INSTINCT|TESLA|GEFORCE|SXM\d?|HBM\d\w?|OAM|AC|VF|GENERATION")
_SIZE = re.compile(r"\d+GB?")


def peak_flops(device_name: str, precision: str, tf32: bool = False, units: int | None = None) -> float | None:
    """Returns the peak FLOP/s of one device under a precision of the config; None if unknown.

    Args:
        device_name: the name that ``torch.cuda.get_device_name`` returns.
        precision: ``bf16``, ``fp16``, ``fp32`` or ``fp64``.
        tf32: whether products in fp32 use TF32 if the device supports it.
        units: the number of compute units or multiprocessors of the device; None assumes a full GPU.
    """
    words = words_of(device_name)
    chip = " ".join(word for word in words if not _SIZE.fullmatch(word))
    rates = RATES.get(" ".join(words), RATES.get(chip))
    whole = UNITS.get(chip)
    if rates is None:
        return None
    by_precision = {"bf16": rates.bf16, "fp16": rates.fp16, "fp32": rates.fp32, "fp64": rates.fp64}
    rate = by_precision.get(precision)
    if tf32 and precision == "fp32" and rates.has_tf32 and rates.bf16 is not None:
        rate = rates.bf16 / 2
    share = 1.0 if whole is None or units is None else min(1.0, units / whole)
    return None if rate is None else rate * share * 1e12


def words_of(device_name: str) -> list[str]:
    """Returns the words that distinguish models: A100, PCIE and 80GB for ``NVIDIA A100-PCIE-80GB``."""
    text = device_name.upper().replace("MAX-Q", "MAX_Q").replace("-", " ").replace("MAX_Q", "MAX-Q")
    return [word for word in text.split() if not _SAME.fullmatch(word)]
