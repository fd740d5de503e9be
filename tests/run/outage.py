"""Makes a folder of a run unavailable for a while, as if its file system were lost, full or hung; this also affects
root.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest


def detachable(folder: Path) -> Callable[[], AbstractContextManager[None]]:
    """Replaces ``folder`` by a symbolic link and returns a context manager that breaks the link.

    No file in the folder can be opened or created inside its ``with`` block. An outage begins and ends with one rename,
    so that no file can be created in between.
    """
    real, away = folder.with_name(f"{folder.name}.real"), folder.with_name(f"{folder.name}.away")
    folder.rename(real)
    folder.symlink_to(real)

    @contextmanager
    def outage() -> Iterator[None]:
        real.rename(away)
        try:
            yield
        finally:
            away.rename(real)

    return outage


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Mounts a file system of that size at ``folder``."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user or container cannot mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Fills the file system; returns the file that takes the space."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


@contextmanager
def disk_that_can_hang(folder: Path) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Mounts a file system at ``folder``; yields a context manager that freezes it.

    A process that writes to a frozen file system sleeps in the kernel (state D), and no signal ends it.
    """
    image = folder.with_name(f"{folder.name}.image")
    with image.open("wb") as file:
        os.truncate(file.fileno(), 8 << 20)
    folder.mkdir()
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        try:
            made = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            made = False
        if not made:
            pytest.skip("this user or container cannot mount an image")

    @contextmanager
    def hang() -> Iterator[None]:
        subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True)

    try:
        yield hang
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
