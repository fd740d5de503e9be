"""Reads small files, mostly those of the kernel in ``/sys`` and ``/proc``."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """Returns the content of ``path`` without surrounding white space; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # some drivers return EINVAL
        return ""
