"""Class folders of images into tar shards and their index. No torch.

A shard is written aside and renamed; ``shards.json`` comes last and makes the directory whole. The same command again
leaves a whole directory as it is.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.config.errors import ConfigError
from hpc_train.data.images import check_classes, class_names, image_files
from hpc_train.data.shards import META, index_file, shard_file
from hpc_train.data.split import SPLITS
from hpc_train.run.files import write_json


@dataclass(frozen=True)
class _Image:
    path: Path
    label: int
    size: int


def make_shards(source: Path, out: Path, shard_bytes: int, on_progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Writes the shards of ``source`` (``train/CLASS/*`` and ``validation/CLASS/*``) to ``out``; returns the meta data.

    Args:
        shard_bytes: of images in a shard; the last image may go beyond it.
        on_progress: gets the images done and their number.

    Raises:
        ConfigError: there are no images, or ``out`` holds other ones.
    """
    classes = class_names(source / "train")
    check_classes(source, "validation", classes, len(classes))
    images = {split: list(_images(source / split, classes)) for split in SPLITS}
    empty = [split for split in SPLITS if not images[split]]
    if empty:
        raise ConfigError(f"there is no image under {source / empty[0]}", where="INPUT", mend="train/CLASS/IMAGE")
    listing = [(str(i.path.relative_to(source)), i.size, shard_bytes) for split in SPLITS for i in images[split]]
    key = hashlib.blake2b(json.dumps(listing).encode(), digest_size=16).hexdigest()
    meta = {"classes": classes, "counts": {split: len(images[split]) for split in SPLITS}, "key": key}
    if (out / META).exists():
        if json.loads((out / META).read_text(encoding="utf-8")).get("key") == key:
            return meta
        raise ConfigError(f"{out} holds shards of other images", where="--out", mend="another directory, or remove it")
    out.mkdir(parents=True, exist_ok=True)
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
    """The rows of the index; ``first`` is the number of the first image."""
    aside = path.with_suffix(".part")
    with tarfile.open(aside, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, image in enumerate(images, first):
            _add(tar, f"{key:07d}{image.path.suffix.lower()}", image.path.read_bytes())
            _add(tar, f"{key:07d}.cls", str(image.label).encode())
    with tarfile.open(aside) as tar:
        places = [(member.offset_data, member.size) for member in tar if not member.name.endswith(".cls")]
    aside.replace(path)
    return [(number, *place, image.label) for place, image in zip(places, images, strict=True)]


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
