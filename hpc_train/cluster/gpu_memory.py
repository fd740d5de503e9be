"""How much memory a GPU has, as far as it is known before a job starts."""

from __future__ import annotations

import subprocess

GIB = 2**30
# Of kinds that come with one size only, by the names that sites give to GRES types (from the vendors' data sheets).
KINDS = {
    "h200": 141e9,
    "gh200": 96e9,
    "h100": 80e9,
    "b200": 180e9,
    "a40": 48e9,
    "l40s": 48e9,
    "mi250x": 64e9,
    "mi300x": 192e9,
}


def gpu_memory(kind: str | None) -> float | None:
    """Bytes of a GPU of the GRES type ``kind``; of this machine's smallest where that is None. None: not known."""
    return KINDS.get(kind.lower()) if kind is not None else _of_this_machine()


def _of_this_machine() -> float | None:
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in listed.stdout.split() if line.isdigit()]
    return min(sizes) * 2.0**20 if sizes else None
