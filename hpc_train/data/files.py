"""Finds the files of a data source by their names: text by its suffix, and images in one directory per class.

The submission and the workers use the same rules. Directories of operating systems, file servers and notebooks are not
classes, and hidden files, such as the ``._`` files of macOS, are not images. Imports neither torch nor numpy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hpc_train.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
SYSTEM_DIRECTORIES = {
    "@eaDir",
    "#recycle",
    "#snapshot",
    "$RECYCLE.BIN",
    "__MACOSX",
    "__pycache__",
    "lost+found",
    "System Volume Information",
}
FIX = "use PATH/train/CLASS/IMAGE and PATH/validation/CLASS/IMAGE with the same classes, and data.path=PATH"


def class_names(directory: Path) -> list[str]:
    """Returns the sorted names of the class directories of a split; links to directories count; raises UserError if
    ``directory`` is not a directory, or cannot be read."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory", where="data.path", fix=FIX)
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not _is_ignored(entry.name))
    except OSError as error:
        raise _unreadable(str(directory), error) from error


def check_classes(root: Path, split: str, classes: list[str], n_classes: int) -> None:
    """Checks the classes of a split against ``classes``, the classes of train/. Raises UserError if there are not
    ``n_classes`` classes, or the split has a class that train/ lacks."""
    if len(classes) != n_classes:
        raise UserError(
            f"{root / 'train'} has {len(classes)} class directories, but data.n_classes is {n_classes}",
            where="data.n_classes",
            fix=f"data.n_classes={len(classes)}" if classes else FIX,
        )
    strange = sorted(set(class_names(root / split)) - set(classes))
    if strange:
        raise UserError(
            f"{root / split} has classes that train/ lacks: {', '.join(strange[:5])}", where="data.path", fix=FIX
        )


def image_files(directory: Path) -> list[str]:
    """Returns the paths of the images in ``directory``, in their order; see ``image_names``."""
    return [f"{directory}{os.sep}{name}" for name in image_names(directory)]


def image_names(directory: Path) -> list[str]:
    """Returns the names of the images in ``directory`` and its subdirectories, relative to it and sorted.

    Links to files are followed, links to directories are not. A missing directory, such as the directory of a class
    without validation images, yields no names. Raises UserError if a directory cannot be read.
    """
    if directory.is_dir():
        return sorted(_images_below(str(directory), ""))
    return []


def _images_below(folder: str, prefix: str) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_ignored(entry.name):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    yield from _images_below(entry.path, f"{prefix}{entry.name}{os.sep}")
                elif entry.name.lower().endswith(SUFFIXES):
                    yield prefix + entry.name
    except OSError as error:
        raise _unreadable(folder, error) from error


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name in SYSTEM_DIRECTORIES


def _unreadable(folder: str, error: OSError) -> UserError:
    return UserError(
        f"{folder} cannot be read: {error.strerror}", where="data.path", fix="correct its permissions (chmod)"
    )


TABLES = (".parquet", ".arrow")
TEXT, JSONL, JSON, GZIP = (".txt", ".md", ".text"), (".jsonl", ".ndjson"), ".json", ".gz"
_FIXES = {
    **dict.fromkeys((GZIP, ".zst", ".xz", ".bz2", ".lz4"), "decompress it"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z"), "unpack it"),
    **dict.fromkeys((".parquet", ".arrow", ".feather"), "write its rows as JSON Lines, e.g. with Dataset.to_json"),
}


def suffix_of(path: Path, reads_gzip: bool = False) -> str:
    """Returns the suffix in lower case; with ``reads_gzip`` the suffix before ``.gz``."""
    name = path.name.lower()
    return Path(name.removesuffix(GZIP) if reads_gzip else name).suffix


def is_text(path: Path, reads_gzip: bool = False) -> bool:
    """Returns whether the suffix does not name a compressed file, an archive or a binary table."""
    return suffix_of(path, reads_gzip) not in _FIXES


def check_is_text(path: Path, where: str, otherwise: str, reads_gzip: bool = False) -> None:
    """Raises UserError if not ``is_text``; ``otherwise`` is a second fix, for a user who does not want this file."""
    if not is_text(path, reads_gzip):
        suffix = suffix_of(path, reads_gzip)
        raise UserError(
            f"{path} is not text: {suffix} files are not read", where=where, fix=f"{_FIXES[suffix]}, or {otherwise}"
        )
