"""Finds where the packed documents of a micro-batch end, on the host, for attention kernels that take boundaries.

The kernels need the boundaries on the device, and their number is part of a shape. Both are computed before the copy to
the device, so that no step waits for a value of the device. The number is rounded up to a power of two, since each
shape may be compiled separately; what is left over are documents without tokens at the end of each sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hpc_train.data.dataset import IGNORED, Array, Batch, Indices

DOCUMENT_ENDS = "document_ends"  # ``[micro, documents]`` int32 in the context: the end of each document, exclusive


def with_document_ends(batch: Batch, pin: bool) -> Batch:
    """Adds ``DOCUMENT_ENDS`` to the context if it has ``document_ids`` ``[micro, seq]``.

    The number of documents depends on this micro-batch alone, since it can change the last bits of gradients. There are
    no ends if a document is in several pieces, because tokens of one piece attend to those of another.

    Args:
        batch: a micro-batch on the host.
        pin: whether to use page-locked memory, from which copies do not block.
    """
    ids = batch.context.get("document_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape != getattr(batch.targets, "shape", None):
        return batch
    counted = (batch.targets != IGNORED).numpy()
    rows = [row for pair in zip(ids.numpy(), counted, strict=True) if (row := _ends(*pair)) is not None]
    if len(rows) < len(ids):
        return batch
    ends = torch.from_numpy(_filled(rows))
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


def _filled(rows: Sequence[Indices]) -> Array:
    documents = 1 << (max(map(len, rows)) - 1).bit_length()
    return np.stack([np.pad(ends, (0, documents - len(ends)), mode="edge") for ends in rows]).astype(np.int32)


def with_equal_numbers(contexts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Returns ``contexts`` with the same number of documents in each, so that they can be joined.

    None has ``DOCUMENT_ENDS`` if one lacks them.
    """
    present = [context[DOCUMENT_ENDS] for context in contexts if DOCUMENT_ENDS in context]
    if len(present) < len(contexts):
        return [{name: context[name] for name in context if name != DOCUMENT_ENDS} for context in contexts]
    documents = max(ends.shape[1] for ends in present)
    return [
        {**context, DOCUMENT_ENDS: torch.cat((ends, ends[:, -1:].expand(-1, documents - ends.shape[1])), dim=1)}
        for context, ends in zip(contexts, present, strict=True)
    ]
