"""Models whose forward depends on the other samples of the batch (BatchNorm)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.models.batch_norm import SyncBatchNorm
from hpc_train.parallel.mesh import Mesh

BatchNorm = nn.modules.batchnorm._BatchNorm


def has_batch_statistics(model: nn.Module) -> bool:
    return any(isinstance(module, BatchNorm) for module in model.modules())


def check_batch(config: Config, mesh: Mesh) -> None:
    """Raises UserError where a step would hold padding: it would enter the statistics."""
    layout, size = mesh.layout, config.batch.global_size
    slots = layout.dp * layout.micro_batches * layout.micro_size
    if slots != size:
        raise UserError(
            f"a global batch of {size} does not divide over {layout.dp} ranks x {layout.micro_batches} micro-batches: "
            f"{slots - size} padded samples would enter the batch statistics of the model",
            where="batch.global_size",
            fix=f"batch.global_size={slots}, or a model without BatchNorm",
        )
    if not config.batch.drop_last:
        raise UserError(
            "the last batch of an epoch is padded, and padding would enter the batch statistics of the model",
            where="batch.drop_last",
            fix="batch.drop_last=true",
        )


def use_fused(model: nn.Module, mesh: Mesh) -> None:
    """Replaces our ``SyncBatchNorm`` by torch's, which is one kernel, where there is an accelerator."""
    ours = any(isinstance(module, SyncBatchNorm) for module in model.modules())
    if ours and mesh.device.type != "cpu" and mesh.layout.dp > 1:
        nn.SyncBatchNorm.convert_sync_batchnorm(model, mesh.group("dp"))


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Running means and variances that each rank takes of its own samples (``SyncBatchNorm`` takes those of all)."""
    return [
        buffer
        for module in model.modules()
        if isinstance(module, BatchNorm) and not isinstance(module, SyncBatchNorm | nn.SyncBatchNorm)
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]


def average_(statistics: Iterable[Tensor], mesh: Mesh) -> None:
    """Replaces running statistics by their mean over the dp ranks, so that checkpoints and evaluation see one model."""
    buffers = list(statistics)
    if not buffers or mesh.layout.dp == 1:
        return
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers]) / mesh.layout.dp
    dist.all_reduce(flat, group=mesh.group("dp"))
    torch._foreach_copy_(buffers, list(flat.split([buffer.numel() for buffer in buffers])))
