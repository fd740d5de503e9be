"""Whether a checkpoint fits, asked before it is written. No torch."""

from __future__ import annotations

import errno
from pathlib import Path

from hpc_train.checkpoint.manifest import BadCheckpoint
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.cluster.storage import FILE_SYSTEM, room_in

MARGIN = 1.02  # archives and metadata beside the tensors
PER_FILE = 64 << 10


def check_space(directory: Path, store: CheckpointStore, tensor_bytes: int, files: int, keep: int) -> None:
    """Asks the file system of ``directory`` and, where it tells, the user's quota there.

    Raises:
        OSError: ENOSPC or EDQUOT, with what is needed, what is free and what would help.
    """
    needed = int(tensor_bytes * MARGIN) + files * PER_FILE
    for room in room_in(directory):
        code, whose = (errno.ENOSPC, "") if room.whose == FILE_SYSTEM else (errno.EDQUOT, f" ({room.whose})")
        if needed > room.free:
            mend = _fitting_keep(store, needed - room.free, keep)
            what = f"the checkpoint needs {amount(needed)}, {amount(room.free)} free{whose}{mend}"
            raise OSError(code, what, str(store.root))
        if room.inodes is not None and room.inodes < files:
            raise OSError(code, f"the checkpoint needs {files} inodes, {room.inodes} free{whose}", str(store.root))


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
