"""What a run's checkpoints are and whether they are whole, told without writing anything. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.checkpoint.archive import Archive
from hpc_train.checkpoint.manifest import BadCheckpoint, Manifest, read_manifest, verify
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load


@dataclass(frozen=True)
class Listed:
    """A committed checkpoint; ``problem`` says what is wrong with it, and is None where nothing was found."""

    checkpoint: Checkpoint
    manifest: Manifest | None  # None: it could not be read
    problem: str | None
    archived: bool = False  # a copy in ``checkpoint.archive``


def list_checkpoints(run: RunDirectory) -> list[Listed]:
    """All checkpoints of ``run``, oldest first, with their files' names and sizes compared."""
    return [look(found, full=False) for found in CheckpointStore(run.checkpoints).committed()]


def list_set_aside(run: RunDirectory) -> list[Listed]:
    """Those that an attempt found damaged and renamed: no run takes them, an operator may look at them."""
    found = []
    for path in CheckpointStore(run.checkpoints).bad():
        step = int(path.name.split(".")[1].removeprefix("step-"))
        manifest = look(Checkpoint(step, path), full=False).manifest
        found.append(Listed(Checkpoint(step, path), manifest, f"damaged, set aside as {path.name}"))
    return found


def list_archived(run: RunDirectory) -> list[Listed]:
    """The copies in the archive of ``run``, oldest first."""
    archive = Archive.of(run, load(run)) if run.config.exists() else None
    if archive is None:
        return []
    return [replace(look(found, full=False), archived=True) for found in archive.store.committed()]


def look(found: Checkpoint, *, full: bool, on_bytes: Callable[[int], None] | None = None) -> Listed:
    """Compares a checkpoint with its manifest.

    Args:
        full: hashes what is in the files; without it only names and sizes are compared.
        on_bytes: told after each piece how many bytes were read.
    """
    manifest = None
    try:
        manifest = read_manifest(found.path)
        verify(found.path, manifest, full=full, on_bytes=on_bytes)
    except (BadCheckpoint, OSError) as error:
        return Listed(found, manifest, str(error).removeprefix(f"{found.path}/"))
    return Listed(found, manifest, None)


def choose(run: RunDirectory, step: int | None) -> Checkpoint:
    """The checkpoint of ``step``, or the newest.

    Raises:
        UserError: there is none.
    """
    committed = CheckpointStore(run.checkpoints).committed()
    if not committed:
        raise UserError(f"{run.path} has no checkpoint", where="RUN", fix="a run that has saved one")
    if step is None:
        return committed[-1]
    for found in committed:
        if found.step == step:
            return found
    steps = ", ".join(str(found.step) for found in committed)
    raise UserError(f"{run.path} has no checkpoint of step {step}", where="--step", fix=f"one of {steps}")


def whole(found: Checkpoint, on_bytes: Callable[[int], None] | None = None) -> Manifest:
    """The manifest of a checkpoint whose every byte is as it was written.

    Raises:
        UserError: it is damaged.
    """
    listed = look(found, full=True, on_bytes=on_bytes)
    if listed.problem is not None or listed.manifest is None:
        raise UserError(
            f"the checkpoint {found.path} is damaged: {listed.problem}",
            where="RUN",
            fix="--step with another one; checkpoint verify RUN tells which are whole",
        )
    return listed.manifest


def find_run(target: str, root: Path) -> RunDirectory:
    """The run, or the imported weights, in ``target``: a directory, or its name below ``root``.

    Raises:
        UserError: there are no checkpoints.
    """
    for path in (Path(target), root / target):
        if (path / "checkpoints").is_dir():
            return RunDirectory(path.absolute())
    raise UserError(
        f"there is no run with checkpoints in {target}",
        where="RUN",
        fix=f"a run directory, or a name below {root}/",
    )
