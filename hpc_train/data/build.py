"""Builds the dataset of a config: any source, a mixture of sources, or synthetic samples."""

from __future__ import annotations

import importlib

import numpy as np

from hpc_train.config.extensions import source_of
from hpc_train.config.schema import (
    DataConfig,
    MixtureDataConfig,
    StreamDataConfig,
    SyntheticDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from hpc_train.config.schema.data import OwnKeys
from hpc_train.data.collate import load_collate
from hpc_train.data.custom import CustomDataset, with_random_access
from hpc_train.data.dataset import SPLITS, Array, Dataset, Sample, next_token_sample
from hpc_train.data.images import generator
from hpc_train.data.mixture import MixtureDataset
from hpc_train.data.shared_files import open_files, shared_file
from hpc_train.data.sources import mixed_sources
from hpc_train.data.stream import StreamDataset
from hpc_train.data.text import TextDataset
from hpc_train.data.tokens import PackedDataset, TokensDataset
from hpc_train.errors import UserError


def build_dataset(config: DataConfig, split: str, seed: int, precision: str = "fp32") -> Dataset:
    """Builds the ``train`` or ``validation`` split that ``config`` describes.

    Args:
        seed: the seed of augmentations and synthetic samples; the order of the samples comes from the sampler.
        precision: that of the model, ``precision.name``.

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
    before = open_files()
    built = build(config, split, seed)
    if not isinstance(built, Dataset):
        built = CustomDataset(with_random_access(built, config.kind), OwnKeys(kind=config.kind), seed)
    is_stream = isinstance(config, StreamDataConfig)  # whose files are opened in the loader processes
    if not is_stream and (isinstance(built, CustomDataset) or not type(built).__module__.startswith("hpc_train.data.")):
        built.shared_file = shared_file(built, before)
    built.floats = "float64" if precision == "fp64" else "float32"
    if config.collate is not None:
        built.collate = load_collate(config, seed)
    return built


def build_text(config: TextDataConfig, split: str, seed: int) -> Dataset:
    """Builds a split of ``data=text``, packed with ``data.packing``."""
    return _packed(config, TextDataset(config, split))


def build_tokens(config: TokensDataConfig, split: str, seed: int) -> Dataset:
    """Builds a split of ``data=tokens``, packed with ``data.packing``."""
    return _packed(config, TokensDataset(config, split))


def build_mixture(config: MixtureDataConfig, split: str, seed: int) -> MixtureDataset:
    """Builds a split of each source of ``data=mixture``.

    Raises:
        UserError: a source has no random access, or the sources do not fit together.
    """
    sources = {name: build_dataset(source, split, seed) for name, source in mixed_sources(config).items()}
    for name, source in sources.items():
        if isinstance(source, StreamDataset):
            raise UserError(
                f"the source {name} is a stream, but a mixture computes its order from the sizes of its sources",
                where=f"data.sources.{name}",
                fix="a source with random access, or a custom stream that mixes its inputs",
            )
    return MixtureDataset(sources, config.weights)


def _packed(config: TextDataConfig | TokensDataConfig, documents: TextDataset | TokensDataset) -> Dataset:
    if config.packing:
        return PackedDataset(documents, config.sequence_length)
    return documents


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
        self._config = config
        self._seed = seed
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
        start = random.integers(0, self._config.vocab_size)
        step = random.integers(1, 9)
        return (start + step * np.arange(self._config.sequence_length + 1)) % self._config.vocab_size

    def _class_patterns(self) -> Array:
        config = self._config
        shape = (config.n_classes, config.channels, config.image_size, config.image_size)
        return generator(self._seed, _CLASSES, 0).standard_normal(shape, dtype=np.float32)
