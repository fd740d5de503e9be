"""Checks the disk space for a checkpoint, and estimates how long a run needs to save and stop; without torch.

Slurm signals a job that many seconds before its time limit, and an agent kills workers that take longer to stop.
"""

from __future__ import annotations

import errno
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint.manifest import BadCheckpoint
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.schema import Config
from hpc_train.layout.memory import state_bytes
from hpc_train.machine.storage import FILE_SYSTEM, room_in
from hpc_train.run.directory import RANK_0, RunDirectory
from hpc_train.units import format_bytes

MARGIN = 1.02  # overhead of zip archives and metadata
PER_FILE = 64 << 10


def check_space(
    directory: Path,
    store: CheckpointStore,
    tensor_bytes: int,
    files: int,
    keep: int,
    setting: str = "checkpoint.keep",
) -> None:
    """Checks that a checkpoint fits on the file system of ``directory`` and, if known, into the user's quota there.

    Args:
        setting: the name of the setting whose value is ``keep``.

    Raises:
        OSError: ENOSPC or EDQUOT; the message states what is needed, what is free and which ``keep`` would fit.
    """
    needed = int(tensor_bytes * MARGIN) + files * PER_FILE
    for room in room_in(directory):
        code = errno.ENOSPC
        whose = ""
        if room.whose != FILE_SYSTEM:
            code = errno.EDQUOT
            whose = f" ({room.whose})"
        if needed > room.free:
            fix = _fitting_keep(store, needed - room.free, keep, setting)
            what = f"the checkpoint needs {format_bytes(needed)}, {format_bytes(room.free)} free{whose}{fix}"
            raise OSError(code, what, str(store.root))
        if room.inodes is not None and room.inodes < files:
            raise OSError(code, f"the checkpoint needs {files} inodes, {room.inodes} free{whose}", str(store.root))


def _fitting_keep(store: CheckpointStore, lacking: int, keep: int, setting: str) -> str:
    """Returns a hint with the largest ``keep`` that leaves enough space, or an empty string."""
    sizes = []
    for checkpoint in store.committed():
        with suppress(BadCheckpoint, OSError):
            sizes.append(checkpoint.manifest().size)
    freed = 0
    for deleted, size in enumerate(sizes[:-1], 1):
        freed += size
        left = len(sizes) - deleted
        if freed >= lacking and left < keep:
            return f", {setting}={left} would fit"
    return ""


UNKNOWN_S = 120  # assumed time of the current step and the exit, before any step has been timed
LEAVING_S = 30  # time for the last values to reach the trackers and for processes to exit
LEAST_S = 60
SAVE_SAFETY_FACTOR = 2  # the file system may be busy during the next save
BYTES_PER_S = 0.5e9  # assumed write bandwidth per node on a shared file system
ROUND_S = 30  # rounding lets runs of one sweep share a job array


@dataclass(frozen=True)
class StopTime:
    """Holds a duration in seconds and the reason for it."""

    seconds: float
    reason: str


def stop_time(config: Config, run: RunDirectory, nodes: int) -> StopTime:
    """Returns ``elastic.stop_grace_s``; for ``auto``, estimates it from the slowest save so far or the state size."""
    setting = config.elastic.stop_grace_s
    if not isinstance(setting, str):
        return StopTime(float(setting), "elastic.stop_grace_s")
    save_s = _slowest_save(run)
    if save_s is not None:
        newest = (run.newest_metrics(attempt).step_s for attempt in range(run.newest_attempt(), -1, -1))
        step_s = next((seconds for seconds in newest if seconds is not None), 0.0)  # newest attempt with a step
        reason = f"{SAVE_SAFETY_FACTOR} x the slowest save so far ({save_s:.3g} s) plus a step ({step_s:.3g} s)"
        return StopTime(_rounded(SAVE_SAFETY_FACTOR * save_s + step_s + LEAVING_S), reason)
    size = state_bytes(config)
    if size is None:
        return StopTime(UNKNOWN_S, "a guess, because no save has been timed yet")
    seconds = size / (BYTES_PER_S * nodes)
    written = f"{SAVE_SAFETY_FACTOR} x {format_bytes(size)} at {BYTES_PER_S / 1e9:g} GB/s per node"
    reason = f"{written}, because no save has been timed yet"
    return StopTime(_rounded(SAVE_SAFETY_FACTOR * seconds + UNKNOWN_S), reason)


def _slowest_save(run: RunDirectory) -> float | None:
    """Returns the seconds of the slowest save of this run, or else of the run that it was forked from."""
    source = run.record().get("forked_from")
    for directory in (run, *([RunDirectory(Path(source))] if source else [])):
        saves = [event.seconds for event in directory.events_of(RANK_0) if event.name == "checkpoint_saved"]
        if saves:
            return max(saves)
    return None


def _rounded(seconds: float) -> int:
    return max(LEAST_S, math.ceil(round(seconds) / ROUND_S) * ROUND_S)
