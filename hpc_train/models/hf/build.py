"""Builds a transformers model on ``meta``: a decoder in three parts, any other model as one module with blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hpc_train.config.hf_config import DECODERS
from hpc_train.config.schema import HFModelConfig
from hpc_train.data.dataset import Ragged
from hpc_train.models.hf.decoder import HFDecoder
from hpc_train.models.hf.lora import AdapterValues, adapt
from hpc_train.models.hf.loss import ConfiguredLoss
from hpc_train.models.hf.pretrained import FirstValues, WeightFiles, skeleton, weights_folder
from hpc_train.models.wrapped import WrappedModel


def build(config: HFModelConfig) -> HFDecoder | HFWhole:
    """Builds the model of ``config``. Call it on the ``meta`` device; the values follow when the model is sharded.
    Raises UserError if the config or the weights cannot be read, or transformers has no such model."""
    module = skeleton(config)
    module.tie_weights()
    files = WeightFiles(weights_folder(config), module) if config.pretrained else None
    if config.lora.rank is None:
        values = FirstValues(module, files)
    else:
        values = AdapterValues(module, files)
        with torch.device("meta"):
            adapt(module, config, values.tied)
    if config.task == "causal_lm" and module.config.model_type in DECODERS:
        return HFDecoder(module, values, config)
    return HFWhole(module, values, config)


class HFWhole(WrappedModel):
    """Wraps ``module``, a model on ``meta``, with the names of transformers. Its parameters get the initial
    ``values``."""

    def __init__(self, module: Any, values: FirstValues, config: HFModelConfig) -> None:
        super().__init__(module, "cross_entropy", config.wrap)
        self.own_count = False
        self._configured = ConfiguredLoss(module, config.task)
        self.balances_experts = self._configured.balance > 0
        self.config = config
        self._values = values
        self.saves_frozen = config.lora.rank is None
        self.tied = values.tied

    def forward(
        self, inputs: Tensor, context: Mapping[str, Tensor], targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
        """Runs the module like ``WrappedModel.forward``, with the loss of its config.

        An evaluation leaves the load-balancing loss out, so that its loss does not depend on the split.
        """
        if isinstance(inputs, Ragged):
            return super().forward(inputs, context, targets)
        outputs = self.bare(inputs, **self._arguments(context))
        if targets is None:
            return outputs["logits"]
        total, count, correct = self._configured(outputs["logits"], targets)
        if self.training:
            if self.balances_experts:
                total = total + self._configured.balance * outputs["aux_loss"] * count
            return total, count
        if self.observe is not None:
            self.observe(outputs["logits"], targets)
        return total, count, correct

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        self._values.fill(name, value, generator)

    def is_stored(self, name: str) -> bool:
        return self._values.is_stored(name)

    def stored_box(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor | None:
        return self._values.read(name, begin, size)

    def init_buffers(self, device: torch.device) -> None:
        self._values.fill_buffers(self, "", device)
