"""Copies the best and the last checkpoint of a run to the directory ``checkpoint.archive``, without torch.

Rank 0 starts ``python -m hpc_train.checkpoint.archive`` after a commit, so that a failed copy cannot affect training.
A copy is hashed while it is written and committed like a save; it reuses files of an interrupted copy. The archive has
the layout of a run, so ``checkpoint list``, ``verify`` and ``export`` work on it, and a run can fork from it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.manifest import BadCheckpoint, FileEntry, Manifest, has_marker, verify
from hpc_train.checkpoint.removals import Kept, Retention, removable
from hpc_train.checkpoint.space import check_space
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore
from hpc_train.config.evaluation import BestMetric, best_metric
from hpc_train.config.schema import Config
from hpc_train.machine.storage import renames_by_copying
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import ARCHIVE, EventLog
from hpc_train.run.files import write_json
from hpc_train.run.freeze import load

_CHUNK = 4 << 20


class ArchiveError(Exception):
    """Reports that the archive cannot hold the run's checkpoints."""


class Orphaned(Exception):
    """Reports that the worker that started this process has exited; the next worker continues the copy."""


@dataclass(frozen=True)
class Archive:
    """Represents the archive of one run.

    Attributes:
        copy: the archive in the layout of a run, with ``config.yaml`` and a ``run.json`` that names the run.
        metric: the metric that selects the best checkpoint; None keeps only the last.
    """

    run: RunDirectory
    copy: RunDirectory
    metric: BestMetric | None

    @classmethod
    def of(cls, run: RunDirectory, config: Config) -> Archive | None:
        """Returns the run's archive in ``checkpoint.archive``, or None if that is not set."""
        archive = config.checkpoint.archive
        root = Path(config.run.root)
        if archive is None:
            return None
        name = run.path.relative_to(root) if run.path.is_relative_to(root) else Path(run.path.name)
        best = best_metric(config.checkpoint.keep_best, config.checkpoint.best_mode)
        return cls(run, RunDirectory(Path(archive) / name), best)

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.copy.checkpoints, by_marker=renames_by_copying(self.copy.checkpoints))

    def update(self, attempt: int, parent: int) -> list[Checkpoint]:
        """Copies the missing checkpoints, newest first, and removes those that are no longer kept.

        Args:
            parent: id of the process that this one must not outlive.

        Returns:
            The new copies.

        Raises:
            ArchiveError: the archive belongs to another run.
            BadCheckpoint: a checkpoint of the run is damaged.
            OSError: the archive cannot be written or is full.
        """
        self._claim()
        copied = []
        while (checkpoint := self._missing()) is not None:
            with suppress(FileExistsError):  # another process has copied it
                copied.append(self._copy(checkpoint, attempt, parent))
        for found in self._stale_after_rollback():
            self.store.remove(found)
        self.store.prune(Retention(1, best=self.metric), attempt)
        return copied

    def adopt(self) -> None:
        """Records that the run continues from the archive's checkpoints and owns them from now on."""
        with suppress(OSError):  # the archive is read-only; the next copy will report that
            self._sign()

    def _sign(self) -> None:
        run_id = self.run.record().get("run_id")
        write_json(self.copy.path / "run.json", {"run_id": run_id, "archived_from": str(self.run.path)})

    def _claim(self) -> None:
        own_id = self.run.record().get("run_id")
        archived_id = self.copy.record().get("run_id")
        if archived_id not in (own_id, None) and self.store.committed():
            raise ArchiveError(
                f"{self.copy.path} holds checkpoints of another run ({archived_id}); move them elsewhere"
            )
        self.copy.create()
        if archived_id != own_id:
            self._sign()
        shutil.copy(self.run.config, self.copy.config)

    def _missing(self) -> Checkpoint | None:
        """Returns the newest checkpoint that the archive should keep and does not have."""
        own = CheckpointStore(self.run.checkpoints).committed()
        if not own:
            return None
        archived = _manifests([found for found in self.store.committed() if found.step <= own[-1].step])
        saved = _manifests(own)
        kept = [Kept(step, manifest.metrics) for step, manifest in (archived | saved).items()]
        dropped = removable(kept, Retention(1, best=self.metric))
        wanted = (c for c in reversed(own) if c.step in saved and c.step not in dropped)
        return next((c for c in wanted if saved[c.step] != archived.get(c.step)), None)

    def _stale_after_rollback(self) -> list[Checkpoint]:
        """Returns archived steps newer than the run's newest; they are stale after a rollback."""
        newest = CheckpointStore(self.run.checkpoints).newest()
        return [] if newest is None else [found for found in self.store.committed() if found.step > newest.step]

    def _copy(self, checkpoint: Checkpoint, attempt: int, parent: int) -> Checkpoint:
        manifest = checkpoint.manifest()
        for found in self.store.committed():
            if found.step == checkpoint.step:  # this copy was made before the run rolled back
                self.store.remove(found)
        earlier = self._interrupted(checkpoint.step)
        writing = self.store.begin(checkpoint.step, attempt)
        check_space(writing, self.store, manifest.size, len(manifest.files), keep=1)
        for name, entry in manifest.files.items():
            if not _reuse(earlier, writing, name, manifest):
                _copy_file(checkpoint.path / name, writing / name, entry, parent)
        for path in earlier:
            disk.remove(path)
        verify(writing, manifest, full=False)
        return self.store.commit(writing, manifest)

    def _interrupted(self, step: int) -> list[Path]:
        """Returns the unfinished copies of ``step`` by earlier processes."""
        found = self.copy.checkpoints.glob(f"*step-{step:08d}.attempt-*")
        return [path for path in found if not (path.name.startswith("bad.") or has_marker(path))]


def _manifests(checkpoints: Sequence[Checkpoint]) -> dict[int, Manifest]:
    """Returns step -> manifest, without checkpoints that were removed meanwhile or are damaged."""
    found = {}
    for checkpoint in checkpoints:
        with suppress(BadCheckpoint, OSError):
            found[checkpoint.step] = checkpoint.manifest()
    return found


def _reuse(earlier: list[Path], writing: Path, name: str, manifest: Manifest) -> bool:
    """Moves an intact file of an unfinished copy into ``writing``; returns False if there is none."""
    for path in earlier:
        with suppress(BadCheckpoint, OSError):
            verify(path, manifest, [name])
            disk.rename(path / name, writing / name)
            return True
    return False


def _copy_file(source: Path, target: Path, entry: FileEntry, parent: int) -> None:
    copy = disk.HashedFile(target)
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with source.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                copy.write(buffer[:count])
                if os.getppid() != parent:
                    raise Orphaned
        copy.close()
    finally:
        copy.abandon()
    if FileEntry(copy.size, copy.digest) != entry:
        raise BadCheckpoint(f"{source}: the content does not match its checksum")


def main(arguments: list[str]) -> int:
    """Updates the archive; the arguments are RUN_DIR, the attempt and the process id of rank 0."""
    run = RunDirectory(Path(arguments[0]))
    attempt = int(arguments[1])
    parent = int(arguments[2])
    os.nice(10)
    events = EventLog.open(run, ARCHIVE, attempt)
    archive = Archive.of(run, load(run))
    assert archive is not None
    try:
        for found in archive.update(attempt, parent):
            events.write("checkpoint_archived", step=found.step, path=str(found.path))
    except (OSError, BadCheckpoint, ArchiveError) as error:
        events.write("archive_failed", message=str(error))
        print(f"checkpoint.archive: {error}; will retry after the next checkpoint", flush=True)
        return 1
    except Orphaned:
        return 1
    finally:
        events.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


_POLL_S = 0.2
_END_S = 5.0


@dataclass
class Archiver:
    """Runs the archive process on rank 0, at most one at a time; that process reports its own failures.

    Attributes:
        active: whether there is an archive and this rank updates it.
    """

    run: RunDirectory
    attempt: int
    active: bool
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _due: bool = field(default=False, init=False)

    def wake(self) -> None:
        """Requests a copy at the next ``poll``; may be called from any thread."""
        self._due = self.active

    def poll(self) -> None:
        """Starts the process if a copy is requested and none is running; does not block."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if not self._due or self._process is not None:
            return
        self._due = False
        command = [sys.executable, "-m", "hpc_train.checkpoint.archive"]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        try:
            self._process = subprocess.Popen(
                [*command, str(self.run.path), str(self.attempt), str(os.getpid())], env=environment
            )
        except OSError as error:
            print(f"checkpoint.archive: {error}", flush=True)

    def finish(self, give_up: Callable[[], bool]) -> None:
        """Waits until everything is copied or ``give_up`` returns True; the next attempt then continues the copy."""
        self.poll()
        while self._process is not None and not give_up():
            time.sleep(_POLL_S)
            self.poll()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
