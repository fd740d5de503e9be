"""Reads CIFAR-100 from its official directory for Python and verifies the md5 of every file.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009); https://www.cs.toronto.edu/~kriz/cifar.html.
The files are pickles. After the verification, an unpickler that only accepts numpy arrays reads them.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hpc_train.config.schema import CIFAR100DataConfig
from hpc_train.data.dataset import Array, Dataset, Sample
from hpc_train.data.images import flip, generator, pixel_scale, shifted_crop
from hpc_train.errors import UserError

OFFICIAL_MD5 = {
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}
MEAN = np.array([0.5071, 0.4865, 0.4409], dtype=np.float32).reshape(3, 1, 1)  # means of the training pixels in [0, 1]
STD = np.array([0.2673, 0.2564, 0.2762], dtype=np.float32).reshape(3, 1, 1)
_SIZE = 32
_FOLDER = "cifar-100-python"
_FIX = (
    "fetch https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz, unpack it, "
    "and set data.path to the folder cifar-100-python"
)
_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("_codecs", "encode"),
}


class _NumpyOnly(pickle.Unpickler):
    """Loads only the classes of a pickled numpy array and rejects all others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the file refers to {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_file(path: Path, md5: str) -> dict[str, Any]:
    """Returns the dict in one official file; raises UserError if the file is missing, has another md5, or contains
    objects other than arrays, lists and strings."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", where="data.path", fix=_FIX) from error
    checksum = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if checksum != md5:
        raise UserError(f"{path} has md5 {checksum}, but the official file has {md5}", where="data.path", fix=_FIX)
    try:
        return _NumpyOnly(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:
        raise UserError(f"{path} is not a file of CIFAR-100: {error}", where="data.path", fix=_FIX) from error


class CIFAR100Dataset(Dataset):
    """Holds the 50,000 training or 10,000 test images with fine labels; the test images are the validation set.

    Inputs are ``[3, image_size, image_size]`` pixels, uint8 or if resized float32, which ``scale`` normalizes per
    channel. Training images are shifted by up to four pixels and randomly mirrored. Each file must have the MD5 sum
    that ``md5`` lists. Raises UserError if a file is missing or has another sum, or the config has another number of
    channels or classes.
    """

    def __init__(
        self, config: CIFAR100DataConfig, split: str, seed: int, md5: Mapping[str, str] = OFFICIAL_MD5
    ) -> None:
        for key, value, right in (("channels", config.channels, 3), ("n_classes", config.n_classes, 100)):
            if value != right:
                raise UserError(
                    f"data.{key} is {value}, but CIFAR-100 has {right}", where=f"data.{key}", fix=f"data.{key}={right}"
                )
        directory = Path(config.path)
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory", where="data.path", fix=_FIX)
        if (directory / _FOLDER).is_dir():
            directory = directory / _FOLDER
        name = "train" if split == "train" else "test"
        self.path = directory / name
        self.class_names: list[str] = read_file(directory / "meta", md5["meta"])["fine_label_names"]
        content = read_file(self.path, md5[name])
        self._pixels: Array = content["data"].reshape(-1, 3, _SIZE, _SIZE)
        self._labels = np.array(content["fine_labels"], dtype=np.int64)
        self.scale = pixel_scale(MEAN, STD)
        self._augment = config.augment and split == "train"
        self._image_size = config.image_size
        self._seed = seed

    def __len__(self) -> int:
        return len(self._labels)

    def sample(self, index: int, epoch: int) -> Sample:
        pixels = self._pixels[index]
        if self._augment:
            random = generator(self._seed, epoch, index)
            pixels = flip(shifted_crop(pixels, 4, random), random)
        pixels = np.ascontiguousarray(pixels)
        if self._image_size != _SIZE:
            size = (self._image_size, self._image_size)
            pixels = F.interpolate(torch.from_numpy(pixels).float().unsqueeze(0), size, mode="bilinear")[0].numpy()
        return Sample(inputs=pixels, targets=self._labels[index])

    def source(self, index: int) -> str:
        return str(self.path)
