"""Checks the file system of ``run.root``: whether nodes share it, has free space, and supports the operations runs
need.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.storage import check_shared
from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.machine.storage import file_system_of, room_in
from hpc_train.units import format_bytes

SLOW_S = 1.0  # time to write a small file to disk
SKEW_S, BAD_SKEW_S = 0.1, 1.0  # between the clocks of a node and of the file server
MIN_FREE_BYTES = 10**9


def check_root(root: Path) -> Iterator[Finding]:
    """Checks what any node can check of ``run.root``: space, latency and the file server's clock."""
    yield check_room(root)
    try:
        written, skew = probe(root)
    except OSError as error:
        text = f"cannot use {root}: {error.strerror}"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = "set another run.root"
        if full:
            fix = "remove files that are no longer needed, or set another run.root"
        yield Finding("run directory", ERROR, text, fix)
        return
    system = file_system_of(root)
    kind = "unknown" if system is None else system.kind
    if written > SLOW_S:
        fix = "the file system is busy: checkpoint.asynchronous=true hides it, another run.root may be faster"
        yield Finding("run directory", WARNING, f"writing a small file took {written:.1f} s ({kind})", fix)
    else:
        yield Finding(
            "run directory", OK, f"{root} ({kind}): a small file is written to disk in {1000 * written:.0f} ms"
        )
    if system is None or not (system.on_a_disk_here or system.in_memory):  # else it has this node's own clock
        yield check_skew(skew)


def check_skew(skew: float) -> Finding:
    """Checks the clock skew: ``skew`` is the number of seconds by which this node's clock is behind the file
    server's.
    """
    text = f"this node's clock is {abs(skew):.2f} s {'behind' if skew > 0 else 'ahead of'} the file server's"
    if abs(skew) < SKEW_S:
        return Finding("clock", OK, "this node's clock agrees with the file server's")
    fix = "ask the site to run chrony or ntpd on the node and on the server"
    return Finding("clock", ERROR if abs(skew) > BAD_SKEW_S else WARNING, text, fix)


def probe(root: Path) -> tuple[float, float]:
    """Performs what leases and checkpoints need (exclusive creation, fsync, rename) on a temporary file in ``root``.

    Returns:
        The seconds it took, and the seconds by which the file server's clock is ahead of this node's.

    Raises:
        OSError: one of the operations failed.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root / f".doctor-{secrets.token_hex(4)}"
    try:
        began = time.monotonic()
        clock = time.time()
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, b"x" * 4096)
            os.fsync(descriptor)
            stamp = os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
        renamed = path.with_suffix(".renamed")
        path.rename(renamed)
        renamed.unlink()
        took = time.monotonic() - began
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return took, _skew_of_stamp(stamp, clock, clock + took)


def _skew_of_stamp(stamp: float, first: float, last: float) -> float:
    """Returns how far ``stamp`` is outside the interval in which it was made, allowing for the kernel's tick
    resolution.
    """
    if stamp > last:
        return stamp - last
    return min(0.0, stamp - first + 0.02)


def check_room(root: Path) -> Finding:
    """Checks the space that is left below ``root``."""
    try:
        rooms = room_in(root)
    except OSError as error:
        return Finding("space", ERROR, f"{root}: {error.strerror}", "set another run.root")
    least = min(rooms, key=lambda room: room.free)
    text = f"{format_bytes(least.free)} free below {root} ({least.whose})"
    if any(room.inodes == 0 for room in rooms):
        return Finding("space", ERROR, f"no inodes are left below {root}", "remove files that are no longer needed")
    if least.free < MIN_FREE_BYTES:
        return Finding("space", ERROR, text, "remove files that are no longer needed, or set another run.root")
    return Finding("space", OK, text)


def check_sharing(root: Path) -> Finding:
    """Checks whether the nodes of a Slurm job can access ``root``, as far as this machine can tell."""
    try:
        notes = check_shared(root)
    except UserError as error:
        return Finding("shared file system", ERROR, error.what, error.fix)
    if notes:
        fix = "run `doctor --submit`, which checks from the nodes"
        return Finding("shared file system", WARNING, notes[0].removeprefix("note: "), fix)
    return Finding("shared file system", OK, f"{root}: no problem found")
