"""Restores what a pass through a model changes beside its parameters: random state, buffers and plain attributes."""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.checkpoint.extra_state import kept_extra_state
from hpc_train.models.model import canonical_name
from hpc_train.models.modes import all_modules
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.writes import checksum

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module, such as ``training``
_CONTAINERS = frozenset((list, dict, set, deque, OrderedDict, defaultdict, Counter))


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restores the default generators of Python, numpy, torch and ``device``."""
    drawn_by_python, drawn_by_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(drawn_by_python)
            np.random.set_state(drawn_by_numpy)


def drawn(device: torch.device) -> str:
    """Returns a hash of the states of these generators, which changes when a number is drawn."""
    states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return hashlib.sha256(pickle.dumps(states)).hexdigest()


@contextmanager
def kept_state(parts: Sequence[nn.Module], *, attributes: bool = True) -> Iterator[None]:
    """Restores the buffers of all modules.

    Args:
        attributes: whether to restore as well their attributes that are tensors, plain values or containers of them,
            and what their state dicts have beyond parameters and buffers. New attributes of these kinds are removed.
    """
    modules = [module for part in parts for module in all_modules(part)]
    kept = [(module._buffers, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    of_modules = [vars(module) for module in modules] if attributes else []
    names = [frozenset(held) for held in of_modules]
    containers: dict[int, Any] = {}
    for held in of_modules:
        for name, value in held.items():
            if name not in _OF_TORCH:
                _add_containers(value, containers)
            if _is_plain(value) or id(value) in containers:
                kept.append((held, name, value))
    contents = [(container, copy.copy(container)) for container in containers.values()]
    tensors = [value for _, _, value in kept if isinstance(value, Tensor)]
    tensors += [value for container in containers.values() for value in _values(container) if isinstance(value, Tensor)]
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        with kept_extra_state(parts) if attributes else nullcontext():
            yield
    finally:
        for held, before in zip(of_modules, names, strict=True):
            for name in [name for name in held if name not in before]:
                if _is_plain(held[name]) or type(held[name]) in _CONTAINERS:
                    del held[name]
        for holder, name, value in kept:
            holder[name] = value
        for container, content in contents:
            _refill(container, content)
        with torch.no_grad():
            for tensor, values in zip(tensors, copies, strict=True):
                tensor.copy_(values)


def _add_containers(value: Any, found: dict[int, Any]) -> None:
    """Adds ``value`` and the containers in it to ``found``, except those of parameters and modules, which torch and
    FSDP exchange."""
    if type(value) not in _CONTAINERS or id(value) in found:
        return
    values = _values(value)
    if not any(isinstance(each, nn.Parameter | nn.Module) for each in values):
        found[id(value)] = value
    for each in values:
        _add_containers(each, found)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    else:
        container.update(content)


def _values(container: Any) -> list[Any]:
    return [*(container.values() if isinstance(container, dict) else container)]


@contextmanager
def kept_parameters(held: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restores the parameters to which a forward pass has written; copies of all of them are in host memory.

    Args:
        held: those of the engine: the shards, also where FSDP has replaced them for a pass.
    """
    local = [each.to_local() if isinstance(each, DTensor) else each.detach() for each in held]
    copies = [(tensor, checksum(tensor), tensor.detach().to("cpu", copy=True)) for tensor in local]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before, copy in copies:
                if checksum(tensor) != before:
                    tensor.copy_(copy)


def plain_attributes(parts: Sequence[nn.Module]) -> dict[str, Any]:
    """Returns name -> value of the attributes of all modules that are tensors or plain values; tensors are copies.

    Modules that decide themselves what their state contains are left out.
    """
    found: dict[str, Any] = {}
    for part in parts:
        users = part.bare if isinstance(part, WrappedModel) else part
        for prefix, module in (*part.named_modules(), ("", users)):
            if _saves_more(module):
                continue
            for name, value in vars(module).items():
                if name not in _OF_TORCH and _is_plain(value):
                    kept = value.detach().clone() if isinstance(value, Tensor) else value
                    found[canonical_name(f"{prefix}.{name}" if prefix else name)] = kept
    return found


def changed_attributes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the names of the attributes whose values differ, or are new."""
    return [name for name, value in after.items() if name not in before or not _same(before[name], value)]


def _saves_more(module: nn.Module) -> bool:
    methods = ("get_extra_state", "_save_to_state_dict", "state_dict")
    overrides = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in methods)
    return overrides or bool(module._state_dict_hooks or module._state_dict_pre_hooks)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple | Tensor | None)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.is_meta or other.is_meta:  # without values, as constants of a model that was built on meta
            return True
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    try:
        return bool(one == other)
    except Exception:  # a tuple of tensors
        return True
