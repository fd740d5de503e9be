"""Implements the vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from hpc_train.config.schema import ViTConfig
from hpc_train.models import families
from hpc_train.models.attention import Attention
from hpc_train.models.model import FlopTerms, Model
from hpc_train.models.transformer import Compiler, CrossEntropyHead, LayerNorm, PreNormLayer


class PatchProjection(nn.Conv2d):
    """Computes a convolution. With tensor parallelism each rank computes the full result, on replicated tensors.

    The convolution gets the local tensors: torch 2.11 returns wrong gradients for the weight and bias of a convolution
    of replicated DTensors.
    """

    def _conv_forward(self, input: Tensor, weight: Any, bias: Any) -> Tensor:
        if not isinstance(input, DTensor):
            return super()._conv_forward(input, weight, bias)
        patches = super()._conv_forward(input.to_local(), weight.to_local(), bias.to_local())
        return DTensor.from_local(patches, input.device_mesh, input.placements, run_check=False)


class ViTStem(nn.Module):
    """Embeds pixels ``[micro, channels, height, width]`` as hidden states ``[micro, 1 + patches, dim]``, class token
    first."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        patches = (config.image_size // config.patch_size) ** 2
        self.patch = PatchProjection(config.channels, config.dim, config.patch_size, stride=config.patch_size)
        self.class_token = nn.Parameter(torch.empty(1, 1, config.dim))
        self.position_embedding = nn.Parameter(torch.empty(1, 1 + patches, config.dim))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, inputs: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        patches = self.patch(inputs).flatten(2).transpose(1, 2)
        first, positions = (value.to(patches.dtype) for value in (self.class_token, self.position_embedding))
        return self.dropout(torch.cat((first.expand(patches.shape[0], -1, -1), patches), dim=1) + positions)

    def compile_with(self, compiler: Compiler) -> None:
        """Compiles the stem, so that everything except the convolution is a single kernel."""
        self.forward = compiler(self.forward)  # type: ignore[method-assign]


class MLP(nn.Module):
    """Computes ``w2(gelu(w1 x))``."""

    def __init__(self, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, mlp_dim)
        self.w2 = nn.Linear(mlp_dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(hidden)))


def vit_layer(config: ViTConfig) -> PreNormLayer:
    attention = Attention(config.dim, config.n_heads, config.n_heads, causal=False, bias=True)
    norm = partial(LayerNorm, config.dim, eps=config.norm_eps)
    return PreNormLayer(norm, attention, MLP(config.dim, config.mlp_dim), config.dropout)


class ViTHead(CrossEntropyHead):
    """Computes logits ``[micro, classes]`` from the hidden state of the class token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.n_classes)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(hidden)[:, 0])


class ViT(Model):
    """Implements ``Model`` for a vision transformer with a class token, learned positions and LayerNorm before
    branches."""

    stem: ViTStem | None
    head: ViTHead | None
    family = "vit"

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        families.check_vit(config, None)
        self.config = config
        self.stem = ViTStem(config)
        self.layers = nn.ModuleDict({str(index): vit_layer(config) for index in range(config.n_layers)})
        self.head = ViTHead(config)

    @property
    def tokens(self) -> int:
        return families.vit_tokens(self.config)

    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        return (inputs.shape[0], self.tokens, self.config.dim)

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Sets norms to 1, biases and the class token to 0, and draws the others from N(0, 0.02) truncated at -2 and 2.

        Source: timm's ``trunc_normal_(std=0.02)``.
        """
        with torch.no_grad():
            if name.endswith("norm.weight"):
                value.fill_(1.0)
            elif name.endswith((".bias", ".class_token")):
                value.zero_()
            else:
                nn.init.trunc_normal_(value, std=0.02, generator=generator)

    def init_buffers(self, device: torch.device) -> None:
        """Does nothing, since a ViT has no buffers."""

    def flops_per_sample(self, inputs: Tensor) -> float:
        return families.vit_flops_per_sample(self.config, tuple(inputs.shape[1:]))

    def flop_terms(self, inputs: Tensor) -> FlopTerms:
        """Returns the terms; a ViT projects patches and has no embedding table."""
        return FlopTerms(masked=None, embedding=0.0)

    def block_flops(self, inputs: Tensor) -> tuple[float, ...]:
        """Splits ``flops_per_sample``; the stem counts the patch projection, the head counts the classifier."""
        config = self.config
        dim = self.config.dim
        stem = 6.0 * (self.tokens - 1) * dim * (config.channels * config.patch_size**2 + 1)
        head = 6.0 * config.n_classes * (dim + 1)
        layer = (self.flops_per_sample(inputs) - stem - head) / config.n_layers
        return (stem, *[layer] * config.n_layers, head)


class ReplicatedStyle(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _enter, _leave)  # type: ignore[arg-type]


def _enter(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    return tuple(
        DTensor.from_local(value, mesh, (Replicate(),), run_check=False)
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
        else value
        for value in inputs
    )


def _leave(_: nn.Module, output: DTensor, __: DeviceMesh) -> Tensor:
    return output.to_local()


def tensor_parallel_plan(model: ViT) -> dict[str, ParallelStyle]:
    """Returns Megatron's plan with replicated hidden states, since a ViT has an odd number of tokens."""
    replicated = Replicate()
    plan: dict[str, ParallelStyle] = {}
    if model.stem is not None:
        plan["stem"] = ReplicatedStyle()
    layer: dict[str, ParallelStyle] = {
        "attention_norm": ReplicatedStyle(),
        "attention": PrepareModuleInput(input_layouts=(replicated, None), desired_input_layouts=(replicated, None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "ffn_norm": ReplicatedStyle(),
        "ffn": PrepareModuleInput(input_layouts=(replicated,), desired_input_layouts=(replicated,)),
        "ffn.w1": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(),
    }
    for key in model.layers:
        plan |= {f"layers.{key}.{name}": style for name, style in layer.items()}
    if model.head is not None:
        plan["head"] = ReplicatedStyle()
    return plan
