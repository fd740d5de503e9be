"""Describes the built-in data sources: keys, kind of samples, builder and input check of each, without torch.

The input checks read only names and sizes of files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_train.config.extensions import IMAGES, TOKENS, DataSource
from hpc_train.config.schema import (
    CIFAR100DataConfig,
    CustomDataConfig,
    ImagesDataConfig,
    ShardsDataConfig,
    SyntheticDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from hpc_train.errors import UserError

WILDCARDS = "*?["
CHECKED_FILES = 1000  # enough files to notice a wrong path, and few enough for a network file system


def _check_tokens(data: TokensDataConfig) -> None:
    documents = ("train.documents", "validation.documents") if data.packing else ()
    for name in ("meta.json", "train.bin", "validation.bin", *documents):
        _check_file(_directory(data.path) / name, "a directory that python -m hpc_train prepare wrote")


def _requires(names: tuple[str, ...], fix: str) -> Callable[[Any], None]:
    """Returns an input check for a directory that must contain the files ``names``."""

    def check(data: Any) -> None:
        for name in names:
            _check_file(_directory(data.path) / name, fix)

    return check


def _check_text(data: TextDataConfig) -> None:
    if data.path is None:
        return
    path = Path(data.path)
    if path.is_dir():
        root, pattern = path, data.pattern
    elif any(mark in data.path for mark in WILDCARDS):
        root = next(parent for parent in path.parents if not any(mark in str(parent) for mark in WILDCARDS))
        pattern = str(path.relative_to(root))
    else:
        _check_file(path, "data.path=FILE, a directory or a glob; null uses the source of Python's standard library")
        return
    files = _directory(str(root)).glob(pattern)
    sizes = [_size(file) for file in itertools.islice((file for file in files if file.is_file()), CHECKED_FILES)]
    if not sizes:
        raise UserError(
            f"no file in {root} matches {pattern}",
            where="data.path, data.pattern",
            fix="data.pattern='**/*.txt' to choose the files of a directory, or data.path='GLOB'",
        )
    if not any(sizes):
        raise UserError(f"{data.path} contains only empty files", where="data.path", fix="data.path=a path with text")


def _check_images(data: ImagesDataConfig) -> None:
    root = _directory(data.path)
    for split in ("train", "validation"):
        folder = root / split
        fix = f"{folder}/CLASS/IMAGE.png, one directory per class"
        if not folder.is_dir():
            raise UserError(f"{folder} is not a directory", where="data.path", fix=fix)
        _readable(folder)
        classes = sum(entry.is_dir() for entry in os.scandir(folder))
        if classes == 0:
            raise UserError(f"{folder} contains no class directories", where="data.path", fix=fix)
        if split == "train" and classes != data.n_classes:
            raise UserError(
                f"{folder} contains {classes} classes, but data.n_classes is {data.n_classes}",
                where="data.n_classes",
                fix=f"data.n_classes={classes}",
            )


def _directory(path: str) -> Path:
    directory = Path(path)
    if not directory.exists():
        raise UserError(f"{directory} does not exist", where="data.path", fix="data.path=DIRECTORY that exists")
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory", where="data.path", fix="data.path=DIRECTORY")
    _readable(directory)
    return directory


def _check_file(path: Path, fix: str) -> None:
    if not path.exists():
        raise UserError(f"{path} does not exist", where="data.path", fix=fix)
    if not path.is_file():
        raise UserError(f"{path} is not a file", where="data.path", fix=fix)
    if _size(path) == 0:
        raise UserError(f"{path} is empty", where="data.path", fix=fix)


def _size(path: Path) -> int:
    _readable(path)
    return path.stat().st_size


def _readable(path: Path) -> None:
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise UserError(f"{path} cannot be read", where="data.path", fix="correct its permissions, or change data.path")


TEXT = DataSource(
    schema=TextDataConfig, gives=TOKENS, builder="hpc_train.data.build:build_text", check_inputs=_check_text
)
TOKEN_FILES = DataSource(
    schema=TokensDataConfig, gives=TOKENS, builder="hpc_train.data.build:build_tokens", check_inputs=_check_tokens
)
CIFAR100 = DataSource(
    schema=CIFAR100DataConfig,
    gives=IMAGES,
    builder="hpc_train.data.cifar100:CIFAR100Dataset",
    check_inputs=_requires(("train", "test", "meta"), "the directory cifar-100-python of the official archive"),
)
IMAGE_FOLDERS = DataSource(
    schema=ImagesDataConfig,
    gives=IMAGES,
    builder="hpc_train.data.images:ImagesDataset",
    check_inputs=_check_images,
)
SHARDS = DataSource(
    schema=ShardsDataConfig,
    gives=IMAGES,
    builder="hpc_train.data.image_shards:ShardsDataset",
    check_inputs=_requires(
        ("shards.json", "train.index.npy", "validation.index.npy"),
        "a directory that python -m hpc_train prepare --images wrote",
    ),
)
SYNTHETIC = DataSource(
    schema=SyntheticDataConfig,
    gives=lambda data: str(data.task),
    builder="hpc_train.data.build:SyntheticDataset",
    check_inputs=None,
)
CUSTOM = DataSource(schema=CustomDataConfig, gives=None, builder="hpc_train.data.build:build_custom", check_inputs=None)
