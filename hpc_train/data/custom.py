"""Reads the items of a user's dataset as samples, and builds micro-batches with a user's ``data.collate``.

The generators of Python, numpy and torch are seeded from seed, epoch and index before each item is read, so that a
random augmentation is the same after a restart and under any number of ranks and loader processes.

A collate function gets the list of the items of one micro-batch, in a loader process. Which samples share a micro-batch
depends on the number of ranks, so its result for an item should depend on that item alone. If it declares a parameter
``random``, it gets one numpy generator per item, which depends on seed, epoch and index only. At the first micro-batch
of each process the function is called twice, and results that differ are refused, since they would change after a
restart.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train.config.import_path import locate
from hpc_train.config.schema import CustomDataConfig, DataConfig, StreamDataConfig
from hpc_train.config.schema.data import OwnKeys
from hpc_train.data.dataset import IGNORED, Array, Batch, Dataset, Nested, Ragged, Sample, leaves, map_leaves
from hpc_train.data.images import generator
from hpc_train.data.sampler import mix
from hpc_train.errors import UserCodeError, UserError

OwnConfig = CustomDataConfig | StreamDataConfig
FORMS = "(inputs, targets), (inputs, targets, context), a dict with {inputs!r} and {targets!r}, or a Sample"


def build_custom(config: CustomDataConfig, split: str, seed: int) -> Dataset:
    """Calls ``_target_(split=split, **args)``.

    A ``Dataset`` is used unchanged. Any other object needs ``__len__`` and ``__getitem__``. Its items are arrays or
    tensors in one of these forms: (inputs, targets), (inputs, targets, context), a dict with ``data.inputs`` and
    ``data.targets``, or a ``Sample``. Raises UserError if the target cannot be imported or called, or its result has no
    random access.
    """
    built = call_target(config, split=split)
    if isinstance(built, Dataset):
        return built
    return CustomDataset(with_random_access(built, config._target_), config, seed)


def call_target(config: OwnConfig, **given: Any) -> Any:
    """Returns ``_target_(**args, **given)``. Raises UserError if the target cannot be imported, or does not take these
    arguments. Raises UserCodeError if the target raised an exception."""
    from hydra.utils import instantiate

    arguments = {**config.args, **given}
    call_text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    try:
        target = instantiate({**arguments, "_target_": config._target_, "_convert_": "all", "_partial_": True})
    except Exception as error:
        cause = error.__cause__ or error
        raise UserError(
            f"{config._target_} cannot be built: {type(cause).__name__}: {cause}",
            where="data._target_, data.args",
            fix="name package.module.ClassOrFunction, importable by the workers",
        ) from error
    try:
        return target.func(**target.keywords)
    except UserError:
        raise
    except Exception as error:
        frames = error.__traceback__
        if isinstance(error, TypeError) and frames is not None and frames.tb_next is None:  # the call itself failed
            raise UserError(
                f"{config._target_} cannot be called with {call_text}: {error}",
                where="data._target_, data.args",
                fix=f"declare the parameters: {_declaration(target.func, arguments)}; data.args holds the others",
            ) from error
        raise UserCodeError.of(f"{config._target_}({call_text}) failed", error) from None


def _declaration(target: Any, names: Iterable[str]) -> str:
    """Returns the first line of a function or constructor with the parameters ``names``."""
    if isinstance(target, type):
        return f"def __init__({', '.join(['self', *names])})"
    return f"def {getattr(target, '__name__', 'target')}({', '.join(names)})"


def with_random_access(built: Any, name: str) -> Any:
    """Returns ``built``; raises UserError if it has no ``__len__`` or ``__getitem__``."""
    if hasattr(built, "__len__") and hasattr(built, "__getitem__"):
        return built
    iterable = hasattr(built, "__iter__")
    raise UserError(
        f"{name} returned {type(built).__name__}, which has no random access",
        where="data._target_",
        fix="return an object with __len__ and __getitem__(index)"
        + (", or use data=stream, which reads iterables" if iterable else ""),
    )


class CustomDataset(Dataset):
    """Reads the items of a map-style dataset as samples.

    Items may differ in length if ``items`` has an attribute ``lengths`` with the number of tokens of each item. Raises
    UserError if ``lengths`` does not have one positive number for each item.

    Args:
        items: the user's dataset.
        config: names the keys of items that are dicts.
        seed: the seed of random augmentations.
        name: the class, for messages; None uses the class of ``items``.
    """

    def __init__(self, items: Any, config: OwnKeys, seed: int, name: str | None = None) -> None:
        if name is None:
            self._name = f"{type(items).__module__}.{type(items).__qualname__}"
        else:
            self._name = name
        self._items = items
        self._reads = ItemReader(config, self._name)
        self._seed = seed
        if getattr(items, "lengths", None) is not None:
            lengths = np.asarray(items.lengths)
            if lengths.shape != (len(items),) or lengths.dtype.kind not in "iu" or (lengths.size and lengths.min() < 1):
                raise UserError(
                    f"{type(items).__name__}.lengths has shape {lengths.shape} and begins with "
                    f"{lengths.ravel()[:3].tolist()}",
                    where="data._target_",
                    fix=f"set lengths to the number of tokens of each of the {len(items)} items, 1 or more",
                )
            self.lengths = lengths.astype(np.int64)

    def __len__(self) -> int:
        return len(self._items)

    def sample(self, index: int, epoch: int) -> Sample:
        return self._reads.sample(self.item(index, epoch), self.describe(index))

    def item(self, index: int, epoch: int) -> Any:
        with seeded_generators(self._seed, epoch, index):
            return self._items[index]

    def source(self, index: int) -> str:
        return self._name


class ItemReader:
    """Converts the items of a user's class, which messages call ``name``, to samples."""

    def __init__(self, config: OwnKeys, name: str) -> None:
        self._inputs = config.inputs
        self._targets = config.targets
        self._name = name

    def sample(self, item: Any, which: str) -> Sample:
        """Returns ``item``, which messages call ``which``, as a sample. Raises UserError if the item has no supported
        form, or a value does not consist of numbers."""
        if isinstance(item, Sample):
            return item
        inputs, targets, context = parts_of(item, self._inputs, self._targets, which)
        arrays = {name: self._array(value, f"context {name!r}", which) for name, value in context.items()}
        return Sample(self._array(inputs, "inputs", which), self._array(targets, "targets", which), arrays)

    def _array(self, value: Any, part: str, which: str) -> Array:
        try:
            return as_array(value)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{which}: {part} is {described(value)}: {error}",
                where="data._target_",
                fix=f"return numbers, numpy arrays or tensors from {self._name}, or convert the items in data.collate",
            ) from None


def parts_of(item: Any, inputs: str, targets: str, which: str) -> tuple[Any, Any, Mapping[str, Any]]:
    """Returns inputs, targets and context of an item or batch; raises UserError if it has no supported form."""
    if isinstance(item, Mapping) and {inputs, targets} <= set(item):
        return item[inputs], item[targets], {name: item[name] for name in item if name not in (inputs, targets)}
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1], {}
    if isinstance(item, tuple | list) and len(item) == 3 and isinstance(item[2], Mapping):
        return item[0], item[1], item[2]
    keys = []
    if isinstance(item, Mapping):
        keys = [name for name in item if isinstance(name, str)]
    fix = f"return {FORMS.format(inputs=inputs, targets=targets)}"
    if len(keys) > 1:
        fix += f", or name its keys: data.inputs={keys[0]} data.targets={keys[1]}"
    raise UserError(f"{which} is {described(item)}", where="data._target_, data.inputs, data.targets", fix=fix)


def described(value: Any) -> str:
    """Returns the type of ``value`` with its shape, keys or length, for messages."""
    name = f"a {type(value).__name__}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{name} of shape {list(value.shape)} and dtype {value.dtype}"
    if isinstance(value, Mapping):
        return f"{name} with the keys {', '.join(map(repr, value)) or 'none'}"
    if isinstance(value, tuple | list):
        return f"{name} of {len(value)} elements"
    return f"{name}, {value!r:.40}"


def as_array(value: Any) -> Array:
    """Returns ``value`` as a numpy array; Python floats become float32, the dtype of models; raises TypeError or
    ValueError if it is not a regular array of numbers."""
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    if array.dtype.kind not in "biufc":
        raise TypeError("these are not numbers")
    if array.dtype == np.float64 and not hasattr(value, "dtype"):
        return array.astype(np.float32)
    return array


@contextmanager
def seeded_generators(*numbers: int) -> Iterator[None]:
    """Seeds the global generators of Python, numpy and torch from ``numbers`` and restores their states afterwards."""
    before = random.getstate(), np.random.get_state(), torch.random.default_generator.get_state()
    seed = 0
    for number in numbers:
        seed = mix(seed ^ (number & 0xFFFFFFFFFFFFFFFF))
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.random.default_generator.manual_seed(seed >> 1)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.random.default_generator.set_state(before[2])


RANDOM = "random"  # the parameter of a user's function that gets the generators
_COLLATE = 0xC0114  # part of each seed, so that the random numbers are independent of those of the items


def load_collate(config: DataConfig, seed: int) -> Collate:
    """Imports ``data.collate``; raises UserError if it cannot be imported or called."""
    assert config.collate is not None
    function = locate(config.collate, "data.collate")
    names = getattr(config, "inputs", "inputs"), getattr(config, "targets", "targets")
    return Collate(function, config.collate, names, seed)


class Collate:
    """Builds micro-batches with ``function``, whose import path is ``name``. A batch that is a dict holds inputs and
    targets under the keys ``names``. The random generators of the items derive from ``seed``."""

    def __init__(self, function: Callable[..., Any], name: str, names: tuple[str, str], seed: int) -> None:
        self._function = function
        self._name = name
        self._names = names
        self._seed = seed
        self._takes_random = RANDOM in _parameters(function)
        self._verified = False

    def __call__(self, dataset: Dataset, items: Sequence[Any], indices: Sequence[int], epoch: int, size: int) -> Batch:
        """Returns the micro-batch of ``items``, which have ``indices`` in the dataset, padded to ``size`` samples.

        Without indices, all samples are padding, for which the only item is the template. Raises UserError if the
        function does not return a batch of these items, or returns a different one each time. Raises UserCodeError if
        the function raised an exception.
        """
        described_indices = indices or [0]
        listed = " to ".join(map(dataset.describe, dict.fromkeys((described_indices[0], described_indices[-1]))))
        which = f"{self._name}, called with {len(items)} items ({listed}),"
        batch = self._built(items, described_indices, epoch, which)
        if not self._verified:
            self._verified = True
            other = self._built(items, described_indices, epoch, which)
            first_tensors, second_tensors = (
                [*_contents((built.inputs, built.targets, built.context), set())] for built in (batch, other)
            )
            if len(first_tensors) != len(second_tensors) or not all(
                first.shape == second.shape and first.dtype == second.dtype and torch.equal(_bits(first), _bits(second))
                for first, second in zip(first_tensors, second_tensors, strict=True)
            ):
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


def _contents(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yields the tensors and arrays in ``value``, including attributes of objects."""
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
    """Returns the number of targets that count: in the first of several tensors of targets, or for a ``Ragged`` the
    number of its items."""
    if isinstance(targets, Ragged):
        return targets.items
    return int((next(leaves(targets)) != IGNORED).sum())
