"""How large a model and its optimizer's state are, counted from the config. No torch."""

from __future__ import annotations

from hpc_train.config.compression import CARRYING
from hpc_train.config.schema import Config, GPTConfig, ModelConfig, OptimConfig, StrategyConfig, ViTConfig


def parameter_count(model: ModelConfig) -> int | None:
    """Parameters of a built-in model, a tied table once; None for a custom one, which only its own code can tell."""
    if isinstance(model, GPTConfig):
        return _gpt(model)
    return _vit(model) if isinstance(model, ViTConfig) else None


def state_bytes(config: Config, replicas: int = 1) -> int | None:
    """Bytes of what a checkpoint holds: the parameters and the optimizer's values for each; None where not known.

    ``replicas``: each of which adds what its compressed gradients left out.
    """
    parameters = parameter_count(config.model)
    if parameters is None:
        return None
    width = 8 if config.precision.name == "fp64" else 4
    moment = 2 if config.optim.moments == "bf16" else width
    values = width + moment * values_per_parameter(config.optim)
    return parameters * (values + width * _carried_per_parameter(config.strategy, replicas))


def values_per_parameter(optim: OptimConfig) -> int:
    """AdamW keeps two moments, SGD with momentum one."""
    return 2 if optim.name == "adamw" else int(optim.momentum > 0)


def _carried_per_parameter(strategy: StrategyConfig, replicas: int) -> int:
    """A residual on each replica, and with momentum correction a velocity."""
    if replicas == 1 or strategy.compression not in CARRYING:
        return 0
    return replicas * (2 if strategy.compression == "topk" and strategy.compression_momentum else 1)


def _gpt(model: GPTConfig) -> int:
    key_value = model.dim // model.n_heads * model.n_kv_heads
    attention = 2 * model.dim * (model.dim + key_value)
    layer = attention + 3 * model.dim * model.ffn_dim + 2 * model.dim  # and two norms
    tables = 1 if model.tied_embeddings else 2
    return model.n_layers * layer + model.dim + tables * model.vocab_size * model.dim


def _vit(model: ViTConfig) -> int:
    dim, patches = model.dim, (model.image_size // model.patch_size) ** 2
    stem = dim * (model.channels * model.patch_size**2 + 1) + dim + (1 + patches) * dim
    feed_forward = 2 * dim * model.mlp_dim + model.mlp_dim + dim
    layer = 4 * dim * (dim + 1) + feed_forward + 4 * dim  # and two norms
    return stem + model.n_layers * layer + 2 * dim + model.n_classes * (dim + 1)
