"""Defines what a user's own loop gets: its ranks, its state in checkpoints, stop requests and metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.parallel.engine import seed_step
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.agent_worker import Heartbeat, Phase, WorkerSpec
from hpc_train.run.events import Event
from hpc_train.run.ledger import read_ledger
from hpc_train.run.requests import StopFlag
from hpc_train.telemetry.metrics import finite_or_none
from hpc_train.telemetry.progress import spent_line
from hpc_train.train.custom_loop.state import LoopState, Registered
from hpc_train.train.report import Report
from hpc_train.train.saving import LastSave, SaveSchedule
from hpc_train.train.step import Control

RESERVED = ("time", "step", "attempt", "world_size", "step_s", "save_s")  # keys of a line that hpc_train writes itself


@dataclass
class _Timer:
    """Measures the time since the last line of metrics."""

    since: float = field(default_factory=time.monotonic)
    step: int = 0
    saving_s: float = 0.0

    def read(self, step: int) -> dict[str, float]:
        """Returns seconds per step and in saves, and starts again."""
        now, steps = time.monotonic(), step - self.step
        found = {"step_s": max(0.0, now - self.since - self.saving_s) / steps if steps > 0 else 0.0}
        found["save_s"] = self.saving_s
        self.since, self.step, self.saving_s = now, step, 0.0
        return found


@dataclass
class Context:
    """Connects a loop with its run: the argument of ``run.entry``, on every rank. A step is whatever the loop counts.

    ``resume``, ``steps``, ``end_step`` and ``save`` are collective: all ranks call them with the same values.

    Attributes:
        config: the whole frozen config. Only the loop itself reads its model, data, optim, precision, batch and train.
        args: ``run.args``.
        device: the GPU of this rank, or the CPU. The process group of ``torch.distributed`` is initialized.
        mesh: the axes ``pp``, ``dp_replicate``, ``dp_shard`` and ``tp`` that ``strategy`` describes; the second and the
            third one together are ``dp`` x ``cp``.
        seed: ``train.seed``.
        step: the completed steps.
        directory: the run directory, for files of the loop's own.
    """

    config: Config
    args: Mapping[str, Any]
    device: torch.device
    mesh: DeviceMesh
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    attempt: int
    seed: int
    directory: Path
    _mesh: Mesh
    _spec: WorkerSpec
    _stop: StopFlag
    _heartbeat: Heartbeat
    _report: Report
    _schedule: SaveSchedule
    _checkpoints: CheckpointManager
    _state: LoopState
    step: int = 0
    _total: int | None = None
    _pending: bool = False  # an agreement was posted and not read
    _stopped: bool = False
    _logged: dict[str, Any] = field(default_factory=dict)
    _timer: _Timer = field(default_factory=_Timer)

    def __post_init__(self) -> None:
        self._control = Control(self._mesh)
        wait_s, grace_s = self.config.checkpoint.wait_for_room_s, self._spec.stop_grace_s
        self._last_save = LastSave(self._mesh, self._heartbeat, self._stop, self._report, wait_s, grace_s)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Returns the process group of this rank along ``pp``, ``dp``, ``cp``, ``dp_cp``, ``dp_replicate``,
        ``dp_shard`` or ``tp``.

        Ranks of ``dp`` read different samples, and ranks of ``cp`` different tokens of the same samples. Gradients are
        averaged over ``dp_cp``, the ranks of both, which is ``dp`` if ``strategy.cp`` is 1.
        """
        return self._mesh.group(axis)

    def resume(self, **objects: Registered) -> int:
        """Registers what checkpoints hold, and loads the newest valid one.

        Args:
            objects: by name, modules, optimizers, tensors, and objects with ``state_dict`` and ``load_state_dict``. A
                tensor is the same on all ranks or a DTensor, which loads under any number of ranks. Everything else in
                a state is numbers and text, the same on all ranks.

        Returns:
            The completed steps: 0 for a new run.

        Raises:
            UserError: an object has no state, or the checkpoint does not match the objects. A fork may have other
                optimizers, and other objects without tensors.
        """
        self._state.register(objects)
        restored = self._checkpoints.restore()
        if restored is None:
            return 0
        if not restored.with_optimizer:
            self._state.forget_optimizers()
        changes = self._state.load_values(restored.extra["loop"], restored.with_optimizer, restored.forked)
        self.step = self._timer.step = restored.step
        if self.rank == 0:
            if not restored.with_optimizer:
                changes.append("the optimizers differ, and all of them start without state")
            print("\n  ".join([f"resumed from {restored.path} at step {restored.step}", *changes]), flush=True)
            details = {"path": str(restored.path), "with_optimizer": restored.with_optimizer, "changes": changes}
            self._report.events.write("resumed", step=restored.step, **details)
        return restored.step

    def steps(self, until: int | None = None) -> Iterator[int]:
        """Yields the number of each step from the one after ``resume`` to ``until`` (by default ``train.steps``).

        Before each step it seeds torch's generators by the seed, the step and the rank, so that a resumed run draws the
        same numbers. After each step it calls ``end_step``, and ends early if that asks for it.
        """
        total = self.config.train.steps if until is None else until
        if total is None:
            raise UserError("train.steps is not set", where="context.steps", fix="context.steps(N), or train.steps=N")
        self._total = total
        if self.rank == 0:
            self._report.events.record(self._report.run, total_steps=total)
        while self.step < total:
            seed_step(self.seed, self.step, self._mesh)
            yield self.step + 1
            if self.end_step(self.step + 1):
                return

    def end_step(self, step: int) -> bool:
        """Ends step ``step``: it is a sign of life, and saves if ``checkpoint.every`` says so.

        Returns:
            Whether the function is to return, because the run was asked to stop. Then a checkpoint was saved.
        """
        self.step = step
        self._heartbeat.enter(Phase.STEP, step)
        self._checkpoints.poll()
        agreement = self._read()
        if agreement.stop:
            self._stop.request("another rank was asked to stop")  # keeps an earlier request of this rank
            self._stopped = True
            self._save_last()
            return True
        if self._schedule.falls_on(step) or agreement.save:
            self.save(step)
        return False

    @property
    def stop_requested(self) -> bool:
        """Returns whether this rank was asked to stop; others may learn it later. ``end_step`` is the same on all."""
        return self._stop.requested

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Saves the registered objects after ``step`` steps; a failed save is reported and the loop goes on.

        Args:
            metrics: for ``checkpoint.keep_best``.
        """
        began = time.monotonic()
        with self._heartbeat.during(Phase.CHECKPOINT, step):
            self._checkpoints.save(step, {"loop": self._state.values()}, metrics)
        self._count_save(began)

    def heartbeat(self) -> None:
        """Tells the agent that this rank is alive, for work that takes long without a step."""
        self._heartbeat.enter(Phase.STEP, self.step)

    def log(self, step: int, **values: float | Tensor) -> None:
        """Writes a line of metrics of ``step`` on rank 0, in the steps that ``telemetry.log_every`` names.

        Args:
            values: numbers, or tensors with one element, read only in these steps. The console shows ``loss``.
        """
        every = self.config.telemetry.log_every
        if self.rank != 0 or self._report.metrics is None or (step not in (1, self._total) and step % every):
            return
        if taken := [name for name in values if name in RESERVED]:
            raise UserError(f"{', '.join(taken)} is written by hpc_train", where="context.log", fix="another name")
        head = {"time": self._report.events.now(), "step": step, "attempt": self.attempt, "world_size": self.world_size}
        own = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
        self._logged = own
        times = self._timer.read(step)
        self._report.metrics.write(head | own | times)
        self._last_save.warn_of_slow_steps(step, times["step_s"])
        total = "" if self._total is None else f"/{self._total}"
        print("  ".join([f"step {step}{total}", *(f"{name} {value:.4g}" for name, value in own.items())]), flush=True)

    def event(self, name: str, **details: Any) -> None:
        """Writes the event ``loop`` with this name to the event log of the run, with this rank and step."""
        self._report.events.write("loop", step=self.step, name=name, **details)

    def _read(self) -> Any:
        """Returns what the ranks agreed on one step ago, after this rank has posted its message for the next one."""
        if not self._pending:
            self._control.post(self._stop.requested, 0, self._schedule.ask())
        agreement = self._control.read(self._stop)
        self._control.post(self._stop.requested, 0, self._schedule.ask())
        self._pending = True
        self._heartbeat.arrive(self.step)
        return agreement

    def _save_last(self) -> None:
        began = time.monotonic()
        with self._heartbeat.during(Phase.CHECKPOINT, self.step):
            save = partial(self._checkpoints.save, self.step, {"loop": self._state.values()}, None, final=True)
            self._last_save.run(lambda again: save(again=again), self.step)
        self._count_save(began)

    def _count_save(self, began: float) -> None:
        seconds = time.monotonic() - began
        self._timer.saving_s += seconds
        self._schedule.saved(max(seconds, self._checkpoints.copied_s), self._checkpoints.durable_s)

    def _finish(self) -> bool:
        """Saves the last state and reports the end; returns whether the function was asked to stop. Collective."""
        if self._pending:
            self._control.read()  # completes the last all-reduce before any rank exits
            self._pending = False
        if not self._stopped and self._state.is_used and self.step > 0:
            self._save_last()
        if self.rank == 0:
            self._report_end()
        return self._stopped

    def _report_end(self) -> None:
        run, events = self._report.run, self._report.events
        if self._stopped:
            total = "" if self._total is None else f" of {self._total}"
            print(f"stopped on request after step {self.step}{total}; the checkpoint is saved")
        else:
            result = {"steps": self.step, "attempt": self.attempt}
            result |= {name: finite_or_none(value) for name, value in self._logged.items()}
            events.record(run, result=result)
            print("finished: " + ", ".join(f"{name} {value}" for name, value in result.items()))
        event, last = "training_stopped" if self._stopped else "training_finished", self._timer.read(self.step)
        head = {"event": event, "time": events.now(), "attempt": self.attempt, "step": self.step}
        spent = read_ledger(run, closing=Event(head | last)).total
        print(spent_line(spent), flush=True)
        events.write(event, step=self.step, **last, ledger=spent.as_json())
