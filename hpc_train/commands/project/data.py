"""The data: noisy pictures of discs, squares and crosses. They are drawn when they are read; nothing is downloaded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

CLASSES = ("disc", "square", "cross")
SIZE = 16  # pixels


class Shapes(Dataset[tuple[Tensor, int]]):
    """Pictures of shapes at random places.

    Args:
        split: ``train`` or ``validation``; hpc_train passes it.
        samples: the pictures of the train split.
        noise: the standard deviation of the noise; a shape has the value 1 and the background 0.
    """

    def __init__(self, split: str, samples: int = 5_000, noise: float = 0.2) -> None:
        self.samples = samples if split == "train" else 500
        self.seed = 0 if split == "train" else 1  # the splits have different pictures
        self.noise = noise

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Returns a picture ``[1, SIZE, SIZE]`` and its class. An index always has the same picture."""
        random = np.random.default_rng((self.seed, index))
        label = int(random.integers(len(CLASSES)))
        radius = random.uniform(3, 6)
        center = random.uniform(radius, SIZE - radius, size=(2, 1, 1))
        down, right = np.abs(np.mgrid[:SIZE, :SIZE] - center)  # the distance of each pixel from the center
        if CLASSES[label] == "disc":
            shape = down**2 + right**2 < radius**2
        elif CLASSES[label] == "square":
            shape = np.maximum(down, right) < radius
        else:
            shape = (np.maximum(down, right) < radius) & (np.minimum(down, right) < radius / 3)
        picture = shape + self.noise * random.standard_normal((SIZE, SIZE))
        return torch.tensor(picture[np.newaxis], dtype=torch.float32), label
