"""Lists and verifies the checkpoints of a run, read-only and without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.checkpoint.manifest import BadCheckpoint, Manifest, foreign_files, read_manifest, verify
from hpc_train.checkpoint.store import PROVED, Checkpoint, CheckpointStore, Kept, best_step
from hpc_train.config.evaluation import BestMetric
from hpc_train.errors import UserError
from hpc_train.run.directory import CheckpointDirectory, RunDirectory, refuse_empty_name, sweep_given
from hpc_train.run.owner import open_run

Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]  # (label, total bytes) -> advance(bytes)


@dataclass(frozen=True)
class Listed:
    """Describes a committed checkpoint and its state.

    Attributes:
        manifest: None if it could not be read.
        problem: what is wrong with the checkpoint; None if no problem was found.
        foreign: files in its directory that do not belong to it and are never read.
        proved: whether ``train.verify`` has found nothing wrong after it was saved.
    """

    checkpoint: Checkpoint
    manifest: Manifest | None
    problem: str | None
    foreign: tuple[str, ...] = ()
    proved: bool = False


def list_checkpoints(run: RunDirectory) -> list[Listed]:
    """Returns all checkpoints of ``run``, oldest first, after a check of file names and sizes."""
    store = CheckpointStore(run.checkpoints)
    listed = (inspect_present(store, checkpoint, full=False) for checkpoint in store.committed())
    proved = run.record().get(PROVED, -1)
    return [replace(item, proved=item.checkpoint.step <= proved) for item in listed if item is not None]


def inspect_present(
    store: CheckpointStore, checkpoint: Checkpoint, *, full: bool, on_bytes: Callable[[int], None] | None = None
) -> Listed | None:
    """Returns what ``inspect_checkpoint`` finds; None if the run has removed the checkpoint meanwhile."""
    listed = inspect_checkpoint(checkpoint, full=full, on_bytes=on_bytes)
    if listed.problem is None or was_kept(store, checkpoint):
        return listed
    return None


def was_kept(store: CheckpointStore, checkpoint: Checkpoint) -> bool:
    """Returns whether a checkpoint is still committed; a run that prunes it or sets it aside first removes its
    commit."""
    return checkpoint in store.committed()


def list_set_aside(run: RunDirectory) -> list[Listed]:
    """Returns checkpoints that an attempt found damaged and renamed; no run loads them."""
    listed = []
    for path in CheckpointStore(run.checkpoints).bad():
        checkpoint = Checkpoint(int(path.name.split(".")[1].removeprefix("step-")), path)
        manifest = inspect_checkpoint(checkpoint, full=False).manifest
        listed.append(Listed(checkpoint, manifest, f"damaged, set aside as {path.name}"))
    return listed


def inspect_checkpoint(checkpoint: Checkpoint, *, full: bool, on_bytes: Callable[[int], None] | None = None) -> Listed:
    """Compares a checkpoint with its manifest.

    Args:
        full: whether to compare the content of the files as well as their names and sizes.
        on_bytes: called with the number of bytes read since the last call.
    """
    manifest = None
    try:
        manifest = read_manifest(checkpoint.path)
        verify(checkpoint.path, manifest, full=full, on_bytes=on_bytes)
        return Listed(checkpoint, manifest, None, foreign=tuple(foreign_files(checkpoint.path, manifest)))
    except (BadCheckpoint, OSError) as error:
        return Listed(checkpoint, manifest, str(error).removeprefix(f"{checkpoint.path}/"))
    except UserError as error:  # another version of hpc_train wrote it
        return Listed(checkpoint, manifest, error.what)


def choose(run: RunDirectory, step: int | None) -> Checkpoint:
    """Returns the checkpoint of ``step``; None selects the newest.

    Raises:
        UserError: the run has no such checkpoint.
    """
    committed = CheckpointStore(run.checkpoints).committed()
    if not committed:
        raise UserError(f"{run.path} has no checkpoint", where="RUN", fix="name a run that has saved one")
    if step is None:
        return committed[-1]
    for checkpoint in committed:
        if checkpoint.step == step:
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in committed)
    raise UserError(f"{run.path} has no checkpoint of step {step}", where="the step", fix=f"use one of {steps}")


NEWEST, BEST = "newest", "best"


def choose_by_name(run: RunDirectory, name: str, metric: BestMetric) -> Checkpoint:
    """Returns the newest checkpoint, the best one, or that of a step.

    Args:
        metric: the metric of ``best``, which evaluations during training have recorded in the manifests. A checkpoint
            without a readable manifest is skipped with a message on standard error.

    Raises:
        UserError: the run has no such checkpoint.
    """
    if name == NEWEST:
        return choose(run, None)
    if name.isdecimal():
        return choose(run, int(name))
    if name != BEST:
        raise UserError(
            f"unknown checkpoint {name!r}", where="--checkpoint", fix="newest, best, or the number of a step"
        )
    readable = []
    for item in list_checkpoints(run):
        if item.manifest is None:
            print(f"the checkpoint of step {item.checkpoint.step} is skipped: {item.problem}", file=sys.stderr)
        else:
            readable.append(Kept(item.checkpoint.step, item.manifest.metrics))
    step = best_step(readable, metric)
    if step is None:
        raise UserError(
            f"no checkpoint of {run.path} has a result for {metric.name}",
            where="--checkpoint best",
            fix="--checkpoint newest or a step; train.eval_every=N evaluates during training",
        )
    return choose(run, step)


def verified_manifest(checkpoint: Checkpoint, on_bytes: Callable[[int], None] | None = None) -> Manifest:
    """Verifies every byte of a checkpoint and returns its manifest.

    Raises:
        UserError: the checkpoint is damaged, or has another format.
    """
    with suppress(BadCheckpoint, OSError):
        read_manifest(checkpoint.path)  # raises for another format, which is not damage
    listed = inspect_checkpoint(checkpoint, full=True, on_bytes=on_bytes)
    if listed.problem is not None or listed.manifest is None:
        raise UserError(
            f"the checkpoint {checkpoint.path} is damaged: {listed.problem}",
            where="RUN",
            fix="select another one with --checkpoint STEP; `checkpoint verify RUN` lists the intact ones",
        )
    return listed.manifest


def find_run(target: str, root: Path, command: str, trust_owner: bool = False) -> RunDirectory:
    """Returns the run, the imported weights, or the checkpoints of another program, in the directory ``target`` or
    ``root``/``target``.

    Args:
        command: the command that opens the run (see ``run.owner``).
        trust_owner: whether the caller has passed ``--trust-owner``.

    Raises:
        UserError: neither directory has checkpoints, ``target`` is a sweep or empty, or the command may not use a run
            of its owner.
    """
    refuse_empty_name(target)
    for path in (Path(target), root / target):
        run = RunDirectory(path.absolute())
        if not run.checkpoints.is_dir() and CheckpointStore(path).committed():
            run = CheckpointDirectory(path.absolute())
        if run.checkpoints.is_dir():
            open_run(run, command, trust_owner)
            return run
        if path.is_dir() and (runs := sorted(path.glob("*/config.yaml"))):
            raise sweep_given(target, [config.parent for config in runs], command)
    fix = f"name a run directory, or a run in {root}/"
    raise UserError(f"no run with checkpoints in {target}", where="RUN", fix=fix)
