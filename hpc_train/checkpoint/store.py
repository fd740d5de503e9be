"""Which checkpoints of a run exist: committed directories, told from all else by their name alone. No torch.

A save writes into ``.step-00000100.attempt-003.0``, a directory of its own; the rename to ``step-00000100`` is the
commit. ``bad.step-00000100.attempt-003`` was committed and did not verify. Whatever else lies there was never finished
or is being removed. No directory is ever written into a second time.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.manifest import NAME, BadCheckpoint, Manifest, read_manifest, verify
from hpc_train.checkpoint.retention import Kept, Retention, removable

_COMMITTED = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.(?:bad\.)?step-\d{8,}\.(?:attempt-(\d+).*|removed.*)")
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
    """

    root: Path
    guard: Callable[[], None] = lambda: None

    def committed(self) -> list[Checkpoint]:
        """All committed checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found = ((_COMMITTED.fullmatch(path.name), path) for path in self.root.iterdir())
        return sorted((Checkpoint(int(match[1]), path) for match, path in found if match), key=lambda c: c.step)

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
        self._refuse_again(self._final(step))
        serial = 0
        while True:
            writing = self.root / f".step-{step:08d}.attempt-{attempt:03d}.{serial}"
            try:
                disk.make_directory(writing)
                return writing
            except FileExistsError:
                serial += 1

    def commit(self, writing: Path, manifest: Manifest) -> Checkpoint:
        """Makes ``writing`` the checkpoint of ``manifest.step``. One process calls this, after all others have synced
        what they wrote. The commit is on disk when this returns."""
        file = disk.HashedFile(writing / NAME)
        try:
            file.write(manifest.encode())
            file.close()
        finally:
            file.abandon()
        disk.sync_directory(writing)
        final, written = self._final(manifest.step), writing.stat().st_ino
        self.guard()
        self._refuse_again(final)
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
        target, serial = self.root / f"bad.{checkpoint.path.name}.attempt-{attempt:03d}", 0
        while target.exists():
            serial += 1
            target = self.root / f"bad.{checkpoint.path.name}.attempt-{attempt:03d}.{serial}"
        self._move(checkpoint.path, target)
        return target

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
        return [path for path, match in found if match and (match[1] is None or int(match[1]) < attempt)]

    def _remove(self, path: Path) -> None:
        """Renames first, so that a removal that is cut short does not look like a checkpoint."""
        name, serial = path.name.lstrip("."), 0
        hidden = path if _REMOVED.search(name) else self.root / f".{name}.removed"
        while hidden != path and hidden.exists():
            serial += 1
            hidden = self.root / f".{name}.removed.{serial}"
        if hidden != path:
            self._move(path, hidden)
        disk.remove(hidden)

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

    def _final(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def _refuse_again(self, final: Path) -> None:
        if final.exists() or final.is_symlink():
            self.guard()
            raise FileExistsError(errno.EEXIST, "this checkpoint is committed already", str(final))
