"""Restores the state that a pass through a model changes besides its parameters: random state, buffers and plain
attributes."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.checkpoint.extra_state import kept_extra_state
from hpc_train.models.build import OF_TORCH, elements, held_by, is_object
from hpc_train.models.model import canonical_name
from hpc_train.models.wrapped import WrappedModel, all_modules
from hpc_train.parallel.writes import checksum


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_CONTAINERS = (OrderedDict, dict, list, set, deque)
_GENERATORS: dict[
    Any, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]
] = {  # functions that get and set the state
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (lambda generator: generator.bit_generator.state, _set_bits),
}


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restores the default generators of Python, numpy, torch and ``device`` after the context."""
    drawn_by_python = random.getstate()
    drawn_by_numpy = np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(drawn_by_python)
            np.random.set_state(drawn_by_numpy)


def drawn(device: torch.device) -> str:
    """Returns a hash of the states of the default generators. It changes when a number is drawn."""
    states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return hashlib.sha256(pickle.dumps(states)).hexdigest()


@contextmanager
def kept_state(parts: Sequence[nn.Module], *, attributes: bool = True) -> Iterator[None]:
    """Restores the buffers of all modules after the context.

    Args:
        attributes: whether to also restore attributes of modules that are plain values, tensors, arrays or random
            number generators, including those in containers and in objects of users' classes; the tensors of modules
            that are not registered; and the extra state in state dicts. New attributes of these kinds are removed.
    """
    modules = [module for part in parts for module in all_modules(part)]
    saved = [(module._buffers, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    namespaces: list[dict[str, Any]] = []
    inner: list[Any] = []
    if attributes:
        namespaces = [vars(module) for module in modules]
        inner = [*held_by(modules)]
    names = [frozenset(namespace) for namespace in namespaces]
    for namespace in namespaces:
        saved += [
            (namespace, name, value) for name, value in namespace.items() if name not in OF_TORCH and _is_kept(value)
        ]
    restorers = [restorer for value in inner if (restorer := _restorer(value)) is not None]
    tensors = {id(value): value for value in (*(value for _, _, value in saved), *inner) if _is_changeable(value)}
    # this includes modules that are in a list or an object in ``modules``, such as a teacher
    registered = {id(value) for module in modules for value in (module, *module.parameters(), *module.buffers())}
    for value in inner:
        if isinstance(value, nn.Module) and id(value) not in registered:
            hidden = (*value.parameters(), *value.buffers())
            tensors |= {id(tensor): tensor for tensor in hidden if id(tensor) not in registered}
    copies = [tensor.detach().clone() for tensor in tensors.values()]
    try:
        with kept_extra_state(parts) if attributes else nullcontext():
            yield
    finally:
        for namespace, before in zip(namespaces, names, strict=True):
            for name in [name for name in namespace if name not in before]:
                if _is_kept(namespace[name]):
                    del namespace[name]
        for namespace, name, value in saved:
            namespace[name] = value
        for restore in restorers:
            restore()
        with torch.no_grad():
            for tensor, values in zip(tensors.values(), copies, strict=True):
                tensor.copy_(values)


def _is_kept(value: Any) -> bool:
    plain = (bool, int, float, str, tuple, Tensor, type(None))
    return isinstance(value, (*plain, *_CONTAINERS, *_GENERATORS, np.ndarray)) or is_object(value)


def _is_changeable(value: Any) -> bool:
    """Returns whether ``value`` is a tensor that neither an optimizer nor FSDP manages."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter | DTensor)


def _restorer(value: Any) -> Callable[[], object] | None:
    """Returns a function that restores the present content of a container, an array or a generator."""
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy()) if value.flags.writeable else None
    for generator, (get_state, set_state) in _GENERATORS.items():
        if isinstance(value, generator):
            return partial(set_state, value, get_state(value))
    for kind in _CONTAINERS:
        if isinstance(value, kind):
            content = elements(value)
            if any(isinstance(element, nn.Parameter) for element in content):  # FSDP replaces parameters
                return None
            if issubclass(kind, dict):
                content = [*dict.items(cast(dict[Any, Any], value))]
            return partial(_refill, value, kind, content)
    return None


def _refill(container: Any, kind: Any, content: list[Any]) -> None:
    kind.clear(container)
    if issubclass(kind, list | deque):
        kind.extend(container, content)
    else:
        kind.update(container, content)


@contextmanager
def kept_parameters(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restores the parameters to which a forward pass has written. Meanwhile, host memory has copies of all.

    Args:
        parameters: the parameters of the engine, i.e. the shards, even if FSDP has replaced them for a pass.
    """
    copies = []
    for parameter in parameters:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
        copies.append((local, checksum(local), local.detach().to("cpu", copy=True)))
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before, copy in copies:
                if checksum(tensor) != before:
                    tensor.copy_(copy)


def plain_attributes(parts: Sequence[nn.Module]) -> dict[str, Any]:
    """Returns name -> a copy of the attributes of all modules that ``kept_state`` restores.

    Modules that define the contents of their state themselves are left out.
    """
    methods = ("get_extra_state", "_save_to_state_dict", "state_dict")
    attributes: dict[str, Any] = {}
    for part in parts:
        of_user = part.bare if isinstance(part, WrappedModel) else part
        for prefix, module in (*part.named_modules(), ("", of_user)):
            overrides = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in methods)
            if overrides or module._state_dict_hooks or module._state_dict_pre_hooks:
                continue
            for name, value in vars(module).items():
                if name not in OF_TORCH and _is_kept(value):
                    attributes[canonical_name(f"{prefix}.{name}" if prefix else name)] = _copied(value)
    return attributes


def _copied(value: Any, depth: int = 8) -> Any:
    """Returns a copy for comparisons: a tensor, a plain value, or a tuple of the copies of the elements of a container
    or object."""
    if _is_changeable(value):
        return value.detach().clone()
    for generator, (get_state, _) in _GENERATORS.items():
        if isinstance(value, generator):
            return _copied(get_state(value))
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, (tuple, *_CONTAINERS)) or is_object(value):
        names = [*dict.keys(value)] if isinstance(value, dict) else []
        return (*names, *(_copied(element, depth - 1) for element in elements(value))) if depth else ()
    return value if isinstance(value, bool | int | float | str) else None


def changed_attributes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns the names of the attributes that are new or whose values differ."""
    return [name for name, value in after.items() if name not in before or not _same(before[name], value)]


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.is_meta or second.is_meta:  # without values, such as constants of a model that was built on meta
            return True
        return first.shape == second.shape and first.dtype == second.dtype and bool(torch.equal(first, second))
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return False
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)
