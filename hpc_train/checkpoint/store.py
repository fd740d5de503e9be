"""Which checkpoints of a run exist: committed directories, told from half-written ones by their name alone.

A save writes into ``.step-00000100.attempt-003``; the rename to ``step-00000100`` is the commit. Whatever else lies
there was never finished and is ignored. No torch.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.run.files import read_json, write_json

_COMMITTED = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.(step-\d{8,})\.(attempt-(\d+)|removed)")
_RECORD = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    step: int
    path: Path

    def record(self) -> dict[str, Any]:
        """What is not a tensor: step, counters, loss scale, config hash, layout."""
        return read_json(self.path / _RECORD)


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints under one directory."""

    root: Path

    def committed(self) -> list[Checkpoint]:
        """All committed checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found = ((_COMMITTED.fullmatch(path.name), path) for path in self.root.iterdir())
        return sorted((Checkpoint(int(match[1]), path) for match, path in found if match), key=lambda c: c.step)

    def newest(self) -> Checkpoint | None:
        return next(reversed(self.committed()), None)

    def writing(self, step: int, attempt: int) -> Path:
        """The directory that ``attempt`` writes the checkpoint of ``step`` into; it is not made here."""
        return self.root / f".step-{step:08d}.attempt-{attempt:03d}"

    def commit(self, writing: Path, step: int, record: dict[str, Any]) -> Checkpoint:
        """Makes ``writing`` the checkpoint of ``step``. One process calls this, after all others have written.

        Everything is on disk before the rename, and the rename itself is when this returns.
        """
        write_json(writing / _RECORD, record)
        for path in writing.iterdir():
            sync(path)
        sync(writing)
        final = self.root / f"step-{step:08d}"
        replaced = self._set_aside(final) if final.exists() else None  # the same step again: the newer counts
        writing.rename(final)
        sync(self.root)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        return Checkpoint(step, final)

    def prune(self, keep: int, attempt: int) -> None:
        """Removes all but the ``keep`` (at least one) newest checkpoints, and what attempts before ``attempt`` left
        unfinished."""
        for checkpoint in self.committed()[: -max(1, keep)]:
            shutil.rmtree(self._set_aside(checkpoint.path), ignore_errors=True)
        for path in self.root.iterdir():
            match = _UNFINISHED.fullmatch(path.name)
            if match and (match[3] is None or int(match[3]) < attempt):
                shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, path: Path) -> Path:
        """Renames what is to be removed, so that a removal that is cut short does not look like a checkpoint."""
        doomed = self.root / f".{path.name}.removed"
        shutil.rmtree(doomed, ignore_errors=True)
        return path.rename(doomed)


def sync(path: Path) -> None:
    """Forces a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def size(path: Path) -> int:
    """Bytes of the files in a checkpoint."""
    return sum(file.stat().st_size for file in path.iterdir())
