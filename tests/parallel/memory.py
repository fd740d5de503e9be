"""Counts the memory that a computation keeps and allocates, tensor by tensor, without a clock or an allocator."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.config.schema import BatchConfig, Config, GPTConfig, StrategyConfig, SyntheticDataConfig, TrainConfig
from hpc_train.data.dataset import Batch, StepBatch


def gpt_config(
    sizes: dict[str, Any], length: int, batch: dict[str, int], strategy: dict[str, Any] | None = None, **train: Any
) -> Config:
    """Returns the config of a step of a GPT with these sizes and of samples of ``length`` tokens."""
    return Config(
        model=GPTConfig(**sizes),
        data=SyntheticDataConfig(sequence_length=length, vocab_size=sizes["vocab_size"]),
        batch=BatchConfig(**batch),
        strategy=StrategyConfig(**strategy or {}),
        train=TrainConfig(steps=1, **train),
    )


def batch_of_eight(length: int, words: int, micro_batches: int) -> StepBatch:
    """Returns a step of 8 samples, of which this rank has micro-batches of two."""
    tokens = torch.arange(2 * length).view(2, length) % words
    return StepBatch((Batch(tokens, tokens),) * micro_batches, 8 * length)


class Allocations(TorchDispatchMode):
    """Observes every tensor that an operator creates inside the block, in forward and backward.

    Attributes:
        largest: the number of elements of the largest of them.
    """

    def __init__(self) -> None:
        super().__init__()
        # By storage. The last tensor of a storage takes its Python object along, which calls the weak reference.
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # the tensor is not a view
                self._add(storage)
                self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
        self._after_operator()
        return made

    def _after_operator(self) -> None:
        """Looks at the tensors that exist; for subclasses, since torch wraps each ``__torch_dispatch__`` at a cost."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._references[key] = weakref.ref(storage, lambda _: self._sizes.pop(key, None))
        self._sizes[key] = storage.nbytes()

    @property
    def alive(self) -> int:
        """Returns the number of bytes of the created tensors that still exist."""
        return sum(self._sizes.values())


def _tensors(values: Any) -> list[Tensor]:
    """Returns the tensors in nested lists, tuples and dicts; torch's own search takes as long as the operators do."""
    if isinstance(values, Tensor):
        return [values._local_tensor if isinstance(values, DTensor) else values]  # a DTensor has no memory
    if not isinstance(values, (list, tuple, dict)):
        return []
    return [tensor for value in (values.values() if isinstance(values, dict) else values) for tensor in _tensors(value)]


class PeakMemory(Allocations):
    """Also observes the peak.

    Attributes:
        peak: the largest number of bytes that the created tensors held at the same time, without those on ``meta``,
            with the size that each storage had then: FSDP frees and fills the storages of gathered parameters without
            creating tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
            return found

        self._watch = patch.object(torch.UntypedStorage, "resize_", resized)
        self._watch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.stop()
        super().__exit__(*error)

    def _after_operator(self) -> None:
        self.peak = max(self.peak, self.alive)

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._add(storage)


class _FusedRMSNorm(torch.autograd.Function):
    """Keeps what the kernel of GPUs keeps: its input, its weight and the reciprocal of each row's norm."""

    @staticmethod
    def forward(context: Any, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = (values.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        context.save_for_backward(values, weight, inverse)
        return (values * inverse).to(values.dtype) * weight

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        values, weight, inverse = context.saved_tensors
        (gradient,) = gradients
        normalized = (values * inverse).to(values.dtype)
        of_weight = (gradient * normalized).sum((*range(gradient.ndim - 1),))
        scaled = gradient * weight
        mean = (scaled * normalized).mean(-1, keepdim=True)
        return (inverse * (scaled - normalized * mean)).to(values.dtype), of_weight, None


@contextmanager
def norms_of_gpus() -> Iterator[None]:
    """Makes RMS norms keep what they keep on GPUs, where one kernel computes them."""

    def fused(values: Tensor, shape: Any, weight: Tensor, eps: float | None) -> Tensor:
        found: Tensor = _FusedRMSNorm.apply(values, weight, eps or torch.finfo(values.dtype).eps)
        return found

    with patch.object(F, "rms_norm", fused):
        yield
