"""Computes the sizes of a GPT from its config: parameters, activations and FLOPs. It does not import torch.

A layer is local if its attention has a sliding window, and global if it attends to the full sequence.
"""

from __future__ import annotations

from typing import Any

from hpc_train.config.extensions import Activations, LinearLayers, RoutedExperts
from hpc_train.config.schema import GPTConfig
from hpc_train.config.values import check_divides
from hpc_train.errors import UserError

SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SEQUENCE = 1024  # tokens of a sample if the data has no fixed length


def head_width(model: GPTConfig) -> int:
    if model.head_dim is None:
        return model.dim // model.n_heads
    return model.head_dim


def query_width(model: GPTConfig) -> int:
    """Returns the width of all queries of a token."""
    return head_width(model) * model.n_heads


def key_value_width(model: GPTConfig) -> int:
    """Returns the width of all keys (or values) of a token."""
    return head_width(model) * model.n_kv_heads


def is_local(model: GPTConfig, layer: int) -> bool:
    """Returns whether ``layer``, counted from 0, has a sliding window."""
    return model.sliding_window is not None and not (model.global_every and (layer + 1) % model.global_every == 0)


def is_sparse(model: GPTConfig, layer: int) -> bool:
    """Returns whether ``layer``, counted from 0, has experts."""
    return model.moe.experts is not None and layer >= model.moe.dense_layers


def expert_width(model: GPTConfig) -> int:
    return model.moe.expert_dim or model.ffn_dim


def shared_width(model: GPTConfig) -> int:
    """Returns the width of all shared experts of a layer, which are one feed-forward branch."""
    return model.moe.shared_experts * expert_width(model)


def keys_per_query(model: GPTConfig, length: int) -> list[int]:
    """Returns, for each layer, the number of tokens to which the last of ``length`` tokens attends."""
    window = min(length, model.sliding_window or length)
    return [window if is_local(model, layer) else length for layer in range(model.n_layers)]


def _gpt_layer_parameters(model: GPTConfig, layer: int, active: bool = False) -> int:
    """Returns the number of parameters of ``layer``; with ``active``, of those that compute a token."""
    queries = query_width(model)
    key_values = key_value_width(model)
    attention = 2 * model.dim * (queries + key_values)
    biases = (queries + 2 * key_values) * model.qkv_bias
    norms = (2 + 2 * model.post_norms) * model.dim + 2 * head_width(model) * model.qk_norm
    router = 0
    width = model.ffn_dim
    if is_sparse(model, layer):
        assert model.moe.experts is not None
        router = model.moe.experts * model.dim
        width = shared_width(model) + expert_width(model) * (model.moe.top_k if active else model.moe.experts)
    return attention + biases + 3 * model.dim * width + norms + router


def gpt_experts(model: GPTConfig) -> RoutedExperts | None:
    moe = model.moe
    if moe.experts is None:
        return None
    sparse = model.n_layers - moe.dense_layers
    return RoutedExperts(moe.experts, moe.top_k, model.dim, expert_width(model), sparse, moe.capacity_factor)


def gpt_linear_layers(model: GPTConfig) -> tuple[LinearLayers, ...]:
    dim = model.dim
    queries = query_width(model)
    key_values = key_value_width(model)
    ffn = model.ffn_dim
    return (
        LinearLayers(("attention.wq", "attention.wk", "attention.wv"), dim, (queries, key_values, key_values)),
        LinearLayers(("attention.wo",), queries, (dim,)),
        LinearLayers(("ffn.w1", "ffn.w3"), dim, (ffn, ffn)),
        LinearLayers(("ffn.w2",), ffn, (dim,)),
    )


def gpt_parameters(model: GPTConfig) -> int:
    """Returns the number of parameters; a tied embedding table counts once."""
    tables = 2 - model.tied_embeddings
    layers = sum(_gpt_layer_parameters(model, layer) for layer in range(model.n_layers))
    return layers + model.dim + tables * model.vocab_size * model.dim


def gpt_stem_parameters(model: GPTConfig) -> int:
    """Returns the number of parameters of the embedding table."""
    return model.vocab_size * model.dim


def gpt_activations(model: GPTConfig, data: Any) -> Activations:
    """Returns the activations of a layer with the kernels of GPUs, whose norms keep only their inputs.

    Fused attention keeps no scores. With a soft cap, the scores are kept, and the keys and values of every query. A
    soft cap of the logits keeps the result of tanh, a third of the bytes that the loss keeps. Compiled code computes
    the activation function again, and keeps its product with the other projection. With experts, every layer counts as
    one that has them.
    """
    dim = model.dim
    queries = query_width(model)
    key_values = key_value_width(model)
    capped = model.attention_softcap is not None
    tokens = int(getattr(data, "sequence_length", None) or _SEQUENCE)
    norms = 2
    if model.post_norms:
        norms = 4
    normed = (queries + key_values) * model.qk_norm
    projected = 2 * (queries + key_values)  # and the attention
    scores = 0
    logits = model.vocab_size
    if capped:
        projected = 4 * queries
        scores = model.n_heads * tokens
    if model.logit_softcap is not None:
        logits = 4 * model.vocab_size // 3
    moe = model.moe
    width = model.ffn_dim
    results = dim  # of the feed-forward branch, as products
    exchanged = routing = widened = 0
    if moe.experts is not None:
        width = shared_width(model) + moe.top_k * expert_width(model)
        results = dim * (moe.top_k + (moe.shared_experts > 0))
        exchanged = moe.top_k * dim  # the gathered rows of the experts, and as many results in the order of the tokens
        # scores, and logits if there is a loss; in int64 the experts, their order and its inverse; weights
        routing = moe.experts * (1 + bool(moe.balance_loss or moe.z_loss)) + 8 * moe.top_k
        widened = dim * (1 + (moe.shared_experts > 0))  # the copy for the router, beside the input of shared experts
    return Activations(
        tokens=tokens,
        norm_inputs=2 * dim,
        layer=norms * dim + projected + 4 * width + normed + 2 * exchanged,
        products=dim + 2 * (queries + key_values) + 2 * width + results,
        layer_input=dim,
        logits=logits,
        scores=scores,
        mixed=queries,
        passing=norms * dim + normed + exchanged,
        tables=2 * head_width(model),
        fused=width,
        backward=2 * max(width, exchanged),
        routing=routing,
        widened=widened,
    )


def gpt_flops_per_sample(model: GPTConfig, shape: tuple[int, ...]) -> float:
    """Returns ``s (6 N + 12 L d s)`` for a sequence of ``s`` tokens, ``L`` layers and queries of width ``d``.

    ``N`` is the number of parameters in matrix products: all parameters except the embedding table, and of the experts
    those that a token chooses. A tied table counts once, as the output projection. The attention term is not halved
    for the causal mask; in a local layer, its second ``s`` is the window if that is smaller. Source: PaLM (Chowdhery et
    al. 2022, arXiv:2204.02311, appendix B).
    """
    length = shape[-1]
    head = 6.0 * length * (model.dim + model.vocab_size * model.dim)
    return sum(gpt_layer_flops(model, length)) + head


def gpt_layer_flops(model: GPTConfig, length: int) -> tuple[float, ...]:
    """Returns the part of ``gpt_flops_per_sample`` in each layer."""
    attention = 12 * query_width(model)
    return tuple(
        float(length * (6 * _gpt_layer_parameters(model, layer, active=True) + attention * keys))
        for layer, keys in enumerate(keys_per_query(model, length))
    )


def gpt_masked_flops(model: GPTConfig, length: int) -> float:
    """Returns the part of ``gpt_flops_per_sample`` for pairs of tokens that a causal mask excludes.

    Of the ``s w`` pairs in a window of ``w`` tokens, about ``w w / 2`` have no key, since fewer than ``w`` tokens
    precede the first ones. Without a window, ``w`` is ``s``.
    """
    return sum(12.0 * query_width(model) * keys**2 / 2 for keys in keys_per_query(model, length))


def check_gpt(model: GPTConfig, data: Any) -> None:
    """Checks the sizes of ``model`` against each other and against ``data``. Raises UserError if the sizes do not fit
    together, or if the vocabulary is smaller than the vocabulary of ``data``."""
    check_divides(model.n_kv_heads, model.n_heads, "model.n_kv_heads", "model.n_heads")
    if model.head_dim is None:
        check_divides(model.n_heads, model.dim, "model.n_heads", "the width model.dim")
    if head_width(model) % 2:
        where = "model.head_dim"
        fix = "an even model.head_dim"
        if model.head_dim is None:
            where = "model.dim, model.n_heads"
            fix = f"a model.dim that is a multiple of {2 * model.n_heads}"
        raise UserError(f"rotary positions need an even head width, not {head_width(model)}", where=where, fix=fix)
    _check_windows(model)
    _check_experts(model)
    _check_rope_scaling(model.rope_scaling)
    vocabulary = getattr(data, "vocab_size", None)
    if vocabulary is not None and model.vocab_size < vocabulary:
        raise UserError(
            f"the data has {vocabulary} token ids, but model.vocab_size is {model.vocab_size}",
            where="model.vocab_size",
            fix=f"model.vocab_size={vocabulary} or more",
        )


def _check_windows(model: GPTConfig) -> None:
    if model.sliding_window is not None:
        return
    for name in ("global_every", "local_rope_theta"):
        if getattr(model, name):
            raise UserError(
                f"model.{name} is {getattr(model, name)}, but no layer has a sliding window",
                where=f"model.{name}",
                fix=f"set model.sliding_window, or leave model.{name} at its default",
            )


def _check_experts(model: GPTConfig) -> None:
    moe = model.moe
    if moe.experts is None:
        return
    if moe.top_k > moe.experts:
        raise UserError(
            f"model.moe.top_k is {moe.top_k}, but there are {moe.experts} experts",
            where="model.moe.top_k",
            fix=f"model.moe.top_k={moe.experts} or less",
        )
    if moe.dense_layers >= model.n_layers:
        raise UserError(
            f"model.moe.dense_layers is {moe.dense_layers}, so none of {model.n_layers} layers has experts",
            where="model.moe.dense_layers",
            fix=f"model.moe.dense_layers={model.n_layers - 1} or less, or model.moe.experts=null",
        )
    if moe.normalize and moe.top_k == 1:
        raise UserError(
            "the weight of a single chosen expert is 1 after its normalization, so the router gets no gradient",
            where="model.moe.normalize, model.moe.top_k",
            fix="model.moe.normalize=false, as in Switch Transformers",
        )


def _check_rope_scaling(scaling: dict[str, float]) -> None:
    if not scaling:
        return
    if set(scaling) != set(SCALING) or min(scaling.values()) <= 0:
        raise UserError(
            f"model.rope_scaling is {dict(scaling)}, but it needs {len(SCALING)} factors above 0",
            where="model.rope_scaling",
            fix=f"set {', '.join(SCALING)}, all above 0",
        )
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise UserError(
            f"low_freq_factor {scaling['low_freq_factor']:g} is not below high_freq_factor "
            f"{scaling['high_freq_factor']:g}",
            where="model.rope_scaling",
            fix="a high_freq_factor above low_freq_factor; Llama 3.1 has 4 and 1",
        )
