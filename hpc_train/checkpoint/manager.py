"""Saves and restores a run. Every method is collective: all ranks call it together."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from hpc_train.checkpoint.state import (
    OptimizerState,
    TensorShape,
    check_match,
    saved_state,
    shapes,
    stored_shapes,
    training_state,
)
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore, size, sync
from hpc_train.config.schema import Config
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog


@dataclass(frozen=True)
class RestoredState:
    """What a checkpoint held besides tensors."""

    step: int  # optimizer steps done
    extra: dict[str, Any]  # as given to ``save``
    path: Path
    with_optimizer: bool = True  # False: a fork with another optimizer, which begins afresh


@dataclass
class CheckpointManager:
    """Keeps the state of ``engine`` and ``optimizer`` in the run's checkpoints.

    The tensors go through ``torch.distributed.checkpoint``: each rank writes its shards under global names, so a
    checkpoint of any layout loads into any other. Coordination uses the control group, on the CPU.
    """

    run: RunDirectory
    engine: Engine
    optimizer: OptimizerState
    mesh: Mesh
    config: Config
    events: EventLog
    _saved_step: int | None = field(default=None, init=False)

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.run.checkpoints)

    def save(self, step: int, extra: dict[str, Any]) -> None:
        """Commits the state after ``step`` steps. A step that is committed already is not saved again.

        Args:
            extra: plain JSON values, the same on every rank.

        Raises:
            Exception: the save failed on some rank; on every rank. The checkpoint before stays in force.
        """
        if self._saved_step == step:
            return
        began = time.monotonic()
        writing = self.store.writing(step, self.events.attempt)
        try:
            self._write(writing)
            self._on_first(lambda: self._commit(writing, step, extra, began))
        except Exception as error:
            if self.mesh.rank == 0:
                self.events.write("checkpoint_failed", step=step, message=f"{type(error).__name__}: {error}")
            raise
        self._saved_step = step

    def restore(self) -> RestoredState | None:
        """Loads the newest committed checkpoint, of this run or of the one it was forked from; None without one.

        Raises:
            ConfigError: the checkpoint is of another model or optimizer.
        """
        found: Checkpoint | None = self._on_first(self._newest)
        if found is None:
            return None
        path, forked = found.path, found.path.parent != self.run.checkpoints
        state = training_state(self.engine, self.optimizer)
        stored = stored_shapes(_metadata(path))
        wanted = self._of_all_ranks(shapes(state))
        with_optimizer = not forked or _optimizer_part(stored) == _optimizer_part(wanted)
        if not with_optimizer:
            stored, wanted = _model_part(stored), _model_part(wanted)
            state = {name: tensor for name, tensor in state.items() if name in wanted}
        check_match(stored, wanted, where=str(path))
        self._load(state, path)
        if not forked:
            self._saved_step = found.step
        return RestoredState(found.step, found.record()["extra"], path, with_optimizer)

    def _newest(self) -> Checkpoint | None:
        """On rank 0, for all: another rank's view of a network file system may be older."""
        newest = self.store.newest()
        source = self.run.record().get("forked_from")
        if newest is None and source is not None:
            newest = CheckpointStore(RunDirectory(Path(source)).checkpoints).newest()
        return newest

    def _write(self, writing: Path) -> None:
        state: dict[str, Any] = dict(saved_state(self.engine, self.optimizer, self.mesh))
        with _quiet():
            dcp.save(
                state, storage_writer=dcp.FileSystemWriter(writing, overwrite=False), process_group=self.mesh.control
            )
        # DCP syncs before Python's buffers are flushed. A client of a network file system syncs its own files only.
        for path in writing.glob(f"__{self.mesh.rank}_*"):
            sync(path)
        dist.barrier(group=self.mesh.control)

    def _commit(self, writing: Path, step: int, extra: dict[str, Any], began: float) -> None:
        record = {
            "format": 1,
            "step": step,
            "extra": extra,
            "config_hash": self.run.record().get("config_hash"),
            "layout": asdict(self.mesh.layout),
            "attempt": self.events.attempt,
            "torch": torch.__version__,
            "time": time.time(),
        }
        checkpoint = self.store.commit(writing, step, record)
        self.events.write(
            "checkpoint_saved",
            step=step,
            path=str(checkpoint.path),
            bytes=size(checkpoint.path),
            seconds=round(time.monotonic() - began, 3),
        )
        self.store.prune(self.config.checkpoint.keep, self.events.attempt)

    def _load(self, state: dict[str, Tensor], path: Path) -> None:
        with _quiet():
            dcp.load(dict(state), storage_reader=dcp.FileSystemReader(path), process_group=self.mesh.control)

    def _of_all_ranks(self, own: Mapping[str, TensorShape]) -> dict[str, TensorShape]:
        gathered: list[Any] = [None] * self.mesh.layout.world_size
        dist.all_gather_object(gathered, own, group=self.mesh.control)
        return {name: shape for part in gathered for name, shape in part.items()}

    def _on_first(self, action: Callable[[], Any]) -> Any:
        """Runs ``action`` on rank 0 and gives every rank its result, or the exception it raised."""
        outcome: list[Any] = [None, None]
        if self.mesh.rank == 0:
            try:
                outcome[0] = action()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.mesh.control)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]


def _metadata(path: Path) -> Metadata:
    return dcp.FileSystemReader(path).read_metadata()


def _model_part(found: Mapping[str, TensorShape]) -> dict[str, TensorShape]:
    return {name: shape for name, shape in found.items() if name.startswith("model.")}


def _optimizer_part(found: Mapping[str, TensorShape]) -> set[str]:
    return {name for name in found if name.startswith("optim.")}


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns of its own use of deprecated names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
