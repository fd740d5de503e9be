"""Determines the properties of the file system of a directory: its kind, whether other hosts can access it, and its
free space.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.machine.sysfs import output_of

MOUNTS = Path("/proc/self/mountinfo")
EXPORTS = Path("/var/lib/nfs/etab")  # NFS exports of this host
MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
DISKS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "overlay"})
# mounted object stores: renaming a directory copies and deletes its objects one by one
BUCKETS = frozenset({"s3fs", "gcsfuse", "goofys", "geesefs", "rclone", "blobfuse", "blobfuse2", "ossfs", "cosfs"})
FILE_SYSTEM = "the file system"  # the owner of a limit, in messages
QUOTA_TIMEOUT_S = 5.0
KIB = 1024

Ask = Callable[[Sequence[str], float], str]


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system. ``kind`` is the kernel's name for it, ``source`` the device or server."""

    mount_point: Path
    kind: str
    source: str

    @property
    def in_memory(self) -> bool:
        return self.kind in MEMORY

    @property
    def of_one_host(self) -> bool:
        """Returns whether the file system is in memory or on a disk of this host, so that other hosts can access it
        only if this host exports it."""
        return self.kind in MEMORY | DISKS

    @property
    def copies_to_rename(self) -> bool:
        """Returns whether renaming a directory is not atomic."""
        return self.kind.removeprefix("fuse.") in BUCKETS


@dataclass(frozen=True)
class Room:
    """Holds the number of bytes and of files that may still be written, and the owner of the limit. None means unknown
    or unlimited."""

    free: int
    inodes: int | None
    whose: str


def file_system_of(path: Path, mounts: Path = MOUNTS) -> FileSystem | None:
    """Returns the file system of ``path``, or of the nearest existing parent; None if the kernel does not show it."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return None
    real = Path(os.path.realpath(path))
    mounts_above = [
        mounted for line in lines if (mounted := _mounted(line)) and real.is_relative_to(mounted.mount_point)
    ]
    # if several file systems are mounted on the same path, the last one is visible
    if mounts_above:
        return max(enumerate(mounts_above), key=lambda item: (len(item[1].mount_point.parts), item[0]))[1]
    return None


def renames_by_copying(path: Path) -> bool:
    """Returns whether renaming a directory below ``path`` is not atomic; False if unknown."""
    system = file_system_of(path)
    return system is not None and system.copies_to_rename


def is_exported(path: Path, exports: Path = EXPORTS) -> bool:
    """Returns whether this host exports ``path`` by NFS."""
    try:
        lines = exports.read_text(errors="replace").splitlines()
    except OSError:
        return False
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(line.split()[0]) for line in lines if line.startswith("/"))


def room_in(path: Path, ask: Ask = output_of) -> list[Room]:
    """Returns the space that is left below ``path``: in the file system, and in this user's quota if known."""
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    status = os.statvfs(existing)
    rooms = [Room(status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None, FILE_SYSTEM)]
    system = file_system_of(existing)
    quota = None if system is None else _quota(system, ask)
    if quota is None:
        return rooms
    return [*rooms, quota]


def _mounted(line: str) -> FileSystem | None:
    """Parses ``36 35 98:0 /root /mount options - type source options``; spaces in a path are octal."""
    left, _, right = line.partition(" - ")
    if len(left.split()) < 5 or len(right.split()) < 2:
        return None
    kind, source, *_ = right.split()
    return FileSystem(Path(_plain(left.split()[4])), kind, _plain(source))


def _plain(escaped: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped)


def _quota(system: FileSystem, ask: Ask) -> Room | None:
    """Returns this user's quota as reported by ``lfs`` or ``quota``; None if neither reports one."""
    if system.kind == "lustre":
        words = ask(["lfs", "quota", "-q", "-u", str(os.getuid()), str(system.mount_point)], QUOTA_TIMEOUT_S).split()
        return _room(words[-8:])
    lines = ask(["quota", "-w", "-p"], QUOTA_TIMEOUT_S).splitlines()
    return next((_room(words[1:]) for line in lines if (words := line.split())[:1] == [system.source]), None)


def _room(words: Sequence[str]) -> Room | None:
    """Parses the columns KiB used, soft limit, hard limit, grace, files used, soft limit, hard limit, grace; * marks an
    exceeded limit.
    """
    if len(words) != 8:
        return None
    numbers = [int(word.rstrip("*")) if word.rstrip("*").isdigit() else 0 for word in words]
    left = []
    for used, soft, hard in (numbers[0:3], numbers[4:7]):
        limit = hard or soft
        left.append(max(0, limit - used) if limit else None)
    size, inodes = left
    if size is None:
        return None
    return Room(size * KIB, inodes, "your quota")
