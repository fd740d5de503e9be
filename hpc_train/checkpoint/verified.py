"""Finds the newest checkpoint that is what its manifest says. All ranks read a share of its files and agree.

Nothing is loaded here: what comes back has been verified by all ranks before any of them touches a tensor.
"""

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

MEMORY = ".verified.json"  # in the store's directory: what this job has verified
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse", "9p", "panfs", "afs", "gfs", "ocfs")


class NoneGood(UserError):
    """There are checkpoints, and all of them are damaged."""


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that all ranks agree on."""

    checkpoint: Checkpoint
    manifest: Manifest
    visibility_timeout_s: float = 0.0  # for how long a rank may not see yet what the others have verified


@dataclass
class VerifiedSearch:
    """One search for the newest good checkpoint. Every method is collective over ``group``.

    Attributes:
        full: the content as well, not the sizes only.
        visibility_timeout_s: see ``manifest.wait_until_visible``; counted on network file systems only.
        on_bad: on rank 0, told each bad checkpoint and why; it may set it aside.
        own: the store is this run's, so that something may be written there.
    """

    store: CheckpointStore
    group: dist.ProcessGroup
    full: bool
    visibility_timeout_s: float
    on_bad: Callable[[Checkpoint, str], None]
    own: bool = True
    _refused: dict[int, str] = field(default_factory=dict, init=False)

    def newest(self) -> VerifiedCheckpoint | None:
        """The newest good checkpoint; None where no checkpoint was ever committed.

        Raises:
            NoneGood: there were some and none is good.
            UserError: this process may not read them.
            OSError: they cannot be read now.
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
        """On rank 0, for all: another rank's view of a network file system may be older."""
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
            raise NoneGood(
                "no checkpoint of this run is good:\n  " + "\n  ".join(bad or [p.name for p in self.store.bad()]),
                where=str(self.store.root),
                fix="put a good checkpoint there; or take another run.name to begin at step 0",
            )
        return None

    def _verify(self, found: VerifiedCheckpoint) -> str | None:
        """The first rank's problem with its share, the same on every rank; None without one."""
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
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
        """So that a restart within this job does not read all of it again."""
        if not (self.full and self.own):
            return
        with suppress(OSError):  # on a full disk it is read again next time
            write_json(self.store.root / MEMORY, self._mark(found))

    def _is_remembered(self, found: VerifiedCheckpoint) -> bool:
        try:
            remembered: bool = read_json(self.store.root / MEMORY) == self._mark(found)
        except (OSError, ValueError):
            return False
        return remembered

    def _mark(self, found: VerifiedCheckpoint) -> dict[str, Any]:
        """This job (the process that starts its workers), and each file with what changes when it is written to."""
        stats = {name: (found.checkpoint.path / name).stat() for name in sorted(found.manifest.files)}
        files = {name: [stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in stats.items()}
        return {"job": process(os.getppid()), "step": found.checkpoint.step, "files": files}

    def _on_first(self, action: Callable[[], Any]) -> Any:
        return on_first(action, self.group)


def _unreadable(checkpoint: Checkpoint, rank: int, error: OSError) -> Exception:
    """What to raise where that says nothing about the checkpoint: a file server that is away may be back later."""
    words = f"rank {rank} cannot read a checkpoint: {error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return UserError(words, where=str(checkpoint.path))
    return OSError(error.errno, words)


def on_first(action: Callable[[], Any], group: dist.ProcessGroup) -> Any:
    """Runs ``action`` on the first rank and gives every rank its result, or the exception it raised."""
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
    """Whether ``path`` lies on a file system whose clients cache what others have written."""
    try:
        real = str(path.resolve())
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    mounts = [(line.split(" ")[4], line.partition(" - ")[2].split(" ")[0]) for line in lines]
    over = [(len(point), kind) for point, kind in mounts if f"{real}/".startswith(f"{point.rstrip('/')}/")]
    return max(over, default=(0, ""))[1].startswith(_NETWORK)
