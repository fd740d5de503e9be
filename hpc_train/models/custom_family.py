"""``model=custom``: a user's module, of which nothing is known before it is built."""

from __future__ import annotations

from hpc_train.config.extensions import ModelFamily
from hpc_train.config.schema import CustomModelConfig

CUSTOM_FAMILY = ModelFamily(
    schema=CustomModelConfig,
    learns_from=None,
    builder="hpc_train.models.build:build_custom",
    parameters=None,
    activations=None,
    flops_per_sample=None,
    tensor_parallel=None,
    hugging_face=None,
)
