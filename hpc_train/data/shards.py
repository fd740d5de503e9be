"""Images in tar shards (the layout of webdataset), read at random by an index: no extraction, few files.

A directory holds ``train-000000.tar`` …, ``validation-000000.tar`` …, an index of each split and ``shards.json``, as
``python -m hpc_train prepare --images`` writes them. A member ``0000042.jpg`` is an image, ``0000042.cls`` its label.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import ShardsDataConfig
from hpc_train.data.images import Pictures

META = "shards.json"
MEND = "build the directory with: python -m hpc_train prepare --images DIRECTORY --out DIR"


def shard_file(directory: Path, split: str, number: int) -> Path:
    return directory / f"{split}-{number:06d}.tar"


def index_file(directory: Path, split: str) -> Path:
    """``[samples, 4]`` int64: number of the shard, first byte in it, bytes, and label of each image."""
    return directory / f"{split}.index.npy"


class ShardsDataset(Pictures):
    """The images of tar shards, augmented as those of class folders are.

    Holds paths and the mapped index. A shard is opened when a process first reads from it; reads give their own
    position, so processes that share an open file by a fork do not disturb each other.

    Raises:
        ConfigError: Pillow is missing, files are missing or damaged, or the classes are not those of the config.
    """

    def __init__(self, config: ShardsDataConfig, split: str, seed: int) -> None:
        directory = Path(config.path)
        meta = _read_json(directory / META)
        self.classes: list[str] = meta["classes"]
        if len(self.classes) != config.n_classes:
            raise ConfigError(
                f"{directory} has {len(self.classes)} classes, the config says {config.n_classes}",
                where="data.n_classes",
                mend=f"data.n_classes={len(self.classes)}",
            )
        self._index = _load_index(index_file(directory, split), meta["counts"][split])
        super().__init__(config, self._index[:, 3].copy(), split, seed)
        self._shards = [shard_file(directory, split, number) for number in range(int(self._index[:, 0].max()) + 1)]
        self._open_files: dict[int, int] = {}

    def source(self, index: int) -> str:
        shard, offset, size, _ = self._index[index].tolist()
        return f"{self._shards[shard]}, bytes {offset} to {offset + size}"

    def _file(self, index: int) -> io.BytesIO:
        shard, offset, size, _ = self._index[index].tolist()
        content = os.pread(self._descriptor(shard), size, offset)
        if len(content) != size:
            raise OSError(f"{self._shards[shard]} ends before byte {offset + size}: copy it again")
        return io.BytesIO(content)

    def _descriptor(self, shard: int) -> int:
        if shard not in self._open_files:
            self._open_files[shard] = os.open(self._shards[shard], os.O_RDONLY | os.O_CLOEXEC)
        return self._open_files[shard]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", where="data.path", mend=MEND) from error


def _load_index(path: Path, samples: int) -> Any:
    try:
        index = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", where="data.path", mend=MEND) from error
    if index.shape != (samples, 4) or not samples:
        raise ConfigError(f"{path} has the shape {index.shape}, not {(samples, 4)}", where="data.path", mend=MEND)
    return index
