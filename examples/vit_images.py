"""Pictures for a first training of a ViT: circles and squares, in one directory per class as your own would be.

python examples/vit_images.py pictures
python -m hpc_train +strategy=dp model=vit_tiny data=images data.path=pictures data.n_classes=2 data.image_size=32
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SIZE = 48


def draw(folder: Path, samples: dict[str, int]) -> None:
    """Writes ``folder/SPLIT/CLASS/NUMBER.png`` for the given number of pictures of each class."""
    random = np.random.default_rng(0)
    for split, number in samples.items():
        for shape in ("circle", "square"):
            target = folder / split / shape
            target.mkdir(parents=True, exist_ok=True)
            for index in range(number):
                picture(shape, random).save(target / f"{index}.png")


def picture(shape: str, random: np.random.Generator) -> Image.Image:
    """Returns one shape of random size, place and color on a noisy background."""
    image = Image.fromarray(random.integers(0, 80, (SIZE, SIZE, 3), dtype=np.uint8))
    side = int(random.integers(12, 36))
    left, top = (int(random.integers(0, SIZE - side)) for _ in range(2))
    color = tuple(int(value) for value in random.integers(100, 256, 3))
    pen = ImageDraw.Draw(image)
    (pen.ellipse if shape == "circle" else pen.rectangle)((left, top, left + side, top + side), fill=color)
    return image


if __name__ == "__main__":
    draw(Path(sys.argv[1]), {"train": 200, "validation": 20})
