"""Peak arithmetic rates of GPUs, dense, from NVIDIA's data sheets: the denominator of model FLOPs utilisation.

MFU = flops_per_sample x samples per second / (GPUs x peak rate) (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

# Part of the device's name -> FLOP/s on tensor cores in bf16 and fp16, FLOP/s outside them in fp32, and in fp64.
# The first name that fits counts, so the longer stand before the shorter.
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
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device under a precision of the config; None where it is not known.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.
    """
    for name, half, single, double in _RATES:
        if name in device_name:
            return {"bf16": half, "fp16": half, "fp32": single, "fp64": double}.get(precision)
    return None
