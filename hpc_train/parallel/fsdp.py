"""Implements ZeRO with FSDP2 (``fully_shard``) over the ``dp_shard`` ranks.

All three kinds shard the optimizer state. They differ in gradients and parameters:

zero1: unsharded gradients accumulate and are reduce-scattered once, after the last micro-batch. Parameters are
    unsharded from the first forward pass of a step to its last backward pass.
zero2: gradients are reduce-scattered after the backward pass of every micro-batch. Parameters are as in zero1.
zero3: gradients are as in zero2. Parameters are gathered for one layer at a time, again for its backward pass, while
    the layer before it in that pass computes. Stem and head stay unsharded within a micro-batch, whose backward pass
    begins with them.

Scalars, such as the temperature of CLIP, are not sharded; ``Sharded`` sums their gradients.

With fewer ``dp_shard`` than ``dp_cp`` ranks (HSDP) the shard groups are replicas of each other, and gradients are
all-reduced between them once per step. ZeRO: Rajbhandari et al. 2020, arXiv:1910.02054.

``strategy.compression=bf16`` sends the gradients of every reduce-scatter in bf16. FSDP's own ``reduce_dtype`` would
also add micro-batches up in that dtype; here only the message and the sum over the ranks are narrow. The all-reduce
between replicas stays as it is, since FSDP does not let it be replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from hpc_train.layout.techniques import DataParallelKind
from hpc_train.models.wrapped import layers_of
from hpc_train.parallel.mesh import Mesh, reduce_scatter_tensor
from hpc_train.parallel.precision.dtypes import compute_dtype, parameter_dtype


def shard(model: nn.Module, mesh: Mesh, kind: DataParallelKind, precision: str, offload: bool = False) -> None:
    """Shards ``model`` in place. Each layer or block is one group, and the rest of the model another.

    The gradients are averaged over the ``dp_cp`` ranks, so scale the loss by their number for a sum.

    Args:
        model: the model or stage before it is materialized, with wrapped and compiled layers or blocks.
        kind: ``zero1``, ``zero2`` or ``zero3``.
        precision: the precision of the config; bf16 and fp16 gather parameters in that dtype, and reduce and accumulate
            gradients in fp32.
        offload: whether to keep shards of parameters and gradients in host memory.
    """
    layout = mesh.layout
    axes = ("dp_shard",) if layout.shard == layout.dp_cp else ("dp_replicate", "dp_shard")
    dtype = compute_dtype(precision)
    # inputs are not cast, since autocast does that where appropriate, and rotary tables stay fp32
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=parameter_dtype(precision) if dtype else None, cast_forward_inputs=False
    )
    home = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload else OffloadPolicy()
    wrap = partial(
        fully_shard,
        mesh=mesh.device_mesh[axes],
        mp_policy=policy,
        offload_policy=home,
        ignored_params={parameter for parameter in model.parameters() if is_replicated(parameter)},
    )
    layers = layers_of(model)
    for layer in layers:
        wrap(layer, reshard_after_forward="parameters" in kind.shards)
    wrap(model, reshard_after_forward=False)
    for layer, following in pairwise(layers):  # FSDP2 does so by itself only in the backward pass
        layer.set_modules_to_forward_prefetch([following])  # type: ignore[operator]


def is_replicated(parameter: Tensor) -> bool:
    """Returns whether every rank holds all of ``parameter``: FSDP shards neither scalars nor what has no elements."""
    return not parameter.ndim or not parameter.numel()


class CastReduceScatter:
    """Sums gradients in ``dtype``; replaces FSDP's reduce-scatter, with its methods."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer of FSDP: gradients before and after the sum, in the dtype in which they accumulate."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sums or averages ``input_tensor`` over the ranks of ``group``; FSDP has chosen the stream, and waits for it.

        Args:
            output_tensor: gets this rank's part, 1/N of the elements.
            async_op: not supported; FSDP leaves it out.
        """
        assert not async_op
        received = output_tensor.new_empty(output_tensor.shape, dtype=self._dtype)
        reduce_scatter_tensor(received, input_tensor.to(self._dtype), op=op, group=group)
        output_tensor.copy_(received)


def cast_gradients(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes the sharded ``model`` reduce its gradients in ``dtype``."""
    collective = CastReduceScatter(dtype)
    for module in sharded_modules(model):
        module.set_custom_reduce_scatter(collective)  # type: ignore[arg-type]


def begin_backward(modules: Iterable[FSDPModule], kind: DataParallelKind, last: bool) -> None:
    """Configures ``modules`` for the micro-batches that follow, which may be the ``last`` of the step."""
    for module in modules:
        module.set_requires_gradient_sync(last or "gradients" in kind.shards, recurse=False)
        module.set_requires_all_reduce(last, recurse=False)
        module.set_reshard_after_backward(last or "parameters" in kind.shards, recurse=False)


def release(modules: Iterable[FSDPModule]) -> None:
    """Frees unsharded parameters after a forward pass without a backward pass; the next update makes them stale."""
    for module in modules:
        module.reshard()


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Returns the groups of ``model`` that are gathered together, each as its module."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
