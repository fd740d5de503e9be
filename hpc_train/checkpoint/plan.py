"""Plans once for all saves which rank writes which part of which tensor, and encodes the result as DCP metadata.

In every save, ``dcp.save`` sends the plans of all ranks to rank 0 as pickled objects, and sends the results and the
metadata back and forth as well. Here a rank describes its parts as one table of integers and sends 16 bytes, the digest
of the table. Equal tables, such as the tables of replicas, are compressed and sent once. Rank 0 assigns each part to
the rank that has the least to write among the ranks that hold the part, and answers with one bit per part. As long as
no digest changes, the plan remains valid, and a save sends only digests.

Rank 0 keeps about 100 bytes per part of the whole checkpoint: its box, its writer and its place in a file. N ranks and
T tensors have up to N x T parts if all ranks shard every tensor, and T x the shards of a replica otherwise.
"""

from __future__ import annotations

import io
import math
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TensorName:
    """Names a tensor of the full checkpoint; ``shape`` is the shape of the unsplit tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Holding:
    """Describes the parts of tensors that one rank holds.

    Attributes:
        tensors: the pickled tuple of the ``TensorName`` of each part; ranks with the same tensors have equal bytes.
        boxes: int64 values, for each part its offsets within the unsplit tensor and then its sizes.
    """

    tensors: bytes
    boxes: bytes

    @classmethod
    def of(cls, items: Sequence[WriteItem]) -> Holding:
        """Describes the items of a rank's local plan.

        Raises:
            ValueError: an item is not a tensor.
        """
        names: list[tuple[str, tuple[int, ...], torch.dtype]] = []
        boxes: list[int] = []
        for item in items:
            data = item.tensor_data
            if data is None:
                raise ValueError(f"{item.index.fqn} is not a tensor, and loading it would unpickle it")
            names.append((item.index.fqn, tuple(data.size), data.properties.dtype))
            boxes += [*data.chunk.offsets, *data.chunk.sizes]
        return cls(pickle.dumps(tuple(names)), np.array(boxes, dtype=np.int64).tobytes())

    @cached_property
    def digest(self) -> bytes:
        return xxhash.xxh3_128(self.tensors + self.boxes).digest()

    def pack(self) -> bytes:
        return zlib.compress(pickle.dumps((self.tensors, self.boxes)), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> Holding:
        return cls(*pickle.loads(zlib.decompress(packed)))


@dataclass(frozen=True)
class Places:
    """Holds where a rank has written its parts, in the order of its plan.

    Attributes:
        files: the names of its files.
        table: int64 values, for each part the index of its file, its offset and its length in bytes.
    """

    files: tuple[str, ...]
    table: bytes

    @classmethod
    def of(cls, infos: Sequence[_StorageInfo]) -> Places:
        files = {name: index for index, name in enumerate(dict.fromkeys(info.relative_path for info in infos))}
        rows = [(files[info.relative_path], info.offset, info.length) for info in infos]
        return cls(tuple(files), np.array(rows, dtype=np.int64).tobytes())

    @property
    def rows(self) -> Ints:
        """Returns the table as an array of shape (parts, 3)."""
        return np.frombuffer(self.table, dtype=np.int64).reshape(-1, 3)

    def ends(self) -> dict[str, int]:
        """Returns the end of the last part in each file."""
        rows = self.rows
        return {
            name: int((rows[:, 1] + rows[:, 2])[rows[:, 0] == index].max()) for index, name in enumerate(self.files)
        }


@dataclass(frozen=True)
class _Group:
    """Groups the ranks that hold the same tensors, by distinct holdings.

    Attributes:
        boxes: int64 of shape (holdings, columns).
        ranks: for each holding the ranks that have it.
    """

    tensors: tuple[TensorName, ...]
    boxes: Ints
    ranks: tuple[Ints, ...]

    @cached_property
    def columns(self) -> list[int]:
        """Returns the first column of each part, and the number of columns."""
        return list(accumulate((2 * len(tensor.shape) for tensor in self.tensors), initial=0))

    @cached_property
    def only(self) -> Ints | None:
        """Returns the rank of each holding if no two ranks have the same; otherwise None."""
        if all(len(ranks) == 1 for ranks in self.ranks):
            return np.concatenate(self.ranks)
        return None


@dataclass(frozen=True)
class _Held:
    """Holds all holdings of one tensor. The arrays have one row per holding.

    Attributes:
        boxes: offsets and sizes.
        part: the part's position in the holding.
        ranks: for each holding the ranks that have it.
        only: the rank of each holding if no two ranks have the same; otherwise None.
    """

    tensor: TensorName
    boxes: Ints
    part: Ints
    ranks: list[Ints]
    only: Ints | None

    @property
    def dimensions(self) -> int:
        return len(self.tensor.shape)

    def keys(self) -> Ints:
        """Returns one integer per holding that is equal where the offsets are."""
        strides = [math.prod(size + 1 for size in self.tensor.shape[axis + 1 :]) for axis in range(self.dimensions)]
        keys: Ints = self.boxes[:, : self.dimensions] @ np.array(strides, dtype=np.int64)
        return keys

    def bytes(self) -> Ints:
        elements: Ints = self.boxes[:, self.dimensions :].prod(axis=1)
        return elements * self.tensor.dtype.itemsize


@dataclass(frozen=True)
class WrittenTensor:
    """Holds the parts of one tensor in a checkpoint. The arrays have one row per part.

    Attributes:
        boxes: offsets and sizes.
        writer: the rank that writes the part.
        part: its position among the parts that this rank holds.
    """

    tensor: TensorName
    boxes: Ints
    writer: Ints
    part: Ints


@dataclass
class SharedPlan:
    """Holds rank 0's plan of a save by ``ranks`` ranks.

    Attributes:
        serial: a number that changes with each plan, so that no rank takes another plan for this one.
        tensor_bytes: bytes of all parts.
    """

    ranks: int
    serial: int
    tensors: list[WrittenTensor]
    written: list[NDArray[np.bool_]]  # rank -> for each part that it holds, whether it writes it
    tensor_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        parts = (written.boxes[:, len(written.tensor.shape) :].prod(axis=1).sum() * written.tensor.dtype.itemsize
                 for written in self.tensors)  # fmt: skip
        self.tensor_bytes = int(sum(parts))

    def answer(self, rank: int) -> bytes:
        """Returns one bit per part that ``rank`` holds: whether it writes the part."""
        return np.packbits(self.written[rank]).tobytes()


def senders(digests: Sequence[bytes]) -> list[int]:
    """Returns the first rank of each distinct holding, which sends it for all."""
    first: dict[bytes, int] = {}
    for rank, digest in enumerate(digests):
        first.setdefault(digest, rank)
    return list(first.values())


def share_out(digests: Sequence[bytes], packed: Mapping[int, bytes], serial: int) -> SharedPlan:
    """Chooses a writer for each part.

    Args:
        digests: the digest of each rank's holding.
        packed: the holdings of ``senders(digests)``.

    Raises:
        ValueError: the parts of a tensor do not tile it.
    """
    groups = _groups(digests, packed)
    load = np.zeros(len(digests), dtype=np.int64)
    parts = np.zeros(len(digests), dtype=np.int64)  # the number of parts that each rank holds
    for group in groups:
        parts[np.concatenate(group.ranks)] = len(group.tensors)
    begins = np.cumsum(parts) - parts
    written = np.zeros(parts.sum(), dtype=np.bool_)
    tensors = [_choose_writers(held, load) for held in _by_tensor(groups)]
    for tensor in tensors:
        _check_tiling(tensor)
        written[begins[tensor.writer] + tensor.part] = True
    return SharedPlan(len(digests), serial, tensors, np.split(written, begins[1:]))


def _groups(digests: Sequence[bytes], packed: Mapping[int, bytes]) -> list[_Group]:
    having: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        having.setdefault(digest, []).append(rank)
    rows: dict[bytes, list[tuple[Ints, Ints]]] = {}  # pickled tensors -> (boxes, ranks) of each holding
    for rank, data in packed.items():
        holding = Holding.unpack(data)
        boxes = np.frombuffer(holding.boxes, dtype=np.int64)
        rows.setdefault(holding.tensors, []).append((boxes, np.array(having[digests[rank]], dtype=np.int64)))
    return [
        _Group(
            tuple(TensorName(*name_fields) for name_fields in pickle.loads(tensors)),
            np.stack([boxes for boxes, _ in group_rows]),
            tuple(ranks for _, ranks in group_rows),
        )
        for tensors, group_rows in rows.items()
    ]


def _by_tensor(groups: Sequence[_Group]) -> Iterator[_Held]:
    """Yields each tensor with all its holdings, in the order in which the ranks list them.

    Raises:
        ValueError: ranks disagree about the shape or dtype of a tensor.
    """
    where: dict[str, list[tuple[_Group, int]]] = {}
    for group in groups:
        for part, tensor in enumerate(group.tensors):
            where.setdefault(tensor.name, []).append((group, part))
    for holdings in where.values():
        first = holdings[0][0].tensors[holdings[0][1]]
        for group, part in holdings:
            if group.tensors[part] != first:
                raise ValueError(f"the ranks disagree about a tensor: {first} and {group.tensors[part]}")
        alone = [group.only for group, _ in holdings if group.only is not None]
        yield _Held(
            first,
            np.concatenate([group.boxes[:, group.columns[part] : group.columns[part + 1]] for group, part in holdings]),
            np.concatenate([np.full(len(group.ranks), part) for group, part in holdings]),
            [ranks for group, _ in holdings for ranks in group.ranks],
            np.concatenate(alone) if len(alone) == len(holdings) else None,
        )


def _choose_writers(held: _Held, load: Ints) -> WrittenTensor:
    """Gives each part of a tensor to the rank that has the fewest bytes to write, and adds them to its ``load``."""
    keys = held.keys()
    sizes = held.bytes()
    order = np.argsort(keys, kind="stable")
    begins = np.flatnonzero(np.diff(keys[order], prepend=keys[order[0]] - 1))
    if len(begins) == len(order) and held.only is not None:  # there is nothing to choose
        np.add.at(load, held.only, sizes)
        return WrittenTensor(held.tensor, held.boxes, held.only, held.part)
    rows: list[int] = []
    writers: list[int] = []
    for begin, end in pairwise([*begins.tolist(), len(order)]):
        choices = []  # (load, rank, holding); of equal loads, the lowest rank wins
        for holding in order[begin:end].tolist():
            ranks = held.ranks[holding]
            least = load[ranks].argmin()
            choices.append((load[ranks[least]], int(ranks[least]), holding))
        _, writer, row = min(choices)
        load[writer] += sizes[row]
        rows.append(row)
        writers.append(writer)
    return WrittenTensor(held.tensor, held.boxes[rows], np.array(writers, dtype=np.int64), held.part[rows])


def _check_tiling(written: WrittenTensor) -> None:
    """Raises ValueError unless the parts are within the tensor, do not overlap, and are the whole of it."""
    axes = len(written.tensor.shape)
    begins, sizes = written.boxes[:, :axes], written.boxes[:, axes:]
    inside = (begins >= 0).all() and (begins + sizes <= np.array(written.tensor.shape, dtype=np.int64)).all()
    covers_all = sizes.prod(axis=1).sum() == math.prod(written.tensor.shape)
    filled = written.boxes[sizes.prod(axis=1) > 0]
    if not (inside and covers_all and (_is_grid(filled, axes) or not _overlap(filled, axes))):
        raise ValueError(
            f"the parts of {written.tensor.name} on the ranks do not tile its shape {written.tensor.shape}"
        )


def _is_grid(boxes: Ints, axes: int) -> bool:
    """Returns whether the boxes are distinct cells of a grid, as in every split along axes, even or uneven."""
    cells = 1
    for axis in range(axes):
        order = np.argsort(boxes[:, axis], kind="stable")
        begins, sizes = boxes[order, axis], boxes[order, axes + axis]
        same = begins[1:] == begins[:-1]
        if not np.where(same, sizes[1:] == sizes[:-1], begins[1:] >= begins[:-1] + sizes[:-1]).all():
            return False
        cells *= len(boxes) - int(same.sum())
    return cells == len(boxes)


def _overlap(boxes: Ints, axes: int) -> bool:
    begins, ends = boxes[:, :axes], boxes[:, :axes] + boxes[:, axes:]
    for row in range(len(boxes) - 1):
        common = (begins[row] < ends[row + 1 :]) & (begins[row + 1 :] < ends[row])
        if common.all(axis=1).any():
            return True
    return False


_PROTOCOL = 4
_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)


def encode_metadata(plan: SharedPlan, places: Sequence[Places]) -> bytearray:
    """Returns the content of ``.metadata``, the pickle of a ``Metadata`` object, for every reader of DCP's format.

    ``Metadata`` has several objects per part of a tensor. 8,000 ranks that shard 300 tensors have 2.4 million parts:
    their objects and the pickler's memo would take several GB, and the pickler would hold the GIL, and thereby block
    training on rank 0, until it is done. Therefore this function writes the opcodes of the parts directly.

    Args:
        places: where each rank has written its parts.
    """
    encoder = _Encoder()
    encoder.out += encoder.open(Metadata)
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

    def key(self, name: str) -> None:
        reference = self.constant(name)  # which may itself add to ``out``
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
