"""Replicas kept in step by DistributedDataParallel: gradients are all-reduced in buckets during the last backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_train.config.schema import StrategyConfig
from hpc_train.parallel.mesh import Mesh

# The name changed in torch 2.13.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def replicate(model: nn.Module, mesh: Mesh, strategy: StrategyConfig) -> DistributedDataParallel:
    """Wraps ``model``, which holds its values already, for the dp ranks.

    The gradients come out averaged over the dp ranks: scale the loss by their number where a sum is wanted. Buffers
    are not broadcast: nothing in a forward may depend on another rank's (batch statistics: ``batch_statistics.py``).
    """
    return DistributedDataParallel(
        model,
        process_group=mesh.group("dp"),
        bucket_cap_mb=strategy.bucket_cap_mb,
        gradient_as_bucket_view=True,
        static_graph=strategy.static_graph,
        **_KEEP_BUFFERS,
    )


def accumulating(model: DistributedDataParallel, last: bool) -> AbstractContextManager[None]:
    """Around forward and backward of each micro-batch: gradients are reduced in the ``last`` one only."""
    return nullcontext() if last else model.no_sync()
