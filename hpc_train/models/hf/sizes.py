"""Computes parameters, activations and FLOPs of transformers models from their config.json, without torch.

The table contains the architectures whose sizes follow from a few keys. The sizes of others are unknown here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpc_train.config import hf_config
from hpc_train.config.extensions import Activations, LinearLayers
from hpc_train.config.hf_config import DECODERS, ties
from hpc_train.config.schema import HFModelConfig

_SEQUENCE = 1024  # tokens of a sample if the data has no fixed length
_EXPLICIT_HEAD_WIDTH = ("gemma", "gemma2", "qwen3")  # their default is not hidden_size / num_attention_heads
_FOUR_NORMS = ("gemma2",)


@dataclass(frozen=True)
class Sizes:
    """Holds the inputs of the formulas.

    Attributes:
        layers, layer: the number of layers, and the parameters of a layer.
        stem, head: the parameters before and after the layers; a tied table belongs to the stem.
        multiplied: the parameters outside the layers with which every token is multiplied.
        width, query, key_value, ffn: the widths of hidden states, queries, keys (or values) and the feed-forward
            branch.
        tokens: the tokens of a sample; None for the length of the sequence.
        logits: the logits of a token.
        adapter: the parameters of the adapters of a layer.
        quantized: the parameters of a layer that are held in NF4.
        classifier: the parameters outside the layers that train in addition to adapters.
    """

    layers: int
    layer: int
    stem: int
    head: int
    multiplied: int
    width: int
    query: int
    key_value: int
    ffn: int
    gated: bool
    tokens: int | None
    logits: int
    adapter: int = 0
    quantized: int = 0
    classifier: int = 0

    @property
    def products(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Returns the inputs and outputs of the linear layers of a layer, grouped by their input, in their order."""
        return (
            (self.width, (self.query, self.key_value, self.key_value)),
            (self.query, (self.width,)),
            (self.width, (self.ffn,) * (1 + self.gated)),
            (self.ffn, (self.width,)),
        )


def values_of(model: HFModelConfig) -> Mapping[str, Any] | None:
    """Returns the content of config.json with the values of ``model.config``; None if it cannot be read on this
    machine."""
    return hf_config.read(model.name_or_path, model.revision, model.config)


def sizes(model: HFModelConfig) -> Sizes | None:
    """Returns the sizes of a config; None if its architecture is not in the table or a key is missing."""
    values = values_of(model)
    if values is None:
        return None
    try:
        if values.get("model_type") in DECODERS:
            return _with_adapters(_decoder(values, model.task), model)
        if model.lora.rank is not None:
            return None
        if (values.get("model_type"), model.task) == ("vit", "image_classification"):
            return _vit(values)
        if (values.get("model_type"), model.task) == ("bert", "masked_lm"):
            return _bert(values)
    except (KeyError, TypeError, ZeroDivisionError):
        pass
    return None


def _decoder(values: Mapping[str, Any], task: str) -> Sizes | None:
    kind, width, ffn, vocabulary = (
        values[key] for key in ("model_type", "hidden_size", "intermediate_size", "vocab_size")
    )
    heads = values["num_attention_heads"]
    if kind in _EXPLICIT_HEAD_WIDTH:
        head = values["head_dim"]
    else:
        head = values.get("head_dim") or width // heads
    groups = values.get("num_key_value_heads") or (heads if kind == "llama" else values["num_key_value_heads"])
    query = heads * head
    key_value = groups * head
    everywhere = bool(values.get("attention_bias")) and kind != "mistral"
    layer = 2 * width * (query + key_value) + 3 * width * ffn
    layer += (query + 2 * key_value) * (everywhere or kind == "qwen2") + width * everywhere
    layer += (2 * ffn + width) * bool(values.get("mlp_bias") and kind == "llama")
    layer += (4 if kind in _FOUR_NORMS else 2) * width + 2 * head * (kind == "qwen3")
    table = vocabulary * width
    if task == "causal_lm":
        output = table
        untied_output = table * (not ties(values))
        logits = vocabulary
    else:
        output = untied_output = width * values.get("num_labels", len(values.get("id2label", "12")))
        logits = 0
    return Sizes(
        values["num_hidden_layers"], layer, table, width + untied_output, width + output, width, query, key_value, ffn,
        True, None, logits,
    )  # fmt: skip


_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a layer of a decoder


def linear_layers(model: HFModelConfig) -> tuple[str, ...]:
    """Returns the names of the linear layers of a decoder of the table; empty for other models."""
    if (values_of(model) or {}).get("model_type") in DECODERS:
        return _LINEAR
    return ()


def products(model: HFModelConfig) -> tuple[LinearLayers, ...] | None:
    """Returns the linear layers of a layer by their input; None if they are unknown or have adapters."""
    counts = sizes(model)
    if counts is None or model.lora.rank is not None:
        return None
    kind = (values_of(model) or {})["model_type"]
    layer, *groups = _NAMES.get(kind) or _NAMES["decoder" if model.task == "causal_lm" else "whole"]
    return tuple(
        LinearLayers(tuple(names.split()), inputs, outputs, layer)
        for names, (inputs, outputs) in zip(groups, counts.products, strict=True)
    )


_DECODER = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
# the name of a layer, and of its linear layers by their input
_NAMES = {
    "decoder": ("layers.{}.block", *_DECODER),
    "whole": ("model.layers.{}", *_DECODER),
    "vit": (
        "vit.layers.{}", "attention.q_proj attention.k_proj attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2",
    ),
    "bert": (
        "bert.encoder.layer.{}", "attention.self.query attention.self.key attention.self.value",
        "attention.output.dense", "intermediate.dense", "output.dense",
    ),
}  # fmt: skip


def _with_adapters(counts: Sizes | None, model: HFModelConfig) -> Sizes | None:
    """Adds ``rank * (inputs + outputs)`` parameters for each linear layer that has an adapter."""
    lora = model.lora
    if counts is None or lora.rank is None:
        return counts
    if lora.modules_to_save is not None or any("." in name for name in lora.targets or ()):
        return None  # full names may select only some layers
    shapes = [(inputs, size) for inputs, outputs in counts.products for size in outputs]
    chosen = _LINEAR if lora.targets is None else lora.targets
    adapter = sum(lora.rank * sum(shape) for name, shape in zip(_LINEAR, shapes, strict=True) if name in chosen)
    quantized = sum(map(math.prod, shapes)) * (lora.base == "nf4")
    classifier = 0 if model.task == "causal_lm" else counts.head - counts.width  # without the last norm
    return replace(counts, adapter=adapter, quantized=quantized, classifier=classifier)


def _encoder_layer(width: int, ffn: int, query_bias: bool = True) -> int:
    """Returns the parameters of a layer with biases and two norms."""
    return 4 * width * width + (1 + 3 * query_bias) * width + 2 * width * ffn + ffn + width + 4 * width


def _vit(values: Mapping[str, Any]) -> Sizes:
    width, ffn, channels, patch = (
        values[key] for key in ("hidden_size", "intermediate_size", "num_channels", "patch_size")
    )
    tokens = 1 + (values["image_size"] // patch) ** 2
    projection = width * (channels * patch**2 + 1)
    classes = values.get("num_labels", len(values.get("id2label", "12")))  # transformers has 2 classes by default
    return Sizes(
        values["num_hidden_layers"], _encoder_layer(width, ffn, values.get("qkv_bias", True)),
        projection + width + tokens * width, 2 * width + classes * (width + 1), projection, width, width, width, ffn,
        False, tokens, 0,
    )  # fmt: skip


def _bert(values: Mapping[str, Any]) -> Sizes:
    width, ffn, vocabulary = (values[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    tables = vocabulary + values["max_position_embeddings"] + values["type_vocab_size"]
    transform = width * width + 3 * width + vocabulary
    untied_output = 0 if values.get("tie_word_embeddings", True) else vocabulary * width
    return Sizes(
        values["num_hidden_layers"], _encoder_layer(width, ffn), tables * width + 2 * width, transform + untied_output,
        transform + vocabulary * width, width, width, width, ffn, False, None, vocabulary,
    )  # fmt: skip


def parameters(model: HFModelConfig) -> int | None:
    """Returns the number of parameters; a tied table counts once."""
    counts = sizes(model)
    if counts is None:
        return None
    return counts.stem + counts.layers * (counts.layer + counts.adapter) + counts.head


def trained_parameters(model: HFModelConfig) -> int | None:
    """Returns the number of parameters that train: all parameters, or the parameters of the adapters and the
    classifier."""
    counts = sizes(model)
    if counts is None or model.lora.rank is None:
        return parameters(model)
    return counts.layers * counts.adapter + counts.classifier


def quantized_parameters(model: HFModelConfig) -> int | None:
    counts = sizes(model)
    if counts is None:
        return None
    return counts.layers * counts.quantized


def layer_parameters(model: HFModelConfig) -> int | None:
    counts = sizes(model)
    if counts is None:
        return None
    return counts.layer + counts.adapter


def stem_parameters(model: HFModelConfig) -> int | None:
    """Returns the number of parameters before the layers; a tied table counts here."""
    counts = sizes(model)
    if counts is None:
        return None
    return counts.stem


def activations(model: HFModelConfig, data: Any) -> Activations:
    """Returns the activations of a layer, counted as for the built-in models. Raises ValueError if the sizes are
    unknown."""
    counts = sizes(model)
    if counts is None:
        raise ValueError(f"the sizes of {model.name_or_path} are unknown")
    width = counts.width
    query = counts.query
    key_value = counts.key_value
    ffn = counts.ffn
    tokens = counts.tokens or int(getattr(data, "sequence_length", None) or _SEQUENCE)
    common = {"tokens": tokens, "norm_inputs": 2 * width, "layer_input": width, "logits": counts.logits}
    if not counts.gated:
        return Activations(**common, layer=6 * width + 2 * ffn, products=6 * width + ffn, backward=ffn)
    layer = 4 * width + 2 * (query + key_value) + 4 * ffn
    products = 2 * (width + query + key_value + ffn)
    return Activations(**common, layer=layer, products=products, fused=ffn, backward=2 * ffn)


def flops_per_sample(model: HFModelConfig, shape: tuple[int, ...]) -> float | None:
    """Returns ``t (6 N + 12 L q t)`` for ``t`` tokens, ``L`` layers and queries of width ``q``; None if unknown.

    ``N`` is the number of parameters in matrix products, in norms and in biases; a tied table counts once. The
    attention is not halved for a causal mask or a window. Source: PaLM (Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B). Frozen parameters have no gradients, so they count four operations instead of six.
    """
    counts = sizes(model)
    if counts is None:
        return None
    tokens = counts.tokens or shape[-1]
    products = counts.layers * (_operations(model) * counts.layer + 6 * counts.adapter)
    products += _operations(model) * counts.multiplied
    return float(tokens * (products + 12 * counts.layers * counts.query * tokens))


def _operations(model: HFModelConfig) -> int:
    """Returns the operations of forward and backward pass per token and parameter of the base model."""
    if model.lora.rank is None:
        return 6
    return 4


def block_flops(model: HFModelConfig, shape: tuple[int, ...]) -> tuple[float, ...] | None:
    """Returns the parts of ``flops_per_sample`` in the stem, each layer and the head; None if they are unknown."""
    counts = sizes(model)
    total = flops_per_sample(model, shape)
    if counts is None or total is None:
        return None
    head = float(_operations(model)) * (counts.tokens or shape[-1]) * counts.multiplied
    return (0.0, *[(total - head) / counts.layers] * counts.layers, head)


def forward_flops(model: HFModelConfig, shape: tuple[int, ...]) -> tuple[float, ...] | None:
    """Returns the operations of the forward pass in the parts of ``block_flops``; None if they are unknown.

    These are a third of all operations, or half of the operations with frozen parameters.
    """
    counts = sizes(model)
    blocks = block_flops(model, shape)
    if counts is None or blocks is None:
        return None
    frozen = 0 if model.lora.rank is None else _operations(model) * (counts.tokens or shape[-1])
    stem, *layers, head = blocks
    of_layers = (flops / 3 + frozen * counts.layer / 6 for flops in layers)
    return (stem / 3, *of_layers, head / 3 + frozen * counts.multiplied / 6)
