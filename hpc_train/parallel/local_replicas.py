"""Connects the replicas of ``strategy.local_steps``, which go on in their processes after another replica is lost.

A collective of several replicas fails on some ranks and completes on others. ``across_replicas`` therefore asks all
ranks of a replica after each such collective whether it has failed on any of them, so that they stop at the same place.
A rank may also wait in a collective for a replica that has stopped already, or for a node without power. When the agent
reports lost replicas, a thread therefore cuts the connections to all other replicas, and each of these collectives
fails.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.parallel.mesh import REPLICA_CONTROL, Mesh, join_replicas
from hpc_train.run.agent_worker import SharedBlock
from hpc_train.run.exits import Failure, ReplicaLost, classify

POLL_S = 0.1
NOTICE_S = 60.0  # from a failed collective until the agent reports a lost replica; otherwise the worker fails


@contextmanager
def across_replicas(mesh: Mesh) -> Iterator[None]:
    """Encloses collectives of several replicas, and no others. Collective; does nothing for a single replica.

    Raises:
        ReplicaLost: a collective has failed on a rank of this replica. Its cause is the error of this rank, if any.
    """
    if mesh.layout.replicas == 1:
        yield
        return
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    is_lost = torch.tensor(int(failure is not None and classify(failure) is Failure.COMMUNICATION))
    dist.all_reduce(is_lost, dist.ReduceOp.MAX, group=mesh.group(REPLICA_CONTROL))
    if is_lost.item():
        raise ReplicaLost("a collective with other replicas has failed") from failure
    if failure is not None:
        raise failure


@torch.no_grad()
def sum_over_replicas(
    tensors: Iterable[Tensor],
    mesh: Mesh,
    bucket_mb: float = 25.0,
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Sums plain tensors over the replicas in place, or reduces them by another operation. Collective; the host waits.

    Args:
        bucket_mb: the size of a message, in MiB.

    Raises:
        ReplicaLost: see ``across_replicas``; some tensors may have changed.
    """
    if mesh.layout.replicas == 1:
        return
    buckets: list[list[Tensor]] = []
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bucket = by_dtype.setdefault(tensor.dtype, [])
        if not bucket or sum(other.nbytes for other in bucket) + tensor.nbytes > bucket_mb * 2**20:
            bucket = by_dtype[tensor.dtype] = []
            buckets.append(bucket)
        bucket.append(tensor)
    with across_replicas(mesh):
        for bucket in buckets:
            together = torch.cat([tensor.reshape(-1) for tensor in bucket]).cpu()
            dist.all_reduce(together, operation, group=mesh.group("replicas"))
            for tensor, values in zip(bucket, together.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(values.view(tensor.shape))


class LostReplicas:
    """Reacts to the reports of the agent about lost replicas.

    Args:
        block: the memory that this worker shares with its agent; None without an agent.
        mesh: the ranks at the start of the attempt.
    """

    def __init__(self, block: SharedBlock | None, mesh: Mesh) -> None:
        self._block = block
        # the lost replicas, and the connections between the others; replaced together, since a thread reads them
        self._watched = frozenset[int](), mesh.connections
        if block is not None and mesh.layout.replicas > 1:
            threading.Thread(target=self._watch, args=(block,), name="lost-replicas", daemon=True).start()

    def _watch(self, block: SharedBlock) -> None:
        """Cuts the connections between replicas as soon as further replicas are lost."""
        while True:
            handled, connections = self._watched
            if block.lost_replicas != handled:
                connections.cut()
            time.sleep(POLL_S)

    def mesh_without(self, mesh: Mesh, failure: ReplicaLost) -> Mesh:
        """Returns the mesh of the replicas that are left. The groups within this replica stay. Collective over them.

        Raises:
            ReplicaLost: the agent has reported no further lost replica.
        """
        until = time.monotonic() + NOTICE_S
        handled, connections = self._watched
        while self._block is None or self._block.lost_replicas == handled:
            if self._block is None or time.monotonic() > until:
                raise failure
            time.sleep(POLL_S)
        connections.cut()  # the thread may not have done so yet
        lost = self._block.lost_replicas
        while not _have_met(self._block, mesh, lost):
            lost = self._block.lost_replicas
        left = join_replicas(mesh, [number for number in mesh.numbers if number not in lost])
        self._watched = lost, left.connections
        return left


def _have_met(block: SharedBlock, mesh: Mesh, lost: frozenset[int]) -> bool:
    """Waits until all ranks without ``lost`` replicas are here, since new groups would wait for another lost rank until
    their timeout. Returns False if more replicas are lost."""
    size = mesh.layout.replica.world_size
    ranks = [size * number + place for number in mesh.numbers if number not in lost for place in range(size)]
    store = dist.PrefixStore(f"without {sorted(lost)}", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), "is here")
    while not store.check([str(rank) for rank in ranks]):
        if block.lost_replicas != lost:
            return False
        time.sleep(POLL_S)
    return True
