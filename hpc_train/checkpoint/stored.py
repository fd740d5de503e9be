"""The tensors of a checkpoint, one at a time and whole, whatever layout wrote them: no ranks and little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from hpc_train.checkpoint.manifest import Manifest
from hpc_train.checkpoint.reader import SafeReader
from hpc_train.checkpoint.state import TensorShape, stored_shapes
from hpc_train.checkpoint.writer import quiet

MODEL = "model."


class StoredTensors:
    """What lies in the directory of a checkpoint that agrees with its manifest, by global name."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._reader = _Reader(path, manifest)
        self.shapes: dict[str, TensorShape] = stored_shapes(self._reader.read_metadata())

    def model(self) -> dict[str, TensorShape]:
        """The tensors of the model, under the names that the model calls them."""
        return {name.removeprefix(MODEL): shape for name, shape in self.shapes.items() if name.startswith(MODEL)}

    def read(self, name: str, into: Tensor | None = None) -> Tensor:
        """The whole tensor ``name``, put together from its shards.

        Args:
            into: where it goes, of the stored shape and type; new memory without it.
        """
        found = self.shapes[name]
        tensor = torch.empty(found.shape, dtype=found.dtype) if into is None else into
        with quiet():
            dcp.load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class _Reader(SafeReader):
    """Reads the metadata once: of a large checkpoint it is many megabytes, and there is a load for each tensor."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, manifest)
        self._metadata = super().read_metadata()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata
