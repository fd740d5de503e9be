"""Builds micro-batches with a user's function, and checks what it returns.

The function gets the list of the items of one micro-batch, in a loader process. Which samples share a micro-batch
depends on the number of ranks, so what it makes of an item should depend on that item alone. For random numbers it may
declare a parameter ``random``: it then gets one numpy generator per item, which depends on seed, epoch and index only.
The global generators are seeded from the samples of the micro-batch. At the first micro-batch of each process the
function is called twice, and results that differ are refused, since they would change after a restart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train.config.schema import DataConfig
from hpc_train.data.custom import FORMS, as_array, described, parts_of, seeded_generators
from hpc_train.data.dataset import IGNORED, Batch, Dataset, Nested, Ragged, leaves, map_leaves
from hpc_train.data.images import generator
from hpc_train.errors import UserCodeError, UserError

RANDOM = "random"  # the parameter of a user's function that gets the generators
_COLLATE = 0xC0114  # in all seeds, so that the numbers are independent of those that made the items


def load_collate(config: DataConfig, seed: int) -> Collate:
    """Imports ``data.collate``.

    Raises:
        UserError: it cannot be imported or called.
    """
    from hydra.utils import instantiate

    assert config.collate is not None
    try:
        function = instantiate({"_target_": config.collate, "_partial_": True}).func
    except Exception as error:
        cause = error.__cause__ or error
        raise UserError(
            f"{config.collate} cannot be imported: {type(cause).__name__}: {cause}",
            where="data.collate",
            fix="data.collate=package.module.function, importable by the workers",
        ) from error
    names = getattr(config, "inputs", "inputs"), getattr(config, "targets", "targets")
    return Collate(function, config.collate, names, seed)


class Collate:
    """Builds micro-batches with ``function``.

    Args:
        name: the import path of the function, for messages.
        names: the keys of inputs and targets in a batch that is a dict.
        seed: the seed of the random numbers.
    """

    def __init__(self, function: Callable[..., Any], name: str, names: tuple[str, str], seed: int) -> None:
        self._function = function
        self._name = name
        self._names = names
        self._seed = seed
        self._takes_random = RANDOM in _parameters(function)
        self._verified = False

    def __call__(self, dataset: Dataset, items: Sequence[Any], indices: Sequence[int], epoch: int, size: int) -> Batch:
        """Returns the micro-batch of ``items``, with padding up to ``size`` samples.

        Args:
            indices: the indices of the items.
            size: the number of samples of the micro-batch; with no ``indices`` all of them are padding, for which the
                only item is the template.

        Raises:
            UserError: the function does not return a batch of these items, or returns another one each time.
            UserCodeError: the function raised an exception.
        """
        described_indices = indices or [0]
        which = f"{self._name}, called with {len(items)} items ({_listed(dataset, described_indices)}),"
        batch = self._built(items, described_indices, epoch, which)
        if not self._verified:
            self._verified = True
            if not _equal(batch, self._built(items, described_indices, epoch, which)):
                raise UserError(
                    f"{which} returned two different batches for the same items",
                    where="data.collate",
                    fix="use the items alone, and draw random numbers from a parameter `random`, which holds one numpy "
                    "generator per item",
                )
        if isinstance(batch.inputs, Ragged):
            ragged = replace(batch.inputs, items=len(indices))
            return Batch(ragged, ragged)
        return _padded(batch, len(indices), size)

    def _built(self, items: Sequence[Any], indices: Sequence[int], epoch: int, which: str) -> Batch:
        extra = {}
        if self._takes_random:
            extra[RANDOM] = [generator(self._seed, epoch, index, _COLLATE) for index in indices]
        with seeded_generators(_COLLATE, self._seed, epoch, *indices):
            try:
                built = self._function(list(items), **extra)
            except UserError:
                raise
            except Exception as error:
                raise UserCodeError.of(which + " failed", error) from None
        if isinstance(built, Ragged):
            same = built if built.targets is not None else replace(built, targets=built.inputs)
            return Batch(same, same)
        if isinstance(built, Batch):
            parts: tuple[Any, Any, Mapping[str, Any]] = (built.inputs, built.targets, built.context)
        elif isinstance(built, tuple | list | Mapping):
            parts = parts_of(built, *self._names, f"{which} returned a batch that")
        else:
            raise UserError(
                f"{which} returned {described(built)}",
                where="data.collate",
                fix=f"return {FORMS.format(inputs=self._names[0], targets=self._names[1])[: -len(', or a Sample')]}",
            )
        inputs, targets, context = (self._tensors(part, len(items), which) for part in parts)
        return Batch(inputs, map_leaves(_wide, targets), context)

    def _tensors(self, value: Any, items: int, which: str, path: str = "") -> Nested:
        """Returns ``value`` with tensors in place of arrays; raises UserError for anything else."""
        if isinstance(value, Mapping):
            return {name: self._tensors(item, items, which, f"{path}[{name!r}]") for name, item in value.items()}
        try:
            if isinstance(value, Tensor):
                tensor = value.detach()
            else:
                tensor = torch.from_numpy(as_array(value))
        except (TypeError, ValueError) as error:
            tensor = None
            problem = str(error)
        if tensor is not None and tensor.shape[:1] == (items,):
            return tensor
        if tensor is not None:
            problem = f"but needs one row for each of the {items} items"
        raise UserError(
            f"{which} returned {described(value)}{f' at {path}' if path else ''}: {problem}",
            where="data.collate",
            fix=f"return tensors or arrays of shape [{items}, ...], in dicts or not; or, for batches without one row "
            "per item, hpc_train.data.dataset.Ragged(inputs, targets)",
        )


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin
        return set()


def _listed(dataset: Dataset, indices: Sequence[int]) -> str:
    first = dataset.describe(indices[0])
    if len(indices) == 1:
        return first
    return f"{first} to {dataset.describe(indices[-1])}"


def _equal(first_batch: Batch, other: Batch) -> bool:
    mine, others = ([*_contents((batch.inputs, batch.targets, batch.context), set())] for batch in (first_batch, other))
    return len(mine) == len(others) and all(
        first.shape == second.shape and first.dtype == second.dtype and torch.equal(_bits(first), _bits(second))
        for first, second in zip(mine, others, strict=True)
    )


def _contents(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yields the tensors and arrays in ``value``, also those that objects have as attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        yield torch.from_numpy(np.ascontiguousarray(value))
    elif id(value) not in seen and not isinstance(value, type | str | bytes):
        seen.add(id(value))
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, tuple | list):
            inner = value
        for member in (*inner, *getattr(value, "__dict__", {}).values()):
            yield from _contents(member, seen)


def _bits(value: Tensor) -> Tensor:
    """Returns ``value`` without NaN, which equals nothing."""
    if value.is_floating_point():
        return value.nan_to_num(nan=0.5)
    return value


def _wide(targets: Tensor) -> Tensor:
    """Converts integers to int64, so that ``IGNORED`` can be represented."""
    if targets.is_floating_point() or targets.is_complex():
        return targets
    return targets.to(torch.int64)


def _padded(batch: Batch, count: int, size: int) -> Batch:
    """Returns ``batch`` with ``size`` rows; those from ``count`` on are copies of the first one without targets."""

    def fill(value: Tensor) -> Tensor:
        return torch.cat((value[:count], value[:1].expand(size - count, *value.shape[1:])))

    def ignore(value: Tensor) -> Tensor:
        return torch.cat((value[:count], torch.full_like(value[:1], IGNORED).expand(size - count, *value.shape[1:])))

    if count == size:
        return batch
    return Batch(map_leaves(fill, batch.inputs), map_leaves(ignore, batch.targets), map_leaves(fill, batch.context))


def target_count(targets: Nested) -> int:
    """Returns the number of targets that count; of several tensors of targets, those of the first; of a ``Ragged`` its
    items."""
    if isinstance(targets, Ragged):
        return targets.items
    return int((next(leaves(targets)) != IGNORED).sum())
