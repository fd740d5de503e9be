"""What a process is doing, as the kernel says."""

from __future__ import annotations

from pathlib import Path


def process_state(pid: int) -> str:
    """The letter: R runs, S sleeps, D waits for storage, T is stopped, Z has ended; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
