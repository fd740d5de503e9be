"""The GPT family: its sizes, memory, FLOPs and names, computed from the config. This file imports no torch."""

from __future__ import annotations

from typing import Any

from hpc_train.config.extensions import TOKENS, Activations, HuggingFaceFormat, ModelFamily, TensorParallel
from hpc_train.config.schema import GPTConfig
from hpc_train.config.values import check_divides
from hpc_train.errors import UserError
from hpc_train.models.hf_names import hf_config, hf_name

_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SEQUENCE = 1024  # tokens of a sample if the data has no fixed length


def key_value_width(model: GPTConfig) -> int:
    """The width of all keys (or values) of a token."""
    return model.dim // model.n_heads * model.n_kv_heads


def _layer_parameters(model: GPTConfig) -> int:
    attention = 2 * model.dim * (model.dim + key_value_width(model))
    return attention + 3 * model.dim * model.ffn_dim + 2 * model.dim  # and two norms


def parameters(model: GPTConfig) -> int:
    """The number of parameters; a tied table counts once."""
    tables = 1 if model.tied_embeddings else 2
    return model.n_layers * _layer_parameters(model) + model.dim + tables * model.vocab_size * model.dim


def activations(model: GPTConfig, data: Any) -> Activations:
    """Queries and keys are kept before and after rotation; the feed-forward branch is gated."""
    dim, key_value = model.dim, key_value_width(model)
    return Activations(
        tokens=int(getattr(data, "sequence_length", None) or _SEQUENCE),
        norm_inputs=2 * dim,
        layer=5 * dim + 3 * key_value + 4 * model.ffn_dim,
        products=4 * dim + 2 * key_value + 2 * model.ffn_dim,
        layer_input=dim,
        logits=model.vocab_size,
    )


def flops_per_sample(model: GPTConfig, shape: tuple[int, ...]) -> float:
    """``s (6 N + 12 L d s)`` for a sequence of ``s`` tokens, ``L`` layers and width ``d``.

    ``N`` counts the parameters that are multiplied (all but the embedding table; a tied table counts once, as the
    output projection). The attention term is not halved for the causal mask. Source: PaLM (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B).
    """
    length = shape[-1]
    multiplied = model.n_layers * _layer_parameters(model) + model.dim + model.vocab_size * model.dim
    return float(length * (6 * multiplied + 12 * model.n_layers * model.dim * length))


def check(model: GPTConfig, data: Any) -> None:
    """
    Raises:
        UserError: the sizes do not fit together, or the vocabulary is smaller than that of ``data``.
    """
    check_divides(model.n_heads, model.dim, "model.n_heads", "the width model.dim")
    check_divides(model.n_kv_heads, model.n_heads, "model.n_kv_heads", "model.n_heads")
    if model.dim // model.n_heads % 2:
        raise UserError(
            f"rotary positions need an even head width, not {model.dim // model.n_heads}",
            where="model.dim, model.n_heads",
            fix=f"a model.dim that is a multiple of {2 * model.n_heads}",
        )
    _check_rope_scaling(model.rope_scaling)
    vocabulary = getattr(data, "vocab_size", None)
    if vocabulary is not None and model.vocab_size < vocabulary:
        raise UserError(
            f"the data has {vocabulary} token ids, but model.vocab_size is {model.vocab_size}",
            where="model.vocab_size",
            fix=f"model.vocab_size={vocabulary} or more",
        )


def _check_rope_scaling(scaling: dict[str, float]) -> None:
    if not scaling:
        return
    if set(scaling) != set(_SCALING) or min(scaling.values()) <= 0:
        raise UserError(
            f"model.rope_scaling is {dict(scaling)}",
            where="model.rope_scaling",
            fix=f"{', '.join(_SCALING)}, all above 0",
        )
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise UserError(
            f"low_freq_factor {scaling['low_freq_factor']:g} is not below high_freq_factor "
            f"{scaling['high_freq_factor']:g}",
            where="model.rope_scaling",
            fix="a high_freq_factor above low_freq_factor; Llama 3.1 has 4 and 1",
        )


GPT_FAMILY = ModelFamily(
    schema=GPTConfig,
    learns_from=TOKENS,
    builder="hpc_train.models.gpt:GPT",
    parameters=parameters,
    activations=activations,
    flops_per_sample=flops_per_sample,
    tensor_parallel=TensorParallel(
        plan="hpc_train.models.gpt:tensor_parallel_plan",
        divisible=("n_heads", "n_kv_heads", "ffn_dim"),
        shards_sequence=True,
    ),
    hugging_face=HuggingFaceFormat(hf_name, hf_config),
    chunked_loss=True,
    check=check,
)
