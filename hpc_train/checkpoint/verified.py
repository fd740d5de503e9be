"""Finds the newest checkpoint that matches its manifest. Each rank verifies a part of its files before any load."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_train.checkpoint.manifest import BadCheckpoint, Manifest, read_manifest, verify
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore
from hpc_train.errors import UserError
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import process

MEMORY = ".verified.json"  # file in the store's directory that records what this job has verified
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse", "9p", "panfs", "afs", "gfs", "ocfs")


class AllDamaged(UserError):
    """Reports that the run has checkpoints and all of them are damaged."""


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """Holds a checkpoint that all ranks have agreed on.

    Attributes:
        visibility_timeout_s: seconds until a rank sees the files that other ranks have verified.
    """

    checkpoint: Checkpoint
    manifest: Manifest
    visibility_timeout_s: float = 0.0


@dataclass
class VerifiedSearch:
    """Searches for the newest valid checkpoint. All methods are collective over ``group``.

    Attributes:
        full: whether to compare the content as well as the sizes.
        visibility_timeout_s: see ``manifest.wait_until_visible``; only applies to network file systems.
        on_bad: called on rank 0 with each bad checkpoint and its problem; it may set the checkpoint aside.
        own: whether the store belongs to this run, so that the search may write to it.
    """

    store: CheckpointStore
    group: dist.ProcessGroup
    full: bool
    visibility_timeout_s: float
    on_bad: Callable[[Checkpoint, str], None]
    own: bool = True
    _refused: dict[int, str] = field(default_factory=dict, init=False)

    def newest(self) -> VerifiedCheckpoint | None:
        """Returns the newest valid checkpoint; None if no checkpoint was ever committed.

        Raises:
            AllDamaged: all checkpoints are damaged.
            UserError: this process has no permission to read them.
            OSError: they cannot be read at the moment.
        """
        while True:
            found = self._propose()
            if found is None:
                return None
            problem = self._verify(found)
            if problem is None:
                self._on_first(partial(self._remember, found))
                return found
            self._on_first(partial(self._refuse, found.checkpoint, problem))

    def _propose(self) -> VerifiedCheckpoint | None:
        found: VerifiedCheckpoint | None = self._on_first(self._candidate)
        return found

    def _candidate(self) -> VerifiedCheckpoint | None:
        """Returns the newest checkpoint with a valid manifest as seen by rank 0, whose view counts for all ranks."""
        timeout_s = self._visibility_s()
        for checkpoint in reversed(self.store.committed()):
            if checkpoint.step in self._refused:
                continue
            try:
                return VerifiedCheckpoint(checkpoint, read_manifest(checkpoint.path, timeout_s), timeout_s)
            except BadCheckpoint as error:
                self._refuse(checkpoint, str(error))
            except OSError as error:
                raise _unreadable(checkpoint, 0, error) from error
        if self._refused or self.store.bad():
            bad = [f"step {step}: {why}" for step, why in sorted(self._refused.items(), reverse=True)]
            raise AllDamaged(
                "all checkpoints of this run are damaged:\n  " + "\n  ".join(bad or [p.name for p in self.store.bad()]),
                where=str(self.store.root),
                fix="restore an intact checkpoint there, or choose another run.name to start at step 0",
            )
        return None

    def _verify(self, found: VerifiedCheckpoint) -> str | None:
        """Returns the problem of the lowest rank that found one, on all ranks; None if there is none."""
        rank = dist.get_rank(self.group)
        ranks = dist.get_world_size(self.group)
        known: bool = self._on_first(lambda: self._is_remembered(found))
        by_size = sorted(found.manifest.files, key=lambda name: (-found.manifest.files[name].size, name))
        outcome: Any = None
        try:
            if rank == 0:
                verify(found.checkpoint.path, found.manifest, full=False, visibility_timeout_s=self._visibility_s())
            full = self.full and not known
            verify(
                found.checkpoint.path,
                found.manifest,
                by_size[rank::ranks],
                full=full,
                visibility_timeout_s=self._visibility_s(),
            )
        except BadCheckpoint as error:
            outcome = f"{error} (rank {rank}, {socket.gethostname()})"
        except OSError as error:
            outcome = _unreadable(found.checkpoint, rank, error)
        outcomes: list[Any] = [None] * ranks
        dist.all_gather_object(outcomes, outcome, group=self.group)
        for other in outcomes:
            if isinstance(other, Exception):
                raise other
        return next((other for other in outcomes if other is not None), None)

    def _refuse(self, checkpoint: Checkpoint, problem: str) -> None:
        self._refused[checkpoint.step] = problem
        self.on_bad(checkpoint, problem)

    def _visibility_s(self) -> float:
        return self.visibility_timeout_s if on_network(self.store.root) else 0.0

    def _remember(self, found: VerifiedCheckpoint) -> None:
        """Records the verified checkpoint, so that a restart within this job does not read it again."""
        if not (self.full and self.own):
            return
        with suppress(OSError):  # on a full disk the checkpoint is verified again next time
            write_json(self.store.root / MEMORY, self._mark(found))

    def _is_remembered(self, found: VerifiedCheckpoint) -> bool:
        try:
            remembered: bool = read_json(self.store.root / MEMORY) == self._mark(found)
        except (OSError, ValueError):
            return False
        return remembered

    def _mark(self, found: VerifiedCheckpoint) -> dict[str, Any]:
        """Returns the identity of this job's agent, and of each file the attributes that change with a write."""
        stats = {name: (found.checkpoint.path / name).stat() for name in sorted(found.manifest.files)}
        files = {name: [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats.items()}
        return {"job": process(os.getppid()), "step": found.checkpoint.step, "files": files}

    def _on_first(self, action: Callable[[], Any]) -> Any:
        return on_first(action, self.group)


def _unreadable(checkpoint: Checkpoint, rank: int, error: OSError) -> Exception:
    """Returns the exception for a failed read that does not prove damage: the file server may recover."""
    message = f"rank {rank} cannot read a checkpoint: {error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return UserError(message, where=str(checkpoint.path))
    return OSError(error.errno, message)


def on_first(action: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """Runs ``action`` on the first rank and broadcasts its result, or raises its exception on all ranks."""
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def on_network(path: Path) -> bool:
    """Returns whether ``path`` is on a network file system, whose clients may cache old content."""
    try:
        real = str(path.resolve())
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    mounts = [(line.split(" ")[4], line.partition(" - ")[2].split(" ")[0]) for line in lines]
    over = [(len(point), kind) for point, kind in mounts if f"{real}/".startswith(f"{point.rstrip('/')}/")]
    return max(over, default=(0, ""))[1].startswith(_NETWORK)
