"""Keeps the state of a loop of the user in checkpoints: named objects, not one model and one optimizer.

Tensors have the names that the trainer's checkpoints use: ``model.OBJECT.NAME`` for parameters and persistent buffers,
and ``optim.OBJECT.NAME.KEY`` for the state of an optimizer, where NAME is the parameter's name in its module, without
the prefixes of wrappers. So a checkpoint of a replicated module loads into a sharded one. All other values are JSON in
the manifest, and loading them runs no code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hpc_train.checkpoint.plain_values import decoded, encoded, tensors_in
from hpc_train.checkpoint.state import TensorShape
from hpc_train.errors import UserError

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # prefixes of torch.compile and of activation checkpointing
WHERE = "context.resume"


class Stateful(Protocol):
    """Describes an object with a state, such as a learning rate schedule; equal on all ranks."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


Registered = nn.Module | torch.optim.Optimizer | Tensor | Stateful


class LoopState:
    """Presents the registered objects as ``CheckpointManager`` sees a model and its optimizer.

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
        """Adds objects whose state belongs to the checkpoints.

        Raises:
            UserError: an object has no state, or an optimizer has a parameter of no registered module.
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
                what = f"the optimizer {name} has a parameter of no registered module"
                raise UserError(what, where=WHERE, fix="pass all modules that it optimizes, e.g. model=model")

    @property
    def is_used(self) -> bool:
        """Returns whether anything is registered."""
        return bool(self._modules or self._optimizers or self._tensors or self._others)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Returns the registered modules in one module, under their names.

        The first version of FSDP gathers its parameters for a state dict, so such modules are left out.
        """
        found = nn.Module()
        modules = {name: _without_ddp(module) for name, module in self._modules.items()}
        for name, module in modules.items():
            if not any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
                found._modules[name] = module
        return (found,)

    def named_parameters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {f"{name}.{inner}": value for name, inner, value in self._named(_own_parameters)}
        found |= self._tensors
        for name, other in self._others.items():
            state = self._loading.setdefault(name, dict(other.state_dict())) if self.stored else other.state_dict()
            found |= {f"{name}.{path}": tensor for path, tensor in tensors_in(state)}
        return found

    def named_buffers(self) -> dict[str, Tensor]:
        return {f"{name}.{inner}": value for name, inner, value in self._named(_persistent_buffers)}

    def compressions(self) -> tuple[()]:
        return ()

    def expect(self, stored: Mapping[str, TensorShape]) -> dict[str, TensorShape]:
        """Takes the names of the tensors that a load fills; an empty ``stored`` leaves the optimizers as they are."""
        if stored:
            self.stored = set(stored)
        return {}

    def named_state(self) -> dict[str, dict[str, Tensor]]:
        """Returns OPTIMIZER.PARAMETER -> key -> tensor; in a load of exactly those that the checkpoint has."""
        names = self._names()
        found = {}
        for name, optimizer in self._optimizers.items():
            if self.stored is not None:
                self._create_stored(name, optimizer, names)
            for parameter in _parameters(optimizer):
                values = optimizer.state.get(parameter, {})
                tensors = {str(key): value for key, value in values.items() if isinstance(value, Tensor)}
                if tensors:
                    found[f"{name}.{names[parameter]}"] = tensors
        return found

    def loaded(self) -> None:
        """Does nothing: a load fills the tensors, and ``load_values`` does the rest."""

    def before_next_update(self, action: Callable[[], None]) -> None:
        """Waits for the copies of an asynchronous save at once: the update of a custom loop is not known."""
        action()

    def forget_optimizers(self) -> None:
        """Empties the state of the optimizers, which a load has created and not filled."""
        for optimizer in self._optimizers.values():
            optimizer.state.clear()

    def values(self) -> dict[str, Any]:
        """Returns what is not a tensor, as JSON.

        Raises:
            UserError: a value has no JSON.
        """
        names = self._names()
        return {
            "optimizers": {
                name: {
                    "groups": [encoded(_options(group), name, WHERE) for group in optimizer.param_groups],
                    "state": {
                        names[parameter]: encoded(rest, name, WHERE)
                        for parameter in _parameters(optimizer)
                        if (rest := _plain_values(optimizer.state.get(parameter, {})))
                    },
                }
                for name, optimizer in self._optimizers.items()
            },
            "objects": {name: encoded(other.state_dict(), name, WHERE) for name, other in self._others.items()},
        }

    def load_values(self, values: Mapping[str, Any], with_optimizers: bool, forked: bool) -> list[str]:
        """Takes over ``values`` of a checkpoint, after its tensors were loaded.

        Args:
            forked: whether the checkpoint is one of another run, which may have had other optimizers and objects.

        Returns:
            In what they differ, each as a sentence. What the checkpoint lacks starts as it is.

        Raises:
            UserError: they differ, and this is not a fork.
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
                    _set_options(group, decoded(options, {}))
            for parameter, rest in saved["state"].items():
                optimizer.state[by_name[parameter]].update(decoded(rest, {}))
        for name, saved in values["objects"].items():
            if name in self._others:
                tensors = dict(tensors_in(self._loading.pop(name, {})))
                self._others[name].load_state_dict(decoded(saved, tensors))
        self.stored = None
        return changes

    def _changes(self, values: Mapping[str, Any]) -> list[str]:
        """Returns in what the optimizers and objects differ from those of a checkpoint."""
        found = []
        for kind, saved, now in (
            ("optimizer", values["optimizers"], self._optimizers),
            ("object", values["objects"], self._others),
        ):
            found += [f"the checkpoint has no {kind} {name}" for name in now if name not in saved]
            found += [f"the checkpoint has an {kind} {name}, which is not passed" for name in saved if name not in now]
        for name, optimizer in self._optimizers.items():
            before, after = len(values["optimizers"].get(name, {}).get("groups", ())), len(optimizer.param_groups)
            if name in values["optimizers"] and before != after:
                found.append(f"the optimizer {name} has {before} parameter groups in the checkpoint and {after} now")
        return found

    def _named(self, parts: Callable[[nn.Module], Iterator[tuple[str, Tensor]]]) -> Iterator[tuple[str, str, Tensor]]:
        for name, module in self._modules.items():
            for path, value in parts(_without_ddp(module)):
                yield name, _without_wrappers(path), value

    def _names(self) -> dict[Tensor, str]:
        return {value: f"{name}.{inner}" for name, inner, value in self._named(_own_parameters)}

    def _create_stored(self, name: str, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        """Makes ``optimizer`` create its state, as far as the checkpoint has it."""
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


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, inner in module.named_modules():
        for name, value in inner.named_buffers(recurse=False):
            if name not in inner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, value


def _without_wrappers(path: str) -> str:
    for prefix in WRAPPERS:
        path = path.replace(prefix, "")
    return path


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group of parameters, with the number in place of a learning rate in a tensor."""
    numbers = {key: value.item() for key, value in group.items() if isinstance(value, Tensor)}
    return {key: value for key, value in group.items() if key != "params"} | numbers


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value


def _plain_values(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}
