"""Maps the names of GPT parameters and config keys to those of Hugging Face's Llama and back. Imports no torch.

Shapes and values are equal (``transformer.rotate`` uses Llama's convention), so both directions only rename tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpc_train.config.schema import GPTConfig
from hpc_train.errors import UserError

OUTPUT = "lm_head.weight"  # a tied model's files lack it or hold a copy of the embedding
_WHOLE = {
    "stem.embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": OUTPUT,
}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.w1.weight": "mlp.gate_proj.weight",
    "ffn.w2.weight": "mlp.down_proj.weight",
    "ffn.w3.weight": "mlp.up_proj.weight",
}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_SUPPORTED: dict[str, Any] = {  # keys that our model lacks, each with the only value that it implements
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
}


def hf_name(name: str) -> str:
    """Returns Llama's name of the GPT parameter ``name``.

    Raises:
        KeyError: a GPT has no such parameter.
    """
    found = _LAYER.fullmatch(name)
    return f"model.layers.{found[1]}.{_LAYER_NAMES[found[2]]}" if found else _WHOLE[name]


def hf_config(config: GPTConfig, positions: int, dtype: str) -> dict[str, Any]:
    """Returns the ``config.json`` from which ``transformers`` builds the ``LlamaForCausalLM`` for ``config``.

    Args:
        positions: the longest sequence that the model was trained on.
        dtype: the dtype of the exported tensors, e.g. ``bfloat16``.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.dim // config.n_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _llama_scaling(config),
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def gpt_config(values: Mapping[str, Any], where: str) -> GPTConfig:
    """Returns the config of the GPT that a Llama's ``config.json`` of ``transformers`` 4 or 5 describes.

    Raises:
        UserError: the model has another architecture, or parts that hpc_train's GPT lacks.
    """
    _refuse_unsupported(values, where)
    try:
        heads, dim = int(values["num_attention_heads"]), int(values["hidden_size"])
        head_dim = values.get("head_dim") or dim // heads
        if head_dim * heads != dim:
            raise _unsupported(f"{heads} heads of width {head_dim} in a model of width {dim}", where)
        return GPTConfig(
            vocab_size=int(values["vocab_size"]),
            n_layers=int(values["num_hidden_layers"]),
            dim=dim,
            n_heads=heads,
            n_kv_heads=int(values.get("num_key_value_heads") or heads),
            ffn_dim=int(values["intermediate_size"]),
            rope_theta=_theta(values),
            rope_scaling=_scaling(values, where),
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(values.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise UserError(f"{where} has no {error.args[0]}", where=where, fix="use the config.json of a Llama") from error


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    for key, supported in _SUPPORTED.items():
        if values.get(key, supported) != supported:
            raise _unsupported(f"{key} {values[key]!r}", where)


def _rotary(values: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the kind of scaling and its values; transformers 5 uses the key ``rope_parameters``, 4
    ``rope_scaling``."""
    rotary = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return rotary.get("rope_type", rotary.get("type", "default")), rotary


def _theta(values: Mapping[str, Any]) -> float:
    return float(_rotary(values)[1].get("rope_theta", values.get("rope_theta", 10000.0)))


def _scaling(values: Mapping[str, Any], where: str) -> dict[str, float]:
    kind, rotary = _rotary(values)
    if kind == "llama3":
        return {name: float(rotary[name]) for name in SCALING}
    if kind != "default":
        raise UserError(
            f"{where} scales its rotary positions with {kind!r}, which model kind gpt does not support",
            where=where,
            fix="set rope_scaling to null there to train the weights without scaling, which changes their results",
        )
    return {}


def _llama_scaling(config: GPTConfig) -> dict[str, Any] | None:
    if not config.rope_scaling:
        return None
    last = SCALING[-1]  # a number of tokens, which Llama's config holds as an integer
    return {"rope_type": "llama3", **config.rope_scaling, last: int(config.rope_scaling[last])}


def _unsupported(what: str, where: str) -> UserError:
    return UserError(
        f"{where} has {what}, which model kind gpt does not support",
        where=where,
        fix="use the weights of a plain Llama",
    )
