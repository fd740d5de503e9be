"""Reads the bytes of text files as one sequence that is cut into windows.

The constructor reads only names and sizes; a file is memory-mapped when one of its windows is first read. A hash of
its name assigns a file to training or validation, so that no text is in both.
"""

from __future__ import annotations

import mmap
import os
import re
import sysconfig
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from hpc_train.config.schema import TextDataConfig
from hpc_train.data.dataset import Array, Dataset, Sample, hash_of, next_token_sample, position
from hpc_train.data.files import check_is_text
from hpc_train.errors import UserError

_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__"})
_OPEN_FILES = 4096  # memory maps that stay open; Linux allows 65,530 per process


@dataclass(frozen=True)
class TextFile:
    """Describes a part of the text: ``size`` bytes of ``path`` from ``start``; ``name`` is relative to the search
    root."""

    name: str
    path: str
    size: int
    start: int = 0


def find_files(path: str | None, pattern: str) -> list[TextFile]:
    """Returns the text files that ``path`` names, ordered by name, without empty files.

    The search skips directories named ``site-packages``, ``dist-packages`` and ``__pycache__``. ``path`` is a file, a
    glob, or a directory that is searched for the glob ``pattern``; None reads the source of the standard library.
    Raises UserError if no file with text was found, or a file cannot be read or is known not to be text.
    """
    root, paths = _search(path, pattern)
    where = "data.path, data.pattern"
    for file in paths:
        check_is_text(file, where, "exclude it with data.pattern")
    files = [_stat(str(name.relative_to(root)), name) for name in paths]
    files = sorted((file for file in files if file.size), key=lambda file: file.name)
    if not files:
        raise UserError(
            f"no text in {path or root}: {len(paths)} files match {pattern!r}, and all of them are empty",
            where=where,
            fix="set data.path to a file, directory or glob; data.pattern='**/*.txt' selects files in a directory",
        )
    return files


def _search(path: str | None, pattern: str) -> tuple[Path, list[Path]]:
    root = Path(path if path is not None else sysconfig.get_paths()["stdlib"])
    if root.is_file():
        return root.parent, [root]
    if root.is_dir():
        return root, _matches(root, pattern)
    anchor = Path(*_fixed_parts(root))
    if anchor == root or not anchor.is_dir():
        raise UserError(
            f"{root} does not exist", where="data.path", fix="name an existing file or directory, or a quoted glob"
        )
    return anchor, _matches(anchor, str(root.relative_to(anchor)))


def _fixed_parts(path: Path) -> list[str]:
    """Returns the leading parts of a path without a wildcard."""
    parts: list[str] = []
    for part in path.parts:
        if any(mark in part for mark in "*?["):
            return parts or ["."]
        parts.append(part)
    return parts


def _matches(root: Path, pattern: str) -> list[Path]:
    """Returns the result of ``root.glob(pattern)`` without the packages installed next to the standard library."""
    regex = re.compile(_as_regex(pattern))
    deepest = None if "**" in pattern else pattern.count("/")
    paths = []
    for folder, folders, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        at_end = deepest is not None and len(relative.parts) >= deepest
        folders[:] = [] if at_end else [name for name in folders if name not in _SKIPPED]
        paths += [Path(folder, name) for name in names if regex.fullmatch((relative / name).as_posix())]
    return paths


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


def _stat(name: str, path: Path) -> TextFile:
    try:
        size = path.stat().st_size
        if not os.access(path, os.R_OK):
            raise PermissionError("permission denied")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}",
            where="data.path",
            fix="correct its permissions (chmod), or exclude it with data.pattern",
        ) from error
    return TextFile(name, str(path), size)


def split_files(files: list[TextFile], share: float) -> dict[str, list[TextFile]]:
    """Assigns files to ``train`` and ``validation`` by a hash of their names.

    If a split would be empty, the file whose hash is nearest to the boundary moves there. A single file is split, and
    its end becomes the validation split.
    """
    if len(files) == 1:
        file = files[0]
        cut = file.size - round(file.size * share)
        return {
            "train": [TextFile(file.name, file.path, cut)],
            "validation": [TextFile(file.name, file.path, file.size - cut, start=cut)],
        }
    ranked = sorted(files, key=lambda file: (position(file.name), file.name))
    border = sum(position(file.name) < share for file in files)
    border = min(max(border, 1), len(files) - 1)
    chosen = {file.name for file in ranked[:border]}
    return {
        "train": [file for file in files if file.name not in chosen],
        "validation": [file for file in files if file.name in chosen],
    }


class TextDataset(Dataset):
    """Reads windows of ``sequence_length`` bytes; token ids are byte values.

    The inputs of sample i are the bytes [i * S, i * S + S) of the concatenated files; the target of each is the next
    byte. A last window without a next byte is dropped. Raises UserError if no files were found, a split is shorter than
    one sequence, or the vocabulary is smaller than 256.
    """

    loads_cheaply = True

    def __init__(self, config: TextDataConfig, split: str) -> None:
        if config.vocab_size < 256:
            raise UserError(
                f"data.vocab_size is {config.vocab_size}, but bytes need 256",
                where="data.vocab_size",
                fix="data.vocab_size=256",
            )
        self._length = config.sequence_length
        self.files = split_files(find_files(config.path, config.pattern), config.validation_share)[split]
        self._ends = np.array(list(accumulate(file.size for file in self.files)), dtype=np.int64)
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        total = int(self._ends[-1])
        if total <= self._length:
            raise UserError(
                f"the {split} text has {total} bytes, but one sequence needs {self._length + 1}",
                where="data.sequence_length, data.validation_share",
                fix="use more text, a shorter data.sequence_length, or another data.validation_share",
            )
        self._samples = (total - 1) // self._length

    def __len__(self) -> int:
        return self._samples

    def fingerprint(self) -> str:
        return hash_of([[file.name, file.size, file.start] for file in self.files])

    def sample(self, index: int, epoch: int) -> Sample:
        return next_token_sample(self.window(index * self._length, self._length + 1))

    def source(self, index: int) -> str:
        return self.source_at(index * self._length)

    def source_at(self, token: int) -> str:
        return self.files[self._file_at(token)].path

    def document_lengths(self) -> Array:
        return np.array([file.size for file in self.files], dtype=np.int64)

    def _file_at(self, offset: int) -> int:
        return int(np.searchsorted(self._ends, offset, side="right"))

    def window(self, start: int, length: int) -> Array:
        """Returns ``length`` bytes of the text from ``start``, which may span several files."""
        number = self._file_at(start)
        pieces = []
        while length:
            file = self.files[number]
            skip = start - int(self._ends[number]) + file.size
            size = min(length, file.size - skip)
            piece = self._map(number)[file.start + skip : file.start + skip + size]
            if len(piece) < size:
                raise UserError(
                    f"{self.files[number].path} has become shorter since training started",
                    where="data.path",
                    fix="copy the files before training, so that they do not change",
                )
            pieces.append(piece)
            start = start + len(piece)
            length = length - len(piece)
            number = number + 1
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)

    def _map(self, number: int) -> mmap.mmap:
        if number in self._maps:
            self._maps.move_to_end(number)
            return self._maps[number]
        with Path(self.files[number].path).open("rb") as file:
            self._maps[number] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._maps) > _OPEN_FILES:
            self._maps.popitem(last=False)[1].close()
        return self._maps[number]
