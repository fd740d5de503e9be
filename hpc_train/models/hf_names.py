"""Maps the names of GPT parameters and config keys to the names in ``transformers`` and back, without torch.

Shapes and values are equal (``attention.rotate`` uses the convention of ``transformers``), so both directions only
rename tensors, and split or stack those of experts. ``FAMILIES`` lists the families. A model is exported as the first
family that has its options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from hpc_train.config.schema import GPTConfig, MoEConfig
from hpc_train.errors import UserError
from hpc_train.models.gpt_sizes import SCALING, expert_width, head_width, is_local

OUTPUT = "lm_head.weight"  # the files of a tied model lack it or contain a copy of the embedding
_OUTSIDE_LAYERS = {
    "stem.embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": OUTPUT,
}
_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.down_proj",
    "ffn.w3": "mlp.up_proj",
}
# of mixtures of experts, where {} is the number of an expert: Mixtral, and other families
_MIXTRAL = {
    "ffn.router": "block_sparse_moe.gate",
    "ffn.experts.w1": "block_sparse_moe.experts.{}.w1",
    "ffn.experts.w2": "block_sparse_moe.experts.{}.w2",
    "ffn.experts.w3": "block_sparse_moe.experts.{}.w3",
}
_EXPERTS = {
    "ffn.router": "mlp.gate",
    "ffn.experts.w1": "mlp.experts.{}.gate_proj",
    "ffn.experts.w2": "mlp.experts.{}.down_proj",
    "ffn.experts.w3": "mlp.experts.{}.up_proj",
}
_POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)|layers\.(\d+)\.(ffn\.experts\.w[123])")
_SUPPORTED: dict[str, Any] = {  # keys that hpc_train's GPT does not have, with the only value that it supports
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "use_bidirectional_attention": False,
    "decoder_sparse_step": 1,
    "router_jitter_noise": 0,
}
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}  # name here -> name in transformers
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class HFFamily:
    """Describes a family of ``transformers`` by the options of ``GPTConfig`` that it has.

    Attributes:
        architecture: the name of the class.
        always: the options that all models of the family have, with their values.
        may: the options that its ``config.json`` may set; all others have their defaults.
        defaults: keys that ``config.json`` may omit, with their values.
        local: takes ``config.json`` and a layer, and returns whether the layer has a sliding window if there are no
            ``layer_types``.
        activation_key: the key of the activation function.
        has_experts: whether its layers have experts.
    """

    architecture: str
    always: Mapping[str, Any] = field(default_factory=dict)
    may: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    local: Callable[[Mapping[str, Any], int], bool] = lambda values, layer: False
    activation_key: str = "hidden_act"
    has_experts: bool = False


_GEMMA = {"activation": "gelu_tanh", "scaled_embeddings": True, "norm_offset": True}
_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256}
_QWEN_DEFAULTS = {"use_sliding_window": False, "max_window_layers": 28}
_WINDOWS = ("sliding_window", "global_every")


def _in_qwen(values: Mapping[str, Any], layer: int) -> bool:
    return bool(values["use_sliding_window"]) and layer >= values["max_window_layers"]


FAMILIES: Mapping[str, HFFamily] = {  # by the ``model_type`` of config.json
    "llama": HFFamily("LlamaForCausalLM", may=("rope_scaling",)),
    "qwen2": HFFamily(
        "Qwen2ForCausalLM", {"qkv_bias": True}, ("rope_scaling", *_WINDOWS), _QWEN_DEFAULTS, local=_in_qwen
    ),
    "qwen3": HFFamily(
        "Qwen3ForCausalLM", {"qk_norm": True}, ("rope_scaling", *_WINDOWS), _QWEN_DEFAULTS, local=_in_qwen
    ),
    "mistral": HFFamily("MistralForCausalLM", may=("rope_scaling", "sliding_window"), local=lambda values, layer: True),
    "gemma": HFFamily("GemmaForCausalLM", _GEMMA, ("rope_scaling",), _GEMMA_DEFAULTS),
    "gemma2": HFFamily(
        "Gemma2ForCausalLM",
        _GEMMA | {"post_norms": True},
        ("rope_scaling", "query_scalar", "attention_softcap", "logit_softcap", *_WINDOWS),
        _GEMMA_DEFAULTS,
        local=lambda values, layer: layer % 2 == 0,
        activation_key="hidden_activation",
    ),
    "gemma3_text": HFFamily(
        "Gemma3ForCausalLM",
        _GEMMA | {"post_norms": True, "qk_norm": True},
        ("query_scalar", "logit_softcap", "local_rope_theta", *_WINDOWS),
        _GEMMA_DEFAULTS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
        local=lambda values, layer: (layer + 1) % values["sliding_window_pattern"] != 0,
        activation_key="hidden_activation",
    ),
    "mixtral": HFFamily(
        "MixtralForCausalLM",
        may=("rope_scaling", "sliding_window", "moe.experts"),
        local=lambda values, layer: True,
        has_experts=True,
    ),
    "qwen3_moe": HFFamily(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        ("rope_scaling", *_WINDOWS, "moe.experts", "moe.dense_layers", "moe.normalize"),
        _QWEN_DEFAULTS | {"norm_topk_prob": False, "mlp_only_layers": ()},
        local=_in_qwen,
        has_experts=True,
    ),
}
_OPTIONS = {
    "activation", "attention_softcap", "global_every", "local_rope_theta", "logit_softcap", "moe.bias_rate",
    "moe.dense_layers", "moe.experts", "moe.normalize", "moe.router", "moe.shared_experts", "norm_offset", "post_norms",
    "qk_norm", "qkv_bias", "query_scalar", "rope_scaling", "scaled_embeddings", "sliding_window",
}  # fmt: skip


def hf_name(model: GPTConfig, name: str) -> str | tuple[str, ...]:
    """Returns the name in ``transformers`` of the parameter ``name`` of ``model``, or of each expert's slice of it;
    raises KeyError if a GPT has no such parameter."""
    match = _LAYER.fullmatch(name)
    if not match:
        return _OUTSIDE_LAYERS[name]
    modules = _MODULES | (_POST_NORMS if model.post_norms else {}) | (_EXPERTS if model.qk_norm else _MIXTRAL)
    if match[5] is None:
        return f"model.layers.{match[1]}.{modules[match[2]]}.{match[3]}"
    of_expert = f"model.layers.{match[4]}.{modules[match[5]]}.weight"
    return tuple(of_expert.format(number) for number in range(model.moe.experts or 0))


def hf_config(model: GPTConfig, positions: int, dtype: str) -> dict[str, Any]:
    """Returns the ``config.json`` from which ``transformers`` builds ``model``.

    The config states ``positions``, the longest sequence of the training, and ``dtype``, the dtype of the exported
    tensors, e.g. ``bfloat16``. Raises UserError if ``transformers`` has no family with these options.
    """
    kind = next((kind for kind, family in FAMILIES.items() if not _problems(model, family)), None)
    if kind is None:
        changed = ", ".join(f"model.{name}={attrgetter(name)(model)}" for name in sorted(_changed(model)))
        raise UserError(
            f"no family of transformers has all of {changed}",
            where="--format",
            fix=f"--format pt, which exports any model; the families are {', '.join(FAMILIES)}",
        )
    if model.dim % model.n_heads:
        raise UserError(
            f"transformers needs a number of heads that divides the width, and {model.n_heads} does not divide "
            f"{model.dim}",
            where="--format",
            fix="--format pt, which exports any model",
        )
    family = FAMILIES[kind]
    values = {
        "architectures": [family.architecture],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": head_width(model),
        "max_position_embeddings": positions,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": _llama_scaling(model),
        "tie_word_embeddings": model.tied_embeddings,
        family.activation_key: _ACTIVATIONS[model.activation],
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }
    options: dict[str, Any] = {
        "query_scalar": {"query_pre_attn_scalar": model.query_scalar or head_width(model)},
        "attention_softcap": {"attn_logit_softcapping": model.attention_softcap},
        "logit_softcap": {"final_logit_softcapping": model.logit_softcap},
        "local_rope_theta": {"rope_local_base_freq": model.local_rope_theta or model.rope_theta},
        "sliding_window": {"sliding_window": model.sliding_window},
        "global_every": _hf_windows(model, family),
    }
    for option in family.may:
        values |= options.get(option, {})
    return values | (_hf_experts(model) if family.has_experts else {})


def _hf_experts(model: GPTConfig) -> dict[str, Any]:
    """Returns the keys of the experts of Mixtral, or of Qwen3-MoE, which normalizes queries and keys."""
    moe = model.moe
    common = {"num_experts_per_tok": moe.top_k, "router_aux_loss_coef": moe.balance_loss, "output_router_logits": False}
    if not model.qk_norm:
        return common | {"num_local_experts": moe.experts, "intermediate_size": expert_width(model)}
    return common | {
        "num_experts": moe.experts,
        "moe_intermediate_size": expert_width(model),
        "norm_topk_prob": moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [*range(moe.dense_layers)],
    }


def _problems(model: GPTConfig, family: HFFamily) -> list[str]:
    """Returns the options of ``model`` that ``family`` does not have."""
    lacks = _changed(model) - {*family.may, *family.always}
    return sorted(lacks | {name for name, value in family.always.items() if getattr(model, name) != value})


def _changed(model: GPTConfig) -> set[str]:
    """Returns the options that do not have their default values."""
    default = GPTConfig()
    return {name for name in _OPTIONS if attrgetter(name)(model) != attrgetter(name)(default)}


def _hf_windows(model: GPTConfig, family: HFFamily) -> dict[str, Any]:
    """Returns the keys that state which layers have a window. Versions of ``transformers`` without ``layer_types`` read
    the other keys."""
    local = [is_local(model, layer) for layer in range(model.n_layers)]
    values: dict[str, Any] = {"layer_types": [_LOCAL if local_layer else _GLOBAL for local_layer in local]}
    if "use_sliding_window" in family.defaults:
        values |= {"use_sliding_window": any(local), "max_window_layers": 0 if any(local) else model.n_layers}
    if "sliding_window_pattern" in family.defaults:
        values |= {"sliding_window_pattern": model.global_every or model.n_layers + 1}
    return values


def gpt_config(values: Mapping[str, Any], where: str) -> GPTConfig:
    """Returns the config of the GPT that a ``config.json`` of ``transformers`` 4 or 5 describes; raises UserError if
    the model has another architecture, or parts that hpc_train's GPT lacks."""
    kind = values.get("model_type", "llama")
    if kind not in FAMILIES:
        raise _unsupported(f"model_type {kind!r}", where)
    family = FAMILIES[kind]
    values = {**family.defaults, **values}
    for key, supported in _SUPPORTED.items():
        if values.get(key) not in (None, supported):
            raise _unsupported(f"{key} {values[key]!r}", where)
    expected = _ACTIVATIONS[family.always.get("activation", "silu")]
    activation = values.get("hidden_activation") or values.get("hidden_act") or expected
    if activation != expected and (activation, expected) != ("gelu", "gelu_pytorch_tanh"):  # old configs of Gemma
        raise _unsupported(f"{family.activation_key} {activation!r}", where)
    try:
        heads = int(values["num_attention_heads"])
        dim = int(values["hidden_size"])
        head_dim = int(values.get("head_dim") or dim // heads)
        options: dict[str, Any] = {}
        if "sliding_window" in family.may:
            options |= _windows(values, family, where)
        if "query_scalar" in family.may:
            scalar = int(values["query_pre_attn_scalar"])
            options["query_scalar"] = None if scalar == head_dim else scalar
        if "local_rope_theta" in family.may and options["sliding_window"] is not None:
            options["local_rope_theta"] = _theta(values, _LOCAL)
        for option, key in (
            ("attention_softcap", "attn_logit_softcapping"),
            ("logit_softcap", "final_logit_softcapping"),
        ):
            if values.get(key) is not None:
                options[option] = float(values[key])
        model = GPTConfig(
            vocab_size=int(values["vocab_size"]),
            n_layers=int(values["num_hidden_layers"]),
            dim=dim,
            n_heads=heads,
            n_kv_heads=int(values.get("num_key_value_heads") or heads),
            ffn_dim=int(values["intermediate_size"]),
            head_dim=None if head_dim * heads == dim else head_dim,
            rope_theta=_theta(values, _GLOBAL),
            rope_scaling=_scaling(values, where),
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            tied_embeddings=bool(values.get("tie_word_embeddings", False)),
            moe=_experts(values, family, where),
            **family.always,
            **options,
        )
    except KeyError as error:
        raise UserError(
            f"{where} has no {error.args[0]}", where=where, fix="use the config.json of the published model"
        ) from error
    problems = _problems(model, family)
    if problems:
        raise _unsupported(", ".join(f"{name} {attrgetter(name)(model)!r}" for name in problems), where)
    return model


def _experts(values: Mapping[str, Any], family: HFFamily, where: str) -> MoEConfig:
    if not family.has_experts:
        return MoEConfig()
    dense = [*values.get("mlp_only_layers", ())]
    if dense != [*range(len(dense))]:
        raise _unsupported(f"mlp_only_layers {dense}", where)
    width = values.get("moe_intermediate_size")
    return MoEConfig(
        experts=int(values.get("num_experts") or values["num_local_experts"]),
        top_k=int(values["num_experts_per_tok"]),
        expert_dim=None if width is None else int(width),
        dense_layers=len(dense),
        normalize=bool(values.get("norm_topk_prob", True)),
    )


def _windows(values: Mapping[str, Any], family: HFFamily, where: str) -> dict[str, int | None]:
    """Returns ``sliding_window`` and ``global_every``."""
    window = values.get("sliding_window")
    layers = int(values["num_hidden_layers"])
    types = values.get("layer_types") if "global_every" in family.may else None
    if types:
        local = [is_local_type == _LOCAL for is_local_type in types]
    else:
        local = [family.local(values, is_local_type) for is_local_type in range(layers)]
    if window is None or not any(local):
        return {"sliding_window": None}
    for every in range(layers + 1):
        if local == [not (every and (layer + 1) % every == 0) for layer in range(layers)]:
            return {"sliding_window": int(window), "global_every": every}
    raise _unsupported(
        f"sliding windows in layers {[layer for layer, is_local_layer in enumerate(local) if is_local_layer]}", where
    )


def _rotary(values: Mapping[str, Any], layers: str) -> tuple[str, Mapping[str, Any]]:
    """Returns the kind of scaling and its values; transformers 5 uses the key ``rope_parameters``, 4
    ``rope_scaling``. Gemma 3 has two in ``rope_parameters``."""
    rotary = values.get("rope_parameters") or values.get("rope_scaling") or {}
    rotary = rotary.get(layers, rotary)
    return rotary.get("rope_type", rotary.get("type", "default")), rotary


def _theta(values: Mapping[str, Any], layers: str) -> float:
    key, default = ("rope_theta", 10000.0) if layers == _GLOBAL else ("rope_local_base_freq", None)
    of_parameters: Mapping[str, Any] = {}
    if values.get("rope_parameters") or layers == _GLOBAL:
        of_parameters = _rotary(values, layers)[1]
    return float(of_parameters.get("rope_theta", values.get(key, default)))


def _scaling(values: Mapping[str, Any], where: str) -> dict[str, float]:
    kind, rotary = _rotary(values, _GLOBAL)
    if kind == "llama3":
        return {name: float(rotary[name]) for name in SCALING}
    if kind != "default":
        raise UserError(
            f"{where} scales its rotary positions with {kind!r}, which model kind gpt does not support",
            where=where,
            fix="set rope_scaling to null in this file to train the weights without scaling, which changes the results",
        )
    return {}


def _llama_scaling(model: GPTConfig) -> dict[str, Any] | None:
    if not model.rope_scaling:
        return None
    last = SCALING[-1]  # a number of tokens, which Llama's config holds as an integer
    return {"rope_type": "llama3", **model.rope_scaling, last: int(model.rope_scaling[last])}


def _unsupported(what: str, where: str) -> UserError:
    return UserError(
        f"{where} has {what}, which model kind gpt does not support",
        where=where,
        fix=f"use the weights of one of the families {', '.join(FAMILIES)}",
    )
