"""Finds the newest checkpoint that matches its manifest. Before any load, each rank verifies a part of the files.

Rank 0 reads the manifest and lists the directory once. Each of N ranks opens, measures and hashes files with 1/N of the
bytes; no rank opens all files.
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

import torch
import torch.distributed as dist
import xxhash

from hpc_train.checkpoint.agreement import Group, lowest, on_first, raise_lowest, rank_in, size_of
from hpc_train.checkpoint.manifest import BadCheckpoint, Manifest, read_manifest, verify
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore
from hpc_train.errors import UserError
from hpc_train.run.files import read_json, write_json
from hpc_train.run.processes import process

MEMORY = ".verified.json"  # file in the store's directory that records what this job has verified
_LIMBS = 4  # 32-bit parts of a sum of 128-bit digests; int64 sums of them cannot overflow
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
        writable: whether the store belongs to this run, so that the search may write to it.
    """

    store: CheckpointStore
    group: Group
    full: bool
    visibility_timeout_s: float
    on_bad: Callable[[Checkpoint, str], None]
    writable: bool = True
    _refused: dict[int, str] = field(default_factory=dict, init=False)

    def newest(self) -> VerifiedCheckpoint | None:
        """Returns the newest valid checkpoint; None if no checkpoint was ever committed.

        Raises:
            AllDamaged: all checkpoints are damaged.
            UserError: this process has no permission to read the checkpoints.
            OSError: the checkpoints cannot be read at the moment.
        """
        while True:
            candidate: VerifiedCheckpoint | None = on_first(self._candidate, self.group)
            if candidate is None:
                return None
            state = self._file_state(candidate)
            remembered = on_first(partial(self._is_remembered, candidate, state), self.group)
            problem = verify_together(candidate, self.group, full=self.full and not remembered)
            if problem is None:
                on_first(partial(self._remember, candidate, state), self.group)
                return candidate
            on_first(partial(self._refuse, candidate.checkpoint, problem), self.group)

    def _candidate(self) -> VerifiedCheckpoint | None:
        """Returns the newest checkpoint with a valid manifest as seen by rank 0, whose view counts for all ranks."""
        timeout_s = self.visibility_timeout_s * on_network(self.store.root)
        for checkpoint in reversed(self.store.committed()):
            if checkpoint.step in self._refused:
                continue
            try:
                return VerifiedCheckpoint(checkpoint, read_manifest(checkpoint.path, timeout_s), timeout_s)
            except BadCheckpoint as error:
                self._refuse(checkpoint, str(error))
            except OSError as error:
                raise _unreadable(checkpoint, 0, error) from error
        damaged = [f"step {step}: {why}" for step, why in sorted(self._refused.items(), reverse=True)]
        damaged = damaged or [path.name for path in self.store.bad()]
        if damaged:
            raise AllDamaged(
                "all checkpoints of this run are damaged:\n  " + "\n  ".join(damaged),
                where=str(self.store.root),
                fix="restore an intact checkpoint there, or choose another run.name to start at step 0",
            )
        return None

    def _file_state(self, candidate: VerifiedCheckpoint) -> str | None:
        """Returns a digest of those attributes of all files that change with a write; None if it is not needed.

        Each rank reads the attributes of its share. The digest is a sum, so it does not depend on the number of ranks.
        Collective.
        """
        if not (self.full and self.writable):
            return None
        limbs = torch.zeros(_LIMBS + 1, dtype=torch.int64)  # the last one counts files that are not visible yet
        for name in _share(candidate.manifest, self.group):
            try:
                stat = (candidate.checkpoint.path / name).stat()
            except OSError:
                limbs[_LIMBS] += 1
                continue
            entry = f"{name}/{stat.st_ino}/{stat.st_size}/{stat.st_mtime_ns}/{stat.st_ctime_ns}"
            value = xxhash.xxh3_128(entry.encode()).intdigest()
            limbs += torch.tensor([value >> 32 * limb & 0xFFFFFFFF for limb in range(_LIMBS)] + [0])
        if self.group is not None:
            dist.all_reduce(limbs, group=self.group)
        *sums, missing = limbs.tolist()
        if missing:
            return None
        return "".join(f"{limb & 0xFFFFFFFF:08x}" for limb in sums)

    def _refuse(self, checkpoint: Checkpoint, problem: str) -> None:
        self._refused[checkpoint.step] = problem
        self.on_bad(checkpoint, problem)

    def _remember(self, verified: VerifiedCheckpoint, state: str | None) -> None:
        """Records the verified checkpoint, so that a restart within this job does not read it again."""
        if state is None:
            return
        with suppress(OSError):  # on a full disk the checkpoint is verified again next time
            write_json(self.store.root / MEMORY, _memory(verified, state))

    def _is_remembered(self, candidate: VerifiedCheckpoint, state: str | None) -> bool:
        try:
            remembered: bool = state is not None and read_json(self.store.root / MEMORY) == _memory(candidate, state)
        except (OSError, ValueError):
            return False
        return remembered


def verify_together(candidate: VerifiedCheckpoint, group: Group, full: bool) -> str | None:
    """Compares the files with the manifest, each rank 1/N of them. Collective.

    Returns:
        The problem of the lowest rank that found one, on all ranks; None if there is none.

    Raises:
        UserError, OSError: a rank cannot read its files, which does not prove damage.
    """
    rank = rank_in(group)
    path = candidate.checkpoint.path
    damage: str | None = None
    unreadable: Exception | None = None
    try:
        share = _share(candidate.manifest, group)
        verify(path, candidate.manifest, share, full=full, visibility_timeout_s=candidate.visibility_timeout_s)
    except BadCheckpoint as error:
        damage = f"{error} (rank {rank}, {socket.gethostname()})"
    except OSError as error:
        unreadable = _unreadable(candidate.checkpoint, rank, error)
    raise_lowest(unreadable, group)
    problem: str | None = lowest(damage, group)
    return problem


def _share(manifest: Manifest, group: Group) -> list[str]:
    """Returns the files that this rank verifies, so that all ranks together verify all."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    return by_size[rank_in(group) :: size_of(group)]


def _memory(verified: VerifiedCheckpoint, state: str) -> dict[str, Any]:
    """Returns the facts that identify a verified checkpoint and, by its agent, this job."""
    return {"job": process(os.getppid()), "step": verified.checkpoint.step, "files": state}


def _unreadable(checkpoint: Checkpoint, rank: int, error: OSError) -> Exception:
    """Returns the exception for a failed read that does not prove damage: the file server may recover."""
    message = f"rank {rank} cannot read a checkpoint: {error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return UserError(message, where=str(checkpoint.path))
    return OSError(error.errno, message)


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
