"""Tensor parallelism: each layer's matrices are split over the ``tp`` ranks of a node.

Megatron's split (Shoeybi et al. 2019, arXiv:1909.08053): the first matrix of a branch by columns (heads, feed-forward
units), the second by rows, one exchange per branch and direction. Between the branches the GPT holds shards of the
sequence (Korthikanti et al. 2022, arXiv:2205.05198): norms and dropout are not computed twice. A ViT has an odd number
of tokens, so its hidden states are whole on every rank. Logits are gathered: every rank computes the same loss.
All parameters become DTensors on the ``tp`` mesh, so that optimizers and checkpoints see one kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hpc_train.errors import UserError
from hpc_train.models.gpt import GPT
from hpc_train.models.model import Model
from hpc_train.models.vit import ViT
from hpc_train.parallel.naming import keep_shared

Plan = dict[str, ParallelStyle]


def apply_tensor_parallel(model: Model, tp_mesh: DeviceMesh) -> None:
    """Splits ``model`` (whole or a stage, on ``meta`` or not) over ``tp_mesh`` in place, before anything wraps it.

    Raises:
        UserError: there is no plan for this model, or its sizes do not divide.
    """
    plan = _plan(model, tp_mesh.size())
    with keep_shared(model):
        parallelize_module(model, tp_mesh, plan)
    model.sequence_shards = tp_mesh.size() if isinstance(model, GPT) else 1


def check_sequence(model: Model, inputs: Tensor) -> None:
    """Raises UserError where the sequence of ``inputs`` ``[micro, seq]`` cannot be cut into equal shards."""
    if model.sequence_shards > 1 and inputs.shape[1] % model.sequence_shards:
        raise UserError(
            f"a sequence of {inputs.shape[1]} does not divide over {model.sequence_shards} tensor-parallel ranks",
            where="data.sequence_length, strategy.tp",
            fix=f"a sequence length that is a multiple of {model.sequence_shards}",
        )


class ReplicatedStyle(ParallelStyle):
    """Parameters whole on every rank; tensors come in and go out whole."""

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


def _plan(model: Model, ranks: int) -> Plan:
    if isinstance(model, GPT):
        config = model.config
        _check({"n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads, "ffn_dim": config.ffn_dim}, ranks)
        return _gpt_plan(model)
    if isinstance(model, ViT):
        _check({"n_heads": model.config.n_heads, "mlp_dim": model.config.mlp_dim}, ranks)
        return _vit_plan(model)
    raise UserError(
        f"there is no tensor-parallel plan for {type(model).__name__}",
        where="strategy.tp",
        fix="strategy.tp=1, or one of the built-in models (gpt, vit)",
    )


def _check(sizes: Mapping[str, int], ranks: int) -> None:
    for key, size in sizes.items():
        if size % ranks:
            raise UserError(
                f"{key} {size} does not divide over {ranks} tensor-parallel ranks",
                where=f"strategy.tp, model.{key}",
                fix=f"a strategy.tp that divides {size}",
            )


def _gpt_plan(model: GPT) -> Plan:
    shard = Shard(1)
    plan: Plan = {}
    if model.stem is not None:
        plan["stem.embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=shard)
    for key in model.layers:
        plan |= {f"layers.{key}.{name}": style for name, style in _gpt_layer_plan(shard).items()}
    if model.head is not None:
        plan["head.norm"] = SequenceParallel()
        plan["head.output"] = ColwiseParallel(input_layouts=shard, output_layouts=Replicate())
    return plan


def _gpt_layer_plan(shard: Shard) -> Plan:
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(shard, None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=shard),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(Replicate(),)),
        "ffn.w1": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(output_layouts=shard),
        "ffn.w3": ColwiseParallel(),
    }


def _vit_plan(model: ViT) -> Plan:
    whole = Replicate()
    plan: Plan = {}
    if model.stem is not None:
        plan["stem"] = ReplicatedStyle()
    layer: Plan = {
        "attention_norm": ReplicatedStyle(),
        "attention": PrepareModuleInput(input_layouts=(whole, None), desired_input_layouts=(whole, None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "ffn_norm": ReplicatedStyle(),
        "ffn": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "ffn.w1": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(),
    }
    for key in model.layers:
        plan |= {f"layers.{key}.{name}": style for name, style in layer.items()}
    if model.head is not None:
        plan["head"] = ReplicatedStyle()
    return plan
