"""Chooses the checkpoint that a run loads: its newest valid one, or that of the forked run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from hpc_train.checkpoint.agreement import on_first
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore, furthest_saved, purged_error, wait_for_checkpoint
from hpc_train.checkpoint.verified import VerifiedCheckpoint, VerifiedSearch, on_network
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog

# seconds for a missing or short file on a network file system, whose attribute caches may be 60 s old
VISIBILITY_TIMEOUT_S = 75.0


@dataclass(frozen=True)
class CheckpointChoice:
    """Searches on rank 0 and tells the others. All ranks call the methods collectively.

    Args:
        store: the run's own checkpoints.
        group: a group of all ranks for the CPU.
    """

    run: RunDirectory
    config: Config
    store: CheckpointStore
    group: dist.ProcessGroup
    events: EventLog

    def newest(self) -> tuple[VerifiedCheckpoint | None, bool]:
        """Returns the checkpoint to load, or None for a new run, and whether it is that of the run's source.

        Raises:
            UserError: all checkpoints are damaged, the saved ones have disappeared, or the source has none.
        """
        found = self._search(self.store, own=True)
        if found is None and on_first(self._is_late, self.group):
            found = self._search(self.store, own=True)
        source = self.run.record().get("forked_from")
        if found is not None or source is None:
            return found, False
        found = self._search(CheckpointStore(RunDirectory(Path(source)).checkpoints), own=False)
        if found is None:
            raise UserError(
                f"the run was forked from {source}, which no longer has a checkpoint",
                where=str(source),
                fix="restore a checkpoint there, or choose another run.name to start at step 0",
            )
        return found, True

    def _is_late(self) -> bool:
        """Returns whether a checkpoint has become visible since the search; called on rank 0 if none was found.

        Raises:
            Purged: the run has saved a checkpoint and none becomes visible.
        """
        saved = furthest_saved(self.run)
        if saved == 0:
            return False
        if wait_for_checkpoint(self.store, VISIBILITY_TIMEOUT_S if on_network(self.store.root) else 0.0):
            return True
        raise purged_error(self.run, saved)

    def _search(self, store: CheckpointStore, own: bool) -> VerifiedCheckpoint | None:
        settings = self.config.checkpoint
        on_bad = partial(self._report_damaged, store, own)
        search = VerifiedSearch(store, self.group, settings.verify == "full", VISIBILITY_TIMEOUT_S, on_bad, own)
        return search.newest()

    def _report_damaged(self, store: CheckpointStore, own: bool, checkpoint: Checkpoint, problem: str) -> None:
        """Reports a damaged checkpoint on rank 0 and sets it aside if it belongs to this run."""
        moved = store.set_aside(checkpoint, self.events.attempt) if own else checkpoint.path
        print(f"skipping the damaged checkpoint of step {checkpoint.step} in {moved}: {problem}", flush=True)
        self.events.write("checkpoint_set_aside", step=checkpoint.step, path=str(moved), message=problem)
