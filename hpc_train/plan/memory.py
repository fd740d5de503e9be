"""An estimate of the memory of each rank, and the size of a model and its optimizer's state, from the config. No torch.

Activations are counted for the built-in transformers as autograd keeps them (a test counts the bytes): a layer's normed
inputs, projections, attention and feed-forward products. The estimate leaves out the CUDA context (about half a GiB),
memory that the allocator keeps unused, and buffers of collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from hpc_train.config.schema import Config, GPTConfig, ModelConfig, OptimConfig, StrategyConfig, ViTConfig
from hpc_train.plan.compression import CARRYING
from hpc_train.plan.layout import Layout
from hpc_train.plan.recomputation import parse_recomputation
from hpc_train.plan.stages import layer_counts

GIB = 2**30
NORMED = 4  # bytes of what norms take in: fp32 also where the rest is half as wide


@dataclass(frozen=True)
class Memory:
    """Bytes on the device of one rank."""

    parameters: float  # with copies in the compute type
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations

    @property
    def largest(self) -> str:
        """The name of the largest part."""
        return max(vars(self), key=lambda name: float(getattr(self, name)))

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in vars(self).items())
        return f"{self.total / GIB:.2f} GiB ({parts})"


def estimate(config: Config, layout: Layout) -> Memory | None:
    """Returns the memory of the rank that needs most, or None for a custom model."""
    if not isinstance(config.model, GPTConfig | ViTConfig):
        return None
    return max((_of_rank(config, layout, rank) for rank in range(layout.pp)), key=lambda memory: memory.total)


def _of_rank(config: Config, layout: Layout, pp_rank: int) -> Memory:
    width, narrow = _widths(config)
    parameters = _held_parameters(config, layout, pp_rank)
    sharded = layout.shards_state
    offload = config.strategy.offload
    share = parameters / layout.shard if sharded else parameters
    gathered = _gathered(config, layout, pp_rank, parameters) if sharded else parameters
    copies = gathered * narrow if sharded or narrow < width else 0.0  # autocast keeps its copies until the backward
    whole_gradients = not sharded or ("gradients" not in layout.kind.shards and layout.micro_batches > 1)
    moments = values_per_parameter(config.optim) * {"bf16": 2, "8bit": 1}.get(config.optim.moments, width)
    return Memory(
        parameters=copies + (0.0 if offload == "all" else share * width),
        gradients=0.0 if offload == "all" else (parameters if whole_gradients else share) * width,
        optimizer=share * moments if offload == "none" else 0.0,
        activations=_activations(config, layout, pp_rank, narrow),
    )


def _widths(config: Config) -> tuple[int, int]:
    """Bytes of a parameter, and of what it is computed with."""
    name = config.precision.name
    return (8, 8) if name == "fp64" else (4, 2 if name in ("bf16", "fp16") else 4)


def _layers_of_rank(config: Config, layout: Layout, pp_rank: int) -> dict[int, int]:
    """The number of layers of each stage of the rank."""
    counts = layer_counts(config.model.n_layers, layout.stages, config.strategy.pp_split if layout.pp > 1 else "even")
    return {stage: counts[stage] for stage, rank in enumerate(layout.placement) if rank == pp_rank}


def _has_head(layout: Layout, pp_rank: int) -> bool:
    return pp_rank == layout.placement[-1]


def _held_parameters(config: Config, layout: Layout, pp_rank: int) -> float:
    """Parameters of the stages of one rank, before they are sharded."""
    count, layer = parameter_count(config.model), _layer_parameters(config)
    assert count is not None
    outside = count - config.model.n_layers * layer  # stem and head
    tied = getattr(config.model, "tied_embeddings", False)
    ends = (pp_rank == 0) + _has_head(layout, pp_rank)
    layers = sum(_layers_of_rank(config, layout, pp_rank).values())
    return (layers * layer + outside * (1 if tied and ends else ends / 2)) / layout.tp


def _layer_parameters(config: Config) -> int:
    """The number of parameters of one layer."""
    from dataclasses import replace

    one, two = (parameter_count(replace(config.model, n_layers=number)) for number in (1, 2))
    assert one is not None and two is not None
    return two - one


def _gathered(config: Config, layout: Layout, pp_rank: int, parameters: float) -> float:
    """Parameters that are whole at one time: all, or where they are sharded two layers and what is no layer."""
    if "parameters" not in layout.kind.shards:
        return parameters
    layer, layers = _layer_parameters(config) / layout.tp, sum(_layers_of_rank(config, layout, pp_rank).values())
    return parameters - max(0, layers - 2) * layer


def _activations(config: Config, layout: Layout, pp_rank: int, narrow: int) -> float:
    tokens = layout.micro_size * _tokens(config)
    every, kept = _layer_bytes(config, narrow)
    of_stages = _layers_of_rank(config, layout, pp_rank)
    layers = sum(of_stages.values())
    recomputed = _recomputed_layers(config, layers)
    of_layer = ((layers - recomputed) * every + recomputed * kept) / max(1, layers)
    in_flight = sum(count * layout.in_flight(stage) for stage, count in of_stages.items())  # layers x micro-batches
    of_layers = in_flight * of_layer + (every if recomputed else 0)  # a layer that computes again is whole then
    logits = _logit_bytes(config, narrow) if _has_head(layout, pp_rank) else 0.0
    return tokens * (of_layers / layout.tp + logits)


def _tokens(config: Config) -> int:
    """Tokens of one sample; 1024 if custom data does not state them."""
    model = config.model
    if isinstance(model, ViTConfig):
        return 1 + (model.image_size // model.patch_size) ** 2
    return int(getattr(config.data, "sequence_length", None) or 1024)


def _layer_bytes(config: Config, narrow: int) -> tuple[float, float]:
    """Bytes kept for the backward per token and layer, without and with activation checkpointing."""
    model, dim = config.model, config.model.dim
    if isinstance(model, GPTConfig):
        key_value = dim // model.n_heads * model.n_kv_heads
        # normed twice, queries and keys before and after rotation, values, attention; a gated feed-forward
        every = 2 * dim * NORMED + (5 * dim + 3 * key_value + 4 * model.ffn_dim) * narrow
        products = (4 * dim + 2 * key_value + 2 * model.ffn_dim) * narrow
    else:
        every = 2 * dim * NORMED + (6 * dim + 2 * model.mlp_dim) * narrow
        products = (6 * dim + model.mlp_dim) * narrow
    keeps = parse_recomputation(config.train.activation_checkpointing).keep_products
    return every, dim * NORMED + (products if keeps else 0)


def _recomputed_layers(config: Config, layers: int) -> int:
    every = parse_recomputation(config.train.activation_checkpointing).every
    return ceil(layers / every) if every else 0


def _logit_bytes(config: Config, narrow: int) -> float:
    """Per token: logits and their gradient, widened to fp32 for the softmax, which keeps its result."""
    if not isinstance(config.model, GPTConfig):
        return 0.0
    widened = 3 * max(4, narrow) + (2 * narrow if narrow < 4 else 0)
    return config.model.vocab_size * widened / config.train.loss_chunks


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
