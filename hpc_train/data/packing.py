"""Documents packed into sequences, each whole in one of them as far as it fits: best-fit decreasing.

A document longer than a sequence is cut into pieces of one sequence and a rest. Pieces go, longest first, where they
leave the least room (Ding et al. 2024, arXiv:2404.10830). All sequences are then nearly full, so micro-batches of equal
shape hold nearly as many tokens each. The model sees positions that begin anew with every piece and attends inside of a
piece only; the last token of a piece has no target, so no loss goes across a boundary.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_train.data.batch import IGNORED
from hpc_train.data.dataset import Array, Dataset, Indices, Sample


class Documents(Protocol):
    """A dataset that knows where documents end in its sequence of tokens."""

    def document_lengths(self) -> NDArray[Any]:
        """Tokens of each document, in order."""

    def window(self, start: int, length: int) -> Array:
        """``length`` tokens from token ``start`` on."""

    def source_at(self, token: int) -> str:
        """The file that a token comes from."""


def pieces_of(lengths: NDArray[Any], sequence_length: int) -> tuple[Indices, Indices]:
    """Start and size of each piece: ``size`` inputs from token ``start`` on, each with the next token as its target."""
    lengths = lengths.astype(np.int64)
    starts, inputs = np.cumsum(lengths) - lengths, lengths - 1
    starts, inputs = starts[inputs > 0], inputs[inputs > 0]  # a single token has no target
    counts = -(-inputs // sequence_length)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * sequence_length
    return np.repeat(starts, counts) + offsets, np.minimum(sequence_length, np.repeat(inputs, counts) - offsets)


def pack(sizes: Indices, sequence_length: int) -> Indices:
    """The sequence of each piece; they are numbered from 0, and no piece is longer than one."""
    places = np.empty(len(sizes), dtype=np.int64)
    with_room: list[list[int]] = [[] for _ in range(sequence_length + 1)]  # sequences by the room that is left
    rooms, count = 0, 0  # bit r of ``rooms``: some sequence has room for r
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        larger = rooms >> size
        if larger:
            room = size + (larger & -larger).bit_length() - 1
            place = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, place, count = sequence_length, count, count + 1
        places[piece] = place
        if room > size:
            with_room[room - size].append(place)
            rooms |= 1 << (room - size)
    return places


class PackedDataset(Dataset):
    """Sequences of whole documents, with ``positions`` and ``document_ids`` ``[seq]`` in the context.

    Raises:
        ConfigError: nobody has noted where documents end.
    """

    loads_cheaply = True

    def __init__(self, documents: Documents, sequence_length: int) -> None:
        self._documents, self._length = documents, sequence_length
        starts, sizes = pieces_of(documents.document_lengths(), sequence_length)
        places = pack(sizes, sequence_length)
        order = np.lexsort((starts, places))
        self._starts, self._sizes = starts[order], sizes[order]
        self._ends = np.cumsum(np.bincount(places))  # of the pieces of each sequence
        self.lengths = np.bincount(places, weights=sizes).astype(np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def fill(self) -> float:
        """The share of all slots that hold a token."""
        return float(self._sizes.sum()) / (len(self) * self._length)

    def sample(self, index: int, epoch: int) -> Sample:
        inputs, targets = np.zeros(self._length, np.int64), np.full(self._length, IGNORED, np.int64)
        positions, documents = np.zeros(self._length, np.int64), np.zeros(self._length, np.int64)
        first = int(self._ends[index - 1]) if index else 0
        at = 0
        for number, piece in enumerate(range(first, int(self._ends[index]))):
            start, size = int(self._starts[piece]), int(self._sizes[piece])
            window, place = self._documents.window(start, size + 1).astype(np.int64), slice(at, at + size)
            inputs[place], targets[place] = window[:-1], window[1:]
            positions[place], documents[place] = np.arange(size), number
            at += size
        documents[at:] = -1  # padding: a document of its own, whose targets are ignored
        return Sample(inputs, targets, {"positions": positions, "document_ids": documents})

    def source(self, index: int) -> str:
        return self._documents.source_at(int(self._starts[self._ends[index - 1] if index else 0]))
