"""Saves and restores the state of a run. All ranks call the methods collectively."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.agreement import Group, from_rank, lowest, on_first, raise_lowest
from hpc_train.checkpoint.extra_state import check_extra_state, digests, extra_state
from hpc_train.checkpoint.host_copies import HostCopies, SideStream, Snapshot, local_shard
from hpc_train.checkpoint.manifest import FileEntry, Manifest
from hpc_train.checkpoint.restoring import LoadHook, OpenCheckpoint, RestoredState, restore
from hpc_train.checkpoint.run_store import SaveSettings
from hpc_train.checkpoint.space import check_space
from hpc_train.checkpoint.state import (
    ALIASES,
    SHOWN,
    ModelState,
    OptimizerState,
    OuterState,
    Ranks,
    kept_until_update,
    saved_state,
)
from hpc_train.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    Removals,
)
from hpc_train.checkpoint.writer import SaveFailed, TensorWriter
from hpc_train.errors import UserError
from hpc_train.parallel.mesh import host_group, use_device
from hpc_train.units import format_bytes

# A slow file system does not end training. If a save hangs, the next one waits for it, and the agent sees the hang.
SLOWEST_WRITE = timedelta(days=1)


class Destination(Protocol):
    """Interface of the place where a manager saves: a run (``RunStore``), or a directory of another program.

    Attributes:
        removals: removes old checkpoints in a thread.
    """

    removals: Removals

    @property
    def store(self) -> CheckpointStore: ...

    @property
    def settings(self) -> SaveSettings: ...

    @property
    def attempt(self) -> int:
        """Returns a number that is higher than that of any program which saved to this place before."""

    def newest(self) -> OpenCheckpoint | None:
        """Returns the newest valid checkpoint; None without any. Collective."""

    def set_aside_after(self, step: int) -> bool:
        """Sets aside the checkpoints of more than ``step`` steps; returns False if there is no other. Collective."""

    def proved(self) -> int | None:
        """Returns the number of steps up to which checkpoints are proved; called on rank 0."""

    def facts(self) -> dict[str, Any]:
        """Returns entries for the manifests; called on rank 0."""

    def config_hash(self) -> str | None:
        """Returns the hash of the frozen config for the manifests; called on rank 0."""

    def report(self, event: str, step: int, details: Mapping[str, Any]) -> None:
        """Records a save, its failure or a warning; called on rank 0."""


@dataclass(frozen=True)
class _Save:
    """Describes one save, from its request to its commit."""

    step: int
    extra: Mapping[str, Any]
    metrics: Mapping[str, float]
    began: float  # time.monotonic()
    state: Mapping[str, Tensor]
    snapshot: Snapshot | None  # host copies; None writes from ``state``
    final: bool = False
    again: bool = False


@dataclass
class CheckpointManager:
    """Keeps the state of ``engine`` and ``optimizer`` in the checkpoints of a run or of another program.

    It writes the tensors with ``torch.distributed.checkpoint``: each rank writes its shards under global names, so a
    checkpoint of any layout loads into any other. The ranks coordinate on the CPU; asynchronous saves use a separate
    process group.

    Attributes:
        raises: whether each failed save raises ``SaveFailed``, of an asynchronous save in the next call; otherwise only
            the last one does.
        ranks_of_node: the ranks that share the host memory of this rank's node.
        outer: the outer steps of ``strategy.local_steps``; None without them.
        durable_s: seconds from the request of the last save to its commit; None before the first.
        copied_s: seconds from the request of the last asynchronous save to the end of its copies from a GPU; the next
            update of the optimizer may have waited that long.
    """

    run_store: Destination
    engine: ModelState
    optimizer: OptimizerState
    mesh: Ranks
    ranks_of_node: int
    raises: bool = False
    outer: OuterState | None = None
    durable_s: float | None = field(default=None, init=False)
    copied_s: float = field(default=0.0, init=False)
    _saved_step: int | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _error: Exception | None = field(default=None, init=False)
    _asynchronous: bool = field(init=False)
    _copies: HostCopies = field(init=False)
    _has_extra: bool | None = field(default=None, init=False)  # whether any rank has extra state; None before a save
    _lacked: bool | None = field(default=None, init=False)  # whether host memory was short at the last save
    _load_hook: LoadHook | None = field(default=None, init=False)
    _group: Group = field(init=False)
    _writer: TensorWriter = field(init=False)
    _facts: dict[str, Any] = field(init=False)  # on rank 0, for the manifests
    _whole: dict[Checkpoint, Manifest] = field(default_factory=dict, init=False)  # on rank 0; see ``prune``

    def __post_init__(self) -> None:
        self._group = self.mesh.control
        on_gpu = self.mesh.device.type == "cuda"
        settings = self.run_store.settings
        self._asynchronous = settings.on_gpu if on_gpu else settings.on_cpu
        side = SideStream(self.mesh.device) if on_gpu and self._asynchronous else None
        self._copies = HostCopies(self.mesh.device, side)
        if self._asynchronous and self._group is not None:
            self._group = host_group(dist.get_process_group_ranks(self._group), SLOWEST_WRITE, "checkpoints")
        self._writer = TensorWriter(self._group)
        aliases = dict(getattr(self.engine, "aliases", {}))  # the state of a custom loop has none
        self._facts = self.run_store.facts() if self.mesh.rank == 0 else {}
        if aliases:
            self._facts[ALIASES] = aliases

    @property
    def store(self) -> CheckpointStore:
        return self.run_store.store

    def save(
        self,
        step: int,
        extra: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        tensors: Mapping[str, Tensor] | None = None,
        final: bool = False,
        again: bool = False,
    ) -> None:
        """Saves the state after ``step`` steps, unless a checkpoint of that step is already committed.

        A failed save is reported on every rank and in the event log. Training may continue, since earlier checkpoints
        remain valid.

        Args:
            extra: JSON values, equal on all ranks.
            metrics: results of an evaluation at this step.
            tensors: tensors of hooks by their names in the checkpoint.
            final: save synchronously, so that the checkpoint is committed on return.
            again: retry a failed save without writing another event about its failure.

        Raises:
            SaveFailed: a final save failed.
            Superseded: a newer attempt works on the run.
        """
        self.wait()
        if self._saved_step != step:
            began = time.monotonic()
            state = self._state(step, tensors)
            snapshot = self._snapshot(step, state) if self._asynchronous and not final else None
            save = _Save(step, extra, metrics or {}, began, state, snapshot, final, again)
            if snapshot is not None:
                self._thread = threading.Thread(
                    target=self._perform, args=(save,), name=f"checkpoint-{step}", daemon=True
                )
                self._thread.start()
                return
            self._perform(save)
            self._surface(final)
        if final:
            self._copies.release()

    def prepare(self, step: int, tensors_at: Callable[[int], Mapping[str, Tensor]]) -> None:
        """Reserves the host memory of asynchronous saves from a GPU, and pins it while training continues. Collective.

        Args:
            step: the number of steps taken; after the first, the state of the optimizer has its size.
            tensors_at: returns the tensors of hooks that a save at a step would get.
        """
        if not self._asynchronous or self.mesh.device.type != "cuda":
            return
        if self._has_room(step, self._state(step, tensors_at(step))):
            self._copies.begin_pin()

    def _state(self, step: int, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Returns the tensors that this rank saves. Collective."""
        state = saved_state(self.engine, self.optimizer, self.mesh, self.outer)
        return state | dict(tensors or {}) | self._extra_state(step)

    def _extra_state(self, step: int) -> dict[str, Tensor]:
        """Returns the extra state that this rank saves. Collective.

        The first save compares the replicas, since the state may depend on the samples that a rank has seen.
        """
        if self._has_extra is None:
            self._has_extra = self._anywhere(bool(digests(self.engine.parts)))
            if self._has_extra:
                self._compare_replicas(step)
        if self._has_extra and self.mesh.dp_cp_rank == 0 and self.mesh.tp_rank == 0:
            return extra_state(self.engine.parts, self.mesh)
        return {}

    def _compare_replicas(self, step: int) -> None:
        local = digests(self.engine.parts)
        by_stage = [from_rank(first, local, self._group) for first in self.mesh.layout.first_ranks]
        first = by_stage[self.mesh.pp_rank]
        differing = sorted(key for key in local if first.get(key) != local[key])
        differing = lowest(differing or None, self._group)
        if differing:
            names = ", ".join(differing[:SHOWN])
            message = (
                f"the state {names} of the model differs between ranks; checkpoints store the state of the first "
                "data-parallel rank, and after a restart all ranks continue with it"
            )
            self._warn(step, message)

    def _snapshot(self, step: int, state: Mapping[str, Tensor]) -> Snapshot | None:
        """Starts the host copies of an asynchronous save; returns None if a node lacks memory for them. Collective."""
        if not self._has_room(step, state):
            return None
        snapshot = self._copies.take(state, kept_until_update(self.engine, state))
        if snapshot.hold is not None:
            self.optimizer.before_next_update(snapshot.hold)
        return snapshot

    def _has_room(self, step: int, state: Mapping[str, Tensor]) -> bool:
        """Reserves the memory for host copies of ``state``; returns whether every node has it. Collective."""
        if self._anywhere(not self._copies.is_planned(state)):
            try:
                self._copies.plan(state, self._writer.names(state))
            except SaveFailed:
                return False  # the synchronous save reports the error
        problem = self._copies.shortage(state, self.ranks_of_node)
        lacks = self._anywhere(problem is not None)
        if self._lacked is not lacks:
            self._lacked = lacks
            settings = self.run_store.settings
            setting = settings.asynchronous
            if lacks:
                reason = lowest(problem and f"on the node of rank {self.mesh.rank}, {problem}", self._group)
                message = (
                    f"{setting}: checkpoints are saved synchronously, because {reason}. Request more memory "
                    f"({settings.memory}), or set {settings.prefix}asynchronous=false"
                )
                self._warn(step, message)
            elif self.mesh.rank == 0 and setting.endswith("=auto"):
                size = format_bytes(self._copies.bytes_of(state))
                print(f"{setting}: training continues during saves; rank 0 copies {size} to host memory", flush=True)
        return not lacks

    def _anywhere(self, flag: bool) -> bool:
        """Returns whether ``flag`` is true on any rank. Collective."""
        if self._group is None:
            return flag
        result = torch.tensor(int(flag))
        dist.all_reduce(result, dist.ReduceOp.MAX, group=self._group)
        return bool(result.item())

    def poll(self) -> None:
        """Reports a failed background save, without blocking; called at step boundaries."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def close(self, give_up: Callable[[], bool]) -> None:
        """Waits until old checkpoints are removed, or ``give_up`` returns True.

        Each rank calls it independently.
        """
        self.run_store.removals.wait(give_up)

    def leave(self) -> None:
        """Frees the process groups of the saves, the group ``control`` included; no collective may follow."""
        for group in {self.mesh.control, self._group} - {None}:
            dist.destroy_process_group(group)

    def wait(self) -> None:
        """Waits until the background save has finished."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._surface(final=False)

    def restore(self) -> RestoredState | None:
        """Loads the newest valid checkpoint of this run or of the run it was forked from; returns None without any.

        Raises:
            UserError: see ``RunStore.newest`` and ``load``.
        """
        return self.load(self.run_store.newest())

    def load(self, checkpoint: OpenCheckpoint | None) -> RestoredState | None:
        """Loads ``checkpoint``; with None, it only checks whether the model's state can be saved, and begins with equal
        replicas.

        Raises:
            UserError: the checkpoint does not match the model or optimizer, or checkpoints cannot hold the model's
                state.
        """
        self._check_extra_state()
        if checkpoint is None:
            if self.outer is not None:
                self.outer.begin()
            return None
        restored, self._load_hook = restore(checkpoint, self.engine, self.optimizer, self.mesh, self._group, self.outer)
        if restored.missing:
            missing = ", ".join(restored.missing[:SHOWN])
            message = f"the checkpoint lacks the state {missing} of the model, which keeps its initial value"
            self._warn(restored.step, message)
        if restored.rounded:
            names = ", ".join(restored.rounded[:SHOWN])
            message = f"frozen weights that are wider in the checkpoint are rounded: {names}"
            self._warn(restored.step, message)
        if restored.path.parent == self.store.root:
            self._whole[checkpoint.checkpoint] = checkpoint.manifest
            self._saved_step = restored.step
        return restored

    def _check_extra_state(self) -> None:
        """Checks on all ranks that checkpoints can hold the state dicts of the modules. Collective."""
        refused: UserError | None = None
        warnings: list[str] = []
        try:
            warnings = check_extra_state(self.engine.parts)
        except UserError as error:
            refused = error
        raise_lowest(refused, self._group)
        for message in lowest(warnings or None, self._group) or ():
            self._warn(0, message)

    def load_hook(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Loads tensors of a hook by their names from the checkpoint that was restored last. Collective.

        Returns:
            None, or which tensor of a rank cannot be loaded; then no rank has loaded any.
        """
        assert self._load_hook is not None
        return self._load_hook(tensors)

    def roll_back(self, step: int) -> RestoredState | None:
        """Loads the newest valid checkpoint of at most ``step`` steps and sets aside the later ones.

        Returns None and changes nothing if there is no such checkpoint.
        """
        self.wait()
        if not self.run_store.set_aside_after(step):
            return None
        return self.restore()

    def keep_proved(self, step: int | None) -> None:
        """Sets aside the checkpoints after the newest proved one, so that the next attempt resumes from it. Collective.

        Args:
            step: the checkpoints of at most so many steps are proved; None uses what earlier attempts have recorded.
        """
        self.wait()
        proved = on_first(self.run_store.proved, self._group) if step is None else step
        if proved is None or not self.run_store.set_aside_after(proved):
            self._warn(0, "no checkpoint is proved, so the run continues from its newest one, if it has any")

    def _perform(self, save: _Save) -> None:
        """Writes and commits a checkpoint; stores an error for ``_surface``."""
        writing: Path | None = None
        try:
            use_device(self.mesh.device)
            tensors = self._host_tensors(save)  # first, so that no copy is running after a save has failed here
            writing = on_first(partial(self.store.begin, save.step, self.run_store.attempt), self._group)
            check_space = partial(self._check_space, writing)
            files = self._writer.write(save.state, writing, check_space, tensors)
            on_first(partial(self._commit, writing, save, files), self._group)
        except (SaveFailed, OSError) as error:
            self._copies.forget_plan()
            failed = error
            if not isinstance(failed, SaveFailed):
                failed = SaveFailed(f"rank 0: {type(error).__name__}: {error}", {0: error})
            self._error = failed
            failed.secondary = self.mesh.rank not in failed.ranks
            if self.mesh.rank == 0:
                if writing is not None:
                    disk.remove(writing)  # before the event, which may need the disk space
                if not save.again:
                    details = {"message": str(failed), "final": save.final}
                    self.run_store.report("checkpoint_failed", save.step, details)
        except Exception as error:
            self._error = error
        else:
            self._saved_step = save.step
            self.durable_s = time.monotonic() - save.began

    def _host_tensors(self, save: _Save) -> Mapping[str, Tensor] | None:
        """Returns the tensors to write instead of ``save.state``; None if all of ``save.state`` is on the host."""
        if save.snapshot is not None:
            if save.snapshot.complete is not None:
                save.snapshot.complete()
                self.copied_s = time.monotonic() - save.began
            return save.snapshot.tensors
        if all(local_shard(tensor).is_cpu for tensor in save.state.values()):
            return None
        return self._copies.streamed(save.state)

    def _surface(self, final: bool) -> None:
        error = self._error
        self._error = None
        if error is None:
            return
        if final or self.raises or not isinstance(error, SaveFailed):
            raise error
        print(f"checkpoint failed ({error}); continuing, the previous checkpoint is still valid", flush=True)

    def _commit(self, writing: Path, save: _Save, files: Mapping[str, FileEntry]) -> None:
        manifest = Manifest(
            step=save.step,
            files=dict(files),
            extra={**save.extra, **self._facts},
            layout=asdict(self.mesh.layout),
            config_hash=self.run_store.config_hash(),
            versions={"torch": str(torch.__version__), "python": platform.python_version()},
            attempt=self.run_store.attempt,
            time=time.time(),
            metrics=dict(save.metrics),
        )
        committed = self.store.commit(writing, manifest)
        seconds = round(time.monotonic() - save.began, 3)
        details = {"path": str(committed.path), "bytes": manifest.size, "seconds": seconds}
        self.run_store.report("checkpoint_saved", save.step, details)
        self.run_store.removals.start(partial(self._prune, committed, manifest))

    def _prune(self, committed: Checkpoint, manifest: Manifest) -> None:
        self._whole[committed] = manifest  # each rank has sent the sizes of its files
        retention = replace(self.run_store.settings.retention, proved=self.run_store.proved())
        self.store.prune(retention, self.run_store.attempt, self._whole)

    def _check_space(self, writing: Path, tensor_bytes: int, files: int) -> None:
        settings = self.run_store.settings
        check = partial(
            check_space, writing, self.store, tensor_bytes, files, settings.retention.newest, f"{settings.prefix}keep"
        )
        try:
            check()
        except OSError:
            if not self.run_store.removals.busy:
                raise
            self.run_store.removals.wait()  # it is making room
            check()

    def _warn(self, step: int, message: str) -> None:
        """Prints a warning on rank 0 and records it."""
        if self.mesh.rank == 0:
            self.run_store.report("warning", step, {"message": message})
            print(message, flush=True)
