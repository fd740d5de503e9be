"""``checkpoint.archive``: the best and the last checkpoint of a run once more, elsewhere. No torch.

The copies are made by a process of their own, ``python -m hpc_train.checkpoint.archive``, which rank 0 starts after a
commit: nothing that happens to it reaches the training. A copy is hashed on its way and committed like a save; what an
interrupted one has written is used by the next. The archive of a run looks like a run, so ``checkpoint list``,
``verify`` and ``export`` take it, and a run can be forked from it.

Rank 0's side of ``checkpoint.archive``: starts the process that copies, and lets it run. No torch.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.manifest import BadCheckpoint, FileEntry, Manifest, has_marker, verify
from hpc_train.checkpoint.space import check_space
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore, Kept, Retention, removable
from hpc_train.cluster.storage import renames_by_copying
from hpc_train.config.schema import Config
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.files import write_json
from hpc_train.run.freeze import load

_CHUNK = 4 << 20


class ArchiveError(Exception):
    """The archive cannot take the run's checkpoints."""


class Orphaned(Exception):
    """The worker that started this process is gone; the next one goes on with the copy."""


@dataclass(frozen=True)
class Archive:
    """The archive of one run.

    Attributes:
        copy: looks like a run, with ``config.yaml`` and ``run.json`` as far as they tell whose it is.
        metric: by which the best is told; None: only the last is kept.
    """

    run: RunDirectory
    copy: RunDirectory
    metric: str | None

    @classmethod
    def of(cls, run: RunDirectory, config: Config) -> Archive | None:
        """The one in ``checkpoint.archive``, under the run's path below ``run.root``; None where none is asked for."""
        place, root = config.checkpoint.archive, Path(config.run.root)
        if place is None:
            return None
        name = run.path.relative_to(root) if run.path.is_relative_to(root) else Path(run.path.name)
        return cls(run, RunDirectory(Path(place) / name), config.checkpoint.keep_best)

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.copy.checkpoints, by_marker=renames_by_copying(self.copy.checkpoints))

    def update(self, attempt: int, parent: int) -> list[Checkpoint]:
        """Copies what is missing, the newest first, and removes what is not kept.

        Args:
            parent: the process that this one must not outlive.

        Returns:
            The new copies.

        Raises:
            ArchiveError: it is another run's.
            BadCheckpoint: a checkpoint of the run is damaged.
            OSError: the archive cannot be written, or has no room.
        """
        self._claim()
        copied = []
        while (checkpoint := self._missing()) is not None:
            with suppress(FileExistsError):  # another process has copied it
                copied.append(self._copy(checkpoint, attempt, parent))
        for found in self._gone_back_behind():
            self.store.remove(found)
        self.store.prune(Retention(1, best=self.metric), attempt)
        return copied

    def adopt(self) -> None:
        """The run goes on from the archive's checkpoints, so they are its own from here on."""
        with suppress(OSError):  # an archive that can only be read; the next copy says so
            self._sign()

    def _sign(self) -> None:
        run_id = self.run.record().get("run_id")
        write_json(self.copy.path / "run.json", {"run_id": run_id, "archived_from": str(self.run.path)})

    def _claim(self) -> None:
        own, theirs = self.run.record().get("run_id"), self.copy.record().get("run_id")
        if theirs not in (own, None) and self.store.committed():
            raise ArchiveError(f"{self.copy.path} has the checkpoints of another run, {theirs}: move them away")
        self.copy.create()
        if theirs != own:
            self._sign()
        shutil.copyfile(self.run.config, self.copy.config)

    def _missing(self) -> Checkpoint | None:
        """The newest checkpoint that is to be kept and is not there."""
        own = CheckpointStore(self.run.checkpoints).committed()
        if not own:
            return None
        there = _manifests([found for found in self.store.committed() if found.step <= own[-1].step])
        here = _manifests(own)
        kept = [Kept(step, manifest.metrics) for step, manifest in (there | here).items()]
        dropped = removable(kept, Retention(1, best=self.metric))
        missing = (c for c in reversed(own) if c.step in here and c.step not in dropped)
        return next((c for c in missing if here[c.step] != there.get(c.step)), None)

    def _gone_back_behind(self) -> list[Checkpoint]:
        """Copies of steps after the run's newest: it has gone back and takes another way."""
        newest = CheckpointStore(self.run.checkpoints).newest()
        return [] if newest is None else [found for found in self.store.committed() if found.step > newest.step]

    def _copy(self, checkpoint: Checkpoint, attempt: int, parent: int) -> Checkpoint:
        manifest = checkpoint.manifest()
        for found in self.store.committed():
            if found.step == checkpoint.step:  # of the way that the run took before it went back
                self.store.remove(found)
        earlier = self._interrupted(checkpoint.step)
        writing = self.store.begin(checkpoint.step, attempt)
        check_space(writing, self.store, manifest.size, len(manifest.files), keep=1)
        for name, entry in manifest.files.items():
            if not _taken_over(earlier, writing, name, manifest):
                _copy_file(checkpoint.path / name, writing / name, entry, parent)
        for path in earlier:
            disk.remove(path)
        verify(writing, manifest, full=False)
        return self.store.commit(writing, manifest)

    def _interrupted(self, step: int) -> list[Path]:
        """What earlier processes have begun to copy."""
        found = self.copy.checkpoints.glob(f"*step-{step:08d}.attempt-*")
        return [path for path in found if not (path.name.startswith("bad.") or has_marker(path))]


def _manifests(checkpoints: Sequence[Checkpoint]) -> dict[int, Manifest]:
    """By step, of those that can be read: one may be removed meanwhile, or damaged, which the next load tells."""
    found = {}
    for checkpoint in checkpoints:
        with suppress(BadCheckpoint, OSError):
            found[checkpoint.step] = checkpoint.manifest()
    return found


def _taken_over(earlier: list[Path], writing: Path, name: str, manifest: Manifest) -> bool:
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
        raise BadCheckpoint(f"{source}: its content is not what was written")


def main(arguments: list[str]) -> int:
    """RUN_DIR, the attempt and the process id of its rank 0."""
    run, attempt, parent = RunDirectory(Path(arguments[0])), int(arguments[1]), int(arguments[2])
    os.nice(10)
    events = EventLog.open(run, f"archive-{socket.gethostname()}-{os.getpid()}", attempt)
    archive = Archive.of(run, load(run))
    assert archive is not None
    try:
        for found in archive.update(attempt, parent):
            events.write("checkpoint_archived", step=found.step, path=str(found.path))
    except (OSError, BadCheckpoint, ArchiveError) as error:
        events.write("archive_failed", message=str(error))
        print(f"checkpoint.archive: {error}; tried again after the next checkpoint", flush=True)
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
    """At most one process at a time. Its failures are told by itself; none is raised here.

    Attributes:
        active: there is an archive, and this rank looks after it.
    """

    run: RunDirectory
    attempt: int
    active: bool
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _due: bool = field(default=False, init=False)

    def wake(self) -> None:
        """There may be something new to copy. May be called in any thread."""
        self._due = self.active

    def poll(self) -> None:
        """Starts the process where one is due and none is at work. Does not wait."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if not self._due or self._process is not None:
            return
        self._due = False
        command = [sys.executable, "-m", "hpc_train.checkpoint.archive"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            self._process = subprocess.Popen(
                [*command, str(self.run.path), str(self.attempt), str(os.getpid())], env=environment
            )
        except OSError as error:
            print(f"checkpoint.archive: {error}", flush=True)

    def finish(self, give_up: Callable[[], bool]) -> None:
        """At the end of a run: until everything is copied, or ``give_up`` says so; then the next attempt goes on."""
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
