"""Runs the worker of ``bench checkpoint``, which alternates saves and loads of a run's state with plain ``dcp.save``.

Each round runs all kinds once, in rotating order, on the same tensors, processes and file system. The time of the
slowest rank counts. Loads read from the page cache, since the files have just been written.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash

from hpc_train.bench.request import CheckpointRequest, Spread, paired_ratio
from hpc_train.bench.worker import BenchRank, Training, measure_on_ranks
from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.manifest import read_manifest, verify
from hpc_train.checkpoint.restoring import load_tensors, open_checkpoint
from hpc_train.checkpoint.run_store import RunStore
from hpc_train.checkpoint.state import compression_state, training_state
from hpc_train.checkpoint.verified import VerifiedCheckpoint
from hpc_train.checkpoint.writer import quiet
from hpc_train.parallel.mesh import largest, synchronize, synchronize_ranks
from hpc_train.parallel.precision.masters import local_part
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import rank_writer
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.requests import StopFlag

Times = dict[str, float]  # kind of save or load -> seconds
_PIECE = 1 << 20  # bytes per call of the hash
PAIRS = {  # ratio -> the two kinds of a round that it compares
    "save / dcp.save": ("save", "dcp_save"),
    "stall / memcpy": ("stall", "memcpy"),
    "stall / dcp.async_save's": ("stall", "dcp_stall"),
    "load / dcp.load": ("load", "dcp_load"),
    "hash / save": ("hash", "save"),
}


def measure(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Runs what ``bench-request.json`` requests; rank 0 writes ``bench-result.json``."""
    return measure_on_ranks(spec, stop, CheckpointRequest, _measure_rounds)


def _measure_rounds(rank: BenchRank, request: CheckpointRequest) -> dict[str, Any] | None:
    """Returns ``seconds`` and ``gb_per_s`` (10^9 bytes of the checkpoint) of each kind, and ``ratio`` of pairs."""
    bench = _CheckpointBench(rank)
    rounds: list[Times] = []
    for number in range(request.rounds + 1):
        rank.write_progress(number, request.rounds + 1)
        rounds.append(bench.round(number))
        if rank.is_stopped():
            return None
    del rounds[0]  # it allocates buffers and warms caches
    seconds = {name: [times[name] for times in rounds] for name in rounds[0]}
    ratios = {}
    for name, (first, second) in PAIRS.items():
        ratio = paired_ratio(seconds[first], seconds[second])
        ratios[name] = {"median": ratio.median, "ci95_low": ratio.low, "ci95_high": ratio.high}
    return {
        **rank.setting(),
        "strategy": rank.config.strategy.name,
        "layout": str(rank.mesh.layout),
        "bytes": bench.bytes,
        "path": str(rank.run.path.parent),
        "rounds": len(rounds),
        "seconds": {name: Spread.of(values).as_quantiles() for name, values in seconds.items()},
        "gb_per_s": {
            name: Spread.of([bench.bytes / value / 1e9 for value in values]).as_quantiles()
            for name, values in seconds.items()
        },
        "ratio": ratios,
    }


class _CheckpointBench:
    """Holds the state of a run and measures the ways to save and load it."""

    def __init__(self, rank: BenchRank) -> None:
        run = rank.run
        mesh = rank.mesh
        settings = replace(rank.config.checkpoint, asynchronous=True, keep=1 << 30)
        config = replace(rank.config, checkpoint=settings)
        training = Training.build(config, mesh)
        engine = training.engine
        events = EventLog.open(run, rank_writer(mesh.rank), run.newest_attempt(), mesh.rank)
        self.run = run
        self.mesh = mesh
        store = RunStore(run, config, events, mesh.control)
        self.manager = CheckpointManager(store, engine, training.optimizer, mesh, rank.spec.local_world_size)
        self.state = training_state(engine, training.optimizer) | compression_state(engine)
        self.copies = [torch.zeros_like(local_part(tensor.detach()), device="cpu") for tensor in self.state.values()]
        self.group = dist.new_group(backend="gloo")  # async_save needs a separate group
        self.step = 0
        self.bytes = 0  # size of a checkpoint over all ranks

    def round(self, number: int) -> Times:
        """Measures each kind once. Collective."""
        kinds = [self._save, self._background, self._plain_dcp, self._plain_dcp_async, self._in_memory]
        first = number % len(kinds)
        times: Times = {}
        for measure_kind in kinds[first:] + kinds[:first]:
            times |= measure_kind()
        return times

    def _save(self) -> Times:
        """Saves synchronously, as at the end of a run, and then verifies and loads the checkpoint."""
        self.step += 1
        times = {"save": self._timed(lambda: self.manager.save(self.step, {}, final=True))}
        checkpoint = self.manager.store.committed()[-1]
        path = checkpoint.path
        manifest = read_manifest(path)
        self.bytes = manifest.size
        share = sorted(manifest.files)[self.mesh.rank :: self.mesh.layout.world_size]
        times["verify"] = self._timed(lambda: verify(path, manifest, share))
        verified = VerifiedCheckpoint(checkpoint, manifest)

        def load() -> None:
            source = open_checkpoint(verified, self.mesh.control)
            load_tensors(self.state, source.reader, self.mesh, self.mesh.control)

        times["load"] = self._timed(load)
        self._forget(path)
        return times

    def _background(self) -> Times:
        """Saves asynchronously, as within a run with ``checkpoint.asynchronous=true``."""
        self.step += 1
        stall, durable = self._in_background(lambda: self.manager.save(self.step, {}), self.manager.wait)
        self._forget(self.manager.store.committed()[-1].path)
        return {"stall": stall, "durable": durable}

    def _plain_dcp(self) -> Times:
        path = self.run.path / "stock"
        writer = dcp.FileSystemWriter(path)
        times = {
            "dcp_save": self._timed(lambda: dcp.save(dict(self.state), storage_writer=writer, process_group=self.group))
        }
        reader = dcp.FileSystemReader(path)
        times["dcp_load"] = self._timed(
            lambda: dcp.load(dict(self.state), storage_reader=reader, process_group=self.group)
        )
        self._forget(path)
        return times

    def _plain_dcp_async(self) -> Times:
        path = self.run.path / "stock-async"
        pending: list[Any] = []

        def begin() -> None:
            writer = dcp.FileSystemWriter(path)
            pending.append(dcp.async_save(dict(self.state), storage_writer=writer, process_group=self.group))

        stall, durable = self._in_background(begin, lambda: pending.pop().result())
        self._forget(path)
        return {"dcp_stall": stall, "dcp_durable": durable}

    def _in_memory(self) -> Times:
        """Measures lower bounds: a copy of this rank's bytes into allocated memory, and their hash."""

        def copy_state() -> None:
            for copy, tensor in zip(self.copies, self.state.values(), strict=True):
                copy.copy_(local_part(tensor.detach()), non_blocking=True)
            synchronize(self.mesh.device)

        def hash_copies() -> None:
            digest = xxhash.xxh3_128()
            for copy in self.copies:
                data = copy.reshape(-1).view(torch.uint8).numpy().data
                for begin in range(0, data.nbytes, _PIECE):
                    digest.update(data[begin : begin + _PIECE])

        return {"memcpy": self._timed(copy_state), "hash": self._timed(hash_copies)}

    def _in_background(self, begin: Callable[[], None], end: Callable[[], None]) -> tuple[float, float]:
        """Returns the seconds until ``begin`` returns, and until ``end`` returns."""
        synchronize_ranks(self.mesh)
        start = time.perf_counter()
        with quiet():
            begin()
            stall = time.perf_counter() - start
            end()
        durable = time.perf_counter() - start
        return largest(stall, self.mesh), largest(durable, self.mesh)

    def _timed(self, action: Callable[[], None]) -> float:
        synchronize_ranks(self.mesh)
        start = time.perf_counter()
        with quiet():
            action()
        return largest(time.perf_counter() - start, self.mesh)

    def _forget(self, path: Path) -> None:
        """Removes the files, so that they do not slow down other saves."""
        synchronize_ranks(self.mesh)
        if self.mesh.rank == 0:
            shutil.rmtree(path)
        synchronize_ranks(self.mesh)
