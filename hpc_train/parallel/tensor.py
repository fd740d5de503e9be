"""Applies tensor parallelism, which splits each layer's matrices over the ``tp`` ranks of a node.

It follows Megatron (Shoeybi et al. 2019, arXiv:1909.08053): the first matrix of a branch is split by columns (heads or
feed-forward units) and the second by rows, with one collective per branch and direction. Between the branches the GPT
holds shards of the sequence (Korthikanti et al. 2022, arXiv:2205.05198), so norms and dropout are not computed twice. A
ViT has an odd number of tokens, so its hidden states are replicated. Every rank computes the same loss: in training the
logits of a GPT stay spread over the ranks (``models/linear_head.py``), and the logits of a ViT are replicated. Experts
are not split: each rank routes its shard of the sequence (``experts.py``). All
parameters become DTensors on the ``tp`` mesh, so optimizers and checkpoints handle only one type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from hpc_train.config.extensions import load_family
from hpc_train.config.import_path import locate
from hpc_train.config.values import check_divides
from hpc_train.errors import UserError
from hpc_train.models.model import Model, keep_shared


def apply_tensor_parallel(model: Model, tp_mesh: DeviceMesh) -> None:
    """Splits ``model`` (whole or a stage) over ``tp_mesh`` in place; call it before anything wraps the model.

    Raises:
        UserError: the model has no plan, the ranks do not divide its sizes, or the plan omits a parameter although it
            shards the sequence: its gradient would be that of the tokens of one rank.
    """
    split = None if model.family is None else load_family(model.family).tensor_parallel
    if split is None:
        raise UserError(
            f"{type(model).__name__} has no tensor-parallel plan",
            where="strategy.tp",
            fix="strategy.tp=1, or use a model whose family has a plan, such as gpt or vit",
        )
    config: Any = model.config
    for name in split.divisible:
        check_divides(tp_mesh.size(), getattr(config, name), "strategy.tp", f"model.{name}")
    plan = locate(split.plan, "model.kind")(model)
    with keep_shared(model):
        parallelize_module(model, tp_mesh, plan)
    omitted = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if split.shards_sequence and omitted:
        raise UserError(
            f"the tensor-parallel plan of {model.family} shards the sequence, but it omits {omitted[0]}",
            where=split.plan,
            fix="a style for every module with parameters; SequenceParallel() for norms between the branches",
        )
    model.sequence_shards = tp_mesh.size() if split.shards_sequence else 1
    if model.stem is not None:
        model.stem.register_forward_hook(_complete)


def check_sequence(model: Model, inputs: Tensor) -> None:
    """Raises UserError if the sequence of ``inputs`` ``[micro, seq]`` cannot be split into equal shards."""
    if model.sequence_shards > 1 and inputs.shape[1] % model.sequence_shards:
        raise UserError(
            f"{inputs.shape[1]} tokens cannot be split over {model.sequence_shards} tensor-parallel ranks",
            where="data, strategy.tp",
            fix=f"sequences of a multiple of {model.sequence_shards} tokens, by data.sequence_length or by padding in "
            "your dataset",
        )


def _complete(_: nn.Module, __: Any, hidden: Any) -> Any:
    """Waits for the collective that ends a stem, since compiled layers return no gradient for what is not complete."""
    if isinstance(hidden, AsyncCollectiveTensor):
        return _Completed.apply(hidden)
    return hidden


class _Completed(torch.autograd.Function):
    """Returns the complete tensor. The layers use it at once, so nothing could overlap with the collective."""

    @staticmethod
    def forward(ctx: Any, value: AsyncCollectiveTensor) -> Tensor:
        return value.trigger_wait()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
