"""Which checkpoints of a run exist: committed directories, told from all else without reading them. No torch.

A save writes into ``.step-00000100.attempt-003.0``, a directory of its own; the rename to ``step-00000100`` is the
commit. Where directories are renamed by copying (buckets that are mounted), it writes into
``step-00000100.attempt-003.0``, and the file ``COMMITTED`` in it is the commit. Both are found, whichever is in force.
``bad.step-00000100.attempt-003`` was committed and did not verify. Whatever else lies there was never finished or is
being removed. No directory is ever written into a second time.

Which checkpoints may be removed: not the newest ones, not every Mth, not the best. No torch.

A run that has saved checkpoints and has none any more is refused: it must not start over in silence. No torch.

The usual causes are a purge of old files on scratch, and a file system that is not mounted. The run's record (events,
``run.json``) often survives a purge, since a resumed run writes to it.
"""

from __future__ import annotations

import errno
import math
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
)
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory

_COMMITTED = re.compile(r"step-(\d{8,})(\.attempt-\d+\.\d+)?")
_UNFINISHED = re.compile(r"(?:\.(?:bad\.)?)?step-\d{8,}\.(?:attempt-(\d+).*|removed.*)")
_REMOVED = re.compile(r"\.removed(\.\d+)?$")
_BAD = re.compile(r"bad\.step-(\d{8,})\.attempt-(\d+)(\.\d+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    step: int
    path: Path

    def manifest(self) -> Manifest:
        """What it consists of, and all that is not a tensor.

        Raises:
            BadCheckpoint: it has none that can be trusted.
        """
        return read_manifest(self.path)

    def is_whole(self) -> bool:
        """Whether all files are there in their full size. The content is not read."""
        try:
            verify(self.path, self.manifest(), full=False)
        except (BadCheckpoint, OSError):
            return False
        return True


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints under one directory.

    Attributes:
        guard: called before anything is committed, set aside or removed; raises where another process has taken over.
        by_marker: commits by the file ``COMMITTED``, for no directory can be renamed in one step.
    """

    root: Path
    guard: Callable[[], None] = lambda: None
    by_marker: bool = False

    def committed(self) -> list[Checkpoint]:
        """All committed checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found = ((_COMMITTED.fullmatch(path.name), path) for path in sorted(self.root.iterdir()))
        steps = {int(match[1]): path for match, path in found if match and (match[2] is None or has_marker(path))}
        return [Checkpoint(step, path) for step, path in sorted(steps.items())]

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.committed()), None)

    def bad(self) -> list[Path]:
        """Those that were set aside, lowest step first."""
        if not self.root.is_dir():
            return []
        return sorted(path for path in self.root.iterdir() if _BAD.fullmatch(path.name))

    def begin(self, step: int, attempt: int) -> Path:
        """Makes the directory that ``attempt`` writes the checkpoint of ``step`` into.

        Raises:
            FileExistsError: the checkpoint of ``step`` is committed already.
        """
        self.guard()
        self.root.mkdir(parents=True, exist_ok=True)
        self._refuse_again(step)
        hidden, serial = "" if self.by_marker else ".", 0
        while True:
            writing = self.root / f"{hidden}step-{step:08d}.attempt-{attempt:03d}.{serial}"
            try:
                disk.make_directory(writing)
                return writing
            except FileExistsError:
                serial += 1

    def commit(self, writing: Path, manifest: Manifest) -> Checkpoint:
        """Makes ``writing`` the checkpoint of ``manifest.step``. One process calls this, after all others have synced
        what they wrote. The commit is on disk when this returns."""
        data = manifest.encode()
        _write(writing / NAME, data)
        disk.sync_directory(writing)
        if self.by_marker:
            return self._mark(writing, manifest.step, data)
        final, written = self.root / f"step-{manifest.step:08d}", writing.stat().st_ino
        self.guard()
        self._refuse_again(manifest.step)
        try:
            disk.rename(writing, final)
        except FileNotFoundError:
            self.guard()  # a newer attempt has revoked it
            raise
        except OSError:
            with suppress(OSError):
                if final.stat().st_ino == written:  # renamed, and perhaps not for good: it was not a commit
                    final.rename(writing)
            raise
        return Checkpoint(manifest.step, final)

    def _mark(self, writing: Path, step: int, manifest: bytes) -> Checkpoint:
        self.guard()
        self._refuse_again(step)
        try:
            _write(writing / COMMITTED, marker(manifest))
            disk.sync_directory(writing)
        except OSError:
            with suppress(OSError):  # it is perhaps not there for good: it was not a commit
                disk.unlink(writing / COMMITTED)
            self.guard()
            raise
        return Checkpoint(step, writing)

    def revoke(self, attempt: int) -> None:
        """Takes from earlier attempts what they have begun: one that wakes up later finds nothing to commit.

        ``guard`` alone cannot do that, since a process may fall asleep between its look and its rename.
        """
        self.guard()
        for path in self._unfinished_before(attempt):
            with suppress(OSError):  # another process was first; or nobody can rename here, that attempt neither
                self._remove(path)

    def set_aside(self, checkpoint: Checkpoint, attempt: int) -> Path:
        """Renames a checkpoint that did not verify, so that nobody takes it and an operator can look at it."""
        name = checkpoint.path.name.partition(".")[0]
        target, serial = self.root / f"bad.{name}.attempt-{attempt:03d}", 0
        while target.exists():
            serial += 1
            target = self.root / f"bad.{name}.attempt-{attempt:03d}.{serial}"
        self._unmark(checkpoint.path)
        self._move(checkpoint.path, target)
        return target

    def remove(self, checkpoint: Checkpoint) -> None:
        """Removes one that is not wanted any more."""
        self._remove(checkpoint.path)

    def prune(self, retention: Retention, attempt: int) -> None:
        """Removes the checkpoints that ``retention`` does not keep, all bad ones but the newest, and what earlier
        attempts left unfinished. Never the newest whole one; those that are not whole do not count as kept."""
        self.guard()
        whole = [checkpoint for checkpoint in self.committed() if checkpoint.is_whole()]
        steps = removable([Kept(found.step, found.manifest().metrics) for found in whole], retention)
        doomed = [checkpoint.path for checkpoint in whole if checkpoint.step in steps] + self.bad()[:-1]
        for path in [*doomed, *self._unfinished_before(attempt)]:
            self._remove(path)

    def _unfinished_before(self, attempt: int) -> list[Path]:
        """What earlier attempts have begun to write, and what somebody has begun to remove."""
        if not self.root.is_dir():
            return []
        found = ((path, _UNFINISHED.fullmatch(path.name)) for path in self.root.iterdir())
        old = (path for path, match in found if match and (match[1] is None or int(match[1]) < attempt))
        return [path for path in old if not has_marker(path)]

    def _remove(self, path: Path) -> None:
        """Hides it first, so that a removal that is cut short does not look like a checkpoint."""
        if _COMMITTED.fullmatch(path.name) and "." in path.name:
            self._unmark(path)
        elif not _REMOVED.search(path.name):
            path = self._hide(path)
        disk.remove(path)

    def _hide(self, path: Path) -> Path:
        name, serial = path.name.lstrip("."), 0
        hidden = self.root / f".{name}.removed"
        while hidden.exists():
            serial += 1
            hidden = self.root / f".{name}.removed.{serial}"
        self._move(path, hidden)
        return hidden

    def _unmark(self, path: Path) -> None:
        """Takes a commit by marker back, as ``_move`` does with one by rename."""
        self.guard()
        if not (path / COMMITTED).exists():
            return
        data = (path / COMMITTED).read_bytes()
        disk.unlink(path / COMMITTED)
        try:
            self.guard()
        except BaseException:
            with suppress(OSError):
                _write(path / COMMITTED, data)
            raise

    def _move(self, source: Path, target: Path) -> None:
        """Renames for an attempt that was the newest before and after; else everything is as it was."""
        self.guard()
        disk.rename(source, target)
        try:
            self.guard()
        except BaseException:
            with suppress(OSError):  # the newer attempt has saved that step again
                disk.rename(target, source)
            raise

    def _refuse_again(self, step: int) -> None:
        final = self.root / f"step-{step:08d}"
        if final.is_symlink() or any(found.step == step for found in self.committed()):
            self.guard()
            raise FileExistsError(errno.EEXIST, "this checkpoint is committed already", str(final))


def _write(path: Path, data: bytes) -> None:
    file = disk.HashedFile(path)
    try:
        file.write(data)
        file.close()
    finally:
        file.abandon()


@dataclass(frozen=True)
class Kept:
    """What counts of a checkpoint that is there and whole."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Retention:
    """What is kept; a checkpoint stays when any of the three wants it."""

    newest: int = 2  # at least one in any case
    every: int = 0  # the first checkpoint of each span of so many steps from this step on; 0: none
    best: str | None = None  # the best by this metric; the lowest, of an accuracy the highest


def removable(checkpoints: Sequence[Kept], retention: Retention) -> set[int]:
    """Steps of the checkpoints that nothing wants to keep."""
    steps = sorted(found.step for found in checkpoints)
    kept = set(steps[-max(1, retention.newest) :])
    if retention.every > 0:
        first: dict[int, int] = {}
        for step in steps:
            first.setdefault(step // retention.every, step)
        kept.update(step for span, step in first.items() if span > 0)
    best = _best(checkpoints, retention.best)
    if best is not None:
        kept.add(best)
    return set(steps) - kept


def _best(checkpoints: Sequence[Kept], metric: str | None) -> int | None:
    if metric is None:
        return None
    sign = -1.0 if "accuracy" in metric else 1.0
    found = [
        (sign * found.metrics[metric], -found.step)
        for found in checkpoints
        if metric in found.metrics and math.isfinite(found.metrics[metric])
    ]
    return -min(found)[1] if found else None


LOOK_AGAIN_S = 1.0


class Purged(UserError):
    """The run's record tells of checkpoints, and there is none."""


def furthest_saved(run: RunDirectory) -> int:
    """The highest step whose checkpoint was committed, as the run's record says; 0 where nothing would be lost."""
    saved = [event["step"] for event in run.read_events() if _tells_of_own(event, run)]
    return max(*saved, int(run.record().get("result", {}).get("steps", 0)), 0)


def _tells_of_own(event: Mapping[str, Any], run: RunDirectory) -> bool:
    """Whether ``event`` tells that a checkpoint of this run was committed, or was there when an attempt resumed."""
    own = f"{run.checkpoints}/"
    return event["event"] == "checkpoint_saved" or (
        event["event"] == "resumed" and str(event.get("path", "")).startswith(own)
    )


def appears(store: CheckpointStore, wait_s: float) -> bool:
    """Whether ``store`` has a checkpoint. A network file system may show an old listing: it is looked at again for
    ``wait_s`` seconds."""
    deadline = time.monotonic() + wait_s
    while not store.committed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_AGAIN_S)
    return True


def refusal(run: RunDirectory, saved: int, archive: Path | None) -> Purged:
    """Says how far the run had come, where its checkpoints were expected, and what can be done.

    Args:
        saved: the highest step whose checkpoint was committed.
        archive: where ``checkpoint.archive`` looks for copies of them; None without.
    """
    reached = max((line["step"] for line in run.read_all_metrics()), default=0)
    trained = f" and had trained to step {reached}" if reached > saved else ""
    copies = "" if archive is None else f"\n  the archive has no copy either: {archive}"
    back = "put the checkpoints back, or mount their file system, and run the same command again"
    if archive is None:
        back += "; checkpoint.archive=DIR takes them from an archive that has copies"
    return Purged(
        f"this run had saved a checkpoint of step {saved}{trained}, but no checkpoint of it is left{copies}\n"
        "  likely causes: a purge of old files on scratch, or a file system that is not mounted here",
        where=f"{run.checkpoints}, where its checkpoints are expected",
        fix=f"{back}\n          to start over at step 0 on purpose: another run.name, or remove this run first: "
        f"rm -r {shlex.quote(str(run.path))}",
    )
