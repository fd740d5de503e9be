"""Reads and writes images in indexed tar shards with the layout of webdataset.

A directory contains ``train-000000.tar`` …, ``validation-000000.tar`` …, an index of each split and ``shards.json``.
The member ``0000042.jpg`` of a shard is an image and ``0000042.cls`` its label. Until all shards are finished, the
directory ``.image-shards`` holds the index rows of each finished shard, with which an interrupted build continues.
``shards.json`` is written last and commits the directory; a directory that is complete is not changed.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.config.schema import ShardsDataConfig
from hpc_train.data.conversion import Builder, Progress, Report, run_jobs, sole_builder
from hpc_train.data.dataset import SPLITS, hash_of
from hpc_train.data.files import check_classes, class_names, image_names
from hpc_train.data.images import DecodedImages, check_content
from hpc_train.errors import UserError
from hpc_train.run.files import read_json, write_json

META = "shards.json"
_WORK, _KEY = ".image-shards", "key.json"
FIX = "build the directory with: python -m hpc_train prepare --images DIRECTORY --out DIR"


def shard_file(directory: Path, split: str, number: int) -> Path:
    return directory / f"{split}-{number:06d}.tar"


def index_file(directory: Path, split: str) -> Path:
    """Returns the index file, ``[samples, 4]`` int64: the shard, first byte, size and label of each image."""
    return directory / f"{split}.index.npy"


class ShardsDataset(DecodedImages):
    """Reads the images of tar shards, with the augmentations of ``ImagesDataset``.

    It holds paths and the memory-mapped index. A shard is opened when a process first reads from it. Each read passes
    its own offset, so forked processes that share an open file do not interfere. Raises UserError if Pillow is missing,
    files are missing or damaged, or the classes do not match the config.
    """

    def __init__(self, config: ShardsDataConfig, split: str, seed: int) -> None:
        directory = Path(config.path)
        try:
            meta = read_json(directory / META)
        except (OSError, ValueError) as error:
            raise UserError(f"{directory / META} cannot be read: {error}", where="data.path", fix=FIX) from error
        self.classes = meta["classes"]
        if len(self.classes) != config.n_classes:
            raise UserError(
                f"{directory} has {len(self.classes)} classes, but data.n_classes is {config.n_classes}",
                where="data.n_classes",
                fix=f"data.n_classes={len(self.classes)}",
            )
        path = index_file(directory, split)
        samples = meta["counts"][split]
        try:
            index = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}", where="data.path", fix=FIX) from error
        if index.shape != (samples, 4) or not samples:
            raise UserError(f"{path} has shape {index.shape}, expected {(samples, 4)}", where="data.path", fix=FIX)
        self._index = index
        super().__init__(config, self._index[:, 3].copy(), split, seed)
        self._shards = [shard_file(directory, split, number) for number in range(int(self._index[:, 0].max()) + 1)]
        self._open_files: dict[int, int] = {}

    def source(self, index: int) -> str:
        shard, offset, size, _ = self._index[index].tolist()
        return f"{self._shards[shard]}, bytes {offset} to {offset + size}"

    def file(self, index: int) -> io.BytesIO:
        shard, offset, size, _ = self._index[index].tolist()
        if shard not in self._open_files:
            self._open_files[shard] = os.open(self._shards[shard], os.O_RDONLY | os.O_CLOEXEC)
        content = os.pread(self._open_files[shard], size, offset)
        if len(content) != size:
            raise OSError(f"{self._shards[shard]} ends before byte {offset + size}; copy it again")
        return io.BytesIO(content)


@dataclass(frozen=True)
class _Image:
    path: str
    label: int
    size: int


@dataclass(frozen=True)
class _Shard:
    """Describes one shard and its place in the index of ``split``; ``first`` is the number of its first image."""

    out: Path
    split: str
    number: int
    first: int
    images: list[_Image]

    @property
    def rows(self) -> Path:
        """Returns the file with the rows of the index, which commits the shard."""
        return self.out / _WORK / f"{self.split}-{self.number:06d}.npy"


def make_shards(
    source: Path, out: Path, shard_bytes: int, workers: int, on_progress: Callable[[Progress, Progress], None]
) -> dict[str, Any]:
    """Writes the shards of ``source`` (``train/CLASS/*`` and ``validation/CLASS/*``) to ``out``; returns the metadata.

    A shard holds ``shard_bytes`` of images, which its last image may exceed. ``workers`` processes share the work.
    ``on_progress`` is called about once per second and at the end, with the progress and the total. Raises UserError if
    there are no images, ``out`` contains shards of other images, or another process writes there.
    """
    classes = class_names(source / "train")
    check_classes(source, "validation", classes, len(classes))
    images = {
        split: [
            _Image(str(path), label, path.stat().st_size)
            for label, name in enumerate(classes)
            for path in map((source / split / name).joinpath, image_names(source / split / name))
        ]
        for split in SPLITS
    }
    empty = [split for split in SPLITS if not images[split]]
    if empty:
        raise UserError(
            f"{source / empty[0]} contains no images", where="INPUT", fix="use the layout train/CLASS/IMAGE"
        )
    listing = [(os.path.relpath(i.path, source), i.size, shard_bytes) for split in SPLITS for i in images[split]]
    key = hash_of(listing)
    with sole_builder(out) as builder:
        for path in (out / META, out / _WORK / _KEY):
            if path.exists() and read_json(path).get("key") != key:
                raise UserError(
                    f"{out} contains shards of other images", where="--out", fix="use another directory, or remove it"
                )
        if not (out / META).exists():
            work = out / _WORK
            work.mkdir(exist_ok=True)
            write_json(work / _KEY, {"key": key})
            for path in work.glob("unfinished-*"):
                path.unlink()
            shards = [shard for split in SPLITS for shard in _shards(out, split, images[split], shard_bytes)]
            _write_missing(shards, workers, builder, on_progress)
            for split in SPLITS:
                rows = [np.load(shard.rows) for shard in shards if shard.split == split]
                np.save(index_file(out, split), np.concatenate(rows))
            builder.check()
            counts = {split: len(images[split]) for split in SPLITS}
            write_json(out / META, {"classes": classes, "counts": counts, "key": key})
        shutil.rmtree(out / _WORK, ignore_errors=True)
    return dict(read_json(out / META))


def _shards(out: Path, split: str, images: list[_Image], shard_bytes: int) -> Iterator[_Shard]:
    number = 0
    first = 0
    size = 0
    for end, image in enumerate(images, 1):
        size += image.size
        if size >= shard_bytes or end == len(images):
            yield _Shard(out, split, number, first, images[first:end])
            number = number + 1
            first = end
            size = 0


def _write_missing(
    shards: list[_Shard], workers: int, builder: Builder, on_progress: Callable[[Progress, Progress], None]
) -> None:
    missing = [shard for shard in shards if not shard.rows.exists()]
    total = _size(shards)
    left = _size(missing)

    def show(done: Progress) -> None:
        builder.check()
        on_progress(Progress(total.bytes - left.bytes + done.bytes, total.items - left.items + done.items), total)

    run_jobs(partial(_write_shard, builder=builder.number), missing, workers, show)


def _size(shards: list[_Shard]) -> Progress:
    images = [image for shard in shards for image in shard.images]
    return Progress(sum(image.size for image in images), len(images))


def _write_shard(shard: _Shard, report: Report, builder: int) -> None:
    unfinished = shard.rows.with_name(f"unfinished-{builder}-{shard.rows.name}")
    read = 0
    with unfinished.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for number, image in enumerate(shard.images):
                key = f"{shard.first + number:07d}"
                content = Path(image.path).read_bytes()
                check_content(content, image.path)
                _add(tar, key + Path(image.path).suffix.lower(), content)
                _add(tar, f"{key}.cls", str(image.label).encode())
                read += image.size
                report(read, number + 1)
        file.flush()
        os.fsync(file.fileno())
    with tarfile.open(unfinished) as tar:
        positions = [(member.offset_data, member.size) for member in tar if not member.name.endswith(".cls")]
    rows = [(shard.number, *position, i.label) for position, i in zip(positions, shard.images, strict=True)]
    unfinished.replace(shard_file(shard.out, shard.split, shard.number))
    with unfinished.open("wb") as file:
        np.save(file, np.array(rows, dtype=np.int64))
    unfinished.replace(shard.rows)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
