"""Saves and loads the state of any training loop, without a config, an agent or a run directory.

The checkpoints have the format of those of runs. The ranks are those of torch's default process group, or one process.

A program leaves the file ``.program-NUMBER-IDENTITY`` in the directory when it saves there for the first time. The
highest number has the directory: the programs with lower numbers can commit nothing any more, such as a job that was
requeued while its processes were suspended. A load changes nothing, except that it sets damaged checkpoints aside.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import xxhash

from hpc_train.checkpoint.agreement import Group, from_rank, lowest, on_first, rank_in, size_of
from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.manifest import BadCheckpoint
from hpc_train.checkpoint.objects import ObjectState, Registered
from hpc_train.checkpoint.restoring import OpenCheckpoint, open_checkpoint
from hpc_train.checkpoint.run_store import VISIBILITY_TIMEOUT_S, SaveSettings
from hpc_train.checkpoint.state import SHOWN, shapes, training_state
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore, Removals, Retention
from hpc_train.checkpoint.verified import VerifiedSearch
from hpc_train.checkpoint.writer import SaveFailed
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.machine.storage import renames_by_copying
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import this_process

WHERE = "hpc_train.checkpoint"
_PROGRAM = re.compile(r"\.program-(\d+)-([0-9a-f]+)")


@dataclass(frozen=True)
class _Ranks:
    """Holds the ranks of torch's default process group as data-parallel ranks; see ``state.Ranks``."""

    device: torch.device
    control: Group
    pp_rank: int = 0
    tp_rank: int = 0

    @property
    def rank(self) -> int:
        return rank_in(self.control)

    @property
    def dp_cp_rank(self) -> int:
        return self.rank

    @property
    def layout(self) -> Layout:
        return Layout(size_of(self.control), 1, 1, 1, "ddp", "sequential", 1, 0, 0)

    def group(self, axis: str) -> Group:
        """Returns a group of all ranks that can send tensors of ``device``."""
        return dist.group.WORLD if self.device.type == "cuda" else self.control


@dataclass
class _Directory:
    """Gives a program access to the checkpoints in ``path``; see ``manager.Destination``."""

    path: Path
    settings: SaveSettings
    group: Group
    removals: Removals = field(init=False)

    def __post_init__(self) -> None:
        self.removals = Removals(lambda error: print(f"cannot remove old checkpoints: {error}", flush=True))

    @property
    def attempt(self) -> int:
        """Returns the number of this program; before its first save, that of the last one."""
        numbers = {identity: number for number, identity in self._claims()}
        return numbers.get(self._identity, max(numbers.values(), default=0))

    @cached_property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.path, self._check_claim, renames_by_copying(self.path))

    def newest(self) -> OpenCheckpoint | None:
        """Returns the newest valid checkpoint; None without any. Collective.

        Raises:
            UserError: all checkpoints are damaged.
        """
        verified = VerifiedSearch(
            self.store, self.group, True, VISIBILITY_TIMEOUT_S, self._skip, writable=False
        ).newest()
        if verified is None:
            return None
        return open_checkpoint(verified, self.group)

    def _skip(self, checkpoint: Checkpoint, problem: str) -> None:
        if checkpoint not in self.store.committed():
            return  # the program that saves here has removed it meanwhile
        path = checkpoint.path
        with suppress(OSError, UserError):  # this process may not write here, or another program saves here
            path = self.store.set_aside(checkpoint, self.attempt)
        print(f"skipping the damaged checkpoint of step {checkpoint.step} in {path}: {problem}", flush=True)

    def set_aside_after(self, step: int) -> bool:
        raise NotImplementedError("a loop loads the newest checkpoint only")

    def proved(self) -> None:
        """Other programs do not verify their numbers."""

    def facts(self) -> dict[str, Any]:
        return {}

    def config_hash(self) -> None:
        return None

    def report(self, event: str, step: int, details: Mapping[str, Any]) -> None:
        """Does nothing, since the caller gets the exception of a failed save and the manager prints its warnings."""

    def admits(self, step: int) -> bool:
        """Claims the directory for this program, before a save; returns whether the checkpoint of ``step`` is missing.

        Raises:
            UserError: another program has taken over the directory, or there is a checkpoint of a later step.
            OSError: this process cannot write to the directory.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._check_claim()
        newest = self.store.newest()
        while newest is not None and newest.step >= step:
            try:
                saved_by = newest.manifest().attempt
            except BadCheckpoint:
                self.store.set_aside(newest, self.attempt)
                newest = self.store.newest()
                continue
            if newest.step > step:
                raise UserError(
                    f"{self.path} has a checkpoint of step {newest.step}, and this program saves step {step}",
                    where=f"{WHERE}.save",
                    fix="load it before training, or save to another directory",
                )
            if saved_by != self.attempt:
                print(f"{newest.path} was saved by an earlier program and is not saved again", flush=True)
            return False
        self._claim()
        return True

    def _claim(self) -> None:
        """Leaves the file of this program if there is none, and hides the unfinished saves of earlier programs."""
        if all(identity != self._identity for _, identity in self._claims()):
            number = max((number for number, _ in self._claims()), default=0) + 1
            write_json(self.path / f".program-{number:03d}-{self._identity}", this_process())
            self.store.revoke(self.attempt)
            self.removals.start(self.store.remove_hidden)

    def _claims(self) -> list[tuple[int, str]]:
        """Returns the number and the identity of each program that has saved here, the last one last."""
        matches = (_PROGRAM.fullmatch(path.name) for path in self.path.glob(".program-*"))
        return sorted((int(match[1]), match[2]) for match in matches if match)

    @cached_property
    def _identity(self) -> str:
        return xxhash.xxh3_64(json.dumps(this_process()).encode()).hexdigest()

    def _check_claim(self) -> None:
        """Raises UserError if another program has saved here since this one did for the first time."""
        claims = self._claims()
        if all(identity != self._identity for _, identity in claims) or claims[-1][1] == self._identity:
            return
        number, identity = claims[-1]
        path = self.path / f".program-{number:03d}-{identity}"
        saver: Mapping[str, Any] = {}
        with suppress(OSError, ValueError):
            saver = read_json(path)
        raise UserError(
            f"another program saves to {self.path} now: process {saver.get('pid')} on {saver.get('host')}",
            where=f"{WHERE}.save",
            fix=f"one directory for each program; if that program has ended, remove {path}",
        )


class Checkpoints:
    """Keeps the state of named objects in the checkpoints of a directory. Every method is collective.

    Args:
        directory: where the checkpoints are; all ranks see it.
        keep: how many of the newest checkpoints are kept.
        asynchronous: whether ``save`` returns when the state is copied to host memory, and a thread writes it. If a
            node lacks the memory, ``save`` says so and writes at once.
        objects: name -> a module (plain, DDP or FSDP2), an optimizer, a tensor, a dict of plain values, a
            ``torch.Generator``, or an object with ``state_dict`` and ``load_state_dict``, such as a learning rate
            schedule. State other than DTensors is equal on all ranks.

    Raises:
        UserError: an object has no state, the ranks pass different objects, or ``torch.distributed`` is not
            initialized in one of several processes.
    """

    def __init__(
        self, directory: str | os.PathLike[str], /, *, keep: int = 2, asynchronous: bool = False, **objects: Registered
    ) -> None:
        if keep < 1:
            raise UserError(f"keep is {keep}", where=WHERE, fix="at least 1")
        self._names = sorted(objects)
        self._objects = ObjectState(WHERE, "pass the same objects as saved")
        self._objects.register(objects)
        state = training_state(self._objects, self._objects)
        device = next((tensor.device for tensor in state.values() if not tensor.is_cpu), torch.device("cpu"))
        self._group = _control_group()
        self._ranks = _Ranks(device, self._group)
        settings = SaveSettings(Retention(keep), asynchronous, asynchronous, "", "sbatch --mem")
        self._directory = _Directory(Path(directory).absolute(), settings, self._group)
        self._asynchronous = asynchronous
        self._step: int | None = None  # of the save that the manager may still be writing
        held = {name: str(shape) for name, shape in shapes(state).items()}
        self._compare(
            held,
            "the objects differ between ranks: {}",
            "pass the same objects on all ranks (pipeline stages are not supported)",
        )
        ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count() or size_of(self._group))
        self._manager = CheckpointManager(
            self._directory, self._objects, self._objects, self._ranks, ranks_of_node, raises=True
        )

    def load(self, *, strict: bool = True) -> int | None:
        """Loads the newest valid checkpoint into the objects; skips damaged ones with a message.

        Args:
            strict: whether the checkpoint must have no other objects than those passed.

        Returns:
            Its step; None if there is no checkpoint.

        Raises:
            UserError: the checkpoint has other objects or shapes, or all checkpoints are damaged.
        """
        self.wait()
        with _naming_the_directory():
            checkpoint = self._directory.newest()
            if checkpoint is not None:
                checkpoint = self._selected(checkpoint, strict)
            restored = self._manager.load(checkpoint)
        if restored is None:
            return None
        values = restored.extra["loop"]
        present = {kind: {name: of[name] for name in of if name in self._names} for kind, of in values.items()}
        self._objects.load_values(present, with_optimizers=True, forked=False)
        return restored.step

    def _selected(self, checkpoint: OpenCheckpoint, strict: bool) -> OpenCheckpoint:
        """Returns the part of a checkpoint that belongs to the objects."""
        path = checkpoint.checkpoint.path
        extra = checkpoint.manifest.extra
        if "loop" not in extra:
            raise UserError(f"{path} is of a run of hpc_train's trainer", where=str(path), fix="checkpoint export RUN")
        in_tensors = {name.split(".")[1] for name in checkpoint.stored}
        saved = extra.get("objects", [*in_tensors, *extra["loop"]["optimizers"], *extra["loop"]["objects"]])
        lacking = [name for name in self._names if name not in saved]
        more = sorted({*saved} - {*self._names})
        problems = []
        if lacking:
            problems.append(f"it has no {', '.join(lacking)}")
        if more and strict:
            problems.append(f"it also has {', '.join(more)}, which is not passed")
        if problems:
            fix = "pass the same objects as saved"
            if not lacking:
                fix += ", or strict=False to load only these"
            raise UserError(f"the checkpoint has other objects: {'; '.join(problems)}", where=str(path), fix=fix)
        stored = {name: shape for name, shape in checkpoint.stored.items() if name.split(".")[1] in self._names}
        return replace(checkpoint, stored=stored)

    def save(self, step: int) -> None:
        """Saves the objects after ``step`` steps, unless this program has already saved this step.

        An asynchronous save that fails raises its error in the next call of a method.

        Raises:
            SaveFailed: the save failed on some rank, e.g. because the disk is full; raised on all ranks. Earlier
                checkpoints remain valid.
            UserError: another program has taken over the directory, the directory has a checkpoint of a
                later step, or the ranks have different values.
        """
        self.wait()
        with self._failing(step):
            self._compare(
                self._objects.digests(),
                "the values of {} differ between ranks",
                "pass equal values on all ranks, and save others in a file per rank",
            )
            if on_first(partial(self._directory.admits, step), self._group):
                self._step = step
                extra = {"loop": self._objects.values(), "objects": self._names}
                self._manager.save(step, extra, final=not self._asynchronous)

    def wait(self) -> None:
        """Waits until an asynchronous save is committed.

        Raises:
            SaveFailed: it failed.
        """
        with self._failing(self._step):
            self._manager.wait()

    def close(self) -> None:
        """Waits for the last save and for the removal of old checkpoints, and frees the process group."""
        try:
            self.wait()
            self._directory.removals.wait()
        finally:
            self._manager.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:  # otherwise other ranks may not call it; a save in the background may not be committed
            self.close()

    def _compare(self, local: Mapping[str, str], message: str, fix: str) -> None:
        """Raises UserError on all ranks if ``local`` differs from that of the first rank."""
        first: Mapping[str, str] = from_rank(0, local, self._group)
        differing = sorted(name for name in {*first, *local} if first.get(name) != local.get(name))
        differing = lowest(differing or None, self._group)
        if differing:
            names = ", ".join(differing[:SHOWN])
            raise UserError(message.format(names), where=WHERE, fix=fix)

    @contextmanager
    def _failing(self, step: int | None) -> Iterator[None]:
        """Raises ``SaveFailed`` for errors of the disk and of lost ranks in the save of ``step``."""
        try:
            yield
        except OSError as error:  # of ``admits``
            raise SaveFailed(f"rank 0: {type(error).__name__}: {error}", {0: error}) from None
        except RuntimeError as error:  # of gloo
            rank = self._ranks.rank
            text = f"the save of step {step} failed on rank {rank}; another rank may have ended: {error}"
            raise SaveFailed(text, {rank: error}) from error


def save(directory: str | os.PathLike[str], step: int, /, *, keep: int = 2, **objects: Registered) -> None:
    """Saves ``objects`` after ``step`` steps; the checkpoint is committed on return. Collective.

    ``Checkpoints`` has the arguments and errors. It also saves asynchronously, and keeps its process group and its plan
    for the next save.
    """
    with Checkpoints(directory, keep=keep, asynchronous=False, **objects) as checkpoints:
        checkpoints.save(step)


def load(directory: str | os.PathLike[str], /, *, strict: bool = True, **objects: Registered) -> int | None:
    """Loads the newest valid checkpoint into ``objects`` and returns its step; None without any. Collective.

    ``Checkpoints.load`` has the arguments and errors.
    """
    with Checkpoints(directory, keep=1, asynchronous=False, **objects) as checkpoints:
        return checkpoints.load(strict=strict)


def _control_group() -> Group:
    """Returns a new group of all ranks on the CPU; None in a process without ``torch.distributed``."""
    if dist.is_available() and dist.is_initialized():
        group = dist.new_group(backend="gloo", group_desc="checkpoints")
        assert isinstance(group, dist.ProcessGroup), "all ranks are in it"
        return group
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        text = f"torch.distributed is not initialized, but WORLD_SIZE is {ranks}"
        raise UserError(text, where=WHERE, fix="call torch.distributed.init_process_group() first")
    return None


@contextmanager
def _naming_the_directory() -> Iterator[None]:
    """Replaces the setting of a run in the fix of an error."""
    try:
        yield
    except UserError as error:
        raise UserError(error.what, where=error.where, fix=error.fix.replace("run.name", "directory")) from None
