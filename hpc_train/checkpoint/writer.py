"""Writes tensors with ``torch.distributed.checkpoint``, hashes each file, and checks that nothing is missing.

The digests travel to rank 0 with DCP's own write results. Rank 0 fails the save unless each planned item was written
exactly once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.futures import Future

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.manifest import FileEntry
from hpc_train.run.exits import CollectiveFailure


class SaveFailed(CollectiveFailure):
    """Reports on all ranks that a save failed on some of them; earlier checkpoints remain valid.

    Args:
        failures: rank -> its exception.

    Attributes:
        ranks: the ranks on which the save failed.
        codes: the ``errno`` values among the failures.
    """

    def __init__(self, message: str, failures: Mapping[int, BaseException]) -> None:
        super().__init__(message)
        self.ranks = frozenset(failures)
        self.codes = {error.errno for error in failures.values() if isinstance(error, OSError) and error.errno}


@dataclass(frozen=True)
class WrittenFile:
    """Describes a file that a rank has written."""

    name: str
    entry: FileEntry


def write_tensors(
    state: Mapping[str, Tensor],
    writing: Path,
    group: dist.ProcessGroup | None,
    check_space: Callable[[int, int], None],
    host: Mapping[str, Tensor] | None = None,
    one_file: bool = True,
) -> dict[str, FileEntry]:
    """Writes ``state`` into the new directory ``writing``, collectively over ``group``; None means one process.

    Args:
        check_space: called on the first rank with the total bytes and the number of files before the first write.
        host: name -> host copy of what this rank writes; ``state`` then only provides names and shapes. A copy is read
            before the next one is asked for, so that all of them may use the same memory.
        one_file: write one file per rank; otherwise one per tensor. DCP keeps all tensors of a file in memory until
            the file is complete.

    Returns:
        All files on the first rank, an empty dict on the others. The files are on disk.

    Raises:
        SaveFailed: the save failed on some rank; raised on all ranks.
    """
    writer = HashingWriter(writing, check_space, one_file)
    try:
        with quiet():
            dcp.save(
                dict(state),
                storage_writer=writer,
                planner=SnapshotPlanner(host),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        _fail(error)
    return dict(writer.files)


def planned_names(state: Mapping[str, Tensor], group: dist.ProcessGroup) -> set[str]:
    """Returns the names of the tensors that this rank will write in a save of ``state``. Collective.

    Ranks may hold the same tensor; the plan of a save chooses which of them writes it. It reads no values.

    Raises:
        SaveFailed: the plan failed on some rank; raised on all ranks.
    """
    planner = SnapshotPlanner(None)

    def local_plan() -> SavePlan:
        planner.set_up_planner(dict(state), is_coordinator=dist.get_rank(group) == 0)
        return planner.create_local_plan()

    def names_of_ranks(plans: list[SavePlan]) -> list[set[str]]:
        return [{item.index.fqn for item in plan.items} for plan in planner.create_global_plan(plans)[0]]

    try:
        with quiet():
            return _DistWrapper(group, True, 0).reduce_scatter("plan", local_plan, names_of_ranks)
    except CheckpointException as error:
        _fail(error)


def _fail(error: CheckpointException) -> NoReturn:
    failures = {rank: found[0] for rank, found in error.failures.items()}
    expected = all(isinstance(failure, OSError) for failure in failures.values())  # these need no traceback
    raise SaveFailed(_describe(failures), failures) from (None if expected else error)


class SnapshotPlanner(dcp.DefaultSavePlanner):
    """Plans a save from the live tensors' names, shapes and shards; reads the values from ``host`` if given."""

    def __init__(self, host: Mapping[str, Tensor] | None) -> None:
        super().__init__()
        self._host = host

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) if self._host is None else self._host[index.fqn]


class HashingWriter(dcp.FileSystemWriter):
    """Writes into an existing empty directory; ``files`` then lists all its files on rank 0."""

    def __init__(self, directory: Path, check_space: Callable[[int, int], None], one_file: bool = True) -> None:
        # DCP would sync before the flush, so HashedFile syncs instead. Where torch has CUDA, DCP copies ahead on the
        # current stream of this thread, even if all tensors are on the host; without copies ahead it uses no device.
        super().__init__(
            directory, single_file_per_rank=one_file, sync_files=False, per_thread_copy_ahead=0, overwrite=False
        )
        self.files: dict[str, FileEntry] = {}
        self.fs: HashingFileSystem = HashingFileSystem(self.files)
        self._check_space = check_space
        self._planned: list[set[MetadataIndex]] = []

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # no path, because the commit renames the directory

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        objects = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if objects:
            raise ValueError(f"{objects[0]} is not a tensor, and loading it would unpickle it")
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
        """Raises unless the written items are the planned ones."""
        for rank, (planned, part) in enumerate(zip(self._planned, results, strict=True)):
            written = [result.index for result in part]
            if len(written) != len(planned) or set(written) != planned:
                missing = sorted({index.fqn for index in planned.difference(written)})
                raise RuntimeError(
                    f"rank {rank} has written {len(written)} of {len(planned)} items; missing: {missing}"
                )
            for result in part:
                info = result.storage_data
                if info.offset + info.length > files[info.relative_path].size:
                    raise RuntimeError(f"rank {rank}: {info.relative_path} ends within {result.index.fqn}")


class HashingFileSystem(FileSystem):
    """Opens only new files, and adds the size and digest of each to ``files`` when it is on disk."""

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
                raise file.failure from None  # torch would report a broken zip file
            raise
        self._files[file.path.name] = FileEntry(file.size, file.digest)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Does nothing, since the first rank has already created the directory."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        disk.rename(Path(path), Path(new_path))
        self._files[Path(new_path).name] = self._files.pop(Path(path).name)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings, since DCP warns about its own use of deprecated names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _describe(failures: Mapping[int, BaseException]) -> str:
    return "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(failures.items()))
