"""The keys of the group ``model``: one dataclass per model family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_train.config import hf_config
from hpc_train.config.schema.key import group, key, required, unless, when


@dataclass
class ModelKeys:
    """Holds the keys that every model config has.

    A custom family derives its dataclass from this one and adds ``n_layers``.
    """

    kind: str = required("The model family: gpt, vit, custom, or package.module:NAME of a custom family.")


@dataclass
class TransformerKeys(ModelKeys):
    """Holds the keys that all built-in transformers have."""

    n_layers: int = required("The number of layers.", at_least=1)
    dim: int = required("The width of the hidden states.", at_least=1)
    n_heads: int = required("The number of attention heads.", at_least=1)
    dropout: float = key(0.0, "The dropout probability.", at_least=0, below=1)


@dataclass
class WrapKeys(ModelKeys):
    """Holds the keys of models that hpc_train does not implement itself."""

    wrap: list[str] | None = key(
        None,
        "The class names of the blocks that are sharded, recomputed and compiled one by one. null uses the blocks "
        "that the model names, or else the repeated blocks of its longest ModuleList; an empty list treats no block "
        "separately.",
    )


EXPERTS = unless("model.moe.experts", None)


@dataclass
class MoEConfig:
    """A mixture of experts, which replaces the feed-forward branch of the layers."""

    experts: int | None = key(
        None, "The number of experts of a layer. null means a single feed-forward branch.", at_least=2
    )
    top_k: int = key(2, "The number of experts that compute a token.", at_least=1, when=EXPERTS)
    expert_dim: int | None = key(None, "The width of an expert. null is ffn_dim.", at_least=1, when=EXPERTS)
    shared_experts: int = key(
        0, "The number of experts that compute every token in addition, without a router.", at_least=0, when=EXPERTS
    )
    dense_layers: int = key(
        0, "The number of first layers with a single feed-forward branch, as in DeepSeek.", at_least=0, when=EXPERTS
    )
    router: str = key(
        "softmax",
        "How logits become scores: softmax over the experts, or sigmoid as in DeepSeek-V3.",
        choices=("softmax", "sigmoid"),
        when=EXPERTS,
    )
    normalize: bool = key(
        True, "Whether the weights of the chosen experts are divided by their sum, as in Mixtral.", when=EXPERTS
    )
    capacity_factor: float | None = key(
        None,
        "In training, an expert computes at most this factor times the mean number of choices in each sequence; later "
        "tokens lose theirs. null drops none.",
        above=0,
        when=EXPERTS,
    )
    balance_loss: float = key(
        0.0,
        "The coefficient of the load-balancing loss of each layer, which is 1 for an even load. It is computed per "
        "sequence.",
        at_least=0,
        when=EXPERTS,
    )
    z_loss: float = key(
        0.0, "The coefficient of the z-loss, which keeps the logits of the router small.", at_least=0, when=EXPERTS
    )
    bias_rate: float | None = key(
        None,
        "The change per step of a bias of each expert for the choice, up for an expert with fewer choices than the "
        "mean, else down, as in DeepSeek-V3. null means no bias; 0 keeps the biases as they are.",
        at_least=0,
        when=EXPERTS,
    )


@dataclass
class GPTConfig(TransformerKeys):
    """Configures a decoder-only transformer like Llama; its options give Qwen2, Qwen3, Mistral, Gemma and, with
    experts, Mixtral and Qwen3-MoE."""

    kind: str = key("gpt", "The model family.")
    vocab_size: int = required("The number of token ids.", at_least=1)
    n_kv_heads: int = required("The number of key and value heads, each shared by several query heads.", at_least=1)
    ffn_dim: int = required("The width of the feed-forward branch.", at_least=1)
    head_dim: int | None = key(None, "The width of a head, an even number. null is dim / n_heads.", at_least=2)
    activation: str = key(
        "silu",
        "The activation function of the gated feed-forward branch. gelu_tanh approximates GELU by tanh, as Gemma does.",
        choices=("silu", "gelu_tanh"),
    )
    qkv_bias: bool = key(False, "Whether the projections to queries, keys and values have biases, as in Qwen2.")
    qk_norm: bool = key(False, "Whether the queries and keys of each head are normalized, as in Qwen3 and Gemma 3.")
    sliding_window: int | None = key(
        None,
        "The number of tokens to which a token attends, including itself. null means no window.",
        at_least=1,
        unit="tokens",
    )
    global_every: int = key(
        0,
        "Every N-th layer attends to all tokens instead of the sliding window: 2 in Gemma 2, 6 in Gemma 3. 0 means "
        "that no layer does.",
        at_least=0,
        when=unless("model.sliding_window", None),
    )
    query_scalar: int | None = key(
        None, "Attention scores are divided by the square root of this number. null is the width of a head.", at_least=1
    )
    attention_softcap: float | None = key(
        None,
        "Attention scores x become cap * tanh(x / cap), as in Gemma 2. No fused attention kernel of PyTorch does this.",
        above=0,
    )
    logit_softcap: float | None = key(None, "Logits x become cap * tanh(x / cap), as in Gemma 2.", above=0)
    scaled_embeddings: bool = key(False, "Whether embeddings are multiplied by the square root of dim, as in Gemma.")
    norm_offset: bool = key(
        False, "Whether norms multiply by 1 + weight, which starts at 0, as in Gemma, or by weight, which starts at 1."
    )
    post_norms: bool = key(
        False, "Whether the outputs of attention and feed-forward branch are normalized too, as in Gemma 2 and 3."
    )
    rope_theta: float = key(10000.0, "The base of the rotary position frequencies.", above=0)
    local_rope_theta: float | None = key(
        None,
        "The base in layers with a sliding window, which rope_scaling then does not change, as in Gemma 3. null is "
        "rope_theta.",
        above=0,
        when=unless("model.sliding_window", None),
    )
    rope_scaling: dict[str, float] = key(
        {},
        "Llama 3.1's scaling of rotary positions: factor, low_freq_factor, high_freq_factor and "
        "original_max_position_embeddings. An empty dictionary disables it.",
    )
    norm_eps: float = key(1e-5, "The epsilon of RMSNorm.", above=0)
    tied_embeddings: bool = key(False, "Whether the output projection shares the embedding table.")
    moe: MoEConfig = group(MoEConfig)


@dataclass
class ViTConfig(TransformerKeys):
    """A vision transformer with a class token."""

    kind: str = key("vit", "The model family.")
    image_size: int = required("The width and height of an image in pixels.", at_least=1, unit="pixels")
    patch_size: int = required("The width and height of a patch in pixels.", at_least=1, unit="pixels")
    channels: int = key(3, "The number of color channels.", at_least=1)
    n_classes: int = required("The number of classes.", at_least=1)
    mlp_dim: int = required("The width of the feed-forward branch.", at_least=1)
    norm_eps: float = key(1e-6, "The epsilon of LayerNorm.", above=0)


@dataclass
class CustomModelConfig(WrapKeys):
    """Builds any custom ``nn.Module`` or ``Model`` by calling ``_target_``."""

    kind: str = key("custom", "The model family.")
    _target_: str = required("The class or function that returns the module: package.module.Name.")
    args: dict[str, Any] = key({}, "The keyword arguments of _target_.")
    loss: str = key(
        "cross_entropy", "The loss of a module that has no method named loss.", choices=("cross_entropy", "mse")
    )
    class_dim: str = key(
        "auto",
        "The dimension of the outputs that holds the classes of the cross-entropy: [micro, classes, ...] (second) or "
        "[micro, ..., classes] (last). auto is the one that fits the targets.",
        choices=("auto", "second", "last"),
        when=when("model.loss", "cross_entropy"),
    )
    sync_batch_norm: bool = key(
        False, "Whether batch normalization uses the statistics of all ranks.", when=when("replicas")
    )


@dataclass
class LoraConfig:
    """Low-rank adapters for the linear layers of a model whose weights stay fixed (Hu et al., arXiv:2106.09685)."""

    rank: int | None = key(None, "The rank of the adapters. null trains the whole model, without adapters.", at_least=1)
    alpha: float = key(
        16.0, "The output of an adapter is multiplied by alpha / rank.", above=0, when=unless("model.lora.rank", None)
    )
    dropout: float = key(
        0.0,
        "The dropout probability of the input of an adapter.",
        at_least=0,
        below=1,
        when=unless("model.lora.rank", None),
    )
    targets: list[str] | None = key(
        None,
        "The names of the layers that get an adapter, such as q_proj; the end of a full name suffices. null is every "
        "linear layer except those of the head.",
        when=unless("model.lora.rank", None),
    )
    modules_to_save: list[str] | None = key(
        None,
        "The full names of modules that are trained and saved themselves. null is the head of a classifier, and no "
        "module of a language model.",
        when=unless("model.lora.rank", None),
    )
    base: str = key(
        "compute",
        "The format of the fixed weights: compute, the format of precision; or nf4 for the linear layers except those "
        "of the head, 4.127 bits per weight (QLoRA, arXiv:2305.14314).",
        choices=("compute", "nf4"),
        when=unless("model.lora.rank", None),
    )


@dataclass
class HFModelConfig(WrapKeys):
    """A model of Hugging Face's transformers."""

    kind: str = key("hf", "The model family.")
    name_or_path: str = required("A directory with config.json and safetensors files, or a name on the hub.")
    task: str = required("What the model computes.", choices=hf_config.TASKS)
    pretrained: bool = key(True, "Whether to read the weights; false initializes a model of this config.")
    revision: str | None = key(None, "The branch, tag or commit on the hub.", when=when("hub"))
    config: dict[str, Any] = key({}, "Values that replace those of config.json, such as num_labels.")
    split_dependent_loss: bool = key(
        False,
        "Whether to train on several ranks or micro-batches with a load-balancing loss (output_router_logits in the "
        "config of the model). Each micro-batch computes its own loss, so the result depends on their number.",
    )
    lora: LoraConfig = group(LoraConfig)

    @property
    def n_layers(self) -> int | None:
        """Returns the number of blocks; None if it is unknown."""
        return hf_config.number(self._values(), "num_hidden_layers")

    @property
    def tied_embeddings(self) -> bool:
        """Returns whether the output projection of a language model shares the embedding table."""
        return hf_config.ties(self._values())

    def _values(self) -> Mapping[str, Any] | None:
        return hf_config.read(self.name_or_path, self.revision, self.config)
