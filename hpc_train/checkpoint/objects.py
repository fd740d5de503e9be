"""Maps the state of named objects, such as modules and optimizers, to the tensors and values of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpc_train.checkpoint.extra_state import decoded, digest, encoded, tensors_in
from hpc_train.checkpoint.state import TensorShape
from hpc_train.errors import UserError

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # prefixes of torch.compile and of activation checkpointing


class Stateful(Protocol):
    """An object with a state, such as a learning rate schedule. The state is equal on all ranks."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


Registered = nn.Module | torch.optim.Optimizer | Tensor | dict[str, Any] | torch.Generator | Stateful


class _Values:
    """Holds a dict, which a load updates in place."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return self._values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values.clear()
        self._values.update(state)


class _RandomState:
    """Holds a random generator of torch."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["state"])


class ObjectState:
    """Presents the registered objects to ``CheckpointManager`` like a model and its optimizer.

    Tensors have names as in the checkpoints of the trainer: ``model.OBJECT.NAME`` for parameters and persistent
    buffers, and ``optim.OBJECT.NAME.KEY`` for the state of an optimizer. NAME is the name of the parameter in its
    module, without the prefixes of wrappers, so a checkpoint of a replicated module loads into a sharded module. All
    other values are JSON in the manifest, so loading them does not run code.

    Args:
        where: the call that passes the objects, for messages.
        fix: what to do if a checkpoint has other objects.

    Attributes:
        stored: the names of the tensors in the checkpoint that is being loaded; None outside of a load.
    """

    def __init__(self, where: str, fix: str) -> None:
        self._where = where
        self._fix = fix
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
                if any(isinstance(part, FullyShardedDataParallel) for part in value.modules()):
                    what = f"{name} is wrapped in FullyShardedDataParallel, whose shards have no global names"
                    raise UserError(what, where=self._where, fix="torch.distributed.fsdp.fully_shard (FSDP2)")
                if any(parameter.is_meta for parameter in value.parameters()):
                    what = f"{name} has parameters on the meta device, which have no values"
                    raise UserError(what, where=self._where, fix=f"{name}.to_empty(device=...) before")
            elif isinstance(value, torch.optim.Optimizer):
                self._optimizers[name] = value
            elif isinstance(value, Tensor):
                self._tensors[name] = value
            elif isinstance(value, dict):
                self._others[name] = _Values(value)
            elif isinstance(value, torch.Generator):
                self._others[name] = _RandomState(value)
            elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                self._others[name] = value
            else:
                fix = "a module, an optimizer, a tensor, a dict, or an object with state_dict and load_state_dict"
                raise UserError(f"{name} is a {type(value).__name__}, which has no state", where=self._where, fix=fix)
        names = self._names()
        for name, optimizer in self._optimizers.items():
            if any(parameter not in names for parameter in _parameters(optimizer)):
                what = f"the optimizer {name} has a parameter that is in no registered module"
                raise UserError(what, where=self._where, fix="pass all modules that it optimizes, e.g. model=model")

    @property
    def is_used(self) -> bool:
        """Returns whether anything is registered."""
        return bool(self._modules or self._optimizers or self._tensors or self._others)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Returns the registered modules as children of one module, by their names."""
        root = nn.Module()
        root._modules.update({name: _without_ddp(module) for name, module in self._modules.items()})
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
            groups = [encoded(_options(group), name, self._where) for group in optimizer.param_groups]
            states = {}
            for parameter in _parameters(optimizer):
                state = optimizer.state.get(parameter, {})
                numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
                if numbers:
                    states[names[parameter]] = encoded(numbers, name, self._where)
            optimizers[name] = {"groups": groups, "state": states}
        objects = {name: encoded(other.state_dict(), name, self._where) for name, other in self._others.items()}
        return {"optimizers": optimizers, "objects": objects}

    def digests(self) -> dict[str, str]:
        """Returns a hash of the state of each object, without the tensors of modules and optimizers and DTensors, to
        compare ranks.
        """
        values = self.values()
        digests = {name: digest(json.dumps(value).encode(), ()) for name, value in values["optimizers"].items()}
        for name, value in values["objects"].items():
            tensors = [tensor for _, tensor in tensors_in(self._others[name].state_dict())]
            replicated = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
            digests[name] = digest(json.dumps(value).encode(), replicated)
        return digests

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
            raise UserError("; ".join(changes), where=self._where, fix=self._fix)
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
