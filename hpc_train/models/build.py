"""Builds the model of a config: a ``Model`` on the ``meta`` device, or a wrapped module with its values."""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.extensions import family_of
from hpc_train.config.import_path import locate
from hpc_train.config.schema import CustomModelConfig, HFModelConfig, ModelConfig
from hpc_train.errors import UserError
from hpc_train.models.batch_norm import convert, is_synchronized
from hpc_train.models.hf.loss import refuse_unless
from hpc_train.models.model import Model, check_parts
from hpc_train.models.wrapped import WrappedModel

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def build_model(config: ModelConfig, seed: int, values: bool = True) -> Model | WrappedModel:
    """Builds the model that ``config`` describes.

    A ``Model`` and a model of transformers are built on the ``meta`` device, since they are split and sharded before
    they get memory and values. Any other module is built on the CPU and wrapped. Its constructor draws the values from
    ``seed``, so they are the same on every rank. The random state of the process does not change. Without ``values``, a
    user's module is built on ``meta`` if its constructor permits this. Raises UserError if the sizes do not fit
    together, ``_target_`` cannot be imported or called, or a ``Model`` is not complete.
    """
    build = locate(family_of(config).builder, "model.kind")
    if isinstance(config, CustomModelConfig):
        built: Model | WrappedModel = build(config, seed, values)
        if isinstance(built, Model):
            check_parts(built, "model._target_")
        return built
    with torch.device("meta"):
        model = build(config)
    if isinstance(model, WrappedModel) and isinstance(config, HFModelConfig):
        return model
    if not isinstance(model, Model):
        raise UserError(
            f"the builder of model kind {config.kind} returned {type(model).__name__}, not a Model",
            where=family_of(config).builder,
            fix="a class derived from hpc_train.models.model.Model, or a function that returns one",
        )
    check_parts(model, family_of(config).builder)
    model.family = config.kind
    model.config = config
    return model


def build_custom(config: CustomModelConfig, seed: int, values: bool = True) -> Model | WrappedModel:
    """Calls ``_target_`` and wraps the result if it is not a ``Model``; see ``build_model``."""
    target = locate(config._target_, "model._target_")
    if isinstance(target, type) and issubclass(target, Model):
        return _in_parts(target, config)
    built = None if values else _without_values(target, config)
    if built is None:
        with torch.random.fork_rng(devices=()), torch.device("cpu"):
            torch.manual_seed(seed)
            built = _call(target, config)
    if isinstance(built, Model):  # the target is a function that returns a Model
        return _in_parts(target, config)
    if not isinstance(built, nn.Module):
        raise UserError(
            f"{config._target_} returned {type(built).__name__}, not an nn.Module",
            where="model._target_",
            fix="a class or function that returns an nn.Module",
        )
    if not callable(getattr(built, "loss", None)):
        refuse_unless(built, config.loss)
    class_dim = config.class_dim if config.loss == "cross_entropy" else "auto"
    return WrappedModel(_with_statistics(built, config), config.loss, config.wrap, class_dim)


def _with_statistics(built: AnyModule, config: CustomModelConfig) -> AnyModule:
    """Returns the module with the batch normalizations that ``model.sync_batch_norm`` requests."""
    if config.sync_batch_norm:
        return cast(AnyModule, convert(built))
    if not is_synchronized(built) and dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0:
        warnings.warn(
            "each rank computes batch statistics from its own micro-batch, so results depend on the number of "
            "ranks; model.sync_batch_norm=true computes them over all ranks",
            stacklevel=2,
        )
    return built


def _without_values(target: Callable[..., Any], config: CustomModelConfig) -> nn.Module | None:
    """Returns the module on ``meta``. Returns None if its constructor reads values, or if the module holds tensors that
    are neither parameters nor buffers, or modules that are not registered, including those in lists, dicts and
    objects."""
    try:
        with torch.device("meta"):
            built = target(**config.args)
    except Exception:  # the build on the CPU reports an error that is not due to meta
        return None
    if not isinstance(built, nn.Module) or any(
        not tensor.is_meta for tensor in (*built.parameters(), *built.buffers())
    ):
        return None
    registered = {id(value) for value in (*built.modules(), *built.parameters(), *built.buffers())}
    held = (value for value in held_by(built.modules()) if isinstance(value, torch.Tensor | nn.Module))
    if all(id(value) in registered for value in held):
        return built
    return None


def _in_parts(target: Callable[..., Any], config: CustomModelConfig) -> Model:
    """Builds a ``Model`` on ``meta``; raises UserError if a key of the config applies only to modules without the three
    parts."""
    default = CustomModelConfig(_target_=config._target_)
    for key, behavior in (("loss", "computes the loss in its head"), ("wrap", "is divided into its layers")):
        if getattr(config, key) != getattr(default, key):
            raise UserError(
                f"{config._target_} is a Model, which {behavior}, so model.{key} has no effect",
                where=f"model.{key}",
                fix=f"remove model.{key}",
            )
    with torch.device("meta"):
        return _with_statistics(_call(target, config), config)


def _call(target: Callable[..., Any], config: CustomModelConfig) -> Any:
    try:
        return target(**config.args)
    except UserError:
        raise
    except Exception as error:
        where = "model.args"
        fix = f"change model.args, which are {dict(config.args)}"
        place = _raised_in(error)
        if place:
            where = f"model.args, {place}"
            fix = f"correct {place}, or {fix}"
        raise UserError(
            f"{config._target_} could not be built: {type(error).__name__}: {error}",
            where=where,
            fix=fix,
        ) from error


def _raised_in(error: Exception) -> str:
    """Returns the last line of the file of the target that ``error`` has left, such as ``net.py:14``.

    It is empty if the call itself has failed, or if the target is not custom code.
    """
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the frame of ``_call``
    if not frames or re.search(r"/(site|dist)-packages/", frames[0].filename):
        return ""
    line = next(frame.lineno for frame in reversed(frames) if frame.filename == frames[0].filename)
    return f"{Path(frames[0].filename).name}:{line}"


OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module, such as its parameters
_SEQUENCES: tuple[Any, ...] = (list, tuple, set, deque)
_SCALARS = (bool, int, float, str, bytes, type(None))
_LIBRARIES = frozenset(("hpc_train", "torch", *sys.stdlib_module_names))


def held_by(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yields the attributes of ``modules`` and the contents of their containers and objects, each value once.

    Numbers and texts are left out. Modules are yielded but not entered.
    """
    seen: dict[int, Any] = {}
    left = [value for module in modules for name, value in vars(module).items() if name not in OF_TORCH]
    while left:
        value = left.pop()
        if not isinstance(value, _SCALARS) and id(value) not in seen:
            seen[id(value)] = value
            yield value
            left += elements(value)


def elements(value: Any) -> list[Any]:
    """Returns the elements of a container, or the dict of an object's attributes; an empty list for any other value."""
    if isinstance(value, dict):
        return [*dict.values(value)]
    for kind in _SEQUENCES:
        if isinstance(value, kind):
            return [*kind.__iter__(value)]
    if is_object(value):
        return [vars(value)]
    return []


def is_object(value: Any) -> bool:
    """Returns whether ``value`` has attributes and its class is not in an installed package.

    Objects of packages are not entered, since they may represent files, threads or device memory.
    """
    if isinstance(value, SimpleNamespace | UserDict | UserList):
        return True
    if isinstance(value, type | nn.Module | Tensor) or not hasattr(value, "__dict__"):
        return False
    module = type(value).__module__
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] not in _LIBRARIES and not re.search(r"/(site|dist)-packages/", file)
