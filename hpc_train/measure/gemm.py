"""How fast this rank multiplies matrices: what takes the place of a data sheet's peak on the CPU."""

from __future__ import annotations

import time

import torch


def measured_gemm_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, seconds: float = 1.0) -> float:
    """FLOP/s of the fastest product of two ``size`` x ``size`` matrices: 2 ``size``³ / time.

    Repeated for ``seconds``, so that another process that takes the cores for a moment does not lower it.
    """
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    until = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < until:
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2.0 * size**3 / best
