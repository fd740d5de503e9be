"""Keeps the weights of a model in bf16, and their fp32 values, the masters, for the optimizer and for checkpoints.

The forward and the backward pass use the bf16 weights, so gradients are also in bf16. The optimizer updates the masters
(``train/optimizers/held.py``), which are sharded like the weights, and rounds them to the weights after each update.
Without masters an update that is smaller than half a unit in the last place of a weight, 0.2 % of it, would be lost
(Micikevicius et al. 2018, arXiv:1710.03740). Checkpoints contain the masters under the names of the parameters, so they
are the same files as those of a run with fp32 weights. Weights that do not train are only rounded: they have no
masters, and checkpoints contain the rounded values.

The attribute of a parameter that holds its master survives as long as the parameter object, which FSDP keeps after the
model is sharded.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hpc_train.models.model import keep_shared

_MASTER = "fp32_master"  # the attribute of a parameter


def local_part(tensor: Tensor) -> Tensor:
    """Returns the shard of this rank, or a plain tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def like_shard(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Returns ``value``, which has the shape of the local shard of ``parameter``, as a tensor sharded like it."""
    value = value.detach()
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    # from_local would move a tensor on the host to the mesh's device
    meta = TensorMeta(parameter.shape, parameter.stride(), value.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    return DTensor(value, spec, requires_grad=False)  # type: ignore[call-arg]


def narrow_weights(model: nn.Module) -> None:
    """Converts the parameters of ``model`` to bf16 in place, and keeps the values of those that train. Buffers stay as
    they are.

    Args:
        model: a model or stage with its values, sharded or not, before anything refers to its parameters.
    """
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    values = {name: local_part(value.detach()).float() for name, value in trained.items()}
    with keep_shared(model):
        # buffers stay as they are, and FSDP takes over the new shards
        model._apply(_narrowed)
    for name, parameter in model.named_parameters():
        if name in values:
            keep_master(parameter, values[name])


def _narrowed(value: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter) and value.is_floating_point():
        return value.to(torch.bfloat16)
    return value


def keep_master(parameter: nn.Parameter, local: Tensor) -> None:
    """Makes ``local``, with the shape of the shard of ``parameter``, the master of this rank."""
    setattr(parameter, _MASTER, like_shard(local, parameter))


def master_of(parameter: Tensor) -> Tensor | None:
    """Returns the master, sharded like the parameter; None if it has none."""
    master: Tensor | None = getattr(parameter, _MASTER, None)
    return master


def saved_value(parameter: Tensor) -> Tensor:
    """Returns what a checkpoint contains for ``parameter``: its master, or the parameter itself if it has none."""
    master = master_of(parameter)
    if master is None:
        return parameter.detach()
    return master


@torch.no_grad()
def round_to_weights(parameters: Iterable[Tensor]) -> None:
    """Sets the parameters that have masters to their rounded values, after the masters were loaded."""
    for parameter in parameters:
        master = master_of(parameter)
        if master is not None:
            local_part(parameter.detach()).copy_(local_part(master))
