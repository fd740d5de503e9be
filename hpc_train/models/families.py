"""Describes the built-in model families: sizes, memory, FLOPs and names, computed from the config without torch."""

from __future__ import annotations

from typing import Any

from hpc_train.config.extensions import IMAGES, TOKENS, Activations, HuggingFaceFormat, ModelFamily, TensorParallel
from hpc_train.config.schema import CustomModelConfig, GPTConfig, ViTConfig
from hpc_train.config.values import check_divides
from hpc_train.errors import UserError
from hpc_train.models.hf_names import SCALING, hf_config, hf_name

_SEQUENCE = 1024  # tokens of a sample if the data has no fixed length


def key_value_width(model: GPTConfig) -> int:
    """Returns the width of all keys (or values) of a token."""
    return model.dim // model.n_heads * model.n_kv_heads


def _gpt_layer_parameters(model: GPTConfig) -> int:
    attention = 2 * model.dim * (model.dim + key_value_width(model))
    return attention + 3 * model.dim * model.ffn_dim + 2 * model.dim  # the last term: two norms


def gpt_parameters(model: GPTConfig) -> int:
    """Returns the number of parameters; a tied embedding table counts once."""
    tables = 1 if model.tied_embeddings else 2
    return model.n_layers * _gpt_layer_parameters(model) + model.dim + tables * model.vocab_size * model.dim


def gpt_activations(model: GPTConfig, data: Any) -> Activations:
    """Returns the activations of a layer; queries and keys are kept before and after the rotation."""
    dim, key_value = model.dim, key_value_width(model)
    return Activations(
        tokens=int(getattr(data, "sequence_length", None) or _SEQUENCE),
        norm_inputs=2 * dim,
        layer=5 * dim + 3 * key_value + 4 * model.ffn_dim,
        products=4 * dim + 2 * key_value + 2 * model.ffn_dim,
        layer_input=dim,
        logits=model.vocab_size,
    )


def gpt_flops_per_sample(model: GPTConfig, shape: tuple[int, ...]) -> float:
    """Returns ``s (6 N + 12 L d s)`` for a sequence of ``s`` tokens, ``L`` layers and width ``d``.

    ``N`` is the number of parameters in matrix products: all but the embedding table. A tied table counts once, as the
    output projection. The attention term is not halved for the causal mask. Source: PaLM (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B).
    """
    length = shape[-1]
    multiplied = model.n_layers * _gpt_layer_parameters(model) + model.dim + model.vocab_size * model.dim
    return float(length * (6 * multiplied + 12 * model.n_layers * model.dim * length))


def check_gpt(model: GPTConfig, data: Any) -> None:
    """Checks the sizes of ``model`` against each other and against ``data``.

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


GPT_FAMILY = ModelFamily(
    schema=GPTConfig,
    learns_from=TOKENS,
    builder="hpc_train.models.gpt:GPT",
    parameters=gpt_parameters,
    activations=gpt_activations,
    flops_per_sample=gpt_flops_per_sample,
    tensor_parallel=TensorParallel(
        plan="hpc_train.models.gpt:tensor_parallel_plan",
        divisible=("n_heads", "n_kv_heads", "ffn_dim"),
        shards_sequence=True,
    ),
    hugging_face=HuggingFaceFormat(hf_name, hf_config),
    chunked_loss=True,
    check=check_gpt,
)


def vit_tokens(model: ViTConfig) -> int:
    """Returns the number of patches plus 1 for the class token."""
    return 1 + (model.image_size // model.patch_size) ** 2


def patch_parameters(model: ViTConfig) -> int:
    """Returns the number of parameters of the patch projection."""
    return model.dim * (model.channels * model.patch_size**2 + 1)


def _vit_layer_parameters(model: ViTConfig) -> int:
    dim = model.dim
    return 4 * dim * (dim + 1) + 2 * dim * model.mlp_dim + model.mlp_dim + dim + 4 * dim  # the last term: two norms


def vit_parameters(model: ViTConfig) -> int:
    """Returns the number of parameters."""
    stem = patch_parameters(model) + model.dim + vit_tokens(model) * model.dim
    head = 2 * model.dim + model.n_classes * (model.dim + 1)
    return stem + model.n_layers * _vit_layer_parameters(model) + head


def vit_activations(model: ViTConfig, data: Any) -> Activations:
    """Returns the activations of a layer; the logits of one token per image are too few to count."""
    dim = model.dim
    return Activations(
        tokens=vit_tokens(model),
        norm_inputs=2 * dim,
        layer=6 * dim + 2 * model.mlp_dim,
        products=6 * dim + model.mlp_dim,
        layer_input=dim,
        logits=0,
    )


def vit_flops_per_sample(model: ViTConfig, shape: tuple[int, ...]) -> float:
    """Returns ``t (6 N + 12 L d t) + 6 (t - 1) P + 6 C`` for an image of ``t`` tokens, ``L`` layers and width ``d``.

    ``N`` is the number of parameters of the layers, ``P`` that of the patch projection and ``C`` that of the
    classifier, which sees one token. As in PaLM, the formula counts six operations per parameter and token and adds the
    attention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    length = vit_tokens(model)
    layers = model.n_layers * _vit_layer_parameters(model)
    attention = 12 * model.n_layers * model.dim * length
    classifier = model.n_classes * (model.dim + 1)
    return float(length * (6 * layers + attention) + 6 * (length - 1) * patch_parameters(model) + 6 * classifier)


def check_vit(model: ViTConfig, data: Any) -> None:
    """Checks the sizes of ``model`` against each other and against ``data``.

    Raises:
        UserError: the sizes do not fit together or do not match the images of ``data``.
    """
    check_divides(model.n_heads, model.dim, "model.n_heads", "the width model.dim")
    check_divides(model.patch_size, model.image_size, "model.patch_size", "model.image_size")
    for name in ("image_size", "channels"):
        given, taken = getattr(data, name, None), getattr(model, name)
        if given is not None and given != taken:
            raise UserError(
                f"data.{name} is {given}, but model.{name} is {taken}",
                where=f"model.{name}",
                fix=f"model.{name}={given}",
            )
    classes = getattr(data, "n_classes", None)
    if classes is not None and model.n_classes < classes:
        raise UserError(
            f"the data has {classes} classes, but model.n_classes is {model.n_classes}",
            where="model.n_classes",
            fix=f"model.n_classes={classes} or more",
        )


VIT_FAMILY = ModelFamily(
    schema=ViTConfig,
    learns_from=IMAGES,
    builder="hpc_train.models.vit:ViT",
    parameters=vit_parameters,
    activations=vit_activations,
    flops_per_sample=vit_flops_per_sample,
    tensor_parallel=TensorParallel(
        plan="hpc_train.models.vit:tensor_parallel_plan", divisible=("n_heads", "mlp_dim"), shards_sequence=False
    ),
    hugging_face=None,
    check=check_vit,
)


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
