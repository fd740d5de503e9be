"""Writes tensors with ``torch.distributed.checkpoint`` such that every byte is accounted for.

Each file is hashed as it is written and synced after Python's buffers are flushed. The digests travel to rank 0 with
DCP's own write results; rank 0 refuses to finish unless each planned item was written once, where the plan says.

Copies of a rank's tensors in host memory, so that training goes on while they are written. The memory is reused.

Of what several ranks hold one of them writes it, as the save's plan says. The plan is made in the background, after the
copies; it is the same for the same tensors, so from the second save on a rank copies only what it will write.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.futures import Future

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.manifest import FileEntry
from hpc_train.run.exits import CollectiveFailure


class SaveFailed(CollectiveFailure):
    """A save failed on some rank and every rank knows it. The checkpoints before are as they were.

    Args:
        failures: by rank.

    Attributes:
        ranks: those on which it failed.
        codes: the numbers of the system's errors among the failures.
    """

    def __init__(self, message: str, failures: Mapping[int, BaseException]) -> None:
        super().__init__(message)
        self.ranks = frozenset(failures)
        self.codes = {error.errno for error in failures.values() if isinstance(error, OSError) and error.errno}


@dataclass(frozen=True)
class WrittenFile:
    """What a rank tells of a file that it has written."""

    name: str
    entry: FileEntry


def write_tensors(
    state: Mapping[str, Tensor],
    writing: Path,
    group: dist.ProcessGroup | None,
    check_space: Callable[[int, int], None],
    host: Mapping[str, Tensor] | None = None,
    one_file: bool = True,
    on_plan: Callable[[set[str]], None] = lambda names: None,
) -> dict[str, FileEntry]:
    """Writes ``state`` into the new directory ``writing``. Collective over ``group``; one process without it.

    Args:
        check_space: called on the first rank with the bytes and the number of files to come, before any is written.
        host: by name, local copies of what this rank holds; ``state`` then gives names and shapes only.
        on_plan: told the names that this rank writes, before it does.
        one_file: of each rank; else one of each tensor. DCP keeps all tensors of a file until the file is whole.

    Returns:
        On the first rank, all files; they are on disk. Elsewhere nothing.

    Raises:
        SaveFailed: on every rank.
    """
    writer = HashingWriter(writing, check_space, one_file)
    try:
        with quiet():
            dcp.save(
                dict(state),
                storage_writer=writer,
                planner=SnapshotPlanner(host, on_plan),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        failures = {rank: found[0] for rank, found in error.failures.items()}
        told = all(isinstance(failure, OSError) for failure in failures.values())  # without a traceback
        raise SaveFailed(_in_words(failures), failures) from (None if told else error)
    return dict(writer.files)


class SnapshotPlanner(dcp.DefaultSavePlanner):
    """Plans by the live tensors' names, shapes and shards; takes the values from copies where there are any."""

    def __init__(self, host: Mapping[str, Tensor] | None, on_plan: Callable[[set[str]], None]) -> None:
        super().__init__()
        self._host, self._on_plan = host, on_plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._on_plan({item.index.fqn for item in plan.items})
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) if self._host is None else self._host[index.fqn]


class HashingWriter(dcp.FileSystemWriter):
    """A ``FileSystemWriter`` into a directory that is there and empty. On rank 0, ``files`` names all it holds then."""

    def __init__(self, directory: Path, check_space: Callable[[int, int], None], one_file: bool = True) -> None:
        # its sync comes before the flush
        super().__init__(directory, single_file_per_rank=one_file, sync_files=False, overwrite=False)
        self.files: dict[str, FileEntry] = {}
        self.fs: HashingFileSystem = HashingFileSystem(self.files)
        self._check_space = check_space
        self._planned: list[set[MetadataIndex]] = []

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # without a path: the directory is about to be renamed

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        objects = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if objects:
            raise ValueError(f"not a tensor, so its load would unpickle it: {objects[0]}")
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        self._planned = [{item.index for item in plan.items} for plan in plans]
        self._check_space(sum(_bytes(item) for plan in plans for item in plan.items), len(plans) + 3)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        results = super().write_data(plan, planner).value()
        disk.sync_directory(Path(self.path))
        written: Future[Any] = Future()
        written.set_result([*results, *(WrittenFile(name, entry) for name, entry in self.files.items())])
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        files = {found.name: found.entry for part in results for found in part if isinstance(found, WrittenFile)}
        tensors = [[found for found in part if not isinstance(found, WrittenFile)] for part in results]
        self._account(tensors, files)
        self.files.update(files)
        super().finish(metadata, tensors)

    def _account(self, results: list[list[Any]], files: Mapping[str, FileEntry]) -> None:
        """Raises where what was written is not what was planned."""
        for rank, (planned, part) in enumerate(zip(self._planned, results, strict=True)):
            written = [result.index for result in part]
            if len(written) != len(planned) or set(written) != planned:
                missing = sorted({index.fqn for index in planned.difference(written)})
                raise RuntimeError(
                    f"rank {rank} has written {len(written)} of {len(planned)} items; missing: {missing}"
                )
            for result in part:
                place = result.storage_data
                if place.offset + place.length > files[place.relative_path].size:
                    raise RuntimeError(f"rank {rank}: {place.relative_path} ends before {result.index.fqn} does")


class HashingFileSystem(FileSystem):
    """Opens new files only, and notes the size and digest of each in ``files`` when it is on disk."""

    def __init__(self, files: dict[str, FileEntry]) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        file = disk.HashedFile(Path(path))
        try:
            yield file
            file.close()
        except BaseException as error:
            file.abandon()
            if file.failure is not None and error is not file.failure:
                raise file.failure from None  # torch tells of it as a broken zip file
            raise
        self._files[file.path.name] = FileEntry(file.size, file.digest)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """The directory was made once, by the first rank."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        disk.rename(Path(path), Path(new_path))
        self._files[Path(new_path).name] = self._files.pop(Path(path).name)


@contextmanager
def quiet() -> Iterator[None]:
    """DCP warns of its own use of deprecated names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _in_words(failures: Mapping[int, BaseException]) -> str:
    return "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(failures.items()))


class HostCopies:
    """Buffers for one snapshot; the next one overwrites them. They are pinned for tensors on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._planned: tuple[frozenset[str], frozenset[str]] | None = None  # of which names, this rank writes which

    @torch.no_grad()  # without it DTensors ask autograd for their shards
    def take(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies what this rank holds of ``state`` and will write, of a DTensor its shard; complete on return."""
        devices, names = set(), self._names(state)
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in names}
        for name in names:
            tensor = state[name]
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            self._buffer(name, local).copy_(local, non_blocking=True)
            if local.is_cuda:
                devices.add(local.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._buffers)

    def planned(self, state: Iterable[str], written: Iterable[str]) -> None:
        """Of a save of the names in ``state``, this rank writes ``written``."""
        self._planned = frozenset(state), frozenset(written)

    def forget_plan(self) -> None:
        """After a save that failed: perhaps other ranks hold other tensors now."""
        self._planned = None

    def _names(self, state: Mapping[str, Tensor]) -> Collection[str]:
        if self._planned is None or self._planned[0] != state.keys():
            return state.keys()
        return self._planned[1]

    def _buffer(self, name: str, local: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        return buffer
