"""Copies micro-batches to a device, normalizes their pixels there, and gives floats the dtype of the model.

On a GPU the copies run in a separate stream, one step before they are used, so that they overlap with computation.
Pixels are copied as 8-bit integers if the dataset provides them, which takes a quarter of the bytes of float32.

Attention kernels for packed documents need the ends of the documents on the device, and the number of documents as part
of a shape. The host computes both before the copy, so that no step waits for a value from the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hpc_train.data.dataset import IGNORED, Array, Batch, Indices, PixelScale, Ragged


@dataclass(frozen=True)
class SentBatches:
    """Holds micro-batches whose copy may still run. The CUDA event ``copied`` marks the end of the copy in its stream;
    it is None if no copy is pending."""

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
    """Copies micro-batches to ``device``. After the copy ``scale`` normalizes the inputs (None leaves them unchanged),
    and floating-point values are converted to the dtype ``floats``."""

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
            largest, mean, std = self._scale
            moved = replace(moved, inputs=(moved.inputs.to(torch.float32) / largest - mean) / std)
        for tensor in moved.tensors:
            if tensor.is_floating_point() and tensor.dtype != self._floats:
                return moved.map(lambda value: value.to(self._floats) if value.is_floating_point() else value)
        return moved


def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns ``[channels, 1, 1]``. A tensor on the device, unlike a number, also divides with exact rounding there."""
    return torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)


DOCUMENT_ENDS = "document_ends"  # ``[micro, documents]`` int32 in the context: the end of each document, exclusive


def with_document_ends(batch: Batch, pin: bool) -> Batch:
    """Adds ``DOCUMENT_ENDS`` to the context of a host micro-batch that has ``document_ids`` ``[micro, seq]``.

    The number of documents depends on this micro-batch alone, since it can change the last bits of gradients. No ends
    are added if a document is in several pieces, because tokens of one piece attend to tokens of another. With ``pin``
    the ends are in page-locked memory, from which copies do not block.
    """
    ids = batch.context.get("document_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape != getattr(batch.targets, "shape", None):
        return batch
    counted = (batch.targets != IGNORED).numpy()
    rows = [row for pair in zip(ids.numpy(), counted, strict=True) if (row := _ends(*pair)) is not None]
    if len(rows) < len(ids):
        return batch
    documents = (
        1 << (max(map(len, rows)) - 1).bit_length()
    )  # a power of two, since each shape may be compiled separately
    filled = [np.pad(row, (0, documents - len(row)), mode="edge") for row in rows]
    ends = torch.from_numpy(np.stack(filled).astype(np.int32))
    return replace(batch, context={**batch.context, DOCUMENT_ENDS: ends.pin_memory() if pin else ends})


def _ends(ids: Array, counted: Array) -> Indices | None:
    """Returns the ends of the runs of equal ``ids``; None if an id has several runs.

    The last run may have the id of another one if no target counts in it: it is padding, to which no token before it
    attends.
    """
    ends = np.append(np.flatnonzero(ids[1:] != ids[:-1]) + 1, len(ids))
    names = ids[ends - 1]
    if not counted[ends[-2] if len(ends) > 1 else 0 :].any():
        names = names[:-1]
    if len(np.unique(names)) == len(names):
        return ends
    return None


def with_equal_numbers(contexts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Returns ``contexts`` with the same number of documents in each, so that they can be joined.

    If any of them lacks ``DOCUMENT_ENDS``, none of the returned contexts has them.
    """
    present = [context[DOCUMENT_ENDS] for context in contexts if DOCUMENT_ENDS in context]
    if len(present) < len(contexts):
        return [{name: context[name] for name in context if name != DOCUMENT_ENDS} for context in contexts]
    documents = max(ends.shape[1] for ends in present)
    return [
        {**context, DOCUMENT_ENDS: torch.cat((ends, ends[:, -1:].expand(-1, documents - ends.shape[1])), dim=1)}
        for context, ends in zip(contexts, present, strict=True)
    ]
