"""Reads tensors of a verified checkpoint without executing code from it.

``.metadata`` is a pickle: it is read with an allow-list of the few plain value classes that DCP writes, and then
checked. Each tensor is a zip archive with a description, which torch reads with ``weights_only``, and its elements,
which are not compressed. Only the bytes from the first to the last element that a rank needs are read, so a rank that
holds some rows of a stored tensor reads these rows. Objects other than tensors are rejected.
"""

from __future__ import annotations

import importlib
import io
import operator
import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hpc_train.checkpoint.agreement import Group, broadcast_bytes, on_first, raise_lowest
from hpc_train.checkpoint.extra_state import keys, names_of, read_entry
from hpc_train.checkpoint.manifest import METADATA, BadCheckpoint, FileEntry, Manifest, verify
from hpc_train.checkpoint.state import ALIASES, TensorShape, stored_shapes, weights_of_hook
from hpc_train.checkpoint.writer import quiet
from hpc_train.run.processes import without_collector

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
}
_ARCHIVE_OVERHEAD = 64 << 10  # bytes of a one-tensor archive in addition to the tensor


class SafeReader(dcp.FileSystemReader):
    """A ``FileSystemReader`` for the checkpoint at ``path``, whose files match ``manifest``.

    Another rank may have verified a file that this one reads. Each rank waits at most ``visibility_timeout_s`` (see
    ``manifest.wait_until_visible``) until it sees its own files in full size.
    """

    def __init__(self, path: Path, manifest: Manifest, visibility_timeout_s: float = 0.0) -> None:
        super().__init__(path)
        self._manifest = manifest
        self._visibility_s = visibility_timeout_s
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads and checks ``.metadata``, once for many loads: it has many megabytes in a large checkpoint.

        Raises:
            BadCheckpoint: the file is damaged, DCP does not write such content, or it refers to other files.
        """
        if self._metadata is None:
            self._metadata = read_metadata(self._read_file(), self._manifest)
        return self._metadata

    def share_metadata(self, group: Group) -> None:
        """Reads and checks ``.metadata`` on the first rank, and sends its bytes to all others. Collective.

        Raises:
            BadCheckpoint: see ``read_metadata``.
        """
        data: bytes | None = None

        def read() -> None:
            nonlocal data
            data = self._read_file()
            self._metadata = read_metadata(data, self._manifest)

        on_first(read, group)
        data = broadcast_bytes(data, group)
        problem: BadCheckpoint | None = None
        try:
            self._metadata = self._metadata or _decode(data)
        except BadCheckpoint as error:  # e.g. out of memory
            problem = error
        raise_lowest(problem, group)

    def _read_file(self) -> bytes:
        self._wait_for([METADATA])
        data = (Path(self.path) / METADATA).read_bytes()
        entry = self._manifest.files[METADATA]
        if FileEntry(len(data), xxhash.xxh3_128(data).hexdigest()) != entry:
            raise BadCheckpoint(f"{METADATA}: the content does not match its checksum")
        return data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items_of: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items_of.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        self._wait_for(items_of)
        for name, items in items_of.items():
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            with (Path(self.path) / name).open("rb", buffering=0) as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read_box(file, self.storage_data[item.storage_index], item))
                    planner.commit_tensor(item, target)
        finished: Future[None] = Future()
        finished.set_result(None)
        return finished

    def _wait_for(self, names: Iterable[str]) -> None:
        verify(Path(self.path), self._manifest, names, full=False, visibility_timeout_s=self._visibility_s)


def read_metadata(data: bytes, manifest: Manifest) -> Metadata:
    """Decodes and checks ``.metadata``.

    Raises:
        BadCheckpoint: it refers to a class that DCP does not write, or it does not match the manifest's files.
    """
    metadata = _decode(data)
    try:
        _check(metadata, manifest)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise BadCheckpoint(f"{METADATA}: DCP does not write such content ({error})") from None
    return metadata


def _decode(data: bytes) -> Metadata:
    try:
        with without_collector():
            metadata: Metadata = _Unpickler(io.BytesIO(data)).load()
    except BadCheckpoint:
        raise
    except Exception as error:
        raise BadCheckpoint(f"{METADATA}: cannot be read ({type(error).__name__}: {error})") from None
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in _ALLOWED:
            raise BadCheckpoint(f"{METADATA}: it refers to {module}.{name}, which is not on the allow-list")
        return vars(importlib.import_module(module))[name]

    def persistent_load(self, pid: Any) -> Any:
        raise BadCheckpoint(f"{METADATA}: it refers to an external object")


def _check(metadata: Any, manifest: Manifest) -> None:
    """Raises unless each tensor's chunks are in files of the checkpoint and have the size of the tensor."""
    _require(type(metadata) is Metadata, "it is not a Metadata object")
    storage: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
    _require(type(storage) is dict and type(metadata.state_dict_metadata) is dict, "a dict is missing")
    chunks = 0
    for name, entry in metadata.state_dict_metadata.items():
        _require(type(name) is str, "a name is not a string")
        _require(type(entry) is TensorStorageMetadata, f"{name} is not a tensor")
        dtype = entry.properties.dtype
        _require(type(dtype) is torch.dtype and type(entry.size) is torch.Size, f"{name} has no dtype or shape")
        for chunk in entry.chunks:
            info = storage[MetadataIndex(name, chunk.offsets)]
            _check_storage(name, info, manifest, chunk.sizes.numel() * dtype.itemsize)
        chunks += len(entry.chunks)
        covered = sum(chunk.sizes.numel() for chunk in entry.chunks)
        _require(covered == entry.size.numel(), f"{name} has {entry.size.numel()} elements, {covered} stored")
    _require(chunks == len(storage), "some chunks belong to no tensor")


def _check_storage(name: str, info: Any, manifest: Manifest, tensor_bytes: int) -> None:
    _require(type(info) is _StorageInfo and type(info.relative_path) is str, f"{name} has no storage info")
    _require(type(info.offset) is int and type(info.length) is int, f"{name}: offset or length is not an integer")
    _require(info.offset >= 0 and info.length > 0, f"{name}: offset or length is negative")
    _require(not info.transform_descriptors, f"{name} is transformed")
    _require(info.relative_path in manifest.files, f"{info.relative_path!r} is not a file of the checkpoint")
    end = manifest.files[info.relative_path].size
    _require(info.offset + info.length <= end, f"{name} extends beyond the end of its file")
    _require(
        tensor_bytes <= info.length <= tensor_bytes + _ARCHIVE_OVERHEAD,
        f"{name} needs {tensor_bytes} bytes, {info.length} stored",
    )


class _Window(io.RawIOBase):
    """Presents a part of an open file as a file that can seek relative to its end, which DCP's class cannot."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("seek before the start of the file")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        filled = 0
        while filled < len(view):  # one call of the system reads 2 GiB at most
            count = self._file.readinto(view[filled:])
            if not count:
                break
            filled += count
        self._at += filled
        return filled


def _read_box(file: io.RawIOBase, info: _StorageInfo, item: ReadItem) -> Tensor:
    """Returns the box of a stored tensor that ``item`` describes, and reads no other rows of it.

    Raises:
        BadCheckpoint: the archive is damaged, or it holds no tensor that contains the box.
    """
    where = f"{info.relative_path} at {info.offset}"
    archive = _Window(file, info.offset, info.length)
    try:
        stored, begin = _describe(archive)
        ends = map(operator.add, item.storage_offsets, item.lengths)
        if not all(end <= size for end, size in zip(ends, stored.shape, strict=True)):
            raise ValueError("it is smaller than its description")
    except (zipfile.BadZipFile, pickle.UnpicklingError, ValueError, OSError, RuntimeError) as error:
        raise BadCheckpoint(f"{where}: not a stored tensor ({error})") from None
    strides = stored.stride()
    first = sum(map(operator.mul, item.storage_offsets, strides))
    count = sum((length - 1) * stride for length, stride in zip(item.lengths, strides, strict=True)) + 1
    if 0 in item.lengths:
        count = 0
    begin += (stored.storage_offset() + first) * stored.itemsize
    data = torch.empty(count * stored.itemsize, dtype=torch.uint8)
    archive.seek(begin)
    if archive.readinto(data.numpy()) < len(data):
        raise BadCheckpoint(f"{where}: the archive ends before the tensor does")
    return data.view(stored.dtype).as_strided(tuple(item.lengths), strides)


def _describe(archive: _Window) -> tuple[Tensor, int]:
    """Returns a tensor on ``meta`` like the stored one, and where its storage begins in the archive."""
    with zipfile.ZipFile(archive) as directory:  # type: ignore[call-overload]
        (storage,) = (member for member in directory.infolist() if "/data/" in member.filename)
    if storage.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its elements are compressed")
    archive.seek(storage.header_offset + _LENGTHS_IN_HEADER)
    name_length, extra_length = struct.unpack("<HH", archive.read(4))
    archive.seek(0)
    stored = torch.load(archive, map_location="meta", weights_only=True)  # type: ignore[arg-type]
    if not isinstance(stored, Tensor) or stored.untyped_storage().nbytes() > storage.file_size:
        raise ValueError("its description does not match its elements")
    return stored, storage.header_offset + _LENGTHS_IN_HEADER + 4 + name_length + extra_length


_LENGTHS_IN_HEADER = 26  # offset of the lengths of name and extra field in the header of a member of a zip archive


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


MODEL = "model."


class StoredTensors:
    """Reads the tensors of a verified checkpoint by global name, one at a time and in one process.

    Args:
        hook: the name of a hook, such as ema; its tensors replace the parameters of the model with the same names.

    Attributes:
        aliases: further names of the model's tied tensors -> their names in the checkpoint; earlier versions stored
            none.

    Raises:
        UserError: the hook has no such tensors in the checkpoint.
    """

    def __init__(self, path: Path, manifest: Manifest, hook: str | None = None) -> None:
        self._reader = SafeReader(path, manifest)
        self.shapes: dict[str, TensorShape] = stored_shapes(self._reader.read_metadata())
        self.aliases: Mapping[str, str] = manifest.extra.get(ALIASES, {})
        self._replaced = {} if hook is None else weights_of_hook(self.shapes, hook)

    def model(self) -> dict[str, TensorShape]:
        """Returns the names of the model's tensors -> their shapes."""
        return {name.removeprefix(MODEL): shape for name, shape in self.shapes.items() if name.startswith(MODEL)}

    def extra_state(self) -> dict[str, Any]:
        """Returns the entries of the model's state dict that are neither parameters nor buffers."""
        return {
            key: read_entry(key, {name: self.read(name) for name in names_of(key, self.shapes)})
            for key in keys(self.shapes)
        }

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """Returns the full tensor ``name``, assembled from its shards.

        Args:
            into: destination of the stored shape and dtype; None allocates a new tensor.
        """
        name = self._replaced.get(name, name)
        stored = self.shapes[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype) if into is None else into
        with quiet():
            dcp.load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor
