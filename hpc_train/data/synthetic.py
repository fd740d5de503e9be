"""Computes samples from their index, for tests, benchmarks and first steps without data files."""

from __future__ import annotations

import numpy as np

from hpc_train.config.schema import SyntheticDataConfig
from hpc_train.data.dataset import Array, Dataset, Sample, next_token_sample
from hpc_train.data.images import generator
from hpc_train.errors import UserError

_CLASSES, _TRAIN, _VALIDATION = 0, 1, 2  # streams of randomness that do not meet


class SyntheticDataset(Dataset):
    """Samples that can be learned and need no files.

    Tokens: counting upward modulo the vocabulary, from a start and by a step (1 to 8) that the index draws.
    Images: a fixed pattern per class in noise; class = index modulo the number of classes.

    Raises:
        UserError: sizes that are not positive, or an unknown task.
    """

    loads_cheaply = True

    def __init__(self, config: SyntheticDataConfig, split: str, seed: int) -> None:
        if config.task not in ("tokens", "images"):
            raise UserError(f"unknown task {config.task!r}", where="data.task", fix="tokens or images")
        self._config, self._seed = config, seed
        self._stream = _TRAIN if split == "train" else _VALIDATION
        self._samples = config.samples if split == "train" else config.validation_samples
        if self._samples < 1:
            key = "samples" if split == "train" else "validation_samples"
            raise UserError(f"{self._samples} synthetic samples", where=f"data.{key}", fix="1 or more")
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
