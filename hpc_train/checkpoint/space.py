"""Whether a checkpoint fits, asked before it is written. No torch.

How long a run takes from a request to stop until it has saved and is gone. No torch.

By that time Slurm asks a job to stop ahead of its time limit, and after it an agent kills workers that have not.
"""

from __future__ import annotations

import errno
import math
from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint.manifest import BadCheckpoint
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.cluster.storage import FILE_SYSTEM, room_in
from hpc_train.config.schema import Config
from hpc_train.plan.memory import state_bytes
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import last_line
from hpc_train.units import format_bytes

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
            fix = _fitting_keep(store, needed - room.free, keep)
            what = f"the checkpoint needs {format_bytes(needed)}, {format_bytes(room.free)} free{whose}{fix}"
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


UNKNOWN_S = 120  # for the step under way and for leaving, before a step has been timed
LEAVING_S = 30  # W&B's last lines, ends of processes
LEAST_S = 60
TIMES = 2  # of what was measured: the next save may find the file system busy
BYTES_PER_S = 0.5e9  # of a node: a modest share of a parallel file system
ROUND_S = 30  # runs of one sweep that differ by less may share an array


@dataclass(frozen=True)
class StopTime:
    """Seconds, and why so many."""

    seconds: float
    reason: str


def stop_time(config: Config, run: RunDirectory, nodes: int) -> StopTime:
    """As ``elastic.stop_grace_s`` says; for ``auto`` by the slowest save of the run so far, else by its size."""
    asked = config.elastic.stop_grace_s
    if not isinstance(asked, str):
        return StopTime(float(asked), "elastic.stop_grace_s")
    save_s = _slowest_save(run)
    if save_s is not None:
        step_s = _newest_step_s(run)
        words = f"{TIMES} x the slowest save so far ({save_s:.3g} s) and two steps ({step_s:.3g} s each)"
        return StopTime(_rounded(TIMES * save_s + 2 * step_s + LEAVING_S), words)
    size = state_bytes(config)
    if size is None:
        return StopTime(UNKNOWN_S, "nothing was saved yet, and the size of a custom model is not known")
    seconds = size / (BYTES_PER_S * nodes)
    words = f"{TIMES} x {format_bytes(size)} at {BYTES_PER_S / 1e9:g} GB/s per node; nothing was saved yet"
    return StopTime(_rounded(TIMES * seconds + UNKNOWN_S), words)


def _slowest_save(run: RunDirectory) -> float | None:
    """Of this run, else of the one that it was forked from."""
    source = run.record().get("forked_from")
    for directory in (run, *([RunDirectory(Path(source))] if source else [])):
        saves = [event["seconds"] for event in directory.read_events() if event["event"] == "checkpoint_saved"]
        if saves:
            return float(max(saves))
    return None


def _newest_step_s(run: RunDirectory) -> float:
    """Of the newest attempt that has logged a step; 0 before the first."""
    for attempt in range(run.newest_attempt(), -1, -1):
        line = last_line(run.metrics_file(attempt))
        if "step_s" in line:
            return float(line["step_s"])
    return 0.0


def _rounded(seconds: float) -> int:
    return max(LEAST_S, math.ceil(round(seconds) / ROUND_S) * ROUND_S)
