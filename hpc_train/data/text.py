"""Reads the bytes of text files as one sequence that is cut into windows.

The constructor reads only names and sizes; a file is memory-mapped when one of its windows is first read. A hash of
its name assigns a file to training or validation, so that no text is in both.
"""

from __future__ import annotations

import mmap
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from hpc_train.config.schema import TextDataConfig
from hpc_train.data.dataset import Array, Dataset, Sample, hash_of, next_token_sample, position
from hpc_train.data.files import TextFile, find_text_files
from hpc_train.errors import UserError

_OPEN_FILES = 4096  # memory maps that stay open; Linux allows 65,530 per process


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
        self.files = split_files(find_text_files(config.path, config.pattern), config.validation_share)[split]
        self._ends = np.array(list(accumulate(file.size for file in self.files)), dtype=np.int64)
        self._mapped = lru_cache(_OPEN_FILES)(_mapped)
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
            piece = self._mapped(file.path)[file.start + skip : file.start + skip + size]
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


def _mapped(path: str) -> mmap.mmap:
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
