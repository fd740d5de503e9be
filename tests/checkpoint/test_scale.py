"""What a save, a removal and a restart cost rank 0 with many ranks: counts of messages, bytes and operations."""

from __future__ import annotations

import errno
import io
import os
import pickle
import sys
import threading
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from benchmarks.checkpoint_scale import SimulatedSave
from hpc_train.checkpoint import disk, manifest
from hpc_train.checkpoint.agreement import broadcast_bytes, from_rank, lowest
from hpc_train.checkpoint.manifest import METADATA, FileEntry, Manifest
from hpc_train.checkpoint.plan import Holding, Places, SharedPlan, encode_metadata, senders, share_out
from hpc_train.checkpoint.reader import SafeReader, read_metadata
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore, Removals, Retention
from hpc_train.checkpoint.verified import VerifiedSearch
from hpc_train.checkpoint.writer import SaveFailed, TensorWriter, _fail, quiet
from tests.checkpoint.tiny import commit, state_of
from tests.ranks import run_on_world, run_ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def items(shape: tuple[int, ...], *boxes: Box, name: str = "w", dtype: torch.dtype = torch.float32) -> list[WriteItem]:
    return [
        WriteItem(
            MetadataIndex(name, torch.Size(offsets)),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                TensorProperties(dtype),
                torch.Size(shape),
            ),
        )
        for offsets, sizes in boxes
    ]


def shared(ranks: list[list[WriteItem]]) -> SharedPlan:
    held = [Holding.of(each) for each in ranks]
    digests = [each.digest for each in held]
    return share_out(digests, {rank: held[rank].pack() for rank in senders(digests)}, 1)


def test_a_later_save_sends_digests_only(tmp_path: Path) -> None:
    save = SimulatedSave(ranks=64, tensors=20, replicas=1)
    gathered = []
    for again in (False, True):
        save.plan(save.describe())
        gathered.append(save.gathered)
        writing = tmp_path / str(again)
        writing.mkdir()
        save.finish(writing, save.results(again))
        gathered.append(save.gathered)
    assert gathered[2] <= 64 * 150 < gathered[0]
    assert gathered[3] <= 64 * 300 < gathered[1]
    one, two = ((tmp_path / name / METADATA).read_bytes() for name in ("False", "True"))
    assert one == two


def test_replicas_send_what_they_hold_once_and_share_the_writes() -> None:
    save = SimulatedSave(ranks=64, tensors=20, replicas=16)
    answers = [pickle.loads(answer) for answer in save.describe()]
    assert save.first.must_send(answers) == [0, 1, 2, 3]
    save.plan([pickle.dumps(answer) for answer in answers])
    assert sum(save.parts) == 4 * 20 and max(save.parts) - min(save.parts) <= 1
    assert save.first.must_send([pickle.loads(answer) for answer in save.describe()]) == []


def test_a_plan_costs_no_python_call_per_part() -> None:
    """8,000 ranks that shard 300 tensors have 2.4 million parts."""

    def calls(ranks: int) -> int:
        boxes = [[((rank,), (1,))] for rank in range(ranks)]
        held = [Holding.of([item for i in range(50) for item in items((ranks,), *box, name=str(i))]) for box in boxes]
        digests = [each.digest for each in held]
        packed = {rank: held[rank].pack() for rank in senders(digests)}
        counted = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            share_out(digests, packed, 1)
        finally:
            sys.setprofile(None)
        return counted

    assert calls(192) - calls(64) < 128 * 50 / 2, "of 50 parts per rank"


def test_one_changed_rank_means_a_new_plan() -> None:
    save = SimulatedSave(ranks=4, tensors=2, replicas=2)
    save.plan(save.describe())
    save.states[1]["another"] = save.states[1].popitem()[1]
    answers = [pickle.loads(answer) for answer in save.describe()]
    assert [answer.serial for answer in answers] == [1, None, 1, None]
    assert save.first.must_send(answers) == [0, 1]


def test_a_plan_of_another_serial_is_not_taken_for_this_one() -> None:
    """Rank 0 has planned anew, and the plan has not arrived anywhere."""
    save = SimulatedSave(ranks=2, tensors=2, replicas=1)
    save.plan(save.describe())
    answers = [pickle.loads(answer) for answer in save.describe()]
    save.first.make_plan(answers, [writer.pack() for writer in save.holders])
    assert save.first.must_send(answers) == [0, 1]


def of_dcp(ranks: list[list[WriteItem]]) -> Metadata:
    """What DCP plans for the same items."""
    return create_default_global_save_plan(dedup_save_plans([SavePlan(each) for each in ranks]))[1]


LARGE = 1 << 40
LAYOUTS = {
    "rows": [items((5, 3), ((0, 0), (2, 3))), items((5, 3), ((2, 0), (2, 3))), items((5, 3), ((4, 0), (1, 3)))],
    "a grid": [items((4, 4), ((row, column), (2, 2))) for row in (0, 2) for column in (0, 2)],
    "no dimension": [items((), ((), ()), dtype=torch.int64)] * 2,
    "an empty part": [items((1, 2), ((0, 0), (1, 2))), items((1, 2), ((1, 0), (0, 2)))],
    "five dimensions": [items((1, 1, 2, 1, 1), ((0,) * 5, (1, 1, 2, 1, 1)), dtype=torch.bfloat16)],
    "large": [items((2 * LARGE,), ((0,), (LARGE,))), items((2 * LARGE,), ((LARGE,), (LARGE,)))],
    "no grid": [items((3, 3), box) for box in (((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)),
                                               ((1, 0), (2, 1)), ((1, 1), (1, 1)))],
    "stages": [items((2,), ((0,), (2,)), name="a"), items((3,), ((0,), (3,)), name="b")],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_encoded_metadata_is_what_dcp_would_write(layout: str) -> None:
    ranks = LAYOUTS[layout]
    plan = shared(ranks)
    counts = [int(written.sum()) for written in plan.written]
    length = 300_000_000_000
    infos = [[_StorageInfo(f"__{r}_0.distcp", i * length, length) for i in range(n)] for r, n in enumerate(counts)]
    found = pickle.loads(bytes(encode_metadata(plan, [Places.of(each) for each in infos])))
    wanted = of_dcp(ranks)
    assert found.state_dict_metadata.keys() == wanted.state_dict_metadata.keys()
    for name, entry in wanted.state_dict_metadata.items():
        stored = found.state_dict_metadata[name]
        assert (stored.properties, stored.size) == (entry.properties, entry.size)  # type: ignore[union-attr]
        assert sorted(map(str, stored.chunks)) == sorted(map(str, entry.chunks))  # type: ignore[union-attr]
        assert {MetadataIndex(name, chunk.offsets) for chunk in entry.chunks} <= found.storage_data.keys()  # type: ignore[union-attr]
    assert sorted(map(str, found.storage_data.values())) == sorted(str(info) for each in infos for info in each)
    assert found.planner_data == {name: (name,) for name in wanted.state_dict_metadata}


@pytest.mark.parametrize(
    "boxes",
    [
        [((0,), (2,))],  # a hole
        [((0,), (2,)), ((1,), (2,))],  # an overlap
        [((0,), (2,)), ((2,), (3,))],  # beyond the end
        [((0,), (3,)), ((1,), (1,))],  # an overlap and a hole of the same size
    ],
)
def test_parts_that_do_not_tile_their_tensor_are_refused(boxes: list[Box]) -> None:
    with pytest.raises(ValueError, match="do not tile"):
        shared([items((4,), box) for box in boxes])


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="disagree about a tensor"):
        shared([items((4,), ((0,), (4,))), items((4,), ((0,), (4,)), dtype=torch.int32)])


class WriterOfBefore(dcp.FileSystemWriter):
    """What earlier versions let DCP write: its own pickle, with the identity of the save in it."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def test_a_checkpoint_of_an_older_version_loads(tmp_path: Path) -> None:
    with quiet():
        dcp.save(state_of(3), storage_writer=WriterOfBefore(tmp_path), no_dist=True)  # type: ignore[arg-type]
    files = {}
    for path in tmp_path.iterdir():
        file = disk.HashedFile(tmp_path / "copy")
        file.write(path.read_bytes())
        file.close()
        (tmp_path / "copy").unlink()
        files[path.name] = FileEntry(file.size, file.digest)
    assert b"save_id" in (tmp_path / METADATA).read_bytes()
    loaded: dict[str, Tensor] = {name: torch.zeros_like(tensor) for name, tensor in state_of(3).items()}
    with quiet():
        dcp.load(loaded, storage_reader=SafeReader(tmp_path, Manifest(3, files)), no_dist=True)  # type: ignore[arg-type]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state_of(3).items())


def test_a_message_describes_a_few_ranks_and_counts_the_others() -> None:
    failures = {rank: (OSError(errno.ENOSPC, "full"), StackSummary()) for rank in range(8000)}
    with pytest.raises(
        SaveFailed, match=r"^rank 0: OSError: \[Errno 28\] full; rank 1: .*; and 7996 more ranks$"
    ) as failed:
        _fail(CheckpointException("write", failures))
    assert len(str(failed.value)) < 300


def test_the_parts_are_described_again_after_a_failed_save(tmp_path: Path) -> None:
    """The ranks that have written do not know that rank 0 has not heard of it."""
    store, writer = CheckpointStore(tmp_path), TensorWriter(None)

    def check(size: int, files: int) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer._first, "finish", lambda *args: pytest.fail("lost"))
        with pytest.raises(BaseException, match="lost"):
            writer.write(state_of(1), store.begin(1, 0), check)
    for step in (2, 3):
        writing = store.begin(step, 0)
        files = writer.write(state_of(step), writing, check)
        read_metadata((writing / METADATA).read_bytes(), Manifest(step, files))


class Opens:
    """Counts files that are opened in this process, by name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for module, name in ((os, "open"), (io, "open")):
            patch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, original: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(Path(path).name if isinstance(path, str | Path) else "")
            return original(path, *args, **kwargs)

        return call


def test_a_removal_opens_no_file_of_a_checkpoint_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, known = CheckpointStore(tmp_path), dict[Checkpoint, Manifest]()
    for step in (1, 2, 3):
        commit(store, step)
    opens = Opens(monkeypatch)
    store.prune(Retention(2), 0, known)
    assert opens.names.count("__0_0.distcp") == 3 and opens.names.count(manifest.NAME) == 3
    commit(store, 4)
    opens.names.clear()
    store.prune(Retention(2), 0, known | {store.committed()[-1]: store.committed()[-1].manifest()})
    assert opens.names.count("__0_0.distcp") == 0
    assert [found.step for found in store.committed()] == [3, 4]


def test_a_known_checkpoint_that_has_lost_a_file_is_not_counted_as_kept(tmp_path: Path) -> None:
    store, known = CheckpointStore(tmp_path), dict[Checkpoint, Manifest]()
    for step in (1, 2, 3):
        commit(store, step)
    store.prune(Retention(3), 0, known)
    (tmp_path / "step-00000003" / "__0_0.distcp").unlink()
    store.prune(Retention(1), 0, known)
    assert [found.step for found in store.committed()] == [2, 3]
    assert [found.step for found in known] == [1, 2]


def test_what_a_restart_hides_is_removed_later(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (store.begin(5, 0) / "__0_0.distcp").write_bytes(b"x")
    store.revoke(1)
    assert [path.name for path in tmp_path.iterdir()] == [".step-00000005.attempt-000.0.removed"]
    assert (tmp_path / ".step-00000005.attempt-000.0.removed" / "__0_0.distcp").exists()
    store.remove_hidden()
    assert list(tmp_path.iterdir()) == []


def test_removals_run_in_turn_and_nobody_waits_for_them() -> None:
    gate, ran, problems = threading.Event(), list[int](), list[Exception]()

    def slow() -> None:
        gate.wait(30)
        ran.append(1)
        raise OSError(errno.EIO, "broken")

    removals = Removals(problems.append)
    removals.start(slow)
    removals.start(lambda: ran.append(2))
    removals.wait(lambda: True)
    assert removals.busy and ran == []
    gate.set()
    removals.wait()
    assert ran == [1, 2] and not removals.busy and "broken" in str(problems)


def agree(rank: int, world_size: int) -> list[Any]:
    group = dist.group.WORLD
    assert group is not None
    return [
        lowest(None, group),
        lowest(f"of {rank}" if rank > 0 else None, group),
        from_rank(2, rank, group),
        broadcast_bytes(b"abc" if rank == 0 else None, group),
        broadcast_bytes(b"" if rank == 0 else None, group),
    ]


def test_all_ranks_learn_of_the_lowest_problem() -> None:
    assert run_on_world(3, agree) == [[None, "of 1", 2, b"abc", b""]] * 3


def restart(rank: int, world_size: int, folder: str) -> tuple[list[str], list[str]]:
    """Which files this rank opens to verify a checkpoint, and then to learn what is in it."""
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        opens = Opens(patch)
        found = VerifiedSearch(CheckpointStore(Path(folder)), group, True, 0.0, lambda bad, why: None).newest()
        assert found is not None
        verified = sorted({name for name in opens.names if name in found.manifest.files})
        opens.names.clear()
        reader = SafeReader(found.checkpoint.path, found.manifest)
        reader.share_metadata(group)
        assert reader.read_metadata().state_dict_metadata.keys() == state_of(1).keys()
    return verified, [name for name in opens.names if name in found.manifest.files]


def test_each_rank_opens_its_share_and_one_reads_the_metadata(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    commit(store, 1)
    (one, read), (two, read_too) = run_ranks(2, restart, str(tmp_path))
    assert sorted(one + two) == [METADATA, "__0_0.distcp"]
    assert set(read) == {METADATA} and read_too == []
