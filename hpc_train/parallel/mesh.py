"""Arranges the ranks of an attempt in a device mesh with the axes pp, dp_replicate, dp_shard and tp."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from hpc_train.plan.layout import Layout

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Mesh:
    """Holds the parallel state of this process, which is passed as a value; none of it is global.

    Attributes:
        device_mesh: the mesh with all axes of ``AXES``, including those of size 1.
        dp: the 1-d mesh of the ranks that read different samples of a batch (``dp_replicate`` x ``dp_shard``).
        control: a gloo group of all ranks, for small CPU collectives besides those of the training.
    """

    layout: Layout
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    dp: DeviceMesh
    control: dist.ProcessGroup

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.layout.dp * self.layout.tp)

    @property
    def dp_rank(self) -> int:
        return self.rank // self.layout.tp % self.layout.dp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tp

    def group(self, axis: str) -> dist.ProcessGroup:
        """Returns the process group of this rank along ``pp``, ``dp``, ``dp_replicate``, ``dp_shard`` or ``tp``."""
        return self.dp.get_group() if axis == "dp" else self.device_mesh[axis].get_group()


def join_mesh(layout: Layout, rank: int, device: torch.device, timeout: timedelta | None = None) -> Mesh:
    """Builds the mesh. Collective: every rank calls it after ``init_process_group``.

    Args:
        timeout: the timeout of the collectives of all groups; None uses torch's default.
    """
    sizes = (layout.pp, layout.dp // layout.shard, layout.shard, layout.tp)
    device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    dp = device_mesh["dp_replicate", "dp_shard"]._flatten("dp")
    control = dist.new_group(backend="gloo", timeout=timeout, group_desc="control")
    mesh = Mesh(layout, rank, device, device_mesh, dp, control)
    if timeout is not None:  # later groups do not inherit the timeout of the first one
        for axis in (*AXES, "dp"):
            _set_pg_timeout(timeout, mesh.group(axis))
    return mesh


# torch 2.13 renamed these collectives.
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
