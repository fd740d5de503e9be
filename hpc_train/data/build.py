"""Builds the dataset of a config: any source, a mixture of sources, or synthetic samples.

It also finds files that a user's dataset opens in its constructor. Forked loader processes share the position of such a
file, so a seek in one process makes another one read the wrong content. Files that are memory-mapped, or read at
explicit positions (``os.pread``), are not affected. HDF5 and SQLite files must not be used after a fork.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpc_train.config.extensions import source_of
from hpc_train.config.import_path import locate
from hpc_train.config.schema import (
    DataConfig,
    MixtureDataConfig,
    StreamDataConfig,
    SyntheticDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from hpc_train.config.schema.data import OwnKeys
from hpc_train.data.custom import CustomDataset, load_collate, with_random_access
from hpc_train.data.dataset import SPLITS, Dataset, Sample, next_token_sample
from hpc_train.data.images import generator
from hpc_train.data.mixture import MixtureDataset
from hpc_train.data.sources import mixed_sources
from hpc_train.data.text import TextDataset
from hpc_train.data.tokens import PackedDataset, TokensDataset


def build_dataset(config: DataConfig, split: str, seed: int, precision: str = "fp32") -> Dataset:
    """Builds the ``train`` or ``validation`` split that ``config`` describes.

    ``seed`` determines augmentations and synthetic samples; the sampler determines the order of the samples.
    ``precision`` is the value of ``precision.name``. Raises UserError if the input is missing, empty or damaged, or it
    does not match the config.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, not one of {SPLITS}")
    build = locate(source_of(config).builder, "data.kind")
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
    return _packed(config, TextDataset(config, split))


def build_tokens(config: TokensDataConfig, split: str, seed: int) -> Dataset:
    return _packed(config, TokensDataset(config, split))


def build_mixture(config: MixtureDataConfig, split: str, seed: int) -> MixtureDataset:
    """Builds a split of each source of ``data=mixture``; raises UserError if the sources do not fit together."""
    sources = {name: build_dataset(source, split, seed) for name, source in mixed_sources(config).items()}
    return MixtureDataset(sources, config.weights)


def _packed(config: TextDataConfig | TokensDataConfig, documents: TextDataset | TokensDataset) -> Dataset:
    if config.packing:
        return PackedDataset(documents, config.sequence_length)
    return documents


_CLASSES, _TRAIN, _VALIDATION = 0, 1, 2  # numbers of independent random streams


class SyntheticDataset(Dataset):
    """Computes learnable samples from their index, for tests, benchmarks and first steps without data files.

    A sample of tokens counts upward modulo the vocabulary, with a random start and a random step of 1 to 8. An image is
    the fixed pattern of its class plus noise; its class is the index modulo the number of classes.
    """

    loads_cheaply = True

    def __init__(self, config: SyntheticDataConfig, split: str, seed: int) -> None:
        self._config = config
        self._seed = seed
        if split == "train":
            self._stream = _TRAIN
            self._samples = config.samples
        else:
            self._stream = _VALIDATION
            self._samples = config.validation_samples
        self._patterns = None
        if config.task == "images":
            shape = (config.n_classes, config.channels, config.image_size, config.image_size)
            self._patterns = generator(seed, _CLASSES, 0).standard_normal(shape, dtype=np.float32)

    def __len__(self) -> int:
        return self._samples

    def sample(self, index: int, epoch: int) -> Sample:
        random = generator(self._seed, self._stream, index)
        if self._patterns is None:
            start = random.integers(0, self._config.vocab_size)
            step = random.integers(1, 9)
            window = start + step * np.arange(self._config.sequence_length + 1)
            return next_token_sample(window % self._config.vocab_size)
        label = index % self._config.n_classes
        noise = random.standard_normal(self._patterns[label].shape, dtype=np.float32)
        return Sample(inputs=self._patterns[label] + noise, targets=np.array(label, dtype=np.int64))

    def source(self, index: int) -> str:
        return "computed"


_DESCRIPTORS = Path("/proc/self/fd")
_READS_S = 60.0  # time for the items that are read in another process
_NOT_FORKED = (b"\x89HDF\r\n\x1a\n", b"SQLite format 3\0")  # beginnings of files that a forked process must not use


class OpenFile(NamedTuple):
    descriptor: int
    device: int
    inode: int
    path: str


def open_files() -> frozenset[OpenFile]:
    """Returns the regular files that this process has open for reading; none without ``/proc``."""
    files = set[OpenFile]()
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else []:
        descriptor = int(entry.name)
        try:
            status = os.fstat(descriptor)
            access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            path = str(entry.readlink())
        except OSError:  # it was closed meanwhile
            continue
        if stat.S_ISREG(status.st_mode) and access != os.O_WRONLY:
            files.add(OpenFile(descriptor, status.st_dev, status.st_ino, path))
    return frozenset(files)


def shared_file(dataset: Dataset, before: frozenset[OpenFile]) -> str:
    """Returns the path of a file that loader processes of ``dataset`` would share; an empty string if there is none.

    If the constructor has left files open that were not open ``before``, some items are read in another process, as
    loader processes do, to see whether they change the positions in these files.
    """
    opened = sorted(open_files() - before)
    unsafe = next((file.path for file in opened if os.pread(file.descriptor, 16, 0).startswith(_NOT_FORKED)), "")
    if unsafe or not opened or not len(dataset):
        return unsafe
    moved = _moved_by_items(dataset, opened)
    if moved is None:
        return ""
    return opened[moved].path


def _moved_by_items(dataset: Dataset, files: Sequence[OpenFile]) -> int | None:
    """Reads some items of ``dataset`` in a forked process, whose errors the loader processes report later.

    The positions in ``files`` are first moved by one byte, since reading an item may end where the constructor ended.

    Returns the number of the first of ``files`` whose position an item changes; None if there is none.
    """
    before = [os.lseek(file.descriptor, 0, os.SEEK_CUR) for file in files]
    marks = [position - 1 if position else 1 for position in before]
    child = os.fork()
    if child == 0:
        try:
            _move(files, marks)
            for index in sorted({0, len(dataset) // 2, len(dataset) - 1}):
                dataset.item(index, 0)
        finally:
            changed = [os.lseek(file.descriptor, 0, os.SEEK_CUR) for file in files]
            moved = (number for number, pair in enumerate(zip(changed, marks, strict=True), 1) if pair[0] != pair[1])
            os._exit(min(next(moved, 0), 255))
    timer = threading.Timer(_READS_S, os.kill, (child, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    _move(files, before)
    code = os.waitstatus_to_exitcode(status)
    if code > 0:
        return code - 1
    return None


def _move(files: Sequence[OpenFile], positions: Sequence[int]) -> None:
    for file, position in zip(files, positions, strict=True):
        os.lseek(file.descriptor, position, os.SEEK_SET)
