"""Arranges the ranks of an attempt in a device mesh with the axes pp, dp_replicate, dp_shard and tp.

A gloo group connects each of its ranks with all others, and an NCCL group takes memory of the GPU and time to start.
Each rank therefore joins as few groups as possible: the default group also serves an axis of all ranks, axes of the
same ranks share a group, and axes of one rank share a group that does not communicate.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

from hpc_train.plan.layout import Layout

AXES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class Mesh:
    """Holds the parallel state of this process, which is passed as a value; none of it is global.

    Attributes:
        device_mesh: the mesh with all axes of ``AXES``, including those of size 1.
        dp: the group of the ranks that read different samples of a batch (``dp_replicate`` x ``dp_shard``).
        control: a gloo group of all ranks, for small CPU collectives besides those of the training. It is the only
            group for tensors on the CPU if ``device`` is a GPU.
    """

    layout: Layout
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    dp: dist.ProcessGroup
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
        """Returns the process group of this rank along ``pp``, ``dp``, ``dp_replicate``, ``dp_shard`` or ``tp``.

        The group of an axis of one rank does not communicate. Do not call reduce_scatter on it, which leaves the
        output unset before torch 2.13.
        """
        return self.dp if axis == "dp" else self.device_mesh.get_group(axis)


def join_mesh(layout: Layout, rank: int, device: torch.device, timeout: timedelta | None = None) -> Mesh:
    """Builds the mesh. Collective: every rank calls it after ``init_process_group``.

    Args:
        timeout: the timeout of the collectives of the new groups; None uses torch's default.
    """
    sizes = (layout.pp, layout.dp // layout.shard, layout.shard, layout.tp)
    ranks = torch.arange(layout.world_size, device="cpu").view(sizes)
    groups = _axis_groups(layout, ranks, device, timeout)
    # All ranks are in this group: with a GPU bound to the default group, the ranks outside a gloo group would wait for
    # its members to split NCCL's communicator, which they do not.
    control = dist.new_group(backend="gloo", timeout=timeout, group_desc="control")
    device_mesh = DeviceMesh.from_group([groups[axis] for axis in AXES], device.type, mesh=ranks, mesh_dim_names=AXES)
    return Mesh(layout, rank, device, device_mesh, groups["dp"], control)


def _axis_groups(
    layout: Layout, ranks: torch.Tensor, device: torch.device, timeout: timedelta | None
) -> dict[str, dist.ProcessGroup]:
    """Returns the groups of this rank along ``dp`` and ``AXES``. Collective.

    Args:
        ranks: the global ranks, of the shape of the mesh.
    """
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None, "init_process_group was called"
    partitions = {"dp": _lines(ranks.flatten(1, 2), 1)} | {axis: _lines(ranks, dim) for dim, axis in enumerate(AXES)}
    silent = _silent_group(rank) if layout.world_size > 1 else world
    made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(layout.world_size)): world}
    groups: dict[str, dist.ProcessGroup] = {}
    for axis, partition in partitions.items():
        own = tuple(next(line for line in partition if rank in line))
        is_used = len(own) > 1 or (axis == "dp_shard" and layout.shards_state)  # fully_shard uses an axis of one rank
        if is_used and own not in made:
            made[own] = _split_world(partition, device, timeout, f"mesh_{axis}")
        groups[axis] = made[own] if is_used else silent
    return groups


def _lines(ranks: torch.Tensor, dim: int) -> list[list[int]]:
    """Returns the ranks of all groups along ``dim``."""
    lines: list[list[int]] = ranks.movedim(dim, -1).flatten(0, -2).tolist()
    return lines


def _split_world(
    partition: list[list[int]], device: torch.device, timeout: timedelta | None, description: str
) -> dist.ProcessGroup:
    """Returns this rank's group of a partition of all ranks. Collective over all ranks."""
    if device.type == "cuda":  # one split of NCCL's communicator for all groups
        found = dist.split_group(split_ranks=partition, timeout=timeout, group_desc=description)
    else:
        made = [dist.new_group(line, timeout=timeout, group_desc=description) for line in partition]
        found = next(group for group in made if isinstance(group, dist.ProcessGroup))
    assert found is not None, "every rank is in one group of the partition"
    return found


def _silent_group(rank: int) -> dist.ProcessGroup:
    """Returns a group of this rank alone, without connections. Other ranks need not call it."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # DETAIL adds checks to each group, which this backend does not support
    try:
        return dist.new_group([rank], backend="fake", use_local_synchronization=True, group_desc="mesh_alone")
    finally:
        dist.set_debug_level(level)


def use_device(device: torch.device) -> None:
    """Makes ``device`` the GPU of the calling thread.

    A new thread uses GPU 0: its first CUDA call would take several hundred MB there from the rank that owns it, or fail
    if the GPU admits only one process. Every thread that may call CUDA calls this first.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


# torch 2.13 renamed these collectives.
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
