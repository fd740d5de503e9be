"""The contract of a dataset: random access to samples, and no state.

A sample is a function of (index, epoch); the epoch only moves augmentations. Datasets hold numpy arrays and paths, so
that they survive a fork, and import no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.errors import ConfigError

Array = NDArray[Any]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One sample; every sample of a dataset has the same shapes, or the dataset says ``lengths``.

    Attributes:
        inputs: ``[seq]`` token ids (int64) or ``[channels, height, width]`` pixels (float32).
        targets: ``[seq]`` or a scalar array, int64; ``IGNORED`` where nothing is to be learnt.
        context: arrays that every layer gets.
    """

    inputs: Array
    targets: Array
    context: Mapping[str, Array] = field(default_factory=dict)


class Dataset(ABC):
    """A finite sequence of samples.

    Attributes:
        loads_cheaply: reading a sample costs next to nothing, so that loader processes would be a waste.
        lengths: tokens of each sample where they differ; what a sample has behind them is padding.
    """

    loads_cheaply: ClassVar[bool] = False
    lengths: Indices | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int, epoch: int) -> Sample:
        """The sample at ``index``, in [0, len), as epoch ``epoch`` sees it."""

    def inputs_shape(self) -> tuple[int, ...]:
        """Of a sample's inputs; of an average one where the lengths differ."""
        shape = self.sample(0, 0).inputs.shape
        return shape if self.lengths is None else (round(float(self.lengths.mean())), *shape[1:])

    def source(self, index: int) -> str:
        """The file that the sample comes from, for messages; empty where there is none."""
        return ""


class SampleError(RuntimeError):
    """A sample could not be read; the message names its index and file and holds the traceback."""


def check_sequence_length(length: int) -> None:
    if length < 1:
        raise ConfigError(f"sequences of {length} tokens", where="data.sequence_length", mend="1 or more")


def next_token_sample(window: Array) -> Sample:
    """A window of S + 1 tokens as S inputs and the S tokens that follow each of them."""
    tokens = window.astype(np.int64)
    return Sample(inputs=tokens[:-1], targets=tokens[1:])
