"""Commits, lists, retains and removes the checkpoints of a run; without torch.

A save writes into the directory ``.step-00000100.attempt-003.0``, and the rename to ``step-00000100`` commits it.
Where directories are renamed by copying (mounted buckets), it writes into ``step-00000100.attempt-003.0``, and the
file ``COMMITTED`` in it commits it. Both kinds are listed. ``bad.step-00000100.attempt-003`` was committed and did not
verify. Any other entry is unfinished or being removed. No directory is written to twice.
"""

from __future__ import annotations

import errno
import re
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.manifest import (
    COMMITTED,
    NAME,
    BadCheckpoint,
    Manifest,
    has_marker,
    marker,
    read_manifest,
    verify,
    verify_listing,
)
from hpc_train.checkpoint.removals import Kept, Retention, removable
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import Event

_COMMITTED = re.compile(r"step-(\d{8,})(\.attempt-\d+\.\d+)?")
_UNFINISHED = re.compile(r"(?:\.(?:bad\.)?)?step-\d{8,}\.(?:attempt-(\d+).*|removed.*)")
_REMOVED = re.compile(r"\.removed(\.\d+)?$")
_BAD = re.compile(r"bad\.step-(\d{8,})\.attempt-(\d+)(\.\d+)?")


@dataclass(frozen=True)
class Checkpoint:
    """Refers to a committed checkpoint."""

    step: int
    path: Path

    def manifest(self) -> Manifest:
        """Reads the manifest of this checkpoint.

        Raises:
            BadCheckpoint: the manifest is missing or damaged.
        """
        return read_manifest(self.path)


@dataclass(frozen=True)
class CheckpointStore:
    """Manages the checkpoints in one directory.

    Attributes:
        guard: called before a commit, rename or removal; raises if a newer attempt has taken over the run.
        by_marker: whether to commit with the file ``COMMITTED``, because directories cannot be renamed atomically.
    """

    root: Path
    guard: Callable[[], None] = lambda: None
    by_marker: bool = False

    def committed(self) -> list[Checkpoint]:
        """Returns all committed checkpoints, oldest first."""
        found = ((_COMMITTED.fullmatch(path.name), path) for path in sorted(self._entries()))
        steps = {int(match[1]): path for match, path in found if match and (match[2] is None or has_marker(path))}
        return [Checkpoint(step, path) for step, path in sorted(steps.items())]

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.committed()), None)

    def bad(self) -> list[Path]:
        """Returns the checkpoints that were set aside, lowest step first."""
        return sorted(path for path in self._entries() if _BAD.fullmatch(path.name))

    def _entries(self) -> list[Path]:
        """Returns what is in the directory; nothing if it does not exist.

        Raises:
            OSError: it cannot be listed, so that nothing is known about its checkpoints.
        """
        try:
            return list(self.root.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def begin(self, step: int, attempt: int) -> Path:
        """Creates the directory into which ``attempt`` writes the checkpoint of ``step``.

        Raises:
            FileExistsError: a checkpoint of ``step`` is already committed.
        """
        self.guard()
        self.root.mkdir(exist_ok=True)  # a run directory that was deleted is not made again
        self._refuse_second_commit(step)
        hidden = "" if self.by_marker else "."
        serial = 0
        while True:
            writing = self.root / f"{hidden}step-{step:08d}.attempt-{attempt:03d}.{serial}"
            try:
                disk.make_directory(writing)
                return writing
            except FileExistsError:
                serial += 1

    def commit(self, writing: Path, manifest: Manifest) -> Checkpoint:
        """Commits ``writing`` as the checkpoint of ``manifest.step``; the commit is on disk on return.

        One process calls this after all others have synced their files.
        """
        data = manifest.encode()
        disk.write_file(writing / NAME, data)
        disk.sync_directory(writing)
        if self.by_marker:
            return self._mark(writing, manifest.step, data)
        final = self.root / f"step-{manifest.step:08d}"
        inode = writing.stat().st_ino
        self.guard()
        self._refuse_second_commit(manifest.step)
        try:
            disk.rename(writing, final)
        except FileNotFoundError:
            self.guard()  # a newer attempt has removed the directory
            raise
        except OSError:
            with suppress(OSError):
                if final.stat().st_ino == inode:  # the rename may not be durable, so undo it
                    final.rename(writing)
            raise
        return Checkpoint(manifest.step, final)

    def _mark(self, writing: Path, step: int, manifest: bytes) -> Checkpoint:
        self.guard()
        self._refuse_second_commit(step)
        try:
            disk.write_file(writing / COMMITTED, marker(manifest))
            disk.sync_directory(writing)
        except OSError:
            with suppress(OSError):  # the marker may not be durable, so undo it
                disk.unlink(writing / COMMITTED)
            self.guard()
            raise
        return Checkpoint(step, writing)

    def revoke(self, attempt: int) -> None:
        """Hides unfinished saves of earlier attempts, so that a suspended process cannot commit one later.

        ``guard`` alone cannot prevent that, since a process may be suspended between the check and its rename. What is
        hidden is left for ``remove_hidden``. Where a marker commits, a directory is removed at once.
        """
        self.guard()
        for path in self._unfinished_before(attempt):
            with suppress(OSError):  # another process was first, or nobody (the old attempt included) can rename here
                if _COMMITTED.fullmatch(path.name):
                    self._remove(path)
                elif not _REMOVED.search(path.name):
                    self._hide(path)

    def remove_hidden(self) -> None:
        """Finishes removals that were interrupted or left by ``revoke``."""
        if self.root.is_dir():
            for path in list(self.root.iterdir()):
                if _UNFINISHED.fullmatch(path.name) and _REMOVED.search(path.name):
                    disk.remove(path)

    def set_aside(self, checkpoint: Checkpoint, attempt: int) -> Path:
        """Renames a checkpoint so that no run loads it and a person can inspect it; returns the new path."""
        name = checkpoint.path.name.partition(".")[0]
        target = self.root / f"bad.{name}.attempt-{attempt:03d}"
        serial = 0
        while target.exists():
            serial += 1
            target = self.root / f"bad.{name}.attempt-{attempt:03d}.{serial}"
        self._unmark(checkpoint.path)
        self._move(checkpoint.path, target)
        return target

    def remove(self, checkpoint: Checkpoint) -> None:
        """Removes a committed checkpoint."""
        self._remove(checkpoint.path)

    def prune(self, retention: Retention, attempt: int, known: dict[Checkpoint, Manifest] | None = None) -> None:
        """Removes checkpoints that ``retention`` does not keep, all bad ones but the newest, and unfinished saves.

        It never removes the newest complete checkpoint. Incomplete checkpoints do not count as kept.

        Args:
            known: checkpoints whose files this process has written or has seen in full size, with their manifests.
                These are complete while all names exist, which takes one listing instead of an open of each file. The
                call adds what it has compared and drops what is gone.
        """
        self.guard()
        known = {} if known is None else known
        complete = self._complete(known)
        known.clear()
        known.update(complete)
        steps = removable([Kept(found.step, manifest.metrics) for found, manifest in complete.items()], retention)
        expired = [checkpoint.path for checkpoint in complete if checkpoint.step in steps] + self.bad()[:-1]
        for path in [*expired, *self._unfinished_before(attempt)]:
            self._remove(path)

    def _complete(self, known: Mapping[Checkpoint, Manifest]) -> dict[Checkpoint, Manifest]:
        """Returns the complete checkpoints, oldest first, with their manifests."""
        found = {}
        for checkpoint in self.committed():
            with suppress(BadCheckpoint, OSError):
                manifest = known.get(checkpoint)
                if manifest is None:
                    manifest = checkpoint.manifest()
                    verify(checkpoint.path, manifest, full=False)
                else:
                    verify_listing(checkpoint.path, manifest)
                found[checkpoint] = manifest
        return found

    def _unfinished_before(self, attempt: int) -> list[Path]:
        """Returns unfinished saves of earlier attempts and unfinished removals."""
        found = ((path, _UNFINISHED.fullmatch(path.name)) for path in self._entries())
        old = (path for path, match in found if match and (match[1] is None or int(match[1]) < attempt))
        return [path for path in old if not has_marker(path)]

    def _remove(self, path: Path) -> None:
        """Removes a directory; hides it first, so that an interrupted removal does not look like a checkpoint."""
        if _COMMITTED.fullmatch(path.name) and "." in path.name:
            self._unmark(path)
        elif not _REMOVED.search(path.name):
            path = self._hide(path)
        disk.remove(path)

    def _hide(self, path: Path) -> Path:
        name = path.name.lstrip(".")
        serial = 0
        hidden = self.root / f".{name}.removed"
        while hidden.exists():
            serial += 1
            hidden = self.root / f".{name}.removed.{serial}"
        self._move(path, hidden)
        return hidden

    def _unmark(self, path: Path) -> None:
        """Removes the marker of a committed checkpoint; restores it if a newer attempt has taken over."""
        self.guard()
        if not (path / COMMITTED).exists():
            return
        data = (path / COMMITTED).read_bytes()
        disk.unlink(path / COMMITTED)
        try:
            self.guard()
        except BaseException:
            with suppress(OSError):
                disk.write_file(path / COMMITTED, data)
            raise

    def _move(self, source: Path, target: Path) -> None:
        """Renames a directory; undoes that if a newer attempt has taken over meanwhile."""
        self.guard()
        disk.rename(source, target)
        try:
            self.guard()
        except BaseException:
            with suppress(OSError):  # the newer attempt may have saved that step again
                disk.rename(target, source)
            raise

    def _refuse_second_commit(self, step: int) -> None:
        final = self.root / f"step-{step:08d}"
        if final.is_symlink() or any(found.step == step for found in self.committed()):
            self.guard()
            raise FileExistsError(errno.EEXIST, "a checkpoint of this step is already committed", str(final))


POLL_S = 1.0


class Purged(UserError):
    """Reports that the run has saved checkpoints and all of them have disappeared.

    The usual causes are a purge of old files on scratch and a file system that is not mounted. The run's events and
    ``run.json`` often survive a purge, since a resumed run writes to them.
    """


def furthest_saved(run: RunDirectory) -> int:
    """Returns the highest step with a committed checkpoint according to events and ``run.json``; 0 without any."""
    record = run.record()
    proofs = [event for event in run.read_events() if _proves_checkpoint(event, run)]
    saved = [*(event.step for event in proofs), record.get("saved_step"), record.get("result", {}).get("steps")]
    return max((step for step in saved if isinstance(step, int)), default=0)


def record_save(run: RunDirectory, step: int) -> None:
    """Records in ``run.json`` that the run has saved a checkpoint, which its events may lose to a purge of old files.

    Only the first save is recorded, so that saves do not write ``run.json``.
    """
    with suppress(OSError, UserError):  # the checkpoint is committed in any case
        if "saved_step" not in run.record():
            run.update_record(saved_step=step)


def _proves_checkpoint(event: Event, run: RunDirectory) -> bool:
    """Returns whether ``event`` reports a commit of this run, or a resume from a checkpoint of this run."""
    own = event.path.startswith(f"{run.checkpoints}/")
    return event.name == "checkpoint_saved" or (event.name == "resumed" and own)


def wait_for_checkpoint(store: CheckpointStore, wait_s: float) -> bool:
    """Waits up to ``wait_s`` seconds for a checkpoint, since a network file system may show an old listing."""
    deadline = time.monotonic() + wait_s
    while not store.committed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def purged_error(run: RunDirectory, saved: int) -> Purged:
    """Returns the error for a run whose checkpoints have disappeared.

    Args:
        saved: the highest step with a committed checkpoint.
    """
    reached = max((line.step for line in run.read_all_metrics()), default=0)
    trained = f" and had trained to step {reached}" if reached > saved else ""
    return Purged(
        f"this run had saved a checkpoint of step {saved}{trained}, but none of its checkpoints is left\n"
        "  likely causes: a purge of old files on scratch, or a file system that is not mounted here",
        where=f"{run.checkpoints}, where its checkpoints are expected",
        fix="restore the checkpoints or mount their file system, and run the same command again\n"
        "          to start over at step 0, choose another run.name, or remove this run first: "
        f"rm -r {shlex.quote(str(run.path))}",
    )
