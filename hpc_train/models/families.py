"""Describes the built-in model families: sizes, memory, FLOPs and names, computed from the config without torch."""

from __future__ import annotations

from typing import Any

from hpc_train.config.extensions import (
    IMAGES,
    TOKENS,
    Activations,
    HuggingFaceFormat,
    LinearLayers,
    ModelFamily,
    TensorParallel,
)
from hpc_train.config.schema import CustomModelConfig, GPTConfig, ViTConfig
from hpc_train.config.values import check_divides
from hpc_train.errors import UserError
from hpc_train.models.gpt_sizes import (
    check_gpt,
    gpt_activations,
    gpt_experts,
    gpt_flops_per_sample,
    gpt_linear_layers,
    gpt_parameters,
    gpt_stem_parameters,
)
from hpc_train.models.hf_names import hf_config, hf_name

GPT_FAMILY = ModelFamily(
    schema=GPTConfig,
    learns_from=TOKENS,
    builder="hpc_train.models.gpt:GPT",
    parameters=gpt_parameters,
    experts=gpt_experts,
    stem_parameters=gpt_stem_parameters,
    linear_layers=gpt_linear_layers,
    activations=gpt_activations,
    flops_per_sample=gpt_flops_per_sample,
    tensor_parallel=TensorParallel(
        plan="hpc_train.models.gpt:tensor_parallel_plan",
        divisible=("n_heads", "n_kv_heads", "ffn_dim"),
        shards_sequence=True,
    ),
    hugging_face=HuggingFaceFormat(hf_name, hf_config),
    chunked_loss=True,
    context_heads=("n_heads", "n_kv_heads"),
    fused_loss=True,
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


def vit_linear_layers(model: ViTConfig) -> tuple[LinearLayers, ...]:
    dim = model.dim
    return (
        LinearLayers(("attention.wq", "attention.wk", "attention.wv"), dim, (dim, dim, dim)),
        LinearLayers(("attention.wo",), dim, (dim,)),
        LinearLayers(("ffn.w1",), dim, (model.mlp_dim,)),
        LinearLayers(("ffn.w2",), model.mlp_dim, (dim,)),
    )


def vit_stem_parameters(model: ViTConfig) -> int:
    """Returns the number of parameters of the patch projection, the class token and the positions."""
    return patch_parameters(model) + model.dim + vit_tokens(model) * model.dim


def vit_parameters(model: ViTConfig) -> int:
    head = 2 * model.dim + model.n_classes * (model.dim + 1)
    return vit_stem_parameters(model) + model.n_layers * _vit_layer_parameters(model) + head


def vit_activations(model: ViTConfig, data: Any) -> Activations:
    """Returns the activations of a layer. The logits of one token per image are negligible."""
    dim = model.dim
    return Activations(
        tokens=vit_tokens(model),
        norm_inputs=2 * dim,
        layer=6 * dim + 2 * model.mlp_dim,
        products=6 * dim + model.mlp_dim,
        layer_input=dim,
        logits=0,
        backward=model.mlp_dim,
    )


def vit_flops_per_sample(model: ViTConfig, shape: tuple[int, ...]) -> float:
    """Returns ``t (6 N + 12 L d t) + 6 (t - 1) P + 6 C`` for an image of ``t`` tokens, ``L`` layers and width ``d``.

    ``N``, ``P`` and ``C`` are the numbers of parameters of the layers, of the patch projection, and of the classifier,
    which gets a single token. As in PaLM, the formula counts six operations per parameter and token and adds the
    attention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    length = vit_tokens(model)
    layers = model.n_layers * _vit_layer_parameters(model)
    attention = 12 * model.n_layers * model.dim * length
    classifier = model.n_classes * (model.dim + 1)
    return float(length * (6 * layers + attention) + 6 * (length - 1) * patch_parameters(model) + 6 * classifier)


def check_vit(model: ViTConfig, data: Any) -> None:
    """Checks the sizes of ``model`` against each other and against ``data``; raises UserError if the sizes do not fit
    together or do not match the images of ``data``."""
    check_divides(model.n_heads, model.dim, "model.n_heads", "the width model.dim")
    check_divides(model.patch_size, model.image_size, "model.patch_size", "model.image_size")
    for name in ("image_size", "channels"):
        given = getattr(data, name, None)
        taken = getattr(model, name)
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
    stem_parameters=vit_stem_parameters,
    linear_layers=vit_linear_layers,
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
