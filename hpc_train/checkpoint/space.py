"""Whether a checkpoint fits, asked before it is written. No torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hpc_train.checkpoint.manifest import BadCheckpoint
from hpc_train.checkpoint.store import CheckpointStore

MARGIN = 1.02  # archives and metadata beside the tensors
PER_FILE = 64 << 10


def check_space(directory: Path, store: CheckpointStore, tensor_bytes: int, files: int, keep: int) -> None:
    """Asks the file system of ``directory``; a file system that enforces a quota on a directory answers with that.

    Raises:
        OSError: ENOSPC, with what is needed, what is free and what would help.
    """
    found = os.statvfs(directory)
    needed, free = int(tensor_bytes * MARGIN) + files * PER_FILE, found.f_bavail * found.f_frsize
    if needed > free:
        mend = _fitting_keep(store, needed - free, keep)
        raise OSError(
            errno.ENOSPC, f"the checkpoint needs {amount(needed)}, {amount(free)} free{mend}", str(store.root)
        )
    if found.f_files > 0 and found.f_favail < files:
        raise OSError(errno.ENOSPC, f"the checkpoint needs {files} inodes, {found.f_favail} free", str(store.root))


def _fitting_keep(store: CheckpointStore, lacking: int, keep: int) -> str:
    """Words for the largest ``checkpoint.keep`` with which the checkpoint would have fitted."""
    sizes = []
    for checkpoint in store.committed():
        try:
            sizes.append(checkpoint.manifest().size)
        except (BadCheckpoint, OSError):
            continue
    freed = 0
    for left, size in zip(range(len(sizes) - 1, 0, -1), sizes, strict=False):
        freed += size
        if freed >= lacking and left < keep:
            return f", keep={left} would fit"
    return ""


def amount(count: int) -> str:
    """Bytes in words, in powers of ten."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
