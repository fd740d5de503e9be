"""Builds the dataset of a config: a built-in source, synthetic samples, or a user's object with random access."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpc_train.config.extensions import source_of
from hpc_train.config.schema import CustomDataConfig, DataConfig, SyntheticDataConfig, TextDataConfig, TokensDataConfig
from hpc_train.data.dataset import SPLITS, Array, Dataset, Indices, Sample, next_token_sample
from hpc_train.data.images import generator
from hpc_train.data.text import TextDataset
from hpc_train.data.tokens import PackedDataset, TokensDataset
from hpc_train.errors import UserError


def build_dataset(config: DataConfig, split: str, seed: int) -> Dataset:
    """Builds the ``train`` or ``validation`` split that ``config`` describes.

    Args:
        seed: the seed of augmentations and synthetic samples; the order of the samples comes from the sampler.

    Raises:
        UserError: the input is missing, empty or damaged, or it does not match the config.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, not one of {SPLITS}")
    module, _, name = source_of(config).builder.partition(":")
    try:
        build = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"the builder of data kind {config.kind} cannot be imported: {type(error).__name__}: {error}",
            where="data.kind",
            fix="use package.module:NAME that the workers can import",
        ) from error
    return as_dataset(build(config, split, seed), config.kind)


def build_text(config: TextDataConfig, split: str, seed: int) -> Dataset:
    """Builds a split of ``data=text``, packed with ``data.packing``."""
    return _packed(config, TextDataset(config, split))


def build_tokens(config: TokensDataConfig, split: str, seed: int) -> Dataset:
    """Builds a split of ``data=tokens``, packed with ``data.packing``."""
    return _packed(config, TokensDataset(config, split))


def _packed(config: TextDataConfig | TokensDataConfig, documents: TextDataset | TokensDataset) -> Dataset:
    return PackedDataset(documents, config.sequence_length) if config.packing else documents


_FORMS = "(inputs, targets), (inputs, targets, context), {'inputs', 'targets', ...context} or a Sample"


def build_custom(config: CustomDataConfig, split: str, seed: int) -> Dataset:
    """Calls ``_target_(split=split, **args)``.

    A ``Dataset`` is used unchanged. Any other object needs ``__len__`` and ``__getitem__``. Its items are arrays or
    tensors in one of these forms: (inputs, targets), (inputs, targets, context), a dict with ``inputs`` and
    ``targets``, or a ``Sample``.

    Raises:
        UserError: the target cannot be imported or called, or its result has no random access.
    """
    from hydra.utils import instantiate

    target = {**config.args, "_target_": config._target_, "_convert_": "all", "split": split}
    try:
        built = instantiate(target)
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, UserError):
            raise cause from None
        raise UserError(
            f"{config._target_} cannot be built for the {split} split: {type(cause).__name__}: {cause}",
            where="data._target_, data.args",
            fix="name package.module.ClassOrFunction, which takes split= and the given args, importable by the workers",
        ) from error
    return as_dataset(built, config._target_)


def as_dataset(built: Any, name: str) -> Dataset:
    """Returns ``built`` if it is a ``Dataset``, else a dataset that reads its items as samples.

    Raises:
        UserError: ``built`` has no random access.
    """
    if isinstance(built, Dataset):
        return built
    if not (hasattr(built, "__len__") and hasattr(built, "__getitem__")):
        raise UserError(
            f"{name} returned {type(built).__name__}, which has no random access",
            where="data._target_",
            fix="return an object with __len__ and __getitem__(index)",
        )
    return CustomDataset(built)


class CustomDataset(Dataset):
    """Reads the items of a map-style dataset as samples.

    Items may differ in length if ``items`` has an attribute ``lengths`` with the number of tokens of each item.

    Raises:
        UserError: ``lengths`` does not have one positive number for each item.
    """

    def __init__(self, items: Any) -> None:
        self._items = items
        if getattr(items, "lengths", None) is not None:
            self.lengths = _lengths(items)

    def __len__(self) -> int:
        return len(self._items)

    def sample(self, index: int, epoch: int) -> Sample:
        return _as_sample(self._items[index])

    def source(self, index: int) -> str:
        return f"{type(self._items).__module__}.{type(self._items).__qualname__}"


def _lengths(items: Any) -> Indices:
    lengths = np.asarray(items.lengths)
    if lengths.shape != (len(items),) or lengths.dtype.kind not in "iu" or (lengths.size and lengths.min() < 1):
        raise UserError(
            f"{type(items).__name__}.lengths has shape {lengths.shape} and begins with {lengths.ravel()[:3].tolist()}",
            where="data._target_",
            fix=f"set lengths to the number of tokens of each of the {len(items)} items, 1 or more",
        )
    return lengths.astype(np.int64)


def _as_sample(item: Any) -> Sample:
    if isinstance(item, Sample):
        return item
    if isinstance(item, Mapping) and {"inputs", "targets"} <= set(item):
        context = {name: _array(value) for name, value in item.items() if name not in ("inputs", "targets")}
        return Sample(_array(item["inputs"]), _array(item["targets"]), context)
    if isinstance(item, tuple | list) and len(item) in (2, 3):
        context = {name: _array(value) for name, value in item[2].items()} if len(item) == 3 else {}
        return Sample(_array(item[0]), _array(item[1]), context)
    raise TypeError(f"an item is a {type(item).__name__}, not {_FORMS}")


def _array(value: Any) -> Array:
    """Returns ``value`` as a numpy array; Python floats become float32, the dtype of models."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype == np.float64 and not hasattr(value, "dtype") else array


_CLASSES, _TRAIN, _VALIDATION = 0, 1, 2  # numbers of independent random streams


class SyntheticDataset(Dataset):
    """Computes learnable samples from their index, for tests, benchmarks and first steps without data files.

    A sample of tokens counts upward modulo the vocabulary, with a random start and a random step of 1 to 8. An image
    is the fixed pattern of its class plus noise; its class is the index modulo the number of classes.

    Raises:
        UserError: a size is not positive, or the task is unknown.
    """

    loads_cheaply = True

    def __init__(self, config: SyntheticDataConfig, split: str, seed: int) -> None:
        if config.task not in ("tokens", "images"):
            raise UserError(f"unknown task {config.task!r}", where="data.task", fix="use tokens or images")
        self._config, self._seed = config, seed
        self._stream = _TRAIN if split == "train" else _VALIDATION
        self._samples = config.samples if split == "train" else config.validation_samples
        if self._samples < 1:
            key = "samples" if split == "train" else "validation_samples"
            raise UserError(
                f"data.{key} is {self._samples}, but must be at least 1", where=f"data.{key}", fix=f"data.{key}=1000"
            )
        self._patterns = self._class_patterns() if config.task == "images" else None

    def __len__(self) -> int:
        return self._samples

    def sample(self, index: int, epoch: int) -> Sample:
        random = generator(self._seed, self._stream, index)
        if self._patterns is None:
            return next_token_sample(self._count(random))
        label = index % self._config.n_classes
        noise = random.standard_normal(self._patterns[label].shape, dtype=np.float32)
        return Sample(inputs=self._patterns[label] + noise, targets=np.array(label, dtype=np.int64))

    def source(self, index: int) -> str:
        return "computed"

    def _count(self, random: np.random.Generator) -> Array:
        start, step = random.integers(0, self._config.vocab_size), random.integers(1, 9)
        return (start + step * np.arange(self._config.sequence_length + 1)) % self._config.vocab_size

    def _class_patterns(self) -> Array:
        config = self._config
        shape = (config.n_classes, config.channels, config.image_size, config.image_size)
        return generator(self._seed, _CLASSES, 0).standard_normal(shape, dtype=np.float32)
