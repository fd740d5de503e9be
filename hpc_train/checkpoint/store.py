"""Commits, lists, retains and removes the checkpoints of a run; without torch.

A save writes into the directory ``.step-00000100.attempt-003.0``, and the rename to ``step-00000100`` commits it.
Where directories are renamed by copying (mounted buckets), it writes into ``step-00000100.attempt-003.0``, and the
file ``COMMITTED`` in it commits it. Both kinds are listed. ``bad.step-00000100.attempt-003`` was committed and did not
verify. Any other entry is unfinished or being removed. No directory is written to twice.
"""

from __future__ import annotations

import errno
import math
import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from hpc_train.config.evaluation import BestMetric
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory


@dataclass(frozen=True)
class Kept:
    """Holds the step and metrics of a complete checkpoint, by which ``removable`` decides."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Retention:
    """Defines which checkpoints are kept; one rule that keeps a checkpoint is enough.

    Attributes:
        newest: keep this many of the newest, at least one.
        every: keep the first checkpoint at or after each multiple of this many steps; 0 disables the rule.
        best: keep the best by this metric.
        proved: keep the newest of at most this many steps; None disables the rule.
    """

    newest: int = 2
    every: int = 0
    best: BestMetric | None = None
    proved: int | None = None


PROVED = "proved_step"  # the key in run.json; ``train.verify`` has proved the checkpoints of at most so many steps


def removable(checkpoints: Sequence[Kept], retention: Retention) -> set[int]:
    """Returns the steps of the checkpoints that ``retention`` does not keep."""
    steps = sorted(checkpoint.step for checkpoint in checkpoints)
    retained = set(steps[-max(1, retention.newest) :])
    if retention.every > 0:
        first: dict[int, int] = {}
        for step in steps:
            first.setdefault(step // retention.every, step)
        retained.update(step for span, step in first.items() if span > 0)
    if retention.proved is not None:
        retained.update([step for step in steps if step <= retention.proved][-1:])
    best = best_step(checkpoints, retention.best)
    if best is not None:
        retained.add(best)
    return set(steps) - retained


def best_step(checkpoints: Sequence[Kept], metric: BestMetric | None) -> int | None:
    """Returns the step with the best ``metric``, the first of equals; None if no checkpoint has it."""
    if metric is None:
        return None
    sign = -1.0 if metric.highest else 1.0
    results = [
        (sign * checkpoint.metrics[metric.name], checkpoint.step)
        for checkpoint in checkpoints
        if metric.name in checkpoint.metrics and math.isfinite(checkpoint.metrics[metric.name])
    ]
    if results:
        return min(results)[1]
    return None


_POLL_S = 0.2


@dataclass
class Removals:
    """Runs removals one after the other in one thread, so that no save waits for their unlinks.

    A checkpoint of N ranks has N files, and a metadata server takes about a millisecond for each. A checkpoint is first
    renamed to a hidden name, or loses its marker, and that is synced; only then its files are unlinked. A process that
    dies in between leaves a hidden directory, which no run loads and which the next removal finishes.

    Attributes:
        report: called in that thread with the exception of a removal that failed.
    """

    report: Callable[[Exception], None]
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _due: list[Callable[[], None]] = field(default_factory=list, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def start(self, removal: Callable[[], None]) -> None:
        """Runs ``removal`` after the ones that are running or due; returns at once. Any thread may call it.

        Each removal searches for everything to remove, so the removals that follow a slow one have little to do.
        """
        with self._lock:
            self._due.append(removal)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="remove-checkpoints", daemon=True)
                self._thread.start()

    def wait(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Waits until all removals are finished or ``give_up`` returns True."""
        while (thread := self._thread) is not None and not give_up():
            thread.join(_POLL_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._thread = None
                    return
                removal = self._due.pop(0)
            try:
                removal()
            except Exception as error:
                self.report(error)


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
        """Reads the manifest; see ``read_manifest``."""
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
        matches = ((_COMMITTED.fullmatch(path.name), path) for path in sorted(self._entries()))
        steps = {int(match[1]): path for match, path in matches if match and (match[2] is None or has_marker(path))}
        return [Checkpoint(step, path) for step, path in sorted(steps.items())]

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.committed()), None)

    def bad(self) -> list[Path]:
        """Returns the checkpoints that were set aside, lowest step first."""
        return sorted(path for path in self._entries() if _BAD.fullmatch(path.name))

    def _entries(self) -> list[Path]:
        """Returns the entries of the directory; none if it does not exist.

        Raises:
            OSError: the directory cannot be listed, so its checkpoints are unknown.
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
        self.root.mkdir(exist_ok=True)  # does not recreate a run directory that was deleted
        self._refuse_second_commit(step)
        hidden = "." * (not self.by_marker)
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

        ``guard`` alone cannot prevent that, since a process may be suspended between the check and its rename.
        ``remove_hidden`` removes the hidden directories. Where a marker commits, directories are removed at once.
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
        target = self._free(f"bad.{name}.attempt-{attempt:03d}")
        self._unmark(checkpoint.path)
        self._move(checkpoint.path, target)
        return target

    def prune(self, retention: Retention, attempt: int, known: dict[Checkpoint, Manifest] | None = None) -> None:
        """Removes checkpoints that ``retention`` does not keep, all bad ones but the newest, and unfinished saves.

        It never removes the newest complete checkpoint. Incomplete checkpoints do not count as kept.

        Args:
            known: checkpoints whose files this process has written or has seen in full size, with their manifests.
                They are complete as long as all names exist, which one listing shows without opening each file. The
                call adds the checkpoints that it has compared and drops those that no longer exist.
        """
        self.guard()
        complete = self._complete(known or {})
        if known is not None:
            known.clear()
            known.update(complete)
        steps = removable(
            [Kept(checkpoint.step, manifest.metrics) for checkpoint, manifest in complete.items()], retention
        )
        expired = [checkpoint.path for checkpoint in complete if checkpoint.step in steps] + self.bad()[:-1]
        for path in [*expired, *self._unfinished_before(attempt)]:
            self._remove(path)

    def _complete(self, known: Mapping[Checkpoint, Manifest]) -> dict[Checkpoint, Manifest]:
        """Returns the complete checkpoints, oldest first, with their manifests."""
        complete = {}
        for checkpoint in self.committed():
            with suppress(BadCheckpoint, OSError):
                manifest = known.get(checkpoint)
                if manifest is None:
                    manifest = checkpoint.manifest()
                    verify(checkpoint.path, manifest, full=False)
                else:
                    verify_listing(checkpoint.path, manifest)
                complete[checkpoint] = manifest
        return complete

    def _unfinished_before(self, attempt: int) -> list[Path]:
        """Returns unfinished saves of earlier attempts and unfinished removals."""
        matches = ((path, _UNFINISHED.fullmatch(path.name)) for path in self._entries())
        old = (path for path, match in matches if match and (match[1] is None or int(match[1]) < attempt))
        return [path for path in old if not has_marker(path)]

    def _remove(self, path: Path) -> None:
        """Removes a directory; hides it first, so that an interrupted removal does not look like a checkpoint."""
        if _COMMITTED.fullmatch(path.name) and "." in path.name:
            self._unmark(path)
        elif not _REMOVED.search(path.name):
            path = self._hide(path)
        disk.remove(path)

    def _hide(self, path: Path) -> Path:
        hidden = self._free(f".{path.name.lstrip('.')}.removed")
        self._move(path, hidden)
        return hidden

    def _free(self, name: str) -> Path:
        """Returns the path ``name``, with a number if it exists."""
        path = self.root / name
        serial = 0
        while path.exists():
            serial += 1
            path = self.root / f"{name}.{serial}"
        return path

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
        if final.is_symlink() or any(checkpoint.step == step for checkpoint in self.committed()):
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
    saved = [record.get("saved_step"), record.get("result", {}).get("steps")]
    for event in run.read_events():
        resumed = event.name == "resumed" and event.path.startswith(f"{run.checkpoints}/")  # not from another run's
        if resumed or event.name == "checkpoint_saved":
            saved.append(event.step)
    return max((step for step in saved if isinstance(step, int)), default=0)


def record_save(run: RunDirectory, step: int) -> None:
    """Records in ``run.json`` that the run has saved a checkpoint, since a purge of old files may remove its events.

    Only the first save is recorded, so that saves do not write ``run.json``.
    """
    with suppress(OSError, UserError):  # the checkpoint is committed in any case
        if "saved_step" not in run.record():
            run.update_record(saved_step=step)


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
