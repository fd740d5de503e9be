"""A run that has saved checkpoints and has none any more is refused: it must not start over in silence. No torch.

The usual causes are a purge of old files on scratch, and a file system that is not mounted. The run's record (events,
``run.json``) often survives a purge, since a resumed run writes to it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.errors import ConfigError
from hpc_train.run.directory import RunDirectory

LOOK_AGAIN_S = 1.0


class Purged(ConfigError):
    """The run's record tells of checkpoints, and there is none."""


def furthest_saved(run: RunDirectory) -> int:
    """The highest step whose checkpoint was committed, as the run's record says; 0 where nothing would be lost."""
    saved = [event["step"] for event in run.read_events() if _tells_of_own(event, run)]
    return max(*saved, int(run.record().get("result", {}).get("steps", 0)), 0)


def _tells_of_own(event: Mapping[str, Any], run: RunDirectory) -> bool:
    """Whether ``event`` tells that a checkpoint of this run was committed, or was there when an attempt resumed."""
    own = f"{run.checkpoints}/"
    return event["event"] == "checkpoint_saved" or (
        event["event"] == "resumed" and str(event.get("path", "")).startswith(own)
    )


def appears(store: CheckpointStore, wait_s: float) -> bool:
    """Whether ``store`` has a checkpoint. A network file system may show an old listing: it is looked at again for
    ``wait_s`` seconds."""
    deadline = time.monotonic() + wait_s
    while not store.committed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_AGAIN_S)
    return True


def refusal(run: RunDirectory, saved: int, archive: Path | None) -> Purged:
    """Says how far the run had come, where its checkpoints were expected, and what can be done.

    Args:
        saved: the highest step whose checkpoint was committed.
        archive: where ``checkpoint.archive`` looks for copies of them; None without.
    """
    reached = max((line["step"] for line in run.read_all_metrics()), default=0)
    trained = f" and had trained to step {reached}" if reached > saved else ""
    copies = "" if archive is None else f"\n  the archive has no copy either: {archive}"
    back = "put the checkpoints back, or mount their file system, and run the same command again"
    if archive is None:
        back += "; checkpoint.archive=DIR takes them from an archive that has copies"
    return Purged(
        f"this run had saved a checkpoint of step {saved}{trained}, but no checkpoint of it is left{copies}\n"
        "  likely causes: a purge of old files on scratch, or a file system that is not mounted here",
        where=f"{run.checkpoints}, where its checkpoints are expected",
        mend=f"{back}\n          to start over at step 0 on purpose: another run.name, or remove this run first: "
        f"rm -r {shlex.quote(str(run.path))}",
    )
