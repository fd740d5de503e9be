"""Defines the interface of a dataset, and the batches that the model receives.

A dataset has random access and no state: a sample is a function of its index and the epoch, and the epoch changes only
augmentations. Datasets hold numpy arrays and paths, so that loader processes can be forked. A hash of its name assigns
a sample to a split, so that no sample is in both splits.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import UserCodeError

if TYPE_CHECKING:  # the command that prepares data, and each of its processes, starts without importing torch
    import torch
    from torch import Tensor

Array = NDArray[Any]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """Holds one sample. All samples of a dataset have the same shapes unless the dataset defines ``lengths``.

    Attributes:
        inputs: ``[seq]`` token ids (int64) or ``[channels, height, width]`` pixels (float32, or uint8 if the dataset
            has a ``scale``).
        targets: ``[seq]`` or a scalar array, int64; ``IGNORED`` at positions without a target.
        context: arrays that every layer gets.
    """

    inputs: Array
    targets: Array
    context: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class PixelScale:
    """Normalizes pixels in [0, 255] to ``(pixels / 255 - mean) / std`` in float32, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Dataset(ABC):
    """Base class of a finite sequence of samples.

    Attributes:
        loads_cheaply: whether reading a sample takes so little time that loader processes do not help.
        lengths: the number of tokens of each sample if they differ; the rest of a sample is padding.
        scale: normalizes the inputs after their copy to the device; None leaves them unchanged.
        collate: builds a micro-batch from the dataset, some ``item``s, their indices, the epoch, and the number of
            samples with padding; None stacks the samples.
        notice: what the user should know about the data, such as records that are not used; empty if nothing.
        shared_file: a file that loader processes would share, see ``shared_files``; empty if there is none.
        floats: the dtype of floating-point values on the device, which is the dtype of the model's parameters.
    """

    loads_cheaply: bool = False
    lengths: Indices | None = None
    scale: PixelScale | None = None
    collate: Callable[[Dataset, Sequence[Any], Sequence[int], int, int], Batch] | None = None
    notice: str = ""
    shared_file: str = ""
    floats: str = "float32"

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int, epoch: int) -> Sample:
        """Returns the sample at ``index`` in [0, len) with the augmentations of ``epoch``."""

    def prefetch(self, index: int) -> None:  # noqa: B027 - most datasets have nothing to do
        """Starts to read the sample at ``index``, which this process requests soon, without waiting. The default does
        nothing.
        """

    def item(self, index: int, epoch: int) -> Any:
        """Returns the item that ``collate`` gets for the sample at ``index``."""
        return self.sample(index, epoch)

    def fingerprint(self) -> str:
        """Returns a hash of the source of the samples, such as the names of the files; empty if it is unknown without
        reading more. It must stay the same for the same data, since checkpoints hold it.
        """
        return ""

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Returns the facts that determine which samples an order reads, as JSON values for checkpoints."""
        return {"samples": len(self), "fingerprint": self.fingerprint()}

    def inputs_shape(self) -> tuple[int, ...]:
        """Returns the shape of a sample's inputs, with the mean length if the lengths differ."""
        shape = self.sample(0, 0).inputs.shape
        if self.lengths is None:
            return shape
        return (round(float(self.lengths.mean())), *shape[1:])

    def source(self, index: int) -> str:
        """Returns the file of the sample for messages, or an empty string if it has none."""
        return ""

    def describe(self, index: int) -> str:
        """Returns the name of the sample for messages."""
        try:
            source = self.source(index)
        except Exception:  # the error that the message is about is more important
            source = ""
        return f"sample {index}{f' ({source})' if source else ''}"


class SampleError(UserCodeError):
    """Reports that a sample could not be read; the message names its index and file and includes the traceback."""


def next_token_sample(window: Array) -> Sample:
    """Returns the sample of a window of S + 1 tokens: S inputs, each with the next token as its target."""
    tokens = window.astype(np.int64)
    return Sample(inputs=tokens[:-1], targets=tokens[1:])


IGNORED = -100  # marks a target that does not count, e.g. padding
Nested = Any  # a Tensor, a Ragged, or a dict of names to Nested, which only a ``collate`` of the user returns


@dataclass(frozen=True)
class Ragged:
    """Holds a micro-batch whose tensors do not have one row per item: graphs, boxes, packed sequences.

    A collate function returns it for the items of one micro-batch of one rank. The model is called with ``inputs``, and
    its method ``loss`` with the outputs and ``targets``. An item is a sample: items are divided among ranks and
    micro-batches like rows, and padding is left out. The sum and the count that the loss returns weight the items.

    Attributes:
        inputs: any object. Tensors in it are moved to the device: those in lists, tuples, dicts and dataclasses, and
            objects with a method ``to``.
        targets: any object, which is moved like ``inputs``; None uses the object ``inputs``.
        items: the number of items, which the collate function does not set. 0 marks a micro-batch without samples: it
            is built from an item of another micro-batch, and its loss does not count.
    """

    inputs: Any
    targets: Any = None
    items: int = -1

    def to(self, device: torch.device) -> Ragged:
        inputs = moved(self.inputs, device)
        same = self.targets is None or self.targets is self.inputs
        return replace(self, inputs=inputs, targets=inputs if same else moved(self.targets, device))


def moved(value: Any, device: torch.device) -> Any:
    """Returns ``value`` with the tensors in it on ``device``; see ``Ragged``."""
    if callable(getattr(value, "to", None)) and not isinstance(value, type):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: moved(item, device) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        values = {member.name: moved(getattr(value, member.name), device) for member in fields(value) if member.init}
        return replace(value, **values)
    return value


def leaves(value: Nested) -> Iterator[Tensor]:
    """Yields the tensors of ``value`` in the order of its dicts; nothing for a ``Ragged``, which has no rows."""
    if isinstance(value, Ragged):
        return
    if isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def map_leaves(function: Callable[[Tensor], Tensor], value: Nested) -> Nested:
    """Returns ``value`` with ``function`` applied to each tensor; a ``Ragged`` is returned as it is."""
    if isinstance(value, Ragged):
        return value
    if isinstance(value, Mapping):
        return {name: map_leaves(function, item) for name, item in value.items()}
    return function(value)


@dataclass(frozen=True)
class Batch:
    """Holds one micro-batch.

    Attributes:
        inputs: ``[micro, seq]`` token ids (int64) or ``[micro, channels, height, width]`` pixels (float32). A model
            without parts may get a dict of tensors, or a ``Ragged``, from ``data.collate``.
        targets: ``[micro, seq]`` or ``[micro]`` int64; ``IGNORED`` at positions without a target. May be a dict like
            ``inputs``; the same object if that is a ``Ragged``.
        context: tensors with a leading micro dim that every stage and layer gets (positions, document ids).
        samples: the index of each row in the dataset, for messages; empty if the rows are not samples of a dataset.
    """

    inputs: Nested
    targets: Nested
    context: Mapping[str, Nested] = field(default_factory=dict)
    samples: tuple[int, ...] = ()

    @property
    def tensors(self) -> Iterator[Tensor]:
        return leaves({"inputs": self.inputs, "targets": self.targets, "context": self.context})

    def to(self, device: torch.device) -> Batch:
        """Returns a copy on ``device``; does not block if the memory is pinned."""
        return self.map(lambda value: value.to(device, non_blocking=True))

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        parts = (map_leaves(function, part) for part in (self.inputs, self.targets, self.context))
        inputs, targets, context = parts
        return Batch(inputs, targets, context, self.samples)


@dataclass(frozen=True)
class StepBatch:
    """Holds the batch of one rank for one step.

    Attributes:
        micro_batches: the micro-batches; their number and shapes are the same on every rank, but ``batch.balance``
            changes the number.
        target_count: the number of targets that count in the *global* batch, over all ranks; the denominator of the
            mean of a built-in loss.
        numbers: the numbers of the micro-batches in the global batch, from which their random numbers follow; empty
            without ``batch.balance``, where these follow from the rank.
    """

    micro_batches: tuple[Batch, ...]
    target_count: int
    numbers: tuple[int, ...] = ()


SPLITS = ("train", "validation")


def position(name: str) -> float:
    """Returns a hash of ``name`` in [0, 1); names below the validation share belong to validation."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def hash_of(*parts: bytes | Array | list[Any]) -> str:
    """Returns a hash of bytes, contiguous arrays and JSON values, for ``Dataset.fingerprint``."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = json.dumps(part).encode() if isinstance(part, list) else part
        digest.update(content if isinstance(content, bytes) else content.data)
    return digest.hexdigest()
