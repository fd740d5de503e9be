"""What a save, a removal and a restart cost rank 0 with a thousand nodes, whose ranks are simulated on this machine.

    python -m benchmarks.checkpoint_scale [--ranks 800 8000] [--tensors 300] [--replicas 1] [--latency-ms 1]

The code of ``hpc_train.checkpoint`` runs; only the transport between the ranks is replaced: each simulated rank calls
what a rank calls, its message is pickled as the collective pickles it, and rank 0 reads all of them. The files are real
and small, and each operation on the file system's metadata (open, stat, rename, unlink, ...) waits for the latency, as
that of a metadata server. Rows without operations are CPU seconds, which other load on the machine hardly changes; the
others are elapsed seconds. Not included: the time of the network, and the write of the tensors themselves.

``--replicas R`` groups the ranks into R replicas that hold the same shards, as hybrid sharding does; 1 shards each
tensor over all ranks. "Waited" is what all ranks wait for, "background" what one thread of rank 0 does meanwhile.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hpc_train.checkpoint.manifest import FileEntry, Manifest, read_manifest, verify
from hpc_train.checkpoint.plan import Places
from hpc_train.checkpoint.reader import read_metadata
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore, Removals, Retention
from hpc_train.checkpoint.writer import Answer, Coordinator, RankWriter, Written

CALLS = ("open", "stat", "lstat", "rename", "mkdir", "unlink", "rmdir", "scandir", "listdir", "fsync")
COLUMNS = 4  # of a simulated tensor
ARCHIVE_BYTES = 1 << 10  # of a stored part in addition to its values
FILE_BYTES = 64
DECODED = 500_000  # parts; more are not decoded, since their objects take more memory than a small machine has


@dataclass(frozen=True)
class Shard:
    """Stands for a DTensor in the state of a simulated rank: the planner asks it for its write items."""

    shape: tuple[int, int]
    begin: int
    rows: int

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        offsets, sizes = torch.Size((self.begin, 0)), torch.Size((self.rows, COLUMNS))
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(), torch.Size(self.shape))
        return [WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)]


def state_of(shard: int, shards: int, tensors: int) -> dict[str, Any]:
    """Returns what a rank holds: one row of each tensor, under names as long as those of a language model."""
    shape = (shards, COLUMNS)
    return {f"optim.blocks.{number:03d}.attention.query.weight.exp_avg": Shard(shape, shard, 1)
            for number in range(tensors)}  # fmt: skip


class SimulatedSave:
    """All ranks of a save in one process. Replicas say the same, so one ``RankWriter`` speaks for all of a shard."""

    def __init__(self, ranks: int, tensors: int, replicas: int) -> None:
        shards = ranks // replicas
        self.ranks = ranks
        self.states = [state_of(shard, shards, tensors) for shard in range(shards)]
        self.holders = [RankWriter(shard) for shard in range(shards)]
        self.parts = [0] * ranks  # that each rank writes
        self.first = Coordinator(ranks)
        self.gathered = 0  # bytes that rank 0 has received

    def describe(self) -> list[bytes]:
        """Returns what each rank says before the save."""
        said = []
        for holder, state in zip(self.holders, self.states, strict=True):
            said.append(pickle.dumps(holder.describe(state)))
            holder._items = []  # as many objects as all ranks together have, in one process
        return [said[rank % len(said)] for rank in range(self.ranks)]

    def plan(self, answers: Sequence[bytes]) -> float:
        """Returns the CPU seconds that rank 0 needs for the plan."""
        self.gathered = sum(map(len, answers))
        begin = time.process_time()
        found: list[Answer] = [pickle.loads(answer) for answer in answers]
        sending = self.first.must_send(found)
        seconds = time.process_time() - begin
        if not sending:
            return seconds
        packed: list[bytes | None] = [None] * len(found)
        for rank in sending:
            packed[rank] = data = self.holders[rank % len(self.holders)].pack()
            self.gathered += len(data)
        begin = time.process_time()
        told = [pickle.dumps(each) for each in self.first.make_plan(found, packed)]
        seconds += time.process_time() - begin
        for rank, (serial, bits) in enumerate(map(pickle.loads, told)):
            self.holders[rank % len(self.holders)].accept(serial, bits)
            self.parts[rank] = sum(byte.bit_count() for byte in bits)
        return seconds

    def results(self, again: bool) -> list[bytes]:
        """Returns what each rank tells after its write; ``again`` means that its parts are where they were."""
        return [pickle.dumps(self._written(rank, again)) for rank in range(self.ranks)]

    def _written(self, rank: int, again: bool) -> Written:
        name, parts = f"__{rank}_0.distcp", self.parts[rank]
        length = COLUMNS * 4 + ARCHIVE_BYTES
        table = torch.tensor([[0, part * length, length] for part in range(parts)], dtype=torch.int64)
        places = Places((name,) if parts else (), table.numpy().tobytes())
        return Written({name: FileEntry(parts * length, f"{rank:032x}")}, None if again else places)

    def finish(self, writing: Path, results: Sequence[bytes]) -> tuple[float, dict[str, FileEntry]]:
        """Returns the CPU seconds of rank 0 to read the results and write ``.metadata``, and all files."""
        self.gathered = sum(map(len, results))
        begin = time.process_time()
        files = self.first.finish(writing, [pickle.loads(result) for result in results])
        return time.process_time() - begin, files


class Delay:
    """Delays each metadata operation of this process and counts them by thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.counts: Counter[int] = Counter()

    @property
    def own(self) -> int:
        """Returns the operations of the calling thread."""
        return self.counts[threading.get_ident()]

    @contextmanager
    def installed(self) -> Iterator[None]:
        originals = {name: getattr(os, name) for name in CALLS}
        for name, original in originals.items():
            setattr(os, name, self._delayed(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(os, name, original)

    def _delayed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.counts[threading.get_ident()] += 1
            time.sleep(self._seconds)
            return original(*args, **kwargs)

        return call


def commit(store: CheckpointStore, step: int, ranks: int) -> tuple[Checkpoint, Manifest]:
    """Commits a checkpoint of ``ranks`` small files without a delay."""
    writing = store.begin(step, 0)
    files = {}
    for name in (".metadata", *(f"__{rank}_0.distcp" for rank in range(ranks))):
        data = name.encode().ljust(FILE_BYTES, b".")
        (writing / name).write_bytes(data)
        files[name] = FileEntry(len(data), xxhash.xxh3_128(data).hexdigest())
    manifest = Manifest(step, files)
    return store.commit(writing, manifest), manifest


def measure_save(row: Callable[..., None], ranks: int, tensors: int, replicas: int, folder: Path) -> None:
    save = SimulatedSave(ranks, tensors, replicas)
    for turn in ("first", "later"):
        answers = save.describe()
        row(f"plan, {turn} save", save.plan(answers), sent=save.gathered)
        writing = folder / turn
        writing.mkdir()
        seconds, files = save.finish(writing, save.results(again=turn == "later"))
        row(f".metadata ({size(files['.metadata'].size)}), {turn} save", seconds, sent=save.gathered)
    if sum(save.parts) > DECODED:
        return
    data = (folder / "later" / ".metadata").read_bytes()
    begin = time.process_time()
    read_metadata(data, Manifest(1, files))
    row("decode and check .metadata at a restart", time.process_time() - begin, sent=len(data))


def measure_files(row: Callable[..., None], ranks: int, folder: Path, latency_s: float) -> None:
    """Measures the commit, the removal of the third checkpoint with ``keep=2``, and a verification by all ranks."""
    store, delay = CheckpointStore(folder), Delay(latency_s)
    known = dict(commit(store, step, ranks) for step in (1, 2))
    writing, manifest = store.begin(3, 0), next(iter(known.values()))
    for path in (folder / "step-00000002").iterdir():
        if path.name in manifest.files:
            os.link(path, writing / path.name)
    latest = Manifest(3, manifest.files)
    problems: list[Exception] = []
    background: list[int] = []

    def prune() -> None:
        store.prune(Retention(2), 0, known)
        background.append(delay.own)

    removals = Removals(problems.append)
    with delay.installed():
        begin = time.perf_counter()
        committed = store.commit(writing, latest)
        known[committed] = latest
        removals.start(prune)
        row("commit", time.perf_counter() - begin, delay.own)
        begin = time.perf_counter()
        removals.wait()
        row("removal of one checkpoint, background", time.perf_counter() - begin, *background)
        if problems or len(store.committed()) != 2:
            raise RuntimeError(f"not removed: {problems}")
        before, begin = delay.own, time.perf_counter()
        found = read_manifest(committed.path)
        verify(committed.path, found, sorted(found.files)[0::ranks])
        row("verification at a restart, by rank 0", time.perf_counter() - begin, delay.own - before)


def size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def measure(ranks: int, tensors: int, replicas: int, latency_s: float, parent: Path) -> None:
    """Prints the rows for one number of ranks."""
    print(f"\n{ranks} ranks, {tensors} tensors each, {replicas} replicas, {1e3 * latency_s:g} ms per operation")
    print(f"{'':44}{'seconds':>9} {'operations':>11} {'to rank 0':>11}")

    def row(name: str, seconds: float, operations: int | None = None, sent: int | None = None) -> None:
        shown = "" if sent is None else size(sent)
        print(f"{name:44}{seconds:9.3f} {'' if operations is None else operations:>11} {shown:>11}", flush=True)

    with tempfile.TemporaryDirectory(dir=parent) as folder:
        (Path(folder) / "saves").mkdir()
        measure_save(row, ranks, tensors, replicas, Path(folder) / "saves")
        measure_files(row, ranks, Path(folder) / "checkpoints", latency_s)
    print(f"{'peak memory of all simulated ranks':44}{size(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}")


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[800, 8000])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--latency-ms", type=float, default=1.0)
    parser.add_argument("--dir", type=Path, help="where the files are written; the default is that of temporary files")
    options = parser.parse_args()
    for ranks in options.ranks:
        measure(ranks, options.tensors, options.replicas, options.latency_ms / 1e3, options.dir)


if __name__ == "__main__":
    main()
