"""The interface of a dataset, and the batches that pass from the data to the model.

A dataset has random access and no state: a sample is a function of its index and the epoch, which only changes
augmentations. Datasets hold numpy arrays and paths, so that loader processes can be forked. The split of a sample is
decided by its name, so that no sample is in both splits.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_train.errors import UserError

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
        raise UserError(f"sequences of {length} tokens", where="data.sequence_length", fix="1 or more")


def next_token_sample(window: Array) -> Sample:
    """A window of S + 1 tokens as S inputs and the S tokens that follow each of them."""
    tokens = window.astype(np.int64)
    return Sample(inputs=tokens[:-1], targets=tokens[1:])


IGNORED = -100  # a target that does not count: padding


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        inputs: ``[micro, seq]`` token ids (int64) or ``[micro, channels, height, width]`` pixels (float32).
        targets: ``[micro, seq]`` or ``[micro]`` int64; ``IGNORED`` where nothing is to be learnt.
        context: tensors with a leading micro dim that every stage and layer gets (positions, document ids).
    """

    inputs: Tensor
    targets: Tensor
    context: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Batch:
        """A copy on ``device``; does not block where the memory is pinned."""
        move = {name: value.to(device, non_blocking=True) for name, value in self.context.items()}
        return Batch(self.inputs.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), move)


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one step.

    Attributes:
        micro_batches: equally many and equally shaped on every rank.
        target_count: targets that count in the *global* batch, over all ranks: the denominator of the mean of a
            built-in loss.
    """

    micro_batches: tuple[Batch, ...]
    target_count: int


SPLITS = ("train", "validation")


def position(name: str) -> float:
    """A hash of ``name``, evenly spread over [0, 1). Names below the validation share are validation."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
