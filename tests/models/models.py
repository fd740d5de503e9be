"""Small models with real values, for the tests of this folder."""

from __future__ import annotations

import hashlib

import torch

from hpc_train.config.schema import GPTConfig, ViTConfig
from hpc_train.models.build import build_model
from hpc_train.models.model import Model

TINY_GPT = GPTConfig(vocab_size=61, n_layers=4, dim=48, n_heads=6, n_kv_heads=2, ffn_dim=80)
TINY_VIT = ViTConfig(image_size=16, patch_size=4, n_classes=7, n_layers=3, dim=32, n_heads=4, mlp_dim=64)


def with_values(config: GPTConfig | ViTConfig, dtype: torch.dtype = torch.float32) -> Model:
    """The model of ``config`` on the CPU; each parameter drawn from a generator seeded by its name."""
    model = build_model(config, seed=0)
    assert isinstance(model, Model)
    model.to_empty(device="cpu").to(dtype)
    for alias, canonical in model.tied.items():
        module, _, name = alias.rpartition(".")
        setattr(model.get_submodule(module), name, model.get_parameter(canonical))
    for name, parameter in model.named_parameters():
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        model.init_parameter(name, parameter.data, torch.Generator().manual_seed(seed))
    model.init_buffers(torch.device("cpu"))
    return model
