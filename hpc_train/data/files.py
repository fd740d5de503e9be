"""Finds the files of a data source by their names: text by its suffix, and images in one directory per class.

The submission and the workers use the same rules. Directories of operating systems, file servers and notebooks are not
classes, and hidden files, such as the ``._`` files of macOS, are not images. Imports neither torch nor numpy.
"""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__"})
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


@dataclass(frozen=True)
class TextFile:
    """Describes a part of the text: ``size`` bytes of ``path`` from ``start``; ``name`` is relative to the search
    root."""

    name: str
    path: str
    size: int
    start: int = 0


def find_text_files(path: str | None, pattern: str, most: int | None = None) -> list[TextFile]:
    """Returns the text files that ``path`` names, ordered by name, without empty files.

    The search skips directories named ``site-packages``, ``dist-packages`` and ``__pycache__``. ``path`` is a file, a
    glob, or a directory that is searched for the glob ``pattern``; None reads the source of the standard library. The
    search ends after ``most`` files. Raises UserError if no file with text was found, or a file cannot be read or is
    known not to be text.
    """
    root, matches = _search(path, pattern)
    where = "data.path, data.pattern"
    files = []
    match = "no file matches"
    for file in itertools.islice(matches, most):
        check_is_text(file, where, "exclude it with data.pattern")
        try:
            size = file.stat().st_size
            if not os.access(file, os.R_OK):
                raise PermissionError("permission denied")
        except OSError as error:
            raise UserError(
                f"{file} cannot be read: {error.strerror or error}",
                where="data.path",
                fix="correct its permissions (chmod), or exclude it with data.pattern",
            ) from error
        if size:
            files.append(TextFile(str(file.relative_to(root)), str(file), size))
        else:
            match = "only empty files match"
    if not files:
        raise UserError(
            f"no text in {path or root}: {match} {pattern!r}",
            where=where,
            fix="set data.path to a file, directory or glob; data.pattern='**/*.txt' selects files in a directory",
        )
    return sorted(files, key=lambda file: file.name)


def _search(path: str | None, pattern: str) -> tuple[Path, Iterable[Path]]:
    """Returns the directory to which the names of the files are relative, and the files that match."""
    root = Path(path if path is not None else sysconfig.get_paths()["stdlib"])
    if root.is_file():
        return root.parent, [root]
    if root.is_dir():
        return root, _matches(root, pattern)
    fixed = [parent for parent in (root, *root.parents) if not any(mark in str(parent) for mark in "*?[")]
    anchor = fixed[0]
    if anchor == root or not anchor.is_dir():
        raise UserError(
            f"{root} does not exist", where="data.path", fix="name an existing file or directory, or a quoted glob"
        )
    return anchor, _matches(anchor, str(root.relative_to(anchor)))


def _matches(root: Path, pattern: str) -> Iterator[Path]:
    """Yields the result of ``root.glob(pattern)`` without the packages installed next to the standard library."""
    regex = re.compile(_as_regex(pattern))
    deepest = None if "**" in pattern else pattern.count("/")
    for folder, folders, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        at_end = deepest is not None and len(relative.parts) >= deepest
        folders[:] = [] if at_end else [name for name in folders if name not in _SKIPPED]
        yield from (Path(folder, name) for name in names if regex.fullmatch((relative / name).as_posix()))


def _as_regex(pattern: str) -> str:
    """Converts a glob over relative names: ``**/`` matches directories, ``*`` and ``?`` match within a name."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}

    def translate(match: re.Match[str]) -> str:
        token = match.group()
        if token.startswith("["):
            if token.startswith("[!"):
                return "[^" + token[2:]
            return token
        return tokens.get(token, re.escape(token))

    return re.sub(r"\*\*/|\*\*|\*|\?|\[!?[^\]]+\]|.", translate, pattern)
