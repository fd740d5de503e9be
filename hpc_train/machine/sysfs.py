"""Reads small files of the kernel in ``/sys`` and ``/proc`` and the output of tools, and sorts numbered names."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NVIDIA = "0x10de"
DISPLAY, ACCELERATOR = "0x0300", "0x0302"  # PCI classes of GPUs with and without a display output


def read_text(path: Path) -> str:
    """Returns the content of ``path`` without surrounding white space; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # some drivers return EINVAL
        return ""


def read_number(path: Path) -> int | None:
    """Returns the number in ``path``; None for other texts, such as ``max`` and the -1 that means unknown."""
    text = read_text(path)
    return int(text) if text.isdigit() else None


def nvidia_gpus(pci: Path, classes: tuple[str, ...] = (DISPLAY, ACCELERATOR)) -> list[Path]:
    """Returns the NVIDIA GPUs among the devices of the PCI bus, in the order of their addresses."""
    return [
        device
        for device in sorted(pci.glob("*"))
        if read_text(device / "vendor") == NVIDIA and read_text(device / "class").startswith(classes)
    ]


def output_of(command: Sequence[str], timeout_s: float = 30.0) -> str:
    """Returns what a tool prints, even if it then fails; "" if it is missing or takes longer than ``timeout_s``."""
    if shutil.which(command[0]) is not None:  # otherwise without a fork, which takes milliseconds
        with suppress(OSError, subprocess.TimeoutExpired):
            return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False).stdout
    return ""


def natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that orders mlx5_9 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
