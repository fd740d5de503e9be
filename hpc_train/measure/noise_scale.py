"""The gradient noise scale: how large a global batch is worth its computing. No torch.

McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, appendix A.1: a gradient over B samples is the true gradient G
plus noise of variance tr(S) / B, so the squared norms at two batch sizes give both without bias:

    |G|^2 = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
    tr(S) = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)

and the simple noise scale is tr(S) / |G|^2, in samples. At that batch twice the steps of the largest batches and twice
the samples of the smallest ones are needed; it grows while the loss falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class NoiseScale:
    """``samples`` is None where the noise hides the gradient: more estimates are needed, or a larger big batch."""

    gradient: float  # |G|^2
    noise: float  # tr(S)
    samples: float | None


def noise_scale(small: Sequence[float], big: Sequence[float], small_size: int, big_size: int) -> NoiseScale:
    """From squared gradient norms at two batch sizes; numerator and denominator are averaged apart.

    Args:
        small: at ``small_size`` samples; any number of them.
    """
    of_small, of_big = fmean(small), fmean(big)
    gradient = (big_size * of_big - small_size * of_small) / (big_size - small_size)
    noise = (of_small - of_big) / (1 / small_size - 1 / big_size)
    return NoiseScale(gradient, noise, noise / gradient if gradient > 0 and noise > 0 else None)
