"""Runs a custom loop in the workers (``run.entry=package.module:function``). The function gets a ``Context``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.objects import ObjectState, Registered
from hpc_train.checkpoint.run_store import RunStore
from hpc_train.config.import_path import locate
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.user_code import own_code_notes
from hpc_train.parallel.engine import seed_step
from hpc_train.parallel.mesh import Mesh
from hpc_train.preflight.run import nccl_log, preflight
from hpc_train.run.agent_worker import Heartbeat, Phase, WorkerSpec
from hpc_train.run.code import check_imports
from hpc_train.run.directory import RunDirectory, rank_writer
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.requests import StopFlag
from hpc_train.telemetry.metrics import finite_or_none
from hpc_train.train.hold import Holds
from hpc_train.train.processes import answer_requests, join, leave
from hpc_train.train.report import Report, open_report
from hpc_train.train.saving import LastSave, SaveSchedule, save_schedule
from hpc_train.train.step import Control
from hpc_train.train.worker import frozen_config

RESERVED = ("time", "step", "attempt", "world_size", "step_s", "save_s")  # keys that hpc_train writes itself


@dataclass
class _Timer:
    """Measures the time since the last line of metrics."""

    since: float = field(default_factory=time.monotonic)
    step: int = 0
    saving_s: float = 0.0

    def read(self, step: int) -> dict[str, float]:
        """Returns the seconds per step and the seconds in saves since the last ``read``, and starts again."""
        now = time.monotonic()
        step_s = 0.0
        if step > self.step:
            step_s = max(0.0, now - self.since - self.saving_s) / (step - self.step)
        times = {"step_s": step_s, "save_s": self.saving_s}
        self.since = now
        self.step = step
        self.saving_s = 0.0
        return times


@dataclass
class Context:
    """Connects a custom loop with its run. The function ``run.entry`` gets it as its argument on every rank.

    The loop defines what a step is. ``resume``, ``steps``, ``end_step`` and ``save`` are collective: all ranks call
    them with the same values.

    Attributes:
        config: the full frozen config. Only the loop itself reads the groups model, data, optim, precision, batch and
            train.
        args: ``run.args``.
        device: the GPU of this rank, or the CPU. The process group of ``torch.distributed`` is initialized.
        mesh: the axes ``pp``, ``dp_replicate``, ``dp_shard`` and ``tp`` that ``strategy`` describes; ``dp_replicate``
            and ``dp_shard`` together are ``dp`` x ``cp``.
        seed: ``train.seed``.
        step: the number of completed steps.
        directory: the run directory, in which the loop may write files.
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
    _state: ObjectState
    _holds: Holds
    step: int = 0
    _total: int | None = None
    _pending: bool = False  # whether an agreement was posted and not yet read
    _stopped: bool = False
    _logged: dict[str, Any] = field(default_factory=dict)
    _timer: _Timer = field(default_factory=_Timer)

    def __post_init__(self) -> None:
        self._control = Control(self._mesh)
        limits = (self.config.checkpoint.wait_for_room_s, self._spec.stop_grace_s)
        self._last_save = LastSave(self._mesh, self._heartbeat, self._stop, self._report, *limits)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Returns the process group of this rank along ``pp``, ``dp``, ``cp``, ``dp_cp``, ``dp_replicate``,
        ``dp_shard`` or ``tp``.

        Ranks of ``dp`` read different samples, and ranks of ``cp`` read different tokens of the same samples. Gradients
        are averaged over ``dp_cp``, the ranks of both axes, which equals ``dp`` if ``strategy.cp`` is 1.
        """
        return self._mesh.group(axis)

    def resume(self, **objects: Registered) -> int:
        """Registers the objects whose state checkpoints contain, and loads the newest valid checkpoint.

        Args:
            objects: name -> a module, an optimizer, a tensor, or an object with ``state_dict`` and ``load_state_dict``.
                A tensor is either equal on all ranks or a DTensor, which loads with any number of ranks. All other
                values in a state are numbers and text, equal on all ranks.

        Returns:
            The number of completed steps; 0 for a new run.

        Raises:
            UserError: an object has no state, or the checkpoint does not match the objects. A fork may have other
                optimizers, and other objects that have no tensors.
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
                changes.append("the optimizers differ, so all of them start without state")
            print("\n  ".join([f"resumed from {restored.path} at step {restored.step}", *changes]), flush=True)
            details = {"path": str(restored.path), "with_optimizer": restored.with_optimizer, "changes": changes}
            self._report.events.write("resumed", step=restored.step, **details)
        return restored.step

    def steps(self, until: int | None = None) -> Iterator[int]:
        """Yields the number of each step from the one after ``resume`` to ``until`` (by default ``train.steps``).

        Before each step, it seeds torch's generators from the seed, the step and the rank, so that a resumed run draws
        the same numbers. After each step, it calls ``end_step`` and ends early if that returns True.
        """
        if until is None:
            until = self.config.train.steps
        if until is None:
            raise UserError("train.steps is not set", where="context.steps", fix="context.steps(N), or train.steps=N")
        self._total = until
        if self.rank == 0:
            self._report.events.record(self._report.run, total_steps=until)
        while self.step < until:
            seed_step(self.seed, self.step, self._mesh)
            yield self.step + 1
            if self.end_step(self.step + 1):
                return

    def end_step(self, step: int) -> bool:
        """Ends step ``step``: reports progress to the agent, and saves if ``checkpoint.every`` requires it.

        Returns:
            Whether the function must return because of a stop request. In this case a checkpoint has been saved.
        """
        self.step = step
        self._heartbeat.enter(Phase.STEP, step)
        self._checkpoints.poll()
        # reads the agreement that was posted one step ago, then posts this rank's message for the next step
        if not self._pending:
            self._control.post(self._stop.requested, 0, self._schedule.ask())
        agreement = self._control.read(self._stop)
        if agreement.holds and not agreement.stop:
            began = time.monotonic()
            self._holds.hold(agreement.holds, step, sys._getframe(1))
            self._timer.since += time.monotonic() - began
        self._control.post(self._stop.requested, 0, self._schedule.ask(), hold=self._holds.ask())
        self._pending = True
        self._heartbeat.arrive(step)
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
        """Returns whether this rank has received a stop request. Other ranks may receive it later; ``end_step`` returns
        the same on all ranks."""
        return self._stop.requested

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Saves the registered objects after ``step`` steps; a failed save is reported and the loop continues.

        Args:
            metrics: the metrics for ``checkpoint.keep_best``.
        """
        with self._saving(step):
            self._checkpoints.save(step, {"loop": self._state.values()}, metrics)

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        began = time.monotonic()
        with self._heartbeat.during(Phase.CHECKPOINT, step):
            yield
        seconds = time.monotonic() - began
        self._timer.saving_s += seconds
        self._schedule.saved(max(seconds, self._checkpoints.copied_s), self._checkpoints.durable_s)

    def _save_last(self) -> None:
        with self._saving(self.step):
            save = partial(self._checkpoints.save, self.step, {"loop": self._state.values()}, None, final=True)
            self._last_save.run(lambda again: save(again=again), self.step)

    def heartbeat(self) -> None:
        """Reports to the agent that this rank is alive, during long work without a step."""
        self._heartbeat.enter(Phase.STEP, self.step)

    def log(self, step: int, **values: float | Tensor) -> None:
        """Writes a line of metrics of ``step`` on rank 0, at the steps that ``telemetry.log_every`` selects.

        Args:
            values: numbers, or tensors with one element, read only at these steps. The console shows ``loss``.
        """
        every = self.config.telemetry.log_every
        if self.rank != 0 or self._report.metrics is None or (step not in (1, self._total) and step % every):
            return
        if taken := [name for name in values if name in RESERVED]:
            raise UserError(f"{', '.join(taken)} is written by hpc_train", where="context.log", fix="another name")
        numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
        self._logged = numbers
        head = {"time": self._report.events.now(), "step": step, "attempt": self.attempt, "world_size": self.world_size}
        times = self._timer.read(step)
        self._report.metrics.write(head | numbers | times)
        self._last_save.warn_of_slow_steps(step, times["step_s"])
        place = f"step {step}" if self._total is None else f"step {step}/{self._total}"
        print("  ".join([place, *(f"{name} {value:.4g}" for name, value in numbers.items())]), flush=True)

    def event(self, name: str, **details: Any) -> None:
        """Writes the event ``loop`` with this name to the event log of the run, with this rank and step."""
        self._report.events.write("loop", step=self.step, name=name, **details)

    def _finish(self) -> bool:
        """Saves the last state and reports the end; returns whether there was a stop request. Collective."""
        if self._pending:
            self._control.read()  # completes the last all-reduce before any rank exits
            self._pending = False
        if not self._stopped and self._state.is_used and self.step > 0:
            self._save_last()
        if self.rank == 0:
            self._report_end()
        return self._stopped

    def _report_end(self) -> None:
        event = "training_finished"
        if self._stopped:
            event = "training_stopped"
            total = "" if self._total is None else f" of {self._total}"
            print(f"stopped on request after step {self.step}{total}; the checkpoint is saved")
        else:
            result = {"steps": self.step, "attempt": self.attempt}
            result |= {name: finite_or_none(value) for name, value in self._logged.items()}
            self._report.events.record(self._report.run, result=result)
            print("finished: " + ", ".join(f"{name} {value}" for name, value in result.items()))
        self._report.end(event, self.step, {}, self._timer.read(self.step))


def train(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Calls the function of ``run.entry`` with a ``Context``, as rank ``spec.rank`` of one attempt.

    Raises:
        UserError: the function cannot be imported.
        Exception: any exception of the function.
    """
    run = RunDirectory(Path(spec.run_dir))
    with closing(EventLog.open(run, rank_writer(spec.rank), spec.attempt, spec.rank)) as events:
        config = frozen_config(spec, run)
        heartbeat = Heartbeat.of(spec.heartbeat)
        answer_requests(spec)
        with nccl_log(spec, config, run) as log:
            mesh = join(spec, config)
            preflight(spec, config, run, mesh, events, log)
            assert config.run.entry is not None, "the agent has chosen this worker"
            function = locate(config.run.entry, "run.entry")
            check_imports(run)
            seed_step(config.train.seed, 0, mesh)
            others = "pass the same objects as before; run.fork=NEW starts a run from this checkpoint with others"
            state = ObjectState("context.resume", others)
            context = Context(
                config=config,
                args=config.run.args,
                device=mesh.device,
                mesh=mesh.device_mesh,
                rank=mesh.rank,
                world_size=mesh.layout.world_size,
                local_rank=spec.local_rank,
                local_world_size=spec.local_world_size,
                node_rank=spec.node_rank,
                attempt=spec.attempt,
                seed=config.train.seed,
                directory=run.path,
                _mesh=mesh,
                _spec=spec,
                _stop=stop,
                _heartbeat=heartbeat,
                _report=open_report(run, mesh, events, 0),
                _schedule=save_schedule(config, run, mesh),
                _checkpoints=CheckpointManager(
                    RunStore(run, config, events, mesh.control), state, state, mesh, spec.local_world_size
                ),
                _state=state,
                _holds=Holds(run, spec, stop, heartbeat, events),
            )
            if mesh.rank == 0:
                print(f"layout: {mesh.layout} on {mesh.device.type}", *own_code_notes(config), sep="\n")
            function(context)
            stopped = context._finish()
            heartbeat.enter(Phase.STOPPING, context.step)
            leave(mesh)

            def give_up() -> bool:
                heartbeat.enter(Phase.STOPPING, context.step)  # removing checkpoints may take long
                return stop.requested or stopped

            context._checkpoints.close(give_up)
            context._report.close()
            return Exit.STOPPED if stopped else Exit.DONE
