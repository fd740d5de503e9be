"""Reads images with Pillow from one directory per class, upright and without transparency, and augments them.

Random crops and flips are computed in numpy as a function of seed, epoch and sample index.
"""

from __future__ import annotations

import importlib
import io
import math
import os
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hpc_train.config.import_path import install_extra
from hpc_train.config.schema import ImagesDataConfig, ShardsDataConfig
from hpc_train.data.dataset import Array, Dataset, PixelScale, Sample, hash_of
from hpc_train.data.files import FIX, check_classes, class_names, image_names
from hpc_train.errors import UserError

MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32).reshape(3, 1, 1)  # means of ImageNet's pixels in [0, 1]
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32).reshape(3, 1, 1)
MODES = {1: "L", 3: "RGB"}


class DecodedImages(Dataset):
    """Decodes and augments images; subclasses define where their files are.

    Inputs are ``[channels, image_size, image_size]`` uint8, which ``scale`` normalizes per channel. A training image is
    a random crop that is mirrored with probability 1/2; a validation image is the square in the middle. ``labels``
    holds the int64 label of each image, and ``classes``, which subclasses set first, the name of each label. Raises
    UserError if Pillow is missing, or the number of channels is invalid.
    """

    classes: list[str]

    def __init__(self, config: ImagesDataConfig | ShardsDataConfig, labels: Array, split: str, seed: int) -> None:
        self._bilinear = pillow().Resampling.BILINEAR
        if config.channels not in MODES:
            raise UserError(
                f"data.channels is {config.channels}, but must be 1 or 3",
                where="data.channels",
                fix="1 (gray) or 3 (RGB)",
            )
        self.labels = labels
        if split == "train":
            counts = np.bincount(labels, minlength=len(self.classes))
            empty = [name for name, count in zip(self.classes, counts, strict=True) if count == 0]
            if empty:
                listed = ", ".join(empty[:5]) + (" ..." if len(empty) > 5 else "")
                self.notice = f"{len(empty)} of {len(self.classes)} classes have no training images: {listed}"
        self._augment = config.augment and split == "train"
        if config.channels == 3:
            self.scale = pixel_scale(MEAN, STD)
        else:
            self.scale = pixel_scale(MEAN.mean(), STD.mean())
        self.decoder = config.decoder
        self.size = config.image_size
        self.channels = config.channels
        self._seed = seed

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        return hash_of(self.labels)

    @abstractmethod
    def file(self, index: int) -> str | BinaryIO:
        """Returns the path of an image, or its bytes as a file."""

    def crop(self, index: int, epoch: int, width: int, height: int) -> Crop:
        """Returns the crop of an image of this size in one epoch; every decoder computes it."""
        if not self._augment:
            return Crop(center_box(width, height), False)
        random = generator(self._seed, epoch, index)
        return Crop(random_box(width, height, random), random.random() < 0.5)

    def sample(self, index: int, epoch: int) -> Sample:
        decoded = open_image(self.file(index), self.source(index), MODES[self.channels])
        crop = self.crop(index, epoch, *decoded.size)
        scaled = decoded.resize((self.size, self.size), self._bilinear, box=crop.box)
        pixels = np.asarray(scaled).reshape(self.size, self.size, self.channels).transpose(2, 0, 1)
        if crop.mirrored:
            pixels = pixels[..., ::-1]
        return Sample(inputs=np.ascontiguousarray(pixels), targets=self.labels[index])


class ImagesDataset(DecodedImages):
    """Reads the images of class directories; the label is the index of the class in the sorted names; raises UserError
    if Pillow is missing, directories are missing or empty, or the classes do not match the config."""

    def __init__(self, config: ImagesDataConfig, split: str, seed: int) -> None:
        root = Path(config.path)
        self.classes = class_names(root / "train")
        check_classes(root, split, self.classes, config.n_classes)
        self._folders = [root / split / name for name in self.classes]
        self._names = NameList(image_names(folder) for folder in self._folders)
        labels = np.repeat(np.arange(len(self.classes), dtype=np.int64), self._names.counts)
        super().__init__(config, labels, split, seed)
        if not len(labels):
            raise UserError(f"{root / split} contains no images", where="data.path", fix=FIX)

    def fingerprint(self) -> str:
        return hash_of(self.classes, self.labels, *self._names.parts)

    def source(self, index: int) -> str:
        return self.file(index)

    def file(self, index: int) -> str:
        return f"{self._folders[int(self.labels[index])]}{os.sep}{self._names[index]}"


class NameList:
    """Holds names in one piece of memory without Python objects, so that forked loader processes share its pages.
    ``counts`` holds the number of names of each group."""

    def __init__(self, groups: Iterable[list[str]]) -> None:
        texts = []
        ends = [np.zeros(1, np.int64)]
        size = 0
        for names in groups:
            encoded = [os.fsencode(name) for name in names]
            texts.append(b"".join(encoded))
            ends.append(np.cumsum([len(encoded_name) for encoded_name in encoded], dtype=np.int64) + size)
            size += len(texts[-1])
        self.counts = [len(group_ends) for group_ends in ends[1:]]
        self._text = b"".join(texts)
        self._ends = np.concatenate(ends)

    @property
    def parts(self) -> tuple[bytes, Array]:
        """Returns the bytes of all names and the start of each name, for a hash."""
        return self._text, self._ends

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self._text[self._ends[index] : self._ends[index + 1]])


def pixel_scale(mean: Array, std: Array) -> PixelScale:
    return PixelScale(tuple(mean.ravel().tolist()), tuple(std.ravel().tolist()))


Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels


class Crop(NamedTuple):
    """Describes the part of an upright image that a sample shows, and whether it is mirrored left to right."""

    box: Box
    mirrored: bool


def generator(seed: int, epoch: int, index: int, *purpose: int) -> np.random.Generator:
    """Returns the random generator of one sample in one epoch, which is the same in every process.

    The augmentation of images passes no ``purpose``; every other use passes a distinct positive number and gets
    independent random numbers.
    """
    return np.random.default_rng((seed & 0xFFFFFFFFFFFFFFFF, epoch, index, *purpose))


def flip(pixels: Array, random: np.random.Generator) -> Array:
    """Mirrors ``[..., width]`` left to right with probability 1/2."""
    if random.random() < 0.5:
        return pixels[..., ::-1]
    return pixels


def shifted_crop(pixels: Array, padding: int, random: np.random.Generator) -> Array:
    """Pads ``[channels, height, width]`` with zeros and crops the old size at a random position (He et al. 2015)."""
    _, height, width = pixels.shape
    padded = np.pad(pixels, ((0, 0), (padding, padding), (padding, padding)))
    top, left = random.integers(0, 2 * padding + 1, size=2)
    return padded[:, top : top + height, left : left + width]


def random_box(width: int, height: int, random: np.random.Generator) -> Box:
    """Returns a box of 8 to 100 % of the area with an aspect ratio of 3/4 to 4/3 (Szegedy et al. 2015)."""
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
    """Returns the square in the middle with ``share`` of the shorter side."""
    side = max(1, round(min(width, height) * share))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


_ORIENTATION, _BITS, _PHOTOMETRIC = 0x0112, 0x0102, 0x0106  # tags of EXIF and TIFF
_WHITE_IS_ZERO = 0  # a value of _PHOTOMETRIC
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def pillow() -> Any:
    """Returns the module ``PIL.Image``; raises UserError if it is not installed."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise UserError(
            "data=images needs Pillow, which is not installed", where="data.kind", fix=install_extra("images")
        ) from error


def open_image(file: str | BinaryIO, name: str, mode: str) -> Any:
    """Returns the image of a file as a Pillow image in ``mode``, L or RGB.

    - 16-bit values are scaled to 8 bits.
    - The image is turned as its EXIF orientation says.
    - Transparent pixels are blended with white.

    Raises UserError if the pixels are integers of 32 bits, floats or LAB colors.

    Args:
        name: the name of the file, for messages.
    """
    library = pillow()
    with library.open(file) as image:
        check_pixels(image, name)
        image.load()
        turn = _TURNS.get(orientation(image))
        decoded = _without_transparency(_in_8_bits(image)).convert(mode)
    if turn is None:
        return decoded
    return decoded.transpose(getattr(library.Transpose, turn))


def check_pixels(image: Any, name: str) -> None:
    """Raises UserError if the pixels of an opened image have no 8-bit equivalent; reads no pixels."""
    if image.mode not in ("F", "I", "LAB") or _is_deep(image):
        return
    content = {"F": "floats", "I": "32-bit integers", "LAB": "LAB colors"}[image.mode]
    raise UserError(
        f"{name} contains {content}, whose conversion to 8 bits is not defined",
        where="data.path",
        fix="convert it to an 8-bit or 16-bit image, or read it with data=custom",
    )


def check_content(content: bytes, name: str) -> None:
    """Checks the pixels of a file as ``check_pixels``; accepts a file that is not an image, since reading it fails
    later."""
    try:
        image = pillow().open(io.BytesIO(content))
    except OSError:
        return
    check_pixels(image, name)


def _is_deep(image: Any) -> bool:
    """Returns whether the pixels are gray with more than 8 bits; Pillow reads some 16-bit files as 32-bit integers."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _in_8_bits(image: Any) -> Any:
    if not _is_deep(image):
        return image
    tags = getattr(image, "tag_v2", {})  # only a TIFF has them
    highest = 2 ** tags.get(_BITS, (16,))[0] - 1
    pixels = np.asarray(image)
    values = pixels.astype(np.float64) * (255 / highest)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        values = 255 - values
    values[pixels == image.info.get("transparency", -1)] = 255  # white, as other transparent pixels
    return pillow().fromarray(np.rint(values).astype(np.uint8))


def _without_transparency(image: Any) -> Any:
    if not image.has_transparency_data:
        return image
    colors = image.convert("RGBA")
    return pillow().alpha_composite(pillow().new("RGBA", colors.size, "white"), colors)


def orientation(image: Any) -> int:
    """Returns the EXIF orientation; 1, upright, if there is none or it cannot be read."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # Pillow raises arbitrary exceptions for damaged metadata, in spite of which the pixels are read
        return 1
