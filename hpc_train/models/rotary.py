"""Rotates queries and keys by their positions (Su et al. 2021, arXiv:2104.09864).

Coordinate ``i`` of a head is paired with ``i + head_dim / 2``, like Llama on Hugging Face.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotaryScaling:
    """Scales rotary frequencies as Llama 3.1 does for sequences longer than those of the pre-training.

    A frequency with fewer than ``low_freq_factor`` periods in the original length is divided by ``factor``. One with
    more than ``high_freq_factor`` periods does not change, and those between are interpolated. The formula is that of
    Meta's ``apply_scaling`` (github.com/meta-llama/llama-models); the names are those of Hugging Face.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def factors(self, frequencies: Tensor) -> Tensor:
        """Returns the factor for each of ``frequencies``, which are in radians per position."""
        periods = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        ramp = (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ramp = ramp.clamp(0, 1)
        return ramp + (1 - ramp) / self.factor


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the cosine and sine of every position's angles.

    Args:
        positions: integers of any shape ``[...]``.
        head_dim: the width of a head, an even number.
        theta: the base of the frequencies ``theta ** (-2 i / head_dim)``.

    Returns:
        Two tensors ``[..., 1, head_dim]``, for all heads of a position; the sines of the first half are negated. They
        are float32 even under fp64, since the table is part of the model's definition.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    periods = theta**exponents
    angles = positions.unsqueeze(-1).float() / periods
    if scaling is not None:
        angles = angles * scaling.factors(1 / periods)
    cosine, sine = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
    return torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates ``heads`` ``[micro, seq, heads, head_dim]`` by the tables of ``rotary_tables`` for ``[seq]`` or
    ``[micro, seq]``.

    Half-precision heads are rotated in float32 and rounded once, since rounded tables would lose the relative positions
    in long sequences.
    """
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cosine + swapped * sine).to(heads.dtype)


class RotaryCache:
    """Caches the tables of positions ``0 … length - 1`` for the longest sequence seen on each device.

    The tables are not buffers of the model, so they need no memory while the model is on ``meta``, are not saved in
    checkpoints, and do not limit the sequence length. They are read outside compiled layers.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RotaryScaling | None = None) -> None:
        self._head_dim = head_dim
        self._theta = theta
        self._scaling = scaling
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the cosine and sine tables, each ``[length, 1, head_dim]``."""
        cached = self._tables.get(device)
        if cached is None or cached[0].shape[0] < length:
            with torch.inference_mode(False), torch.no_grad():
                cached = self.compute(torch.arange(length, device=device))
            self._tables[device] = cached
        return cached[0][:length], cached[1][:length]

    def compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tables of any ``positions``, as ``rotary_tables`` does."""
        return rotary_tables(positions, self._head_dim, self._theta, self._scaling)
