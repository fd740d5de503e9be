"""Checks before submission that the nodes can see the run directory and that the checkpoints fit into it."""

from __future__ import annotations

import math
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

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
    """The estimated checkpoints of a job: the bytes and files of one checkpoint, and the bytes of those that exist
    already."""

    size: int
    files: int
    present: int

    @classmethod
    def of(cls, job: Job) -> Checkpoints | None:
        """Estimates the size from the newest checkpoint of the run, or else from the config; returns None if neither is
        possible."""
        sizes = []
        for checkpoint in CheckpointStore(job.run.checkpoints).committed():
            with suppress(BadCheckpoint, OSError):
                sizes.append(checkpoint.manifest().size)
        size = sizes[-1] if sizes else state_bytes(job.config, job.layout.dp_cp, job.layout.replicas)
        return None if size is None else cls(int(size * MARGIN), job.layout.world_size + 3, sum(sizes))


def check_room(jobs: Sequence[Job], rooms: Sequence[Room] | None = None) -> list[str]:
    """Returns one line with the space that the checkpoints of ``jobs`` may need; an empty list if their size is
    unknown.

    Raises UserError if they do not fit; the fix names the largest ``checkpoint.keep`` with which they do.
    """
    estimates = [(job, Checkpoints.of(job)) for job in jobs]
    sized = [(job, checkpoints) for job, checkpoints in estimates if checkpoints is not None]
    if not sized:
        return []
    rooms = room_in(jobs[0].run.path) if rooms is None else rooms
    least = min(rooms, key=lambda room: room.free)
    needed = _bytes(sized)
    if needed > least.free:
        most = max(job.config.checkpoint.keep for job, _ in sized)
        fitting = (keep for keep in range(most - 1, 0, -1) if _bytes(sized, keep) <= least.free)
        fix = next((f"checkpoint.keep={keep} would fit; " for keep in fitting), "")
        raise UserError(
            f"the checkpoints need {format_bytes(needed)}, but {format_bytes(least.free)} are free ({least.whose})",
            where="checkpoint.keep, run.root",
            fix=f"{fix}another run.root, or remove files that are no longer needed",
        )
    files = sum(_count(job.config, job.config.checkpoint.keep) * item.files + OTHER_FILES for job, item in sized)
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

    Raises UserError if they cannot see it because it is in memory or in a temporary directory of this machine.
    """
    system = system or file_system_of(path)
    if system is None or not system.of_one_host or is_exported(path):
        return []
    # the nodes of a test cluster share the kernel of this machine, and thus its boot time, under other names
    booted = psutil.boot_time()
    others = [
        node.name
        for node in nodes()
        if node.host_name != socket.gethostname() and (node.booted is None or abs(node.booted - booted) > SAME_BOOT_S)
    ]
    if not others:
        return []
    what = f"{path} is on a local file system of this machine ({system.kind} on {system.mount_point})"
    temporary = ("/tmp", "/var/tmp", tempfile.gettempdir())
    if system.in_memory or any(path.is_relative_to(folder) for folder in temporary):
        raise UserError(
            f"{what}, which the nodes of the job, such as {others[0]}, cannot see",
            where="run.root",
            fix="run.root=DIR on a file system that all nodes share, or set HPC_TRAIN_ROOT",
        )
    return [f"note: {what}; the nodes must see it under the same path; a run.root on shared storage is safe"]


def _bytes(sized: Sequence[tuple[Job, Checkpoints]], keep: int | None = None) -> int:
    """Returns the bytes that the jobs will write in addition to the existing checkpoints."""
    total = 0
    for job, item in sized:
        count = _count(job.config, job.config.checkpoint.keep if keep is None else keep)
        total += max(0, count * item.size - item.present)
    return total


def _count(config: Config, keep: int) -> int:
    """Returns the maximum number of checkpoints of a run at one time: the retained ones and the one being written."""
    settings = config.checkpoint
    steps = config.train.steps
    if settings.every == "0":
        return 1
    count = keep + 1 + (settings.keep_best is not None)
    if settings.keep_every and steps is not None:
        count += steps // settings.keep_every
    every = parse_save_every(settings.every)
    if every.steps and steps is not None:
        count = min(count, math.ceil(steps / every.steps))
    return count
