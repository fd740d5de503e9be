"""Encodes ``.metadata``, DCP's description of a checkpoint, from the tables of a plan.

The file is the pickle of a ``Metadata`` object, with several objects per part of a tensor. 8,000 ranks that shard 300
tensors have 2.4 million parts: their objects and the pickler's memo would take several GB, and the pickler would hold
Python's interpreter lock, and so the training of rank 0, until it is done. So the opcodes of the parts are written
directly. Every reader of DCP's format gets the same objects.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hpc_train.checkpoint.plan import Places, SharedPlan, WrittenTensor

_PROTOCOL = 4
_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)


def encode_metadata(plan: SharedPlan, places: Sequence[Places]) -> bytearray:
    """Returns the content of ``.metadata``.

    Args:
        places: where each rank has written its parts.
    """
    encoder = _Encoder()
    encoder.begin(Metadata)
    encoder.key("state_dict_metadata")
    encoder.dictionary((written.tensor.name, _tensor(encoder, written)) for written in plan.tensors)
    encoder.key("planner_data")
    encoder.dictionary((written.tensor.name, _raw((written.tensor.name,))) for written in plan.tensors)
    encoder.key("storage_data")
    _storage(encoder, plan, places)
    encoder.key("storage_meta")
    encoder.out += _raw(StorageMeta())  # no path, because the commit renames the directory
    encoder.key("version")
    encoder.out += _raw(CURRENT_DCP_VERSION) + encoder.end() + pickle.STOP
    return encoder.out


def _tensor(encoder: _Encoder, written: WrittenTensor) -> bytes:
    """Returns the opcodes of the ``TensorStorageMetadata`` of a tensor."""
    axes = len(written.tensor.shape)
    offsets, sizes = encoder.constant("offsets"), encoder.constant("sizes")
    begin, end = encoder.open(ChunkStorageMetadata) + offsets, encoder.end()
    chunks = [
        begin + encoder.size(box[:axes]) + sizes + encoder.size(box[axes:]) + end
        for box in map(tuple, written.boxes.tolist())
    ]
    fields = {
        "properties": _raw(TensorProperties(dtype=written.tensor.dtype)),
        "size": encoder.size(written.tensor.shape),
        "chunks": pickle.EMPTY_LIST + pickle.MARK + b"".join(chunks) + pickle.APPENDS,
    }
    content = b"".join(encoder.constant(name) + value for name, value in fields.items())
    return encoder.open(TensorStorageMetadata) + content + end


def _storage(encoder: _Encoder, plan: SharedPlan, places: Sequence[Places]) -> None:
    """Writes the dict from the index of each part to its place in a file."""
    position = [np.cumsum(written) - 1 for written in plan.written]
    rows = [place.rows for place in places]
    files = [[encoder.constant(name) for name in place.files] for place in places]
    encoder.out += pickle.EMPTY_DICT
    for written in plan.tensors:
        name = encoder.constant(written.tensor.name)
        begin = encoder.open(MetadataIndex) + encoder.constant("fqn") + name + encoder.constant("index")
        offset_key = encoder.constant("offset")
        middle = encoder.end() + encoder.open(_StorageInfo) + encoder.constant("relative_path")
        length_key = encoder.constant("length")
        end = encoder.end()
        axes = len(written.tensor.shape)
        parts = []
        writers = zip(written.writer.tolist(), written.part.tolist(), written.boxes[:, :axes].tolist(), strict=True)
        for hint, (rank, part, offsets) in enumerate(writers):
            file, offset, length = rows[rank][position[rank][part]].tolist()
            parts += [begin, _integer(hint), offset_key, encoder.size(tuple(offsets)), middle, files[rank][file],
                      offset_key, _integer(offset), length_key, _integer(length), end]  # fmt: skip
        encoder.out += pickle.MARK + b"".join(parts) + pickle.SETITEMS


class _Encoder:
    """Writes opcodes to ``out``. Strings and classes are written once, and then referred to by their number."""

    def __init__(self) -> None:
        self.out = bytearray(pickle.PROTO + bytes([_PROTOCOL]))
        self._references: dict[Any, bytes] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}

    def constant(self, value: Any) -> bytes:
        """Returns a reference to a string or class. The first time, it writes the definition to ``out``."""
        if value not in self._references:
            number = len(self._references)
            self.out += _raw(value) + pickle.MEMOIZE + pickle.POP
            self._references[value] = pickle.LONG_BINGET + number.to_bytes(4, "little")
        return self._references[value]

    def open(self, kind: type) -> bytes:
        """Returns the opcodes that create a ``kind`` and begin its fields; ``end`` closes them."""
        return self.constant(kind) + pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK

    def end(self) -> bytes:
        return pickle.SETITEMS + pickle.BUILD

    def begin(self, kind: type) -> None:
        self.out += self.open(kind)

    def key(self, name: str) -> None:
        reference = self.constant(name)
        self.out += reference

    def dictionary(self, items: Iterable[tuple[str, bytes]]) -> None:
        self.out += pickle.EMPTY_DICT
        for name, value in items:
            reference = self.constant(name)
            self.out += pickle.MARK + reference + value + pickle.SETITEMS

    def size(self, values: tuple[int, ...]) -> bytes:
        """Returns the opcodes of a ``torch.Size``."""
        if values not in self._sizes:
            numbers = b"".join(map(_integer, values))
            if len(values) < 4:
                opcodes = numbers + _TUPLES[len(values)]
            else:
                opcodes = pickle.MARK + numbers + pickle.TUPLE
            self._sizes[values] = self.constant(torch.Size) + opcodes + pickle.TUPLE1 + pickle.REDUCE
        return self._sizes[values]


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return pickle.BININT1 + value.to_bytes(1, "little")
    if 0 <= value < 1 << 31:
        return pickle.BININT + value.to_bytes(4, "little")
    encoded = pickle.encode_long(value)  # type: ignore[attr-defined]
    return bytes(pickle.LONG1 + len(encoded).to_bytes(1, "little") + encoded)


def _raw(value: Any) -> bytes:
    """Returns the opcodes of a small object, without a header and without numbers for its parts."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=3)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]
