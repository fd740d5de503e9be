"""Runs a custom loop in the workers (``run.entry=package.module:function``). The function gets a ``Context``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hpc_train.checkpoint.extra_state import decoded, encoded, tensors_in
from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.run_store import RunStore
from hpc_train.checkpoint.state import TensorShape
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
    _state: LoopState
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
        self._control.post(self._stop.requested, 0, self._schedule.ask())
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


WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # prefixes of torch.compile and of activation checkpointing
WHERE = "context.resume"


class Stateful(Protocol):
    """An object with a state, such as a learning rate schedule. The state is equal on all ranks."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


Registered = nn.Module | torch.optim.Optimizer | Tensor | Stateful


class LoopState:
    """Presents the registered objects to ``CheckpointManager`` like a model and its optimizer.

    Tensors have names as in the checkpoints of the trainer: ``model.OBJECT.NAME`` for parameters and persistent
    buffers, and ``optim.OBJECT.NAME.KEY`` for the state of an optimizer. NAME is the name of the parameter in its
    module, without the prefixes of wrappers, so a checkpoint of a replicated module loads into a sharded module. All
    other values are JSON in the manifest, so loading them does not run code.

    Attributes:
        stored: the names of the tensors in the checkpoint that is being loaded; None outside of a load.
    """

    def __init__(self) -> None:
        self.stored: Collection[str] | None = None
        self._modules: dict[str, nn.Module] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._tensors: dict[str, Tensor] = {}
        self._others: dict[str, Stateful] = {}
        self._loading: dict[str, dict[str, Any]] = {}  # state dicts whose tensors a load fills

    def register(self, objects: Mapping[str, Registered]) -> None:
        """Adds objects whose state is saved in checkpoints.

        Raises:
            UserError: an object has no state, or an optimizer has a parameter that is in no registered module.
        """
        for name, value in objects.items():
            if isinstance(value, nn.Module):
                self._modules[name] = value
            elif isinstance(value, torch.optim.Optimizer):
                self._optimizers[name] = value
            elif isinstance(value, Tensor):
                self._tensors[name] = value
            elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                self._others[name] = value
            else:
                fix = "a module, an optimizer, a tensor, or an object with state_dict and load_state_dict"
                raise UserError(f"{name} is a {type(value).__name__}, which has no state", where=WHERE, fix=fix)
        names = self._names()
        for name, optimizer in self._optimizers.items():
            if any(parameter not in names for parameter in _parameters(optimizer)):
                what = f"the optimizer {name} has a parameter that is in no registered module"
                raise UserError(what, where=WHERE, fix="pass all modules that it optimizes, e.g. model=model")

    @property
    def is_used(self) -> bool:
        """Returns whether anything is registered."""
        return bool(self._modules or self._optimizers or self._tensors or self._others)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Returns the registered modules as children of one module, by their names.

        Modules with the first version of FSDP are left out, because it gathers its parameters for a state dict.
        """
        root = nn.Module()
        for name, wrapped in self._modules.items():
            module = _without_ddp(wrapped)
            if not any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
                root._modules[name] = module
        return (root,)

    def named_parameters(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, module in self._modules.items():  # a parameter that two modules share has two names
            for path, parameter in _without_ddp(module).named_parameters():
                tensors[f"{name}.{_without_wrappers(path)}"] = parameter
        tensors |= self._tensors
        for name, other in self._others.items():
            state: Mapping[str, Any] = other.state_dict()
            if self.stored:
                state = self._loading.setdefault(name, dict(state))
            tensors |= {f"{name}.{path}": tensor for path, tensor in tensors_in(state)}
        return tensors

    def named_buffers(self) -> dict[str, Tensor]:
        """Returns the persistent buffers."""
        buffers = {}
        for name, module in self._modules.items():
            for path, inner in _without_ddp(module).named_modules():
                for key, value in inner.named_buffers(recurse=False):
                    if key not in inner._non_persistent_buffers_set:
                        buffers[f"{name}.{_without_wrappers(f'{path}.{key}' if path else key)}"] = value
        return buffers

    def compressions(self) -> tuple[()]:
        return ()

    def expect(self, stored: Mapping[str, TensorShape]) -> dict[str, TensorShape]:
        """Stores the names of the tensors that a load fills. An empty ``stored`` leaves the optimizers unchanged."""
        if stored:
            self.stored = set(stored)
        return {}

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """Returns OPTIMIZER.PARAMETER -> key -> tensor. During a load, these are exactly the tensors in the
        checkpoint."""
        names = self._names()
        states = {}
        for name, optimizer in self._optimizers.items():
            if self.stored is not None:
                self._create_stored(name, optimizer, names)
            for parameter in _parameters(optimizer):
                values = optimizer.state.get(parameter, {})
                tensors = {str(key): value for key, value in values.items() if isinstance(value, Tensor)}
                if tensors:
                    states[f"{name}.{names[parameter]}"] = tensors
        return states

    def loaded(self) -> None:
        """Does nothing, since a load fills the tensors and ``load_values`` restores the other values."""

    def before_next_update(self, action: Callable[[], None]) -> None:
        """Calls ``action`` immediately, since it is unknown when a custom loop updates: it waits for the copies of an
        asynchronous save."""
        action()

    def forget_optimizers(self) -> None:
        """Clears the state of the optimizers, which a load has created but not filled."""
        for optimizer in self._optimizers.values():
            optimizer.state.clear()

    def values(self) -> dict[str, Any]:
        """Returns all values that are not tensors, as JSON.

        Raises:
            UserError: a value cannot be written as JSON.
        """
        names = self._names()
        optimizers = {}
        for name, optimizer in self._optimizers.items():
            groups = [encoded(_options(group), name, WHERE) for group in optimizer.param_groups]
            states = {}
            for parameter in _parameters(optimizer):
                state = optimizer.state.get(parameter, {})
                numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
                if numbers:
                    states[names[parameter]] = encoded(numbers, name, WHERE)
            optimizers[name] = {"groups": groups, "state": states}
        objects = {name: encoded(other.state_dict(), name, WHERE) for name, other in self._others.items()}
        return {"optimizers": optimizers, "objects": objects}

    def load_values(self, values: Mapping[str, Any], with_optimizers: bool, forked: bool) -> list[str]:
        """Loads the ``values`` of a checkpoint, after its tensors were loaded.

        Args:
            forked: whether the checkpoint is from another run, which may have had other optimizers and objects.

        Returns:
            A sentence for each difference. An object that is not in the checkpoint keeps its present state.

        Raises:
            UserError: the objects differ, and this is not a fork.
        """
        changes = self._changes(values)
        if changes and not forked:
            fix = "pass the same objects as before; run.fork=NEW starts a run from this checkpoint with others"
            raise UserError("; ".join(changes), where=WHERE, fix=fix)
        by_name = {name: parameter for parameter, name in self._names().items()}
        for name, saved in values["optimizers"].items() if with_optimizers else ():
            optimizer = self._optimizers.get(name)
            if optimizer is None:
                continue
            if len(optimizer.param_groups) == len(saved["groups"]):
                for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
                    for key, value in decoded(options, {}).items():
                        if isinstance(group.get(key), Tensor):
                            group[key].fill_(value)
                        else:
                            group[key] = value
            for parameter, rest in saved["state"].items():
                optimizer.state[by_name[parameter]].update(decoded(rest, {}))
        for name, saved in values["objects"].items():
            if name in self._others:
                tensors = dict(tensors_in(self._loading.pop(name, {})))
                self._others[name].load_state_dict(decoded(saved, tensors))
        self.stored = None
        return changes

    def _changes(self, values: Mapping[str, Any]) -> list[str]:
        """Returns a sentence for each difference between the registered objects and the contents of a checkpoint."""
        changes = []
        for kind, saved, now in (
            ("optimizer", values["optimizers"], self._optimizers),
            ("object", values["objects"], self._others),
        ):
            changes += [f"the checkpoint has no {kind} {name}" for name in now if name not in saved]
            changes += [
                f"the checkpoint has an {kind} {name}, which is not passed" for name in saved if name not in now
            ]
        for name, optimizer in self._optimizers.items():
            if name in values["optimizers"]:
                before = len(values["optimizers"][name].get("groups", ()))
                after = len(optimizer.param_groups)
                if before != after:
                    what = f"has {before} parameter groups in the checkpoint and {after} now"
                    changes.append(f"the optimizer {name} {what}")
        return changes

    def _names(self) -> dict[Tensor, str]:
        """Returns the name of each parameter of the modules."""
        return {
            parameter: f"{name}.{_without_wrappers(path)}"
            for name, module in self._modules.items()
            for path, parameter in _without_ddp(module).named_parameters()
        }

    def _create_stored(self, name: str, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        """Makes ``optimizer`` create the state that the checkpoint contains."""
        assert self.stored is not None
        stored = {parameter: f"optim.{name}.{names[parameter]}." for parameter in _parameters(optimizer)}
        if not any(each.startswith(f"optim.{name}.") for each in self.stored):
            return
        optimizer.zero_grad(set_to_none=True)
        if not optimizer.state:  # a step with zero gradients and a learning rate of zero
            root = nn.ModuleDict({key.replace(".", "_"): module for key, module in self._modules.items()})
            get_optimizer_state_dict(root, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
        for parameter, prefix in stored.items():
            if not any(each.startswith(prefix) for each in self.stored):
                optimizer.state.pop(parameter, None)


def _without_ddp(module: nn.Module) -> nn.Module:
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


def _without_wrappers(path: str) -> str:
    for prefix in WRAPPERS:
        path = path.replace(prefix, "")
    return path


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a parameter group. Tensors, such as a learning rate, are converted to numbers."""
    numbers = {key: value.item() for key, value in group.items() if isinstance(value, Tensor)}
    return {key: value for key, value in group.items() if key != "params"} | numbers


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
            state = LoopState()
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
