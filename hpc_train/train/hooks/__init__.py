"""Runs custom code at the events of a training: start, step, evaluation, checkpoint and end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.checkpoint.state import HOOKS, OptimizerState
from hpc_train.config.import_path import locate
from hpc_train.config.schema import Config, TargetConfig
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.local_replicas import across_replicas
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.directory import RunDirectory
from hpc_train.train.metrics import named_errors


@dataclass(frozen=True)
class HookContext:
    """The information that a hook gets at an event. It is the same on every rank except for ``mesh`` and the tensors.

    Attributes:
        step: the number of completed optimizer steps.
        total_steps: the number of steps of the run.
        x
        engine: runs the model; ``parts`` are the modules that this rank holds.
        optimizer: the optimizer; ``named_state()`` maps parameter names to their state.
        mesh: ``rank``, ``device``, ``layout`` and the process groups of this rank.
        config: the config of the run.
        run: the run directory.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, Any]
    engine: Engine
    optimizer: OptimizerState
    mesh: Mesh
    config: Config
    run: RunDirectory
    request_end: Callable[[str], None]
    show_text: Callable[[int, str, str], None]

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Returns global name -> parameter of this rank: a full tensor, or a ``DTensor`` with the shard of this
        rank."""
        return self.engine.named_parameters()

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.layout.world_size

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    def stop(self, reason: str) -> None:
        """Requests that the run ends as done, after a checkpoint. The request of a single rank is sufficient.

        A request in ``evaluation`` ends the run at that step. A request in ``step`` ends the run up to two steps later,
        since the ranks agree on it while they compute; the last step is evaluated.
        """
        self.request_end(reason)

    def log_text(self, name: str, text: str) -> None:
        """Adds text to the log and to trackers such as W&B. Calls on ranks other than 0 have no effect."""
        if self.rank == 0:
            self.show_text(self.step, name, text)


class Hook:
    """Base class of hooks, whose methods do nothing. Any object with some of these methods can be a hook.

    All ranks call the same methods at the same steps, so they may communicate. An error in a hook ends the attempt like
    an error in the model.
    """

    def start(self, context: HookContext) -> None:
        """Runs at the start of each attempt and after a rollback, after the weights are loaded."""

    def step(self, context: HookContext) -> None:
        """Runs after each optimizer step."""

    def evaluation(self, context: HookContext) -> None:
        """Runs after each evaluation, within ``evaluating``. The results are in ``context.metrics``."""

    @contextmanager
    def evaluating(self, context: HookContext) -> Iterator[None]:
        """Encloses each evaluation, for example to evaluate other weights."""
        yield

    def checkpoint(self, context: HookContext) -> None:
        """Runs before each save, once per step."""

    def end(self, context: HookContext) -> None:
        """Runs when the run is done, after its last save. Does not run when the run stops on request and will
        continue."""

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the state to save: JSON values, equal on all ranks, and tensors.

        A tensor is either a ``DTensor``, of which each rank saves its shard, or equal on all ranks that have its key.
        The names, shapes and dtypes of tensors must not depend on the layout.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state, after ``start``. The tensors are the tensors of ``state_dict``, with loaded values.

        It is not called in a fork, or if the checkpoint does not contain the hook.
        """


Load = Callable[[Mapping[str, Tensor]], str | None]  # loads into tensors, or returns the reason why it cannot


@dataclass
class _NamedHook:
    """Holds a hook with its name in the config and its title in error messages."""

    name: str
    title: str
    hook: Any

    def call(self, method: str, context: HookContext) -> None:
        action = getattr(self.hook, method, None)
        if action is not None:
            with self.errors(method, context.step):
                action(context)

    def errors(self, method: str, step: int) -> AbstractContextManager[None]:
        return named_errors(self.title, f"{method}()", step)

    def state(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the values of the state that are not tensors, and the tensors."""
        if not hasattr(self.hook, "state_dict"):
            return {}, {}
        with self.errors("state_dict", step):
            state: Mapping[str, Any] = self.hook.state_dict()
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            values = {key: value for key, value in state.items() if key not in tensors}
            json.dumps(values)
            return values, tensors


@dataclass
class Hooks:
    """Calls hooks in the order of the config. All methods are collective.

    Attributes:
        context: the context without step and metrics, which the worker sets once per attempt.
        end_reason: the reason with which a hook of this rank has requested the end of the run; None without a request.
        values: the values of the states that are not tensors, by hook, as collected by ``before_save``.
        tensors: the tensors of the states, as collected by ``before_save``, by their names in a checkpoint.
    """

    configs: Mapping[str, TargetConfig]
    context: HookContext | None = None
    end_reason: str | None = None
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    _collected: int | None = field(default=None, init=False)
    _hooks: list[_NamedHook] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        for name, config in self.configs.items():
            title = f"hook {name} ({config._target_})"
            target = locate(config._target_, f"hooks.{name}._target_")
            with named_errors(title, "its constructor"):
                self._hooks.append(_NamedHook(name, title, target(**config.args)))
        self._steppers = [hook for hook in self._hooks if hasattr(hook.hook, "step")]

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def begin(self, step: int, saved: Mapping[str, Any], load: Load) -> list[str]:
        """Starts the hooks and loads their states.

        Args:
            saved: the ``values`` in the loaded checkpoint.

        Returns:
            A message for each hook whose state is not in the checkpoint.
        """
        messages = []
        self._collected = None
        for hook in self._hooks:
            hook.call("start", self._at(step))
            if hook.name not in saved:
                if step > 0 and any(hook.state(step)):
                    messages.append(f"the checkpoint has no state of the hook {hook.name}, which starts at step {step}")
                continue
            _, tensors = hook.state(step)
            missing = load({f"{HOOKS}{hook.name}.{key}": tensor for key, tensor in tensors.items()})
            if missing is not None:
                messages.append(f"the hook {hook.name} starts at step {step} without its saved state: {missing}")
                continue
            if hasattr(hook.hook, "load_state_dict"):
                with hook.errors("load_state_dict", step):
                    hook.hook.load_state_dict({**saved[hook.name], **tensors})
        return messages

    def after_step(self, step: int) -> None:
        if self._steppers:
            context = self._at(step)
            for hook in self._steppers:
                hook.call("step", context)

    @contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """Runs an evaluation with the weights that the hooks choose."""
        with ExitStack() as stack:
            for hook in self._hooks:
                if hasattr(hook.hook, "evaluating"):
                    with hook.errors("evaluating", step):
                        stack.enter_context(hook.hook.evaluating(self._at(step)))
            yield

    def after_evaluation(self, step: int) -> bool:
        """Calls the hooks; returns whether a hook of any rank has requested the end of the run."""
        if not self._hooks:
            return False
        context = self._at(step)
        for hook in self._hooks:
            hook.call("evaluation", context)
        ends = torch.tensor(self.end_reason is not None, dtype=torch.int64)
        with across_replicas(context.mesh):
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=context.mesh.control)
        return bool(ends.item())

    def before_save(self, step: int) -> None:
        """Collects the states, once per step, since the step of the last save of a run may already have been saved."""
        if step == self._collected:
            return
        self._collected = step
        for hook in self._hooks:
            hook.call("checkpoint", self._at(step))
        self._collect(step)

    def state_tensors(self, step: int) -> Mapping[str, Tensor]:
        """Returns tensors as a save would, without an event."""
        self._collect(step)
        return self.tensors

    def _collect(self, step: int) -> None:
        self.values.clear()
        self.tensors.clear()
        for hook in self._hooks:
            self.values[hook.name], tensors = hook.state(step)
            self.tensors |= {f"{HOOKS}{hook.name}.{key}": tensor for key, tensor in tensors.items()}

    def end(self, step: int) -> None:
        for hook in self._hooks:
            hook.call("end", self._at(step))

    def as_end(self, reason: str | None) -> dict[str, Any] | None:
        """Returns the record in a checkpoint of an end that a hook has requested; None without a request."""
        return None if reason is None else {"reason": reason, "hooks": self._described()}

    def same_end(self, recorded: Mapping[str, Any] | None) -> str | None:
        """Returns the reason of a recorded end; None if there is none, or if the config of the hooks has changed
        since."""
        if recorded is None or recorded["hooks"] != self._described():
            return None
        return str(recorded["reason"])

    def _described(self) -> dict[str, Any]:
        return {name: [config._target_, config.args] for name, config in self.configs.items()}

    def request_end(self, reason: str) -> None:
        self.end_reason = self.end_reason or reason

    def _at(self, step: int) -> HookContext:
        assert self.context is not None, "the worker has set it"
        return replace(self.context, step=step, metrics=self.metrics)
