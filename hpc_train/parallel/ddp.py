"""Replicas kept in step by DistributedDataParallel: gradients are all-reduced in buckets during the last backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import StrategyConfig
from hpc_train.parallel.mesh import Mesh

# The name changed in torch 2.13.
_RENAMED = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def replicate(model: nn.Module, mesh: Mesh, strategy: StrategyConfig, bucket_cap_mb: float) -> DistributedDataParallel:
    """Wraps ``model``, which holds its values already, for the dp ranks.

    The gradients come out averaged over the dp ranks: scale the loss by their number where a sum is wanted. Buffers
    are not broadcast: nothing in a forward may depend on another rank's (batch statistics: ``batch_statistics.py``).
    """
    return DistributedDataParallel(
        model,
        process_group=mesh.group("dp"),
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,
        static_graph=strategy.static_graph,
        **_KEEP_BUFFERS,
    )


@contextmanager
def accumulating(model: DistributedDataParallel, last: bool) -> Iterator[None]:
    """Around forward and backward of each micro-batch: gradients are reduced in the ``last`` one only.

    Raises:
        ConfigError: a parameter was not used in the step before.
    """
    try:
        with nullcontext() if last else model.no_sync():
            yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        raise ConfigError(
            "the model has parameters that its forward does not use: DDP waits for their gradients",
            where="strategy.static_graph",
            mend="strategy.static_graph=true where every step leaves out the same ones, else "
            "strategy.data_parallel=reduce",
        ) from error
