"""Builds a transformers model on ``meta``: a decoder in three parts, any other model as one module with blocks."""

from __future__ import annotations

import torch

from hpc_train.config.hf_config import DECODERS
from hpc_train.config.schema import HFModelConfig
from hpc_train.models.hf.decoder import HFDecoder
from hpc_train.models.hf.lora import AdapterValues, adapt
from hpc_train.models.hf.pretrained import skeleton, weights_folder
from hpc_train.models.hf.values import FirstValues
from hpc_train.models.hf.weights import WeightFiles
from hpc_train.models.hf.whole import HFWhole


def build(config: HFModelConfig) -> HFDecoder | HFWhole:
    """Builds the model of ``config``. Call it on the ``meta`` device; the values follow when the model is sharded.

    Raises:
        UserError: the config or the weights cannot be read, or transformers has no such model.
    """
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
