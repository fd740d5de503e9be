"""Reads and writes images in indexed tar shards with the layout of webdataset.

A directory contains ``train-000000.tar`` …, ``validation-000000.tar`` …, an index of each split and ``shards.json``.
The member ``0000042.jpg`` of a shard is an image and ``0000042.cls`` its label. The writer renames each finished shard
and writes ``shards.json`` last, which commits the directory; it does not change a directory that is complete.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.config.schema import ShardsDataConfig
from hpc_train.data.dataset import SPLITS
from hpc_train.data.images import DecodedImages, check_classes, class_names, image_files
from hpc_train.errors import UserError
from hpc_train.run.files import make_directory, write_json

META = "shards.json"
FIX = "build the directory with: python -m hpc_train prepare --images DIRECTORY --out DIR"


def shard_file(directory: Path, split: str, number: int) -> Path:
    return directory / f"{split}-{number:06d}.tar"


def index_file(directory: Path, split: str) -> Path:
    """Returns the index file, ``[samples, 4]`` int64: the shard, first byte, size and label of each image."""
    return directory / f"{split}.index.npy"


class ShardsDataset(DecodedImages):
    """Reads the images of tar shards, with the augmentations of ``ImagesDataset``.

    It holds paths and the memory-mapped index. A shard is opened when a process first reads from it. Each read passes
    its own offset, so forked processes that share an open file do not interfere.

    Raises:
        UserError: Pillow is missing, files are missing or damaged, or the classes do not match the config.
    """

    def __init__(self, config: ShardsDataConfig, split: str, seed: int) -> None:
        directory = Path(config.path)
        meta = _read_json(directory / META)
        self.classes: list[str] = meta["classes"]
        if len(self.classes) != config.n_classes:
            raise UserError(
                f"{directory} has {len(self.classes)} classes, but data.n_classes is {config.n_classes}",
                where="data.n_classes",
                fix=f"data.n_classes={len(self.classes)}",
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
            raise OSError(f"{self._shards[shard]} ends before byte {offset + size}; copy it again")
        return io.BytesIO(content)

    def _descriptor(self, shard: int) -> int:
        if shard not in self._open_files:
            self._open_files[shard] = os.open(self._shards[shard], os.O_RDONLY | os.O_CLOEXEC)
        return self._open_files[shard]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", where="data.path", fix=FIX) from error


def _load_index(path: Path, samples: int) -> Any:
    try:
        index = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", where="data.path", fix=FIX) from error
    if index.shape != (samples, 4) or not samples:
        raise UserError(f"{path} has shape {index.shape}, expected {(samples, 4)}", where="data.path", fix=FIX)
    return index


@dataclass(frozen=True)
class _Image:
    path: Path
    label: int
    size: int


def make_shards(source: Path, out: Path, shard_bytes: int, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Writes the shards of ``source`` (``train/CLASS/*`` and ``validation/CLASS/*``) to ``out``; returns the metadata.

    Args:
        shard_bytes: the bytes of images in a shard; the last image may exceed them.
        on_progress: called with the number of images done and the total.

    Raises:
        UserError: there are no images, or ``out`` contains shards of other images.
    """
    classes = class_names(source / "train")
    check_classes(source, "validation", classes, len(classes))
    images = {split: list(_images(source / split, classes)) for split in SPLITS}
    empty = [split for split in SPLITS if not images[split]]
    if empty:
        raise UserError(
            f"{source / empty[0]} contains no images", where="INPUT", fix="use the layout train/CLASS/IMAGE"
        )
    listing = [(str(i.path.relative_to(source)), i.size, shard_bytes) for split in SPLITS for i in images[split]]
    key = hashlib.blake2b(json.dumps(listing).encode(), digest_size=16).hexdigest()
    meta = {"classes": classes, "counts": {split: len(images[split]) for split in SPLITS}, "key": key}
    if (out / META).exists():
        if json.loads((out / META).read_text(encoding="utf-8")).get("key") == key:
            return meta
        raise UserError(
            f"{out} contains shards of other images", where="--out", fix="use another directory, or remove it"
        )
    make_directory(out, "--out")
    done, total = 0, len(listing)
    for split in SPLITS:
        rows: list[tuple[int, int, int, int]] = []
        for number, group in enumerate(_groups(images[split], shard_bytes)):
            rows += _write_shard(shard_file(out, split, number), number, group, first=len(rows))
            done += len(group)
            on_progress(done, total)
        np.save(index_file(out, split), np.array(rows, dtype=np.int64))
    write_json(out / META, meta)
    return meta


def _images(folder: Path, classes: list[str]) -> Iterator[_Image]:
    for label, name in enumerate(classes):
        for path in map(Path, image_files(folder / name)):
            yield _Image(path, label, path.stat().st_size)


def _groups(images: list[_Image], shard_bytes: int) -> Iterator[list[_Image]]:
    group: list[_Image] = []
    for image in images:
        group.append(image)
        if sum(each.size for each in group) >= shard_bytes:
            yield group
            group = []
    if group:
        yield group


def _write_shard(path: Path, number: int, images: list[_Image], first: int) -> list[tuple[int, int, int, int]]:
    """Writes one shard and returns its rows of the index; ``first`` is the number of the first image."""
    partial = path.with_suffix(".part")
    with tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, image in enumerate(images, first):
            _add(tar, f"{key:07d}{image.path.suffix.lower()}", image.path.read_bytes())
            _add(tar, f"{key:07d}.cls", str(image.label).encode())
    with tarfile.open(partial) as tar:
        positions = [(member.offset_data, member.size) for member in tar if not member.name.endswith(".cls")]
    partial.replace(path)
    return [(number, *position, image.label) for position, image in zip(positions, images, strict=True)]


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
