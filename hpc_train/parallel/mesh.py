"""Arranges the ranks of an attempt in a device mesh with the axes pp, dp_replicate, dp_shard and tp.

Ranks of ``dp`` read different samples, and ranks of ``cp`` different tokens of the same samples. Both hold the same
parameters, so the axes dp_replicate and dp_shard together arrange all ranks of dp x cp, the group ``dp_cp``.

With ``strategy.local_steps`` all these groups are those of one replica, and the group ``replicas`` connects the ranks
at the same position in all replicas. The groups of several replicas use gloo, also between GPUs: their links are slow,
and a group of NCCL that loses a rank would end the processes of the others.

A gloo group connects each of its ranks with all others, and an NCCL group takes memory of the GPU and time to start.
Each rank therefore joins as few groups as possible: the default group also serves an axis of all ranks, axes of the
same ranks share a group, and axes of one rank share a group that does not communicate. ``cp``, its two parts and ``ep``
have separate groups: layers wait for their exchanges, which would otherwise queue behind the parameters and gradients
of other layers. Each pair of neighbors in a pipeline of more than two ranks also has a separate group: NCCL runs the
messages of a group one after the other, and one that waits for its sender would delay the messages of the other
neighbor (pytorch#172668).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

from hpc_train.layout.layout import Layout
from hpc_train.models.model import TokenShares

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
EXPERT_AXES = ("pp", "expert_replicate", "expert_shard", "ep")  # of the same ranks, if ep is above 1
APART = ("cp", "heads", "ring", "ep")
REPLICA_CONTROL = "replica_control"


class Connections:
    """Holds the TCP connections of process groups on the hosts, which gloo opens when it creates a group."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []  # duplicates, since gloo may close a descriptor at any time

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Adds the connections that this process opens inside the block."""
        before = _sockets()
        yield
        for descriptor in _sockets() - before:
            duplicate = socket.socket(fileno=os.dup(int(descriptor.partition(" ")[0])))
            try:
                duplicate.getpeername()
                self._sockets.append(duplicate)
            except OSError:  # it listens
                duplicate.close()

    def cut(self) -> None:
        """Ends the connections, so that collectives of these groups fail here and on the other side."""
        for connection in self._sockets:
            with suppress(OSError):  # the other side has ended it
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[str]:
    """Returns the descriptor and the name of each socket of this process."""
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                sockets.add(f"{entry.name} {name}")
    return sockets


@dataclass(frozen=True)
class Mesh:
    """Holds the parallel state of this process. It is passed as a value and never stored globally.

    Attributes:
        device_mesh: the mesh of this rank's replica with all axes of ``AXES``, including those of size 1.
        groups: by name, the groups of ``AXES`` and ``EXPERT_AXES``, ``dp``, ``cp``, ``dp_cp`` and ``replica``; if some
            of the ``cp`` ranks exchange heads and others form a ring, also ``heads`` and ``ring``; and with several
            replicas ``replicas`` and ``REPLICA_CONTROL``, a gloo group of the ranks of this replica.
        control: a gloo group of all ranks, for small CPU collectives other than the collectives of the training. It is
            the only group for tensors on the CPU if ``device`` is a GPU.
        timeout: the timeout of the collectives of all groups; None uses torch's default.
        links: pp rank of a neighbor in the ring of this rank's pipeline -> the group of the two; empty for fewer than
            three ranks, which have one neighbor.
        expert_mesh: the mesh with all axes of ``EXPERT_AXES``, on which the parameters of experts are; None if every
            rank of ``dp`` holds all experts of its layers.
        numbers: the numbers of the replicas, in the order of ranks, as counted at the start of the attempt.
        connections: of the groups of several replicas.
    """

    layout: Layout
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    groups: Mapping[str, dist.ProcessGroup]
    control: dist.ProcessGroup
    timeout: timedelta | None = None
    links: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)
    expert_mesh: DeviceMesh | None = None
    numbers: tuple[int, ...] = (0,)
    connections: Connections = field(default_factory=Connections)

    @property
    def replica(self) -> Mesh:
        """Returns the mesh of the ranks that sum gradients in each step: all ranks, or with ``strategy.local_steps``
        those of this rank's replica."""
        layout = self.layout.replica
        return replace(self, layout=layout, rank=self.rank % layout.world_size)

    @property
    def replica_rank(self) -> int:
        """Returns the position of this rank's replica among ``layout.replicas``."""
        return self.rank // self.layout.replica.world_size

    @property
    def pp_rank(self) -> int:
        layout = self.layout.replica
        return self.rank % layout.world_size // layout.stage_ranks

    @property
    def dp_rank(self) -> int:
        return self.dp_cp_rank // self.layout.cp

    @property
    def cp_rank(self) -> int:
        return self.dp_cp_rank % self.layout.cp

    @property
    def token_shares(self) -> TokenShares:
        return TokenShares(self.layout.cp, self.cp_rank, self.layout.ring)

    @property
    def dp_cp_rank(self) -> int:
        """Returns the position of this rank among those that hold the same parameters."""
        layout = self.layout.replica
        return self.replica_rank * layout.dp_cp + self.rank // layout.tp % layout.dp_cp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.layout.tp

    def group(self, axis: str) -> dist.ProcessGroup:
        """Returns the process group of this rank along ``pp``, ``dp``, ``cp``, ``dp_cp``, ``dp_replicate``,
        ``dp_shard``, ``tp``, or with ``ep`` above 1 an axis of ``EXPERT_AXES``, within its replica; ``replica``, all
        ranks of its replica; or ``replicas``, the ranks at the same position in all replicas, on their hosts.

        Ranks of ``dp`` read different samples. Gradients are summed over ``dp_cp``, which is ``dp`` x ``cp``, but those
        of experts over ``expert_replicate`` and ``expert_shard``. The group of an axis of one rank does not
        communicate. Do not call reduce_scatter on it, which leaves the output unset before torch 2.13.
        """
        return self.groups[axis]

    def gradient_group(self, parameter: nn.Parameter) -> dist.ProcessGroup:
        """Returns the ranks over which the gradient of a parameter that ZeRO does not shard is summed."""
        if isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names == ("ep",):
            return self.groups["expert_replicate"]
        return self.groups["dp_cp"]


def join_mesh(layout: Layout, rank: int, device: torch.device, timeout: timedelta | None = None) -> Mesh:
    """Builds the mesh. Collective: every rank calls it after ``init_process_group``.

    Args:
        timeout: the timeout of the collectives of the new groups; None uses torch's default.
    """
    replica = layout.replica
    sizes = (layout.replicas, layout.pp, replica.dp_cp // layout.shard, layout.shard, layout.tp)
    ranks = torch.arange(layout.world_size, device="cpu").view(sizes)
    of_replica = ranks[rank // replica.world_size]
    groups = _axis_groups(layout, ranks, device, timeout)
    # All ranks are in this group: with a GPU bound to the default group, the ranks outside a gloo group would wait for
    # its members to split NCCL's communicator, which they do not.
    connections = Connections()
    with connections.recorded():
        control = dist.new_group(backend="gloo", timeout=timeout, group_desc="control")
        if layout.replicas > 1:
            groups["replicas"] = host_group(_line_of(rank, _lines(ranks, 0)), timeout, "replicas")
    if layout.replicas > 1:
        groups[REPLICA_CONTROL] = host_group(of_replica.flatten().tolist(), timeout, REPLICA_CONTROL)
    device_mesh = DeviceMesh.from_group(
        [groups[axis] for axis in AXES], device.type, mesh=of_replica, mesh_dim_names=AXES
    )
    links = _links(_lines(ranks, 1), rank, device, timeout) if layout.pp > 2 else {}
    expert_mesh = None
    if layout.ep > 1:
        expert_mesh = DeviceMesh.from_group(
            [groups[axis] for axis in EXPERT_AXES],
            device.type,
            mesh=of_replica.view(layout.pp, *replica.expert_sizes),
            mesh_dim_names=EXPERT_AXES,
        )
    numbers = tuple(range(layout.replicas))
    return Mesh(layout, rank, device, device_mesh, groups, control, timeout, links, expert_mesh, numbers, connections)


def host_group(ranks: list[int], timeout: timedelta | None, description: str) -> dist.ProcessGroup:
    """Returns a new gloo group of the global ``ranks``, which include this one. Collective over them; no other rank
    calls it, since with a GPU bound to the default group it would wait for them to split NCCL's communicator."""
    # The name of a group is a hash of its ranks and the number of groups. The name of a group of the same ranks that
    # was destroyed would lead to the addresses of that group, so a group that stays is added first.
    _silent_group(dist.get_rank(), "names")
    group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True, group_desc=description)
    assert isinstance(group, dist.ProcessGroup), "this rank is in it"
    return group


def join_replicas(mesh: Mesh, numbers: Sequence[int]) -> Mesh:
    """Returns the mesh of some of the replicas, which include this one. Collective over their ranks.

    Args:
        numbers: see ``Mesh.numbers``.
    """
    size = mesh.layout.replica.world_size
    place = mesh.rank % size
    layout = replace(mesh.layout, dp=mesh.layout.replica.dp * len(numbers), replicas=len(numbers))
    connections = Connections()
    with connections.recorded():
        of_all = [size * number + other for number in numbers for other in range(size)]
        control = host_group(of_all, mesh.timeout, "control")
        replicas = host_group([size * number + place for number in numbers], mesh.timeout, "replicas")
    return replace(
        mesh,
        layout=layout,
        rank=size * numbers.index(mesh.numbers[mesh.replica_rank]) + place,
        control=control,
        groups={**mesh.groups, "replicas": replicas},
        numbers=tuple(numbers),
        connections=connections,
    )


def _axis_groups(
    layout: Layout, ranks: torch.Tensor, device: torch.device, timeout: timedelta | None
) -> dict[str, dist.ProcessGroup]:
    """Returns the groups of ``Mesh``. Collective.

    Args:
        ranks: the global ranks ``[replicas, ...]``, of the shape of the mesh of each replica.
    """
    rank = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None, "init_process_group was called"
    apart = ranks.view(layout.replicas, layout.pp, -1, layout.cp, layout.tp)
    partitions = {"dp": _lines(apart, 2), "dp_cp": _lines(apart.flatten(2, 3), 2), "cp": _lines(apart, 3)}
    partitions |= {axis: _lines(ranks, dim) for dim, axis in enumerate(AXES, 1)}
    if 1 < layout.ring < layout.cp:
        divided = apart.unflatten(3, (layout.ring, -1))
        partitions |= {"heads": _lines(divided, 4), "ring": _lines(divided, 3)}
    if layout.ep > 1:
        of_experts = ranks.view(layout.replicas, layout.pp, *layout.replica.expert_sizes)
        partitions |= {axis: _lines(of_experts, dim) for dim, axis in enumerate(EXPERT_AXES, 1)}
    partitions["replica"] = _lines(ranks.flatten(1), 1)
    silent = _silent_group(rank) if layout.world_size > 1 else world
    made: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(layout.world_size)): world}
    groups: dict[str, dist.ProcessGroup] = {}
    for axis, partition in partitions.items():
        line_of_rank = tuple(_line_of(rank, partition))
        # fully_shard uses an axis of one rank
        is_used = len(line_of_rank) > 1 or (axis.endswith("_shard") and layout.shards_state)
        if not is_used:
            groups[axis] = silent
        elif axis not in APART and line_of_rank in made:
            groups[axis] = made[line_of_rank]
        else:
            group = split_world(partition, device, timeout, f"mesh_{axis}")
            assert group is not None, "every rank is in one line of an axis"
            groups[axis] = group
            if axis not in APART:
                made[line_of_rank] = group
    return groups


def _links(
    pipelines: list[list[int]], rank: int, device: torch.device, timeout: timedelta | None
) -> dict[int, dist.ProcessGroup]:
    """Returns the groups of this rank and each neighbor in the ring of its pipeline. Collective.

    Args:
        pipelines: the global ranks of each pipeline.
    """
    pp = len(pipelines[0])
    position = next(pipeline.index(rank) for pipeline in pipelines if rank in pipeline)
    pairs = [(first, (first + 1) % pp) for first in range(pp)]
    rounds = [pairs[0 : pp - 1 : 2], pairs[1::2], *([pairs[-1:]] if pp % 2 else [])]  # no rank is twice in one
    links: dict[int, dist.ProcessGroup] = {}
    for disjoint in rounds:
        lines = [[pipeline[place] for place in pair] for pipeline in pipelines for pair in disjoint]
        group = split_world(lines, device, timeout, "mesh_link")
        if group is not None:
            links |= {place: group for pair in disjoint if position in pair for place in pair if place != position}
    return links


def _line_of(rank: int, lines: list[list[int]]) -> list[int]:
    return next(line for line in lines if rank in line)


def _lines(ranks: torch.Tensor, dim: int) -> list[list[int]]:
    """Returns the ranks of all groups along ``dim``."""
    lines: list[list[int]] = ranks.movedim(dim, -1).flatten(0, -2).tolist()
    return lines


# The wrapper that DebugLevel.DETAIL (``train.debug``) puts around a group can be split from torch 2.12 on.
SPLITS_CHECKED = not torch.__version__.startswith("2.11.")


def split_world(
    lines: list[list[int]], device: torch.device, timeout: timedelta | None, description: str
) -> dist.ProcessGroup | None:
    """Returns this rank's group of disjoint ``lines``; None if it is in none. Collective over all ranks.

    With NCCL this is one split of the communicator of all ranks, whereas each ``new_group`` would be one. A rank in no
    line takes part in the split without a color, which makes no communicator.
    """
    if device.type == "cuda" and (SPLITS_CHECKED or dist.get_debug_level() != dist.DebugLevel.DETAIL):
        return dist.split_group(split_ranks=lines, timeout=timeout, group_desc=description)
    made = [dist.new_group(line, timeout=timeout, group_desc=description) for line in lines]
    return next((group for group in made if isinstance(group, dist.ProcessGroup)), None)


def _silent_group(rank: int, description: str = "mesh_alone") -> dist.ProcessGroup:
    """Returns a group of this rank alone, without connections. Other ranks need not call it."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # DETAIL adds checks to each group, which this backend does not support
    try:
        return dist.new_group([rank], backend="fake", use_local_synchronization=True, group_desc=description)
    finally:
        dist.set_debug_level(level)


def use_device(device: torch.device) -> None:
    """Makes ``device`` the GPU of the calling thread.

    A new thread uses GPU 0: its first CUDA call would take several hundred MB there from the rank that owns it, or fail
    if the GPU admits only one process. Every thread that may call CUDA calls this first.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has done all work that is queued; a CPU has no queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def synchronize_ranks(mesh: Mesh) -> None:
    """Waits until the work of this rank's device is done and all ranks have reached this call. Collective."""
    synchronize(mesh.device)
    dist.barrier(group=mesh.control)


def largest(value: float, mesh: Mesh) -> float:
    """Returns the largest ``value`` of all ranks. Collective."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=mesh.control)
    return tensor.item()


# torch 2.13 renamed these collectives.
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
