"""Reads small files of the kernel in ``/sys`` and ``/proc``, and sorts their numbered names."""

from __future__ import annotations

import re
from pathlib import Path


def read_text(path: Path) -> str:
    """Returns the content of ``path`` without surrounding white space; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # some drivers return EINVAL
        return ""


def natural(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that orders mlx5_9 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)]
