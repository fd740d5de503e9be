"""Reads tensors of a verified checkpoint without running code from it.

``.metadata`` is a pickle: it is read with an allow-list of the few classes that DCP puts there, all of them plain
values, and then checked. Each tensor is a zip archive that torch reads with ``weights_only``; here its directory is
looked at first, so that a small file cannot unfold into a large one. Objects that are not tensors are refused.

The tensors of a checkpoint, one at a time and whole, whatever layout wrote them: no ranks and little memory.
"""

from __future__ import annotations

import importlib
import io
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from hpc_train.checkpoint.manifest import METADATA, BadCheckpoint, FileEntry, Manifest, verify
from hpc_train.checkpoint.state import TensorShape, stored_shapes
from hpc_train.checkpoint.writer import quiet

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
_ARCHIVE_OVERHEAD = 64 << 10  # bytes of a one-tensor archive beside the tensor


class SafeReader(dcp.FileSystemReader):
    """A ``FileSystemReader`` of the checkpoint at ``path``, whose files agree with ``manifest``.

    Another rank may have verified the file that this one reads: each waits, for ``visibility_timeout_s`` at most (see
    ``manifest.wait_until_visible``), until it sees its own files whole.
    """

    def __init__(self, path: Path, manifest: Manifest, visibility_timeout_s: float = 0.0) -> None:
        super().__init__(path)
        self._manifest, self._visibility_s = manifest, visibility_timeout_s

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """
        Raises:
            BadCheckpoint: it is damaged, is not what DCP writes, or points outside the checkpoint's files.
        """
        self._await([METADATA])
        data = (Path(self.path) / METADATA).read_bytes()
        entry = self._manifest.files[METADATA]
        if FileEntry(len(data), xxhash.xxh3_128(data).hexdigest()) != entry:
            raise BadCheckpoint(f"{METADATA}: its content is not what was written")
        metadata = read_metadata(data, self._manifest)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._await({self.storage_data[item.storage_index].relative_path for item in plan.items})
        return super().read_data(plan, planner)

    def _await(self, names: Iterable[str]) -> None:
        verify(Path(self.path), self._manifest, names, full=False, visibility_timeout_s=self._visibility_s)

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        _check_archive(_Window(file, sinfo.offset, sinfo.length), sinfo)
        return super()._slice_file(file, sinfo)


def read_metadata(data: bytes, manifest: Manifest) -> Metadata:
    """Decodes the content of ``.metadata``.

    Raises:
        BadCheckpoint: it names something else than DCP does, or does not fit the manifest's files.
    """
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except BadCheckpoint:
        raise
    except Exception as error:
        raise BadCheckpoint(f"{METADATA}: cannot be read ({type(error).__name__}: {error})") from None
    try:
        _check(metadata, manifest)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise BadCheckpoint(f"{METADATA}: not what DCP writes ({error})") from None
    return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in _ALLOWED:
            raise BadCheckpoint(f"{METADATA}: names {module}.{name}, which is not loaded")
        return vars(importlib.import_module(module))[name]

    def persistent_load(self, pid: Any) -> Any:
        raise BadCheckpoint(f"{METADATA}: refers to an object outside")


def _check(metadata: Any, manifest: Manifest) -> None:
    """Raises unless each tensor's shards are pieces of files of the checkpoint, as large as the tensor says."""
    _require(type(metadata) is Metadata, "no Metadata")
    places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
    _require(type(places) is dict and type(metadata.state_dict_metadata) is dict, "no dict")
    pieces = 0
    for name, entry in metadata.state_dict_metadata.items():
        _require(type(name) is str, "a name is not text")
        _require(type(entry) is TensorStorageMetadata, f"{name} is not a tensor")
        dtype = entry.properties.dtype
        _require(type(dtype) is torch.dtype and type(entry.size) is torch.Size, f"{name} has no type or shape")
        for chunk in entry.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            _check_place(name, place, manifest, chunk.sizes.numel() * dtype.itemsize)
        pieces += len(entry.chunks)
        covered = sum(chunk.sizes.numel() for chunk in entry.chunks)
        _require(covered == entry.size.numel(), f"{name} has {entry.size.numel()} elements, {covered} stored")
    _require(pieces == len(places), "pieces that belong to no tensor")


def _check_place(name: str, place: Any, manifest: Manifest, tensor_bytes: int) -> None:
    _require(type(place) is _StorageInfo and type(place.relative_path) is str, f"{name} has no place")
    _require(type(place.offset) is int and type(place.length) is int, f"{name}: no numbers")
    _require(place.offset >= 0 and place.length > 0, f"{name}: negative")
    _require(not place.transform_descriptors, f"{name} is transformed")
    _require(place.relative_path in manifest.files, f"{place.relative_path!r} is not a file of the checkpoint")
    end = manifest.files[place.relative_path].size
    _require(place.offset + place.length <= end, f"{name} reaches beyond its file")
    _require(tensor_bytes <= place.length <= tensor_bytes + _ARCHIVE_OVERHEAD, f"{name}: {place.length} bytes")


class _Window(io.RawIOBase):
    """A part of an open file as a file (DCP's own cannot seek from its end)."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data: bytes = self._file.read(rest if size is None or size < 0 else min(size, rest))
        self._at += len(data)
        return data


def _check_archive(archive: _Window, place: _StorageInfo) -> None:
    try:
        members = zipfile.ZipFile(archive).infolist()  # type: ignore[call-overload]
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise BadCheckpoint(f"{place.relative_path} at {place.offset}: not a stored tensor ({error})") from None
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    if not stored or sum(member.file_size for member in members) > place.length:
        raise BadCheckpoint(f"{place.relative_path} at {place.offset}: unfolds into more than it is")


def _require(fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(what)


MODEL = "model."


class StoredTensors:
    """What lies in the directory of a checkpoint that agrees with its manifest, by global name."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._reader = _Reader(path, manifest)
        self.shapes: dict[str, TensorShape] = stored_shapes(self._reader.read_metadata())

    def model(self) -> dict[str, TensorShape]:
        """The tensors of the model, under the names that the model calls them."""
        return {name.removeprefix(MODEL): shape for name, shape in self.shapes.items() if name.startswith(MODEL)}

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """The whole tensor ``name``, put together from its shards.

        Args:
            into: where it goes, of the stored shape and type; new memory without it.
        """
        found = self.shapes[name]
        tensor = torch.empty(found.shape, dtype=found.dtype) if into is None else into
        with quiet():
            dcp.load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class _Reader(SafeReader):
    """Reads the metadata once: of a large checkpoint it is many megabytes, and there is a load for each tensor."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, manifest)
        self._metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata
