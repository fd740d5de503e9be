"""How fast this rank multiplies matrices: what takes the place of a data sheet's peak on the CPU."""

from __future__ import annotations

import time

import torch


def measured_gemm_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 8) -> float:
    """FLOP/s of the fastest of ``repeats`` products of two ``size`` x ``size`` matrices: 2 ``size``³ / time."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2.0 * size**3 / best
