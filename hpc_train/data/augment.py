"""Random crops and flips that are a function of (seed, epoch, sample index), in numpy."""

from __future__ import annotations

import math

import numpy as np

from hpc_train.data.dataset import Array

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels


def generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random stream of one sample in one epoch, whichever process draws it."""
    return np.random.default_rng((seed & 0xFFFFFFFFFFFFFFFF, epoch, index))


def flip(pixels: Array, random: np.random.Generator) -> Array:
    """Mirrors ``[..., width]`` left to right, half of the time."""
    return pixels[..., ::-1] if random.random() < 0.5 else pixels


def shifted_crop(pixels: Array, padding: int, random: np.random.Generator) -> Array:
    """Pads ``[channels, height, width]`` by zeros and cuts the old size out at a random place (He et al. 2015)."""
    _, height, width = pixels.shape
    padded = np.pad(pixels, ((0, 0), (padding, padding), (padding, padding)))
    top, left = random.integers(0, 2 * padding + 1, size=2)
    return padded[:, top : top + height, left : left + width]


def random_box(width: int, height: int, random: np.random.Generator) -> Box:
    """A box of 8 to 100 % of the area and a ratio of sides of 3/4 to 4/3 (Szegedy et al. 2015, "Inception crop")."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left = int(random.integers(0, width - box_width + 1))
            top = int(random.integers(0, height - box_height + 1))
            return left, top, left + box_width, top + box_height
    return center_box(width, height, share=1.0)


def center_box(width: int, height: int, share: float = 0.875) -> Box:
    """The square in the middle whose side is ``share`` of the shorter side."""
    side = max(1, round(min(width, height) * share))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def resize(pixels: Array, size: int) -> Array:
    """``[channels, height, width]`` as float32 ``[channels, size, size]``, bilinear, edges at the same place."""
    for axis in (1, 2):
        pixels = _stretch(pixels.astype(np.float32), size, axis)
    return pixels


def _stretch(pixels: Array, size: int, axis: int) -> Array:
    old = pixels.shape[axis]
    centres = np.clip((np.arange(size, dtype=np.float32) + 0.5) * old / size - 0.5, 0, old - 1)
    lower = np.floor(centres).astype(np.int64)
    upper = np.minimum(lower + 1, old - 1)
    share = (centres - lower).reshape(-1, *[1] * (pixels.ndim - 1 - axis))
    return pixels.take(lower, axis) * (1 - share) + pixels.take(upper, axis) * share
