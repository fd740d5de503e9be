"""Copies micro-batches, with the ends of packed documents, to a device, normalizes their pixels there, and gives
floating-point values the dtype of the model.

On a GPU the copies run in a separate stream, one step before they are used, so that they overlap with computation.
Pixels travel as 8-bit integers where the dataset has them, a quarter of the bytes of float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hpc_train.data.dataset import Batch, PixelScale, Ragged
from hpc_train.data.document_ends import with_document_ends


@dataclass(frozen=True)
class SentBatches:
    """Holds micro-batches whose copy may still run.

    Attributes:
        copied: marks the end of the copy in its stream; None if nothing is to be waited for.
    """

    micro_batches: tuple[Batch, ...]
    device: torch.device
    copied: torch.cuda.Event | None = None

    def receive(self) -> tuple[Batch, ...]:
        """Returns the micro-batches for use in the current stream, which waits for the copy; the host does not."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self.copied)
            for batch in self.micro_batches:
                for value in batch.tensors:
                    value.record_stream(stream)  # its memory is not reused before this stream has used it
        return tuple(map(self._with_ragged, self.micro_batches))

    def _with_ragged(self, batch: Batch) -> Batch:
        """Copies a ragged micro-batch in the current stream: its tensors are not known, so none could be recorded."""
        if not isinstance(batch.inputs, Ragged):
            return batch
        ragged = batch.inputs.to(self.device)
        return replace(batch, inputs=ragged, targets=ragged)


class DeviceCopy:
    """Copies micro-batches to ``device``.

    Args:
        scale: normalizes the inputs after the copy; None leaves them unchanged.
        floats: the dtype that floating-point values get after the copy.
    """

    def __init__(self, device: torch.device, scale: PixelScale | None, floats: str = "float32") -> None:
        self._device = device
        self._floats: torch.dtype = getattr(torch, floats)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._scale = None
        if scale is not None:
            self._scale = [_channels(value, device) for value in ((255.0,), scale.mean, scale.std)]

    def send(self, batches: Iterable[Batch]) -> SentBatches:
        """Starts to copy ``batches``; the host does not wait if their memory is page-locked."""
        if self._stream is None:
            return SentBatches(tuple(map(self._copy, batches)), self._device)
        with torch.cuda.stream(self._stream):
            sent = tuple(map(self._copy, batches))
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return SentBatches(sent, self._device, copied)

    def _copy(self, batch: Batch) -> Batch:
        moved = with_document_ends(batch, pin=self._stream is not None).to(self._device)
        if self._scale is not None:
            moved = replace(moved, inputs=self._normalized(moved.inputs))
        for tensor in moved.tensors:
            if tensor.is_floating_point() and tensor.dtype != self._floats:
                return moved.map(lambda value: value.to(self._floats) if value.is_floating_point() else value)
        return moved

    def _normalized(self, pixels: Tensor) -> Tensor:
        assert self._scale is not None
        largest, mean, std = self._scale
        return (pixels.to(torch.float32) / largest - mean) / std


def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns ``[channels, 1, 1]``. A tensor on the device, unlike a number, also divides with exact rounding there."""
    return torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)
