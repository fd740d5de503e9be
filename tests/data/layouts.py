"""Layouts for tests of the data: only what says how a global batch is divided."""

from __future__ import annotations

import math

from hpc_train.layout.layout import Layout


def replicas(dp: int, global_size: int, micro_batches: int = 1) -> Layout:
    """``dp`` data-parallel ranks with ``micro_batches`` micro-batches that are just large enough."""
    local = math.ceil(global_size / dp)
    return Layout(
        dp=dp,
        pp=1,
        tp=1,
        shard=1,
        data_parallel="ddp",
        schedule="1f1b",
        stages_per_rank=1,
        micro_batches=micro_batches,
        micro_size=math.ceil(local / micro_batches),
    )
