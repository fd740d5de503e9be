"""Checks before submission that the nodes see the run directory and that the checkpoints fit there."""

from __future__ import annotations

import math
import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint.manifest import BadCheckpoint
from hpc_train.checkpoint.space import MARGIN
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.schema import Config
from hpc_train.config.values import parse_save_every
from hpc_train.errors import UserError
from hpc_train.launch.job import Job
from hpc_train.layout.memory import state_bytes
from hpc_train.machine.storage import FileSystem, Room, file_system_of, is_exported, room_in
from hpc_train.schedulers.slurm.client import show_nodes
from hpc_train.schedulers.slurm.records import NodeRecord
from hpc_train.units import format_bytes

OTHER_FILES = 64  # files of a run besides checkpoints: logs, events, metrics, W&B
SAME_BOOT_S = 5  # Slurm and the kernel round differently


@dataclass(frozen=True)
class Checkpoints:
    """The estimated checkpoints of a job: bytes and files of each, and the bytes that exist already."""

    size: int
    files: int
    present: int

    @classmethod
    def of(cls, job: Job) -> Checkpoints | None:
        """Estimates the size from the newest checkpoint of the run, else from the config; None if both fail."""
        sizes = _sizes(job)
        size = sizes[-1] if sizes else state_bytes(job.config, job.layout.dp_cp)
        return None if size is None else cls(int(size * MARGIN), job.layout.world_size + 3, sum(sizes))


def check_room(jobs: Sequence[Job], rooms: Sequence[Room] | None = None) -> list[str]:
    """Returns one line with the space that the checkpoints of ``jobs`` may need; none if their size is unknown.

    Raises:
        UserError: they do not fit; the fix names the largest ``checkpoint.keep`` that does.
    """
    known = [(job, found) for job in jobs if (found := Checkpoints.of(job)) is not None]
    if not known:
        return []
    rooms = room_in(jobs[0].run.path) if rooms is None else rooms
    least = min(rooms, key=lambda room: room.free)
    needed = _bytes(known)
    if needed > least.free:
        raise UserError(
            f"the checkpoints need {format_bytes(needed)}, but {format_bytes(least.free)} are free ({least.whose})",
            where="checkpoint.keep, run.root",
            fix=_fitting_keep(known, least.free) + "another run.root, or remove files that are no longer needed",
        )
    files = sum(_count(job.config, job.config.checkpoint.keep) * found.files + OTHER_FILES for job, found in known)
    for room in rooms:
        if room.inodes is not None and files > room.inodes:
            raise UserError(
                f"the run needs {files} files, but only {room.inodes} more can be created ({room.whose})",
                where="run.root",
                fix="another run.root, or remove files that are no longer needed",
            )
    return [
        f"checkpoints: up to {format_bytes(needed)} more in {jobs[0].config.run.root}, {format_bytes(least.free)} free"
    ]


def check_shared(
    path: Path, system: FileSystem | None = None, nodes: Callable[[], Sequence[NodeRecord]] = show_nodes
) -> list[str]:
    """Returns a note if the nodes of a Slurm job may not see ``path``.

    Args:
        nodes: returns the nodes that Slurm knows.

    Raises:
        UserError: they cannot see it, since it is in memory or in the temporary directory of this machine.
    """
    system = system or file_system_of(path)
    if system is None or not (system.in_memory or system.on_a_disk_here) or is_exported(path):
        return []
    others = _other_hosts(nodes())
    if not others:
        return []
    what = f"{path} is on a local file system of this machine ({system.kind} on {system.mount_point})"
    if system.in_memory or _is_temporary(path):
        raise UserError(
            f"{what}, which the nodes of the job, such as {others[0]}, cannot see",
            where="run.root",
            fix="run.root=DIR on a file system that all nodes share, or set HPC_TRAIN_ROOT",
        )
    return [f"note: {what}; the nodes must see it under the same path; a run.root on shared storage is safe"]


def _sizes(job: Job) -> list[int]:
    sizes = []
    for checkpoint in CheckpointStore(job.run.checkpoints).committed():
        with suppress(BadCheckpoint, OSError):
            sizes.append(checkpoint.manifest().size)
    return sizes


def _bytes(known: Sequence[tuple[Job, Checkpoints]], keep: int | None = None) -> int:
    """Returns the bytes that the jobs will write in addition to the existing checkpoints."""
    total = 0
    for job, found in known:
        count = _count(job.config, job.config.checkpoint.keep if keep is None else keep)
        total += max(0, count * found.size - found.present)
    return total


def _count(config: Config, keep: int) -> int:
    """Returns the maximum number of checkpoints of a run at one time: the kept ones and the one being written."""
    settings, steps = config.checkpoint, config.train.steps
    count = keep + 1 + (settings.keep_best is not None)
    if settings.keep_every and steps is not None:
        count += steps // settings.keep_every
    every = parse_save_every(settings.every)
    if every.steps and steps is not None:
        count = min(count, math.ceil(steps / every.steps))
    return 1 if settings.every == "0" else count


def _fitting_keep(known: Sequence[tuple[Job, Checkpoints]], free: int) -> str:
    most = max(job.config.checkpoint.keep for job, _ in known)
    fitting = (keep for keep in range(most - 1, 0, -1) if _bytes(known, keep) <= free)
    return next((f"checkpoint.keep={keep} would fit; " for keep in fitting), "")


def _is_temporary(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in ("/tmp", "/var/tmp", tempfile.gettempdir()))


def _other_hosts(nodes: Iterable[NodeRecord]) -> list[str]:
    """Returns the nodes with another name than this machine, and another boot time: the nodes of a test cluster share
    its kernel under other names.
    """
    booted = _booted()
    others = (node for node in nodes if node.host_name != socket.gethostname())
    return [node.name for node in others if node.booted is None or abs(node.booted - booted) > SAME_BOOT_S]


def _booted() -> float:
    lines = Path("/proc/stat").read_text().splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)
