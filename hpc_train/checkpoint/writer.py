"""Writes tensors in the format of ``torch.distributed.checkpoint``, hashes the files, and checks that all was written.

The ranks exchange little data: the digests of their holdings, and after the write the digest of each file (see
``plan``). The places of the parts in the files change only with the plan, so rank 0 keeps the bytes of ``.metadata``
and writes them again. A save fails if a rank has not written each planned part exactly once, or if rank 0 finds a file
that is shorter than its parts.

A rank syncs its own files. Rank 0 syncs the directory once, after all ranks have closed theirs and before the commit
(``CheckpointStore.commit``). That makes the entries of all ranks durable: on a local file system and on Lustre's
metadata server the entries are in one journal, which the later sync commits up to its end; NFS servers commit an entry
before they reply; and GPFS writes an entry back before it gives the directory's token to the node that syncs. A sync by
each rank would be N syncs of one object.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import _DistWrapper

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.manifest import METADATA, FileEntry
from hpc_train.checkpoint.plan import Holding, Places, SharedPlan, encode_metadata, senders, share_out
from hpc_train.run.exits import CollectiveFailure

SHOWN = 4  # failed ranks that a message describes


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
class Answer:
    """Holds a rank's message before a save: the serial of the plan that it knows, and the digest of its holding."""

    serial: int | None
    digest: bytes


@dataclass(frozen=True)
class Written:
    """Holds a rank's message to the others after its write.

    Attributes:
        files: its files by name.
        places: the places of its parts; None if they have not changed since the last save of this plan.
    """

    files: Mapping[str, FileEntry]
    places: Places | None


class RankWriter:
    """Holds one rank's share of the plan, and writes it.

    Args:
        single_file: write one file per rank; otherwise one per tensor. DCP keeps all tensors of a file in memory until
            the file is complete.
    """

    def __init__(self, rank: int, single_file: bool = True) -> None:
        self._rank = rank
        self._single_file = single_file
        self._items: list[WriteItem] = []
        self._holding: Holding | None = None
        self._planned: tuple[int, bytes, bytes] | None = None  # serial, digest of the holding, one bit per part
        self._written: Places | None = None  # the places of the last write
        self._known: Places | None = None  # the places that rank 0 knows

    def describe(self, state: Mapping[str, Tensor]) -> Answer:
        """Describes the holding of this rank, without reading values."""
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(dict(state), is_coordinator=self._rank == 0)
        self._items = planner.create_local_plan().items
        self._holding = Holding.of(self._items)
        serial = None
        if self._planned is not None and self._planned[1] == self._holding.digest:
            serial = self._planned[0]
        return Answer(serial, self._holding.digest)

    def pack(self) -> bytes:
        """Returns the described holding."""
        assert self._holding is not None, "nothing is described"
        return self._holding.pack()

    def accept(self, serial: int, bits: bytes) -> None:
        """Accepts rank 0's plan for the described holding."""
        assert self._holding is not None, "nothing is described"
        self._planned = serial, self._holding.digest, bits
        self._known = None

    @property
    def items(self) -> list[WriteItem]:
        """Returns the items of the described holding that this rank writes."""
        assert self._planned is not None, "nothing is planned"
        bits = np.unpackbits(np.frombuffer(self._planned[2], dtype=np.uint8), count=len(self._items))
        return [item for item, written in zip(self._items, bits.tolist(), strict=True) if written]

    def write(self, writing: Path, state: Mapping[str, Tensor], host: Mapping[str, Tensor] | None) -> Written:
        """Writes this rank's files; they are on disk on return, and their entries when rank 0 has synced ``writing``.

        Raises:
            RuntimeError: DCP has not written each item exactly once.
        """
        writer = HashingWriter(writing, self._single_file)
        planner = SnapshotPlanner(state, host)
        items = self.items
        plan = SavePlan(items, storage_data=_StoragePrefix(f"__{self._rank}_"))
        results = writer.write_data(plan, planner).value()
        places = {result.index: result.storage_data for result in results}
        planned = [item.index for item in items]
        if len(results) != len(planned) or places.keys() != set(planned):
            missing = sorted({index.fqn for index in set(planned) - places.keys()})
            raise RuntimeError(
                f"rank {self._rank} has written {len(results)} of {len(planned)} items; missing: {missing}"
            )
        self._written = Places.of([places[index] for index in planned])
        return Written(dict(writer.files), None if self._written == self._known else self._written)

    def confirm(self) -> None:
        """Records that rank 0 knows the places of the last write."""
        self._known = self._written


class Coordinator:
    """Holds rank 0's plan for all ranks, and the encoded ``.metadata`` of its last save."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._serial = 0
        self._plan: SharedPlan | None = None
        self._places: list[Places | None] = []
        self._metadata: bytearray | None = None

    def must_send(self, answers: Sequence[Answer]) -> list[int]:
        """Returns the ranks that must send their holdings for a new plan; none if the last plan is still valid."""
        if self._plan is not None and all(answer.serial == self._plan.serial for answer in answers):
            return []
        return senders([answer.digest for answer in answers])

    def make_plan(self, answers: Sequence[Answer], packed: Sequence[bytes | None]) -> list[tuple[int, bytes]]:
        """Returns for each rank the serial of a new plan and the parts that it writes; see ``RankWriter.accept``."""
        self._plan = None
        self._places = [None] * self._ranks
        self._metadata = None
        self._serial += 1
        sent = {rank: data for rank, data in enumerate(packed) if data is not None}
        self._plan = plan = share_out([answer.digest for answer in answers], sent, self._serial)
        return [(plan.serial, plan.answer(rank)) for rank in range(self._ranks)]

    def check_space(self, check: Callable[[int, int], None]) -> None:
        """Calls ``check`` with the bytes of all tensors and the number of files."""
        assert self._plan is not None, "nothing is planned"
        check(self._plan.tensor_bytes, self._ranks + 3)

    def finish(self, writing: Path, written: Sequence[Written]) -> dict[str, FileEntry]:
        """Writes ``.metadata`` and returns all files.

        Raises:
            RuntimeError: a file ends within one of its parts.
        """
        assert self._plan is not None, "nothing is planned"
        for rank, answer in enumerate(written):
            if answer.places is not None and answer.places != self._places[rank]:
                self._places[rank] = answer.places
                self._metadata = None
        places = [place for place in self._places if place is not None]
        assert len(places) == self._ranks, "a rank has not sent where its parts are"
        files = {name: entry for answer in written for name, entry in answer.files.items()}
        for rank, place in enumerate(places):
            for name, end in place.ends().items():
                size = files[name].size if name in files else 0
                if name not in files or end > size:
                    raise RuntimeError(f"rank {rank}: {name} has {size} bytes, and its last part ends at {end}")
        if self._metadata is None:
            self._metadata = encode_metadata(self._plan, places)
        metadata = disk.write_file(writing / METADATA, self._metadata)
        files[METADATA] = FileEntry(metadata.size, metadata.digest)
        return files


class TensorWriter:
    """Writes tensors collectively over ``group``, and plans again only when the holdings of a rank have changed.

    Args:
        group: None means one process.
        single_file: see ``RankWriter``.
    """

    def __init__(self, group: dist.ProcessGroup | None, single_file: bool = True) -> None:
        self._ranks = _DistWrapper(group, group is not None, 0)
        self._local = RankWriter(self._ranks.get_rank(), single_file)
        self._first = Coordinator(self._ranks.get_world_size())  # used on rank 0

    def names(self, state: Mapping[str, Tensor]) -> set[str]:
        """Returns the names of the tensors that this rank will write in a save of ``state``. Collective.

        Ranks may hold the same tensor; the plan chooses which of them writes it. This reads no values.

        Raises:
            SaveFailed: the plan failed on some rank; raised on all ranks.
        """
        try:
            with quiet():
                self._plan(state, None)
        except CheckpointException as error:
            _fail(error)
        return {item.index.fqn for item in self._local.items}

    def write(
        self,
        state: Mapping[str, Tensor],
        writing: Path,
        check_space: Callable[[int, int], None],
        host: Mapping[str, Tensor] | None = None,
    ) -> dict[str, FileEntry]:
        """Writes ``state`` into the new directory ``writing``. Collective.

        Args:
            check_space: called on the first rank with the total bytes and the number of files before the first write.
            host: name -> host copy of a tensor that this rank writes; ``state`` only provides names and shapes. A copy
                is read before the next one is requested, so that all of them may use the same memory.

        Returns:
            All files on the first rank, an empty dict on the others. The files are on disk.

        Raises:
            SaveFailed: the save failed on some rank; raised on all ranks.
        """
        files: dict[str, FileEntry] = {}

        def finish(written: list[Written]) -> None:
            files.update(self._first.finish(writing, written))

        try:
            with quiet():
                self._plan(state, check_space)
                self._ranks.all_reduce("write", partial(self._local.write, writing, state, host), finish)
        except CheckpointException as error:
            _fail(error)
        self._local.confirm()
        return files

    def _plan(self, state: Mapping[str, Tensor], check_space: Callable[[int, int], None] | None) -> None:
        """Plans a save, and checks the space for it; the ranks send their holdings only if these have changed."""
        answers: list[Answer] = []

        def ask(received: list[Answer]) -> list[int]:
            answers.extend(received)
            sending = self._first.must_send(received)
            if not sending and check_space is not None:
                self._first.check_space(check_space)
            return sending

        def plan(packed: list[bytes | None]) -> list[tuple[int, bytes]]:
            plans = self._first.make_plan(answers, packed)
            if check_space is not None:
                self._first.check_space(check_space)
            return plans

        sending = self._ranks.all_reduce("plan", partial(self._local.describe, state), ask)
        if sending:
            sends = self._ranks.get_rank() in sending
            local_plan = self._ranks.reduce_scatter("plan", lambda: self._local.pack() if sends else None, plan)
            self._local.accept(*local_plan)


def write_tensors(
    state: Mapping[str, Tensor],
    writing: Path,
    group: dist.ProcessGroup | None,
    check_space: Callable[[int, int], None],
    host: Mapping[str, Tensor] | None = None,
    single_file: bool = True,
) -> dict[str, FileEntry]:
    """Writes ``state`` once; see ``TensorWriter``."""
    return TensorWriter(group, single_file).write(state, writing, check_space, host)


def _fail(error: CheckpointException) -> NoReturn:
    failures = {rank: failure[0] for rank, failure in error.failures.items()}
    messages = [f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in sorted(failures.items())]
    if len(messages) > SHOWN:
        messages[SHOWN:] = [f"and {len(messages) - SHOWN} more ranks"]
    message = "; ".join(messages)
    if all(isinstance(failure, OSError) for failure in failures.values()):  # these need no traceback
        raise SaveFailed(message, failures) from None
    raise SaveFailed(message, failures) from error


class SnapshotPlanner(dcp.DefaultSavePlanner):
    """Reads the values of a save from ``host`` if given, otherwise from the live tensors."""

    def __init__(self, state: Mapping[str, Tensor], host: Mapping[str, Tensor] | None) -> None:
        super().__init__()
        self.set_up_planner(dict(state))
        self._host = host

    def lookup_object(self, index: MetadataIndex) -> Any:
        if self._host is None:
            return super().lookup_object(index)
        return self._host[index.fqn]


class HashingWriter(dcp.FileSystemWriter):
    """Writes new files into an existing directory; ``files`` lists them."""

    def __init__(self, directory: Path, single_file: bool = True) -> None:
        # DCP would sync before the flush, so HashedFile syncs instead. Where torch has CUDA, DCP copies ahead on the
        # current stream of this thread, even if all tensors are on the host; without copies ahead it uses no device.
        super().__init__(
            directory, single_file_per_rank=single_file, sync_files=False, per_thread_copy_ahead=0, overwrite=False
        )
        self.files: dict[str, FileEntry] = {}
        self.fs: HashingFileSystem = HashingFileSystem(self.files)


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


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings, since DCP warns about its own use of deprecated names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
