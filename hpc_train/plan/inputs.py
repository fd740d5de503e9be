"""Checks of what a config names: the files of the data, by name and size only, and the variables of a site profile."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from hpc_train.config.schema import (
    CIFAR100DataConfig,
    DataConfig,
    FabricConfig,
    ImagesDataConfig,
    ShardsDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from hpc_train.errors import UserError

WILDCARDS = "*?["
LOOKED_AT = 1000  # files: enough to detect a wrong path, and cheap on a network file system


def check_inputs(data: DataConfig) -> None:
    """Raises UserError if a file of ``data`` is missing, unreadable or empty."""
    if isinstance(data, TextDataConfig) and data.path is not None:
        _check_text(data)
    elif isinstance(data, TokensDataConfig):
        documents = ("train.documents", "validation.documents") if data.packing else ()
        for name in ("meta.json", "train.bin", "validation.bin", *documents):
            _check_file(_directory(data.path) / name, "a directory that python -m hpc_train prepare wrote")
    elif isinstance(data, CIFAR100DataConfig):
        for name in ("train", "test", "meta"):
            _check_file(_directory(data.path) / name, "the unpacked cifar-100-python directory of the official archive")
    elif isinstance(data, ImagesDataConfig):
        _check_images(data)
    elif isinstance(data, ShardsDataConfig):
        for name in ("shards.json", "train.index.npy", "validation.index.npy"):
            _check_file(_directory(data.path) / name, "a directory that python -m hpc_train prepare --images wrote")


def _check_text(data: TextDataConfig) -> None:
    assert data.path is not None
    path = Path(data.path)
    if path.is_dir():
        root, pattern = path, data.pattern
    elif any(mark in data.path for mark in WILDCARDS):
        root = next(parent for parent in path.parents if not any(mark in str(parent) for mark in WILDCARDS))
        pattern = str(path.relative_to(root))
    else:
        _check_file(path, "data.path=a file, a directory or a glob; null takes the standard library's source")
        return
    files = _directory(str(root)).glob(pattern)
    sizes = [_size(file) for file in itertools.islice((file for file in files if file.is_file()), LOOKED_AT)]
    if not sizes:
        raise UserError(
            f"no file in {root} matches {pattern}",
            where="data.path, data.pattern",
            fix="data.pattern='**/*.txt' chooses files in a directory; data.path may be a glob in quotes",
        )
    if not any(sizes):
        raise UserError(f"all files of {data.path} are empty", where="data.path", fix="data.path=a path with text")


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
            raise UserError(f"{folder} holds no class directories", where="data.path", fix=fix)
        if split == "train" and classes != data.n_classes:
            raise UserError(
                f"{folder} holds {classes} classes, not {data.n_classes}",
                where="data.n_classes",
                fix=f"data.n_classes={classes}",
            )


def _directory(path: str) -> Path:
    directory = Path(path)
    if not directory.exists():
        raise UserError(f"{directory} does not exist", where="data.path", fix="data.path=an existing directory")
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory", where="data.path", fix="data.path=the directory of it")
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
        raise UserError(f"{path} cannot be read", where="data.path", fix="read permission for it, or another data.path")


VARIABLE = re.compile(r"(NCCL|TORCH_NCCL|GLOO|TP|FI|OFI|UCX|SHARP|MLX5|RDMAV)_[A-Z0-9_]+")


def check_profile(fabric: FabricConfig) -> None:
    """Raises UserError for a name that no communication library reads, or a value that cannot be exported."""
    for name, value in fabric.variables.items():
        where = f"cluster.fabric.variables.{name}"
        if not VARIABLE.fullmatch(name):
            raise UserError(
                f"{name} is not a variable of NCCL, libfabric, UCX or gloo",
                where=where,
                fix=f"the correct name, or +cluster.env.{name}={value} for a variable of another program",
            )
        if not value or not value.isprintable():
            raise UserError(
                f"{name} is {value!r}, which cannot be exported", where=where, fix="a printable value, or no entry"
            )
