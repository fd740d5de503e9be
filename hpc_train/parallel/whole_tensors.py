"""Collectives on one tensor that holds the parts of all ranks, under the names of torch 2.13 or those before."""

from __future__ import annotations

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
