"""What the node lets a process have: memory that it may lock, files that it may open, shared memory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = -1  # as resource.RLIM_INFINITY
SHARED_MEMORY = Path("/dev/shm")
_LINE = r"^{name}\s+(\d+|unlimited)\s+(\d+|unlimited)"


@dataclass(frozen=True)
class Limits:
    """None: not known; ``UNLIMITED``: there is none.

    Attributes:
        locked_memory: bytes, which RDMA cards read from (``ulimit -l``).
        open_files: of one process (``ulimit -n``).
        most_open_files: to which a process may raise that by itself.
        shared_memory: bytes, the size of ``/dev/shm``.
    """

    locked_memory: int | None = None
    open_files: int | None = None
    most_open_files: int | None = None
    shared_memory: int | None = None

    @property
    def locking(self) -> str | None:
        """How much may be locked, in words; None where that is not limited, or not known."""
        if self.locked_memory in (None, UNLIMITED):
            return None
        return f"at most {self.locked_memory} bytes may be locked (ulimit -l)"


def read_limits(proc: Path) -> Limits:
    """Those of the process that reads, or of the one that copied its ``/proc/self/limits`` into a recording."""
    try:
        text = (proc / "self/limits").read_text(errors="replace")
    except OSError:
        return Limits()
    locked, files = (_soft_and_hard(text, name) for name in ("Max locked memory", "Max open files"))
    return Limits(locked[0], *files)


def shared_memory(directory: Path = SHARED_MEMORY) -> int | None:
    """The bytes that fit into it; None where it is missing."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def _soft_and_hard(text: str, name: str) -> tuple[int | None, int | None]:
    found = re.search(_LINE.format(name=name), text, re.MULTILINE)
    return (None, None) if found is None else (_limit(found[1]), _limit(found[2]))


def _limit(word: str) -> int:
    return UNLIMITED if word == "unlimited" else int(word)
