"""The ViT family: its sizes, memory and FLOPs, computed from the config. This file imports no torch."""

from __future__ import annotations

from typing import Any

from hpc_train.config.extensions import IMAGES, Activations, ModelFamily, TensorParallel
from hpc_train.config.schema import ViTConfig
from hpc_train.config.values import check_divides
from hpc_train.errors import UserError


def tokens(model: ViTConfig) -> int:
    """The number of patches, plus the class token."""
    return 1 + (model.image_size // model.patch_size) ** 2


def patch_parameters(model: ViTConfig) -> int:
    """The parameters of the patch projection."""
    return model.dim * (model.channels * model.patch_size**2 + 1)


def _layer_parameters(model: ViTConfig) -> int:
    dim = model.dim
    return 4 * dim * (dim + 1) + 2 * dim * model.mlp_dim + model.mlp_dim + dim + 4 * dim  # and two norms


def parameters(model: ViTConfig) -> int:
    """The number of parameters."""
    stem = patch_parameters(model) + model.dim + tokens(model) * model.dim
    head = 2 * model.dim + model.n_classes * (model.dim + 1)
    return stem + model.n_layers * _layer_parameters(model) + head


def activations(model: ViTConfig, data: Any) -> Activations:
    """The logits of one token per image are too few to count."""
    dim = model.dim
    return Activations(
        tokens=tokens(model),
        norm_inputs=2 * dim,
        layer=6 * dim + 2 * model.mlp_dim,
        products=6 * dim + model.mlp_dim,
        layer_input=dim,
        logits=0,
    )


def flops_per_sample(model: ViTConfig, shape: tuple[int, ...]) -> float:
    """``t (6 N + 12 L d t) + 6 (t - 1) P + 6 C`` for an image of ``t`` tokens, ``L`` layers and width ``d``.

    ``N`` are the parameters of the layers, ``P`` those of the patch projection and ``C`` those of the classifier,
    which sees one token. The formula counts six operations per parameter and token, and the attention, as in PaLM
    (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    """
    length = tokens(model)
    layers = model.n_layers * _layer_parameters(model)
    attention = 12 * model.n_layers * model.dim * length
    classifier = model.n_classes * (model.dim + 1)
    return float(length * (6 * layers + attention) + 6 * (length - 1) * patch_parameters(model) + 6 * classifier)


def check(model: ViTConfig, data: Any) -> None:
    """
    Raises:
        UserError: the sizes do not fit together, or not to the images of ``data``.
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
    parameters=parameters,
    activations=activations,
    flops_per_sample=flops_per_sample,
    tensor_parallel=TensorParallel(
        plan="hpc_train.models.vit:tensor_parallel_plan", divisible=("n_heads", "mlp_dim"), shards_sequence=False
    ),
    hugging_face=None,
    check=check,
)
