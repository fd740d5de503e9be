"""Finds the checkpoint that an attempt resumes from, and sets aside or removes others, without knowing the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.agreement import Group, on_first
from hpc_train.checkpoint.restoring import OpenCheckpoint, open_checkpoint
from hpc_train.checkpoint.store import (
    PROVED,
    Checkpoint,
    CheckpointStore,
    Removals,
    Retention,
    furthest_saved,
    purged_error,
    record_save,
    wait_for_checkpoint,
)
from hpc_train.checkpoint.verified import VerifiedCheckpoint, VerifiedSearch, on_network
from hpc_train.config.evaluation import best_metric
from hpc_train.config.schema import Config
from hpc_train.config.values import saves_asynchronously
from hpc_train.errors import UserError
from hpc_train.machine.storage import renames_by_copying
from hpc_train.models.hf.lora import BASE, base_identity, check_base
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog


class Superseded(Exception):
    """Reports that a newer attempt works on the run, so that this one must not change it."""


@dataclass(frozen=True)
class SaveSettings:
    """Says how a ``CheckpointManager`` saves.

    Attributes:
        retention: which checkpoints are kept.
        on_cpu, on_gpu: whether saves from this kind of device are asynchronous, if host memory allows.
        prefix: the beginning of the names of ``keep`` and ``asynchronous`` in messages.
        memory: the setting of the host memory of a node, for messages.
    """

    retention: Retention
    on_cpu: bool
    on_gpu: bool
    prefix: str
    memory: str

    @property
    def asynchronous(self) -> str:
        """Returns the setting as it appears in messages."""
        value = "auto" if self.on_cpu != self.on_gpu else str(self.on_cpu).lower()
        return f"{self.prefix}asynchronous={value}"


@dataclass
class RunStore:
    """Gives an attempt access to the checkpoints of its run.

    Attributes:
        group: all ranks, on the CPU.
        removals: removes old checkpoints in a thread.
    """

    run: RunDirectory
    config: Config
    events: EventLog
    group: Group
    removals: Removals = field(init=False)

    def __post_init__(self) -> None:
        self.removals = Removals(self._report_removal)

    @property
    def store(self) -> CheckpointStore:
        commit = self.config.checkpoint.commit
        by_marker = renames_by_copying(self.run.checkpoints) if commit == "auto" else commit == "marker"
        return CheckpointStore(self.run.checkpoints, self._check_claim, by_marker)

    @property
    def settings(self) -> SaveSettings:
        settings = self.config.checkpoint
        best = best_metric(settings.keep_best, settings.best_mode)
        return SaveSettings(
            Retention(settings.keep, settings.keep_every, best),
            saves_asynchronously(settings, on_gpus=False),
            saves_asynchronously(settings, on_gpus=True),
            "checkpoint.",
            "cluster.mem",
        )

    @property
    def attempt(self) -> int:
        return self.events.attempt

    def proved(self) -> int | None:
        """See ``Destination``."""
        step = self.run.record().get(PROVED)
        return step if isinstance(step, int) else None

    def facts(self) -> dict[str, Any]:
        """Returns entries for the manifests; called on rank 0."""
        base = base_identity(self.config.model)
        return {BASE: base} if base else {}

    def config_hash(self) -> str | None:
        value: str | None = self.run.record().get("config_hash")
        return value

    def report(self, event: str, step: int, details: Mapping[str, Any]) -> None:
        """Writes ``event`` to the event log of the run."""
        self.events.write(event, step=step, **details)
        if event == "checkpoint_saved":
            record_save(self.run, step)

    def newest(self) -> OpenCheckpoint | None:
        """Returns the newest valid checkpoint of the run or of the run it was forked from; None without any.

        Earlier attempts can commit nothing afterwards. Collective.

        Raises:
            UserError: all checkpoints are damaged, the saved ones have disappeared, or the run that this one was forked
                from has none.
        """

        def revoke() -> None:
            self.removals.wait()
            self.store.revoke(self.events.attempt)
            self.removals.start(self.store.remove_hidden)

        on_first(revoke, self.group)
        verified = self._search(self.store)
        if verified is None and on_first(self._appears_late, self.group):
            verified = self._search(self.store)
        forked_from = self.run.record().get("forked_from")
        forked = False
        if verified is None and forked_from is not None:
            forked = True
            verified = self._search(CheckpointStore(RunDirectory(Path(forked_from)).checkpoints), writable=False)
            if verified is None:
                raise UserError(
                    f"the run was forked from {forked_from}, which no longer has a checkpoint",
                    where=str(forked_from),
                    fix="restore a checkpoint there, or choose another run.name to start at step 0",
                )
        if verified is None:
            return None
        check_base(self.config.model, verified.manifest.extra, str(verified.checkpoint.path))
        return open_checkpoint(verified, self.group, forked)

    def set_aside_after(self, step: int) -> bool:
        """Sets aside the checkpoints of more than ``step`` steps; returns False, without a change, if there is no
        other. Collective."""
        return bool(on_first(partial(self._set_aside_after, step), self.group))

    def _set_aside_after(self, step: int) -> bool:
        self.removals.wait()
        store = self.store
        committed = store.committed()
        if not any(checkpoint.step <= step for checkpoint in committed):
            return False
        for checkpoint in committed:
            if checkpoint.step > step:
                self.events.write(
                    "checkpoint_set_aside",
                    step=checkpoint.step,
                    path=str(store.set_aside(checkpoint, self.events.attempt)),
                    message=f"rolling back to a checkpoint of step {step} or earlier",
                    rolled_back=True,
                )
        return True

    def _search(self, store: CheckpointStore, writable: bool = True) -> VerifiedCheckpoint | None:
        """Returns the newest valid checkpoint of ``store``; damaged ones that this run may write are set aside."""

        def report(checkpoint: Checkpoint, problem: str) -> None:
            path = checkpoint.path
            if writable:
                path = store.set_aside(checkpoint, self.events.attempt)
            print(f"skipping the damaged checkpoint of step {checkpoint.step} in {path}: {problem}", flush=True)
            self.events.write("checkpoint_set_aside", step=checkpoint.step, path=str(path), message=problem)

        full = self.config.checkpoint.verify == "full"
        return VerifiedSearch(store, self.group, full, VISIBILITY_TIMEOUT_S, report, writable).newest()

    def _appears_late(self) -> bool:
        """Returns whether a checkpoint has become visible since the search; called on rank 0 if none was found.

        Raises:
            Purged: the run has saved a checkpoint and none becomes visible.
        """
        saved = furthest_saved(self.run)
        if saved == 0:
            return False
        if wait_for_checkpoint(self.store, VISIBILITY_TIMEOUT_S * on_network(self.store.root)):
            return True
        raise purged_error(self.run, saved)

    def _check_claim(self) -> None:
        newest = self.run.newest_attempt()
        if newest > self.events.attempt:
            raise Superseded(f"attempt {newest} has taken over the run from attempt {self.events.attempt}")

    def _report_removal(self, error: Exception) -> None:
        if not isinstance(error, Superseded):  # which the next save reports
            step = furthest_saved(self.run)
            self.events.write("warning", step=step, message=f"cannot remove old checkpoints: {error}")


# seconds for a missing or short file on a network file system, whose attribute caches may be 60 s old
VISIBILITY_TIMEOUT_S = 75.0
