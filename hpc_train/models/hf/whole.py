"""Trains any model of transformers as one module, whose blocks are sharded, recomputed and compiled one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpc_train.config.schema import HFModelConfig
from hpc_train.models.hf.values import FirstValues
from hpc_train.models.wrapped import WrappedModel


class HFWhole(WrappedModel):
    """Wraps a model on ``meta`` with the names of transformers.

    Args:
        module: the model on ``meta``.
        values: the first values of its parameters.
    """

    def __init__(self, module: Any, values: FirstValues, config: HFModelConfig) -> None:
        super().__init__(module, "cross_entropy", config.wrap, class_dim="last")
        self.config, self._values = config, values
        self.saves_frozen = config.lora.rank is None
        self.tied = values.tied

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Reads the parameter from the files, or draws it as transformers does."""
        self._values.fill(name, value, generator)

    def is_stored(self, name: str) -> bool:
        """Returns whether the files have the parameter."""
        return self._values.is_stored(name)

    def stored_box(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor | None:
        """Returns the box from the files; see ``Model.stored_box``."""
        return self._values.read(name, begin, size)

    def init_buffers(self, device: torch.device) -> None:
        """Reads or computes all buffers."""
        self._values.fill_buffers(self, "", device)
