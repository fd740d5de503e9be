"""Reads the memory-mapped token files that ``python -m hpc_train prepare`` writes, and packs documents into sequences.

Packing is best-fit decreasing (Ding et al. 2024, arXiv:2404.10830): a document longer than a sequence is cut into
pieces of one sequence and a rest, and each piece, longest first, is placed into the sequence with the least sufficient
room. Positions restart with each piece, tokens attend only to their own piece, and the last token of a piece has no
target, so that no loss crosses a boundary.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.schema import TokensDataConfig
from hpc_train.data.dataset import IGNORED, Array, Dataset, Indices, Sample, hash_of, next_token_sample
from hpc_train.errors import UserError

META = "meta.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
LENGTHS = np.dtype("<u4")  # the dtype of document lengths
_FIX = "build the directory with: python -m hpc_train prepare INPUT... --out DIR"


@dataclass(frozen=True)
class TokensMeta:
    """Holds the content of ``meta.json``.

    Attributes:
        dtype: ``uint16`` or ``uint32``, little-endian.
        vocab_size: the token ids are below it.
        counts: the number of tokens in ``train.bin`` and ``validation.bin``.
        separator: the token id that ends each document; None if there is none.
        source: the inputs and settings from which the files were built, for information.
    """

    dtype: str
    vocab_size: int
    counts: dict[str, int]
    separator: int | None = None
    source: dict[str, Any] = field(default_factory=dict)


def documents_file(directory: Path, split: str) -> Path:
    """Returns the file with the number of tokens of each document of ``<split>.bin``, including the separator."""
    return directory / f"{split}.documents"


def read_meta(directory: Path) -> TokensMeta:
    """Reads and checks ``meta.json``; raises UserError if the file is missing, is not JSON, or has invalid content."""
    path = directory / META
    try:
        meta = TokensMeta(**json.loads(path.read_text(encoding="utf-8")))
        valid = meta.dtype in DTYPES and meta.vocab_size > 0 and all(int(count) >= 0 for count in meta.counts.values())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", where="data.path", fix=_FIX) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is not a valid description of token files: {error}", where="data.path", fix=_FIX
        ) from error
    if not valid:
        raise UserError(
            f"{path} has dtype {meta.dtype!r}, vocab_size {meta.vocab_size} and counts {meta.counts}, which is invalid",
            where="data.path",
            fix=f"use dtype {' or '.join(DTYPES)} and positive numbers, or {_FIX}",
        )
    return meta


class TokensDataset(Dataset):
    """Reads windows of ``sequence_length`` tokens of ``train.bin`` or ``validation.bin``.

    The inputs of sample i are the tokens [i * S, i * S + S); the target of each is the next token. Raises UserError if
    files are missing, damaged or too short, or contain token ids outside the vocabulary.
    """

    loads_cheaply = True

    def __init__(self, config: TokensDataConfig, split: str) -> None:
        directory = Path(config.path)
        self._documents = documents_file(directory, split)
        if not directory.is_dir():
            raise UserError(f"{directory} is not a directory", where="data.path", fix=_FIX)
        meta = read_meta(directory)
        self.path = directory / f"{split}.bin"
        self._length = config.sequence_length
        self._vocab_size = config.vocab_size
        if meta.vocab_size > config.vocab_size:
            raise UserError(
                f"{directory} has token ids up to {meta.vocab_size - 1}, but data.vocab_size is {config.vocab_size}",
                where="data.vocab_size",
                fix=f"data.vocab_size={meta.vocab_size}, and model.vocab_size at least as large",
            )
        self._fingerprint = hash_of([meta.dtype, meta.vocab_size, meta.separator, sorted(meta.counts.items())])
        dtype = DTYPES[meta.dtype]
        expected = meta.counts.get(split)
        try:
            size = self.path.stat().st_size
            if not size:
                raise UserError(f"{self.path} is empty", where="data.path", fix=_FIX)
            tokens = np.memmap(self.path, dtype=dtype, mode="r", shape=(size // dtype.itemsize,))
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}", where="data.path", fix=_FIX) from error
        if size % dtype.itemsize or expected != len(tokens):
            raise UserError(
                f"{self.path} has {size} bytes, but {META} states {expected} tokens of {dtype.itemsize} bytes",
                where="data.path",
                fix=f"copy it again, or {_FIX}",
            )
        self._tokens = tokens
        if len(self._tokens) <= self._length:
            raise UserError(
                f"{self.path} has {len(self._tokens)} tokens, but one sequence needs {self._length + 1}",
                where="data.sequence_length",
                fix="use more tokens, or a shorter data.sequence_length",
            )

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def fingerprint(self) -> str:
        return self._fingerprint

    def sample(self, index: int, epoch: int) -> Sample:
        return next_token_sample(self.window(index * self._length, self._length + 1))

    def prefetch(self, index: int) -> None:
        self.prefetch_window(index * self._length, self._length + 1)

    def prefetch_window(self, start: int, length: int) -> None:
        """Makes the kernel read ``length`` tokens from ``start``. Without it, ``window`` stops the training process
        for each page that is not in memory, for milliseconds on a parallel file system.
        """
        first = start * self._tokens.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        end = (start + length) * self._tokens.itemsize
        mapped: mmap.mmap = self._tokens._mmap  # type: ignore[attr-defined]  # numpy has no public name for it
        mapped.madvise(mmap.MADV_WILLNEED, first, end - first)

    def source(self, index: int) -> str:
        return str(self.path)

    def source_at(self, token: int) -> str:
        return str(self.path)

    def window(self, start: int, length: int) -> Array:
        """Returns ``length`` tokens from ``start``; raises UserError if one is outside the vocabulary."""
        window = self._tokens[start : start + length]
        if int(window.max()) >= self._vocab_size:
            raise UserError(
                f"{self.path} contains token id {int(window.max())} after token {start}, "
                f"but the vocabulary has {self._vocab_size} tokens",
                where="data.vocab_size",
                fix=f"use the vocabulary of the tokenizer that wrote the file, or {_FIX}",
            )
        return window

    def document_lengths(self) -> NDArray[Any]:
        """Returns the tokens of each document with its separator; raises UserError if the file is missing."""
        tokens = len(self._tokens)
        fix = "prepare the directory again: python -m hpc_train prepare INPUT... --out DIR"
        try:
            lengths = np.fromfile(self._documents, dtype=LENGTHS)
        except OSError as error:
            raise UserError(
                f"{self._documents} cannot be read: {error.strerror}", where="data.packing", fix=fix
            ) from error
        if int(lengths.sum(dtype=np.int64)) != tokens:
            raise UserError(
                f"the documents in {self._documents} add up to {lengths.sum(dtype=np.int64)} tokens, but there are "
                f"{tokens}",
                where="data.packing",
                fix=fix,
            )
        return lengths


class Documents(Protocol):
    """Interface of a dataset that knows the lengths of the documents in its sequence of tokens."""

    def document_lengths(self) -> NDArray[Any]:
        """Returns the number of tokens of each document, in order."""

    def window(self, start: int, length: int) -> Array:
        """Returns ``length`` tokens from ``start``."""

    def source_at(self, token: int) -> str:
        """Returns the file that contains a token."""

    def fingerprint(self) -> str:
        """See ``Dataset.fingerprint``."""


def pieces_of(lengths: NDArray[Any], sequence_length: int) -> tuple[Indices, Indices]:
    """Returns the start and size of each piece; each of its inputs has the next token as its target."""
    lengths = lengths.astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    inputs = lengths - 1
    starts, inputs = starts[inputs > 0], inputs[inputs > 0]  # a single token has no target
    counts = -(-inputs // sequence_length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * sequence_length
    return np.repeat(starts, counts) + offsets, np.minimum(sequence_length, np.repeat(inputs, counts) - offsets)


def pack(sizes: Indices, sequence_length: int) -> Indices:
    """Returns the number of the sequence for each piece; no piece is empty or longer than a sequence.

    All pieces of one size are placed together. While the least sufficient room stays the same, each sequence with this
    room, the newest first, takes as many of them as fit: after one of them its room is the least sufficient.
    """
    order = np.argsort((sequence_length - sizes).astype(np.min_scalar_type(sequence_length)), kind="stable")
    sequence_of = np.empty(len(sizes), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(sequence_length + 1)]  # sequences by their remaining room
    rooms = 0  # bit r is set if some sequence has room r
    count = 0
    first = 0
    for size, last in _runs(sizes[order]):
        while first < last:
            larger = rooms >> size
            room = size + (larger & -larger).bit_length() - 1 if larger else sequence_length
            fitting = room // size
            needed = -(-(last - first) // fitting)
            if larger:
                taken = with_room[room][: -needed - 1 : -1]
                del with_room[room][-needed:]
                rooms ^= 0 if with_room[room] else 1 << room
            else:
                taken = list(range(count, count + needed))
                count += needed
            placed = min(last - first, len(taken) * fitting)
            sequence_of[order[first : first + placed]] = np.repeat(taken, fitting)[:placed]
            first += placed
            in_last = placed - (len(taken) - 1) * fitting
            for left, sequences in ((room - fitting * size, taken[:-1]), (room - in_last * size, taken[-1:])):
                if left and sequences:
                    with_room[left] += sequences
                    rooms |= 1 << left
    return sequence_of


def _runs(values: Indices) -> Iterator[tuple[int, int]]:
    """Yields each value of sorted ``values`` with the end of its run."""
    if len(values):
        ends = np.append(np.flatnonzero(np.diff(values)) + 1, len(values))
    else:
        ends = values
    yield from zip(values[ends - 1].tolist(), ends.tolist(), strict=True)


class PackedDataset(Dataset):
    """Packs documents into sequences, with ``positions`` and ``document_ids`` ``[seq]`` in the context; raises
    UserError if the lengths of the documents are not known."""

    loads_cheaply = True

    def __init__(self, documents: Documents, sequence_length: int) -> None:
        self.documents = documents
        self._length = sequence_length
        starts, sizes = pieces_of(documents.document_lengths(), sequence_length)
        sequence_of = pack(sizes, sequence_length)
        order = np.argsort(sequence_of, kind="stable")  # the pieces are in the order of their starts
        self._starts = starts[order]
        self._sizes = sizes[order]
        self._ends = np.cumsum(np.bincount(sequence_of))  # the last piece of each sequence, exclusive
        self.lengths = np.bincount(sequence_of, weights=sizes).astype(np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def fingerprint(self) -> str:
        return self.documents.fingerprint()

    @property
    def fill(self) -> float:
        """Returns the share of all positions that hold a token."""
        return float(self._sizes.sum()) / (len(self) * self._length)

    @property
    def documents_per_sequence(self) -> dict[int, float]:
        """Returns how many documents of each length a sequence has on average; its padding counts as one."""
        assert self.lengths is not None
        counts = np.bincount(np.concatenate([self._sizes, self._length - self.lengths]))
        counts[0] = 0  # full sequences have no padding
        return {length: int(counts[length]) / len(self) for length in np.flatnonzero(counts).tolist()}

    def sample(self, index: int, epoch: int) -> Sample:
        inputs, targets = np.zeros(self._length, np.int64), np.full(self._length, IGNORED, np.int64)
        positions = np.zeros(self._length, np.int64)
        documents = np.zeros(self._length, np.int64)
        first = int(self._ends[index - 1]) if index else 0
        at = 0
        for number, piece in enumerate(range(first, int(self._ends[index]))):
            start = int(self._starts[piece])
            size = int(self._sizes[piece])
            piece_sample = self.piece(start, size)
            place = slice(at, at + size)
            inputs[place] = piece_sample.inputs
            targets[place] = piece_sample.targets
            positions[place] = np.arange(size)
            documents[place] = number
            at += size
        documents[at:] = -1  # padding is a separate document, whose targets are ignored
        return Sample(inputs, targets, {"positions": positions, "document_ids": documents})

    def prefetch(self, index: int) -> None:
        if not isinstance(self.documents, TokensDataset):
            return
        first = int(self._ends[index - 1]) if index else 0
        for piece in range(first, int(self._ends[index])):
            self.documents.prefetch_window(int(self._starts[piece]), int(self._sizes[piece]) + 1)

    def piece(self, start: int, size: int) -> Sample:
        """Returns the inputs and targets ``[size]`` of the piece that begins at the token ``start``."""
        return next_token_sample(self.documents.window(start, size + 1))

    def source(self, index: int) -> str:
        return self.documents.source_at(int(self._starts[self._ends[index - 1] if index else 0]))
