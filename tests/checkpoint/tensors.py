"""Reads a checkpoint without ranks or a model, for comparisons."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a committed checkpoint, unsharded."""
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


def assert_same_bits(one: Path, other: Path) -> None:
    """Raises AssertionError if a name, a shape or a bit of two checkpoints differs."""
    left, right = read_tensors(one), read_tensors(other)
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert different == [], f"{len(different)} of {len(left)} tensors differ"
