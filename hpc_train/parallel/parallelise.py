"""From a model to what a rank computes with: split, wrapped, sharded and filled, in the only order that works."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from hpc_train.config.layout import ZERO
from hpc_train.config.schema import Config
from hpc_train.models.model import Model
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel import activation_checkpointing, batch_statistics, chunked_loss, fsdp
from hpc_train.parallel.compile import compile_layers
from hpc_train.parallel.materialise import is_meta, materialise
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision import parameter_dtype
from hpc_train.parallel.tensor import apply_tensor_parallel

AnyModel = TypeVar("AnyModel", bound=Model | WrappedModel)


def parallelise(config: Config, mesh: Mesh, model: AnyModel) -> AnyModel:
    """Makes ``model`` (whole or a pipeline stage), in place, what this rank trains; DDP's wrapper comes afterwards.

    Args:
        model: on ``meta``, or with values (then those of dp rank 0 count).
    """
    dtype, offload = parameter_dtype(config.precision.name), config.strategy.offload == "all"
    split_and_wrap(config, mesh, model)
    meta = is_meta(model)
    if not meta:
        batch_statistics.use_fused(model, mesh)
        model.to(device=mesh.device, dtype=dtype)
        _take_first_replica(model, mesh)
    if mesh.layout.dp > 1 and mesh.layout.data_parallel in ZERO:
        fsdp.shard(model, mesh, mesh.layout.data_parallel, config.precision.name, offload)
    if meta and isinstance(model, Model):
        home = torch.device("cpu") if offload else mesh.device
        materialise(model, mesh.device, config.train.seed, dtype, home)
    model.train()
    return model


def split_and_wrap(config: Config, mesh: Mesh, model: Model | WrappedModel) -> None:
    """What decides how ``model`` computes, in place: all but the sharding of its state."""
    if mesh.layout.tp > 1 and isinstance(model, Model):
        apply_tensor_parallel(model, mesh.device_mesh["tp"])
    chunked_loss.apply(model, config.train.loss_chunks)
    activation_checkpointing.apply(model, config.train.activation_checkpointing)
    if config.train.compile:
        compile_layers(model)


def _take_first_replica(model: nn.Module, mesh: Mesh) -> None:
    """A user's module may have been initialised differently on each rank."""
    if mesh.layout.dp == 1:
        return
    group = mesh.group("dp")
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), dist.get_global_rank(group, 0), group=group)
