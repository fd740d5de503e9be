"""ZeRO through FSDP2 (``fully_shard``): what each stage keeps sharded over the ``dp_shard`` ranks, and when.

All of them shard the optimizer state. They differ in gradients and parameters:

zero1: gradients accumulate whole and are reduce-scattered once, after the last micro-batch; parameters are whole from
    the first forward of a step to its last backward.
zero2: gradients are reduce-scattered after the backward of every micro-batch, and kept as shards; parameters as zero1.
zero3: gradients as zero2; parameters are whole only for the layer at work, and gathered again for its backward. Stem
    and head stay whole within a micro-batch: its backward begins with them.

With fewer ``dp_shard`` than dp ranks (HSDP) the shard groups are replicas of each other: gradients are all-reduced
between them once per step. ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from hpc_train.models.model import Model
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision import compute_dtype, parameter_dtype
from hpc_train.plan.techniques import DataParallelKind


def shard(model: nn.Module, mesh: Mesh, kind: DataParallelKind, precision: str, offload: bool = False) -> None:
    """Shards ``model`` in place: each layer is one group, stem and head another; a model without parts is one group.

    The gradients come out averaged over the dp ranks: scale the loss by their number where a sum is wanted.

    Args:
        model: whole or a stage, before it is materialised; layers already wrapped and compiled.
        kind: ``zero1``, ``zero2`` or ``zero3``.
        precision: of the config; under bf16 and fp16 parameters are gathered in that type, gradients reduced in fp32.
        offload: shards of parameters and gradients are in host memory.
    """
    layout = mesh.layout
    axes = ("dp_shard",) if layout.shard == layout.dp else ("dp_replicate", "dp_shard")
    dtype = compute_dtype(precision)
    # Inputs are not cast: autocast does that where it is right, and rotary tables keep fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=parameter_dtype(precision) if dtype else None, cast_forward_inputs=False
    )
    home = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload else OffloadPolicy()
    wrap = partial(fully_shard, mesh=mesh.device_mesh[axes], mp_policy=policy, offload_policy=home)
    if isinstance(model, Model):
        for layer in model.layers.values():
            wrap(layer, reshard_after_forward="parameters" in kind.shards)
    wrap(model, reshard_after_forward=False)


def begin_backward(model: nn.Module, kind: DataParallelKind, last: bool) -> None:
    """Tells ``model`` before each micro-batch whether it is the last of the step."""
    for module in _sharded(model):
        module.set_requires_gradient_sync(last or "gradients" in kind.shards, recurse=False)
        module.set_requires_all_reduce(last, recurse=False)
        module.set_reshard_after_backward(last or "parameters" in kind.shards, recurse=False)


def release(model: nn.Module) -> None:
    """Drops whole parameters after a forward without a backward: they would be stale after the next update."""
    for module in _sharded(model):
        module.reshard()


def _sharded(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
