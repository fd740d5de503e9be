"""Measures for the preflight the facts and clocks of all ranks, and how fast they compute and exchange data.

Cheap and local measurements come first. Stages that exceed the time limit are skipped and reported. All functions are
collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.parallel.mesh import Mesh
from hpc_train.preflight.bandwidth import PairRate, best_of, rounds, slow_nodes
from hpc_train.preflight.checks import Bandwidths, ClockOffset, RankFacts, slow_devices
from hpc_train.preflight.collectives import Ranks, measure
from hpc_train.preflight.nccl_log import Transport

FIRST_BYTES, GROWTH = 256 << 10, 16  # sizes of the all-reduces, within the time of a stage
COPIES = 8  # number of message copies that must fit into GPU memory
AGAIN = 5  # the second matrix products take this many times as long as the first
EXCHANGES = 3  # exchanges of a pair per round; the fastest counts
LEAST_EXCHANGE = 1 << 20  # bytes, more than a link buffers


@dataclass(frozen=True)
class Effort:
    """Sets the amount of measurement. ``bytes`` is the largest message; no stage begins after ``limit_s``."""

    gemm_s: float
    gemm_size: int
    stage_s: float
    bytes: int
    limit_s: float


def effort(mode: str, cuda: bool) -> Effort:
    """Returns the effort of the modes ``quick`` and ``full``."""
    # on CPUs a product takes less than a time slice, so that the fastest one is undisturbed by other processes
    size, largest = (8192, 1 << 30) if cuda else (256, 4 << 20)
    if mode == "full":
        return Effort(1.0, size, 1.0, 4 * largest, 120.0)
    return Effort(0.1, size, 0.25, largest, 20.0)


@dataclass(frozen=True)
class Crew:
    """The ranks by node: rank = node position x ``per_node`` + local rank. Only rank 0 knows the names of ``nodes``."""

    mesh: Mesh
    nodes: tuple[str, ...]
    per_node: int

    @property
    def count(self) -> int:
        """Returns the number of nodes."""
        return -(-self.mesh.layout.world_size // self.per_node)

    @property
    def node_position(self) -> int:
        return self.mesh.rank // self.per_node

    @property
    def local(self) -> int:
        return self.mesh.rank % self.per_node

    @property
    def world(self) -> Ranks:
        group = dist.group.WORLD
        assert group is not None, "it was joined"
        return Ranks(group, self.mesh.device)

    def agree(self, on_first: bool) -> bool:
        """Returns what rank 0 says. Collective."""
        return self.world.largest(float(on_first and self.mesh.rank == 0)) > 0


def to_first(value: Any, mesh: Mesh) -> list[Any]:
    """Returns the values of all ranks on rank 0, and [] on the others: if each rank received the facts of all, these
    would be 8 MB per rank with 8,000 ranks. Collective.
    """
    gathered: list[Any] = [None] * mesh.layout.world_size if mesh.rank == 0 else []
    dist.gather_object(value, gathered or None, group=mesh.control, group_dst=0)
    return gathered


def fitting(effort: Effort, crew: Crew) -> Effort:
    """Limits the messages to what fits into all GPUs several times. Collective."""
    if crew.mesh.device.type != "cuda":
        return effort
    free, _ = torch.cuda.mem_get_info(crew.mesh.device)
    return replace(effort, bytes=min(effort.bytes, int(-crew.world.largest(-float(free))) // COPIES))


@dataclass(frozen=True)
class Measured:
    """The results on rank 0. The others have only the bandwidth over all ranks and ``left_out``."""

    ranks: tuple[RankFacts, ...]
    clocks: tuple[ClockOffset, ...]
    bandwidths: Bandwidths
    left_out: tuple[str, ...]


def measure_all(
    crew: Crew, facts: RankFacts, effort: Effort, transport: Callable[[], Transport | None], now: Callable[[], float]
) -> Measured:
    """Measures everything but the paired test.

    Args:
        facts: this rank's facts, without measurements and ``transport``.
        transport: reads NCCL's log, which is complete only after the first collectives.
        now: this node's clock in seconds since the epoch.
    """
    mesh = crew.mesh
    began = time.monotonic()
    clocks = clock_offsets(crew.nodes, range(0, mesh.layout.world_size, crew.per_node), mesh.control, now)
    facts = replace(facts, gemm=_gemm(crew, effort), copy=_copy(crew))
    bandwidths = Bandwidths()
    left_out = []
    stages = {"in the node": _in_node, "over each rail": _over_rails, "over all ranks": _over_all}
    for name, stage in stages.items():
        if crew.world.largest(time.monotonic() - began) > effort.limit_s:
            left_out.append(name)
        else:
            bandwidths = stage(crew, effort, bandwidths)
    if mesh.device.type == "cuda":
        torch.cuda.empty_cache()  # free the memory for the model
    ranks = tuple(to_first(replace(facts, transport=transport()), mesh))
    # the better of two counts: a GPU may have been waking up, a CPU busy
    if crew.agree(bool(slow_devices(ranks))):
        again = to_first(_gemm(crew, replace(effort, gemm_s=AGAIN * effort.gemm_s)), mesh)
        ranks = tuple(replace(rank, gemm=max(rank.gemm, flops)) for rank, flops in zip(ranks, again, strict=True))
    return Measured(ranks, clocks, bandwidths, tuple(left_out))


def paired_test(crew: Crew, world_bus: float, effort: Effort) -> tuple[PairRate, ...]:
    """Exchanges data between all nodes in pairs, and repeats it if a node seems slow. Rank 0 receives the rates.

    Args:
        world_bus: all-reduce bandwidth in bytes/s, from which the message size is chosen.
    """
    size = int(min(effort.bytes, max(LEAST_EXCHANGE, world_bus * effort.stage_s / 8)))
    first_pass = _pass(crew, size)
    if crew.agree(bool(slow_nodes(first_pass))):
        return best_of(first_pass, _pass(crew, size))
    return first_pass


def _in_node(crew: Crew, effort: Effort, bandwidths: Bandwidths) -> Bandwidths:
    if crew.per_node == 1 or crew.count == 1:
        return bandwidths  # the only node has all ranks
    first = crew.node_position * crew.per_node
    bus = to_first(_all_reduce_among(crew, range(first, first + crew.per_node), effort), crew.mesh)
    return replace(bandwidths, nodes=dict(zip(crew.nodes, bus[:: crew.per_node], strict=True)))


def _over_rails(crew: Crew, effort: Effort, bandwidths: Bandwidths) -> Bandwidths:
    if crew.per_node == 1 or crew.count == 1:
        return bandwidths  # the only rail equals the group of all ranks
    rail = range(crew.local, crew.mesh.layout.world_size, crew.per_node)
    bus = to_first(_all_reduce_among(crew, rail, effort), crew.mesh)
    return replace(bandwidths, rails=tuple(bus[: crew.per_node]))


def _over_all(crew: Crew, effort: Effort, bandwidths: Bandwidths) -> Bandwidths:
    if crew.world.size == 1:
        return bandwidths
    return replace(bandwidths, world=_all_reduce(crew.world, effort))


def _all_reduce_among(crew: Crew, ranks: Sequence[int], effort: Effort) -> float:
    """Measures an all-reduce in a temporary group. All ranks call it at once, each with its group of a partition of all
    ranks, since NCCL splits the communicator of all ranks for it.
    """
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="preflight")
    bus = _all_reduce(Ranks(group, crew.mesh.device), effort)
    dist.barrier(group=crew.mesh.control)  # no rank closes a connection that another still reads
    dist.destroy_process_group(group)
    return bus


def _all_reduce(ranks: Ranks, effort: Effort) -> float:
    """Returns the best bus bandwidth over growing sizes in bytes/s."""
    rate = measure("all_reduce", FIRST_BYTES, ranks, 0.0)
    best = rate.bus
    while rate.bytes * GROWTH <= effort.bytes and rate.seconds * GROWTH < effort.stage_s:
        rate = measure("all_reduce", rate.bytes * GROWTH, ranks, effort.stage_s / 4)
        best = max(best, rate.bus)
    return best


def _pass(crew: Crew, size: int) -> tuple[PairRate, ...]:
    """Runs all rounds once."""
    elements = size // 4 // crew.per_node
    sent, received = (torch.zeros(elements, device=crew.mesh.device) for _ in range(2))
    exchanges: list[tuple[tuple[int, int], float]] = []
    for pairs in rounds(crew.count):
        partner = _partners(pairs).get(crew.node_position)
        dist.barrier(group=crew.mesh.control)
        if partner is not None:
            seconds = min(_exchange(crew, partner, sent, received) for _ in range(EXCHANGES))
            first, second = sorted((crew.node_position, partner))
            exchanges.append(((first, second), seconds))
    slowest: dict[tuple[int, int], float] = {}
    for positions, seconds in (exchange for rank in to_first(exchanges, crew.mesh) for exchange in rank):
        slowest[positions] = max(seconds, slowest.get(positions, 0.0))
    return tuple(
        PairRate((crew.nodes[first], crew.nodes[second]), elements * 4 * crew.per_node / seconds)
        for (first, second), seconds in slowest.items()
    )


def _partners(pairs: Sequence[tuple[int, int]]) -> Mapping[int, int]:
    return dict(pairs) | {b: a for a, b in pairs}


def _exchange(crew: Crew, partner: int, sent: torch.Tensor, received: torch.Tensor) -> float:
    """Returns the seconds in which this rank exchanged data with the rank of the same local rank on node
    ``partner``.
    """
    peer = partner * crew.per_node + crew.local
    group = crew.world.group
    operations = [
        dist.P2POp(dist.isend, sent, peer, group=group),
        dist.P2POp(dist.irecv, received, peer, group=group),
    ]
    began = time.perf_counter()
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if crew.mesh.device.type == "cuda":
        torch.cuda.synchronize(crew.mesh.device)
    return time.perf_counter() - began


def _gemm(crew: Crew, effort: Effort) -> float:
    """Returns the FLOP/s of this rank's device; on the CPU of one core."""
    device = crew.mesh.device
    threads = torch.get_num_threads()
    if device.type == "cuda":
        return measured_gemm_flops(device, torch.bfloat16, effort.gemm_size, effort.gemm_s)
    torch.set_num_threads(1)  # several would wait for each other while other processes run
    flops = measured_gemm_flops(device, torch.float32, effort.gemm_size, effort.gemm_s)
    torch.set_num_threads(threads)
    return flops


COPY_BYTES, COPIES_TO_GPU = 64 << 20, 5  # the fastest copy counts


def _copy(crew: Crew) -> float | None:
    if crew.mesh.device.type == "cuda":
        return copy_rate(crew.mesh.device, crew.mesh.control)
    return None


def copy_rate(device: torch.device, control: dist.ProcessGroup) -> float:
    """Returns the bytes/s from pinned host memory to this rank's GPU. All ranks copy at once."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device_copy = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    dist.barrier(group=control)
    best = float("inf")
    for _ in range(COPIES_TO_GPU):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        device_copy.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return COPY_BYTES / best


MESSAGES = 8  # messages per node; the one with the shortest round trip counts


def clock_offsets(
    names: Sequence[str], first_ranks: Sequence[int], group: dist.ProcessGroup, now: Callable[[], float]
) -> tuple[ClockOffset, ...]:
    """Compares the clocks of all nodes with that of rank 0, one node at a time. Collective over ``group``, on the CPU.

    With t0 and t3 rank 0's times of sending and receiving, and t1 and t2 the other's times of receiving and sending,
    the other clock is ((t1 - t0) + (t2 - t3)) / 2 ahead, with an error of at most half the round trip (NTP, RFC 5905,
    sec. 8).

    Args:
        names: of the nodes, on rank 0.
        first_ranks: one rank of each node, in the order of ``names``; 0 for the first node.
        now: returns seconds since the epoch.

    Returns:
        The offsets of all nodes but the first on rank 0; () on the other ranks.
    """
    if dist.get_rank(group) == 0:
        return tuple(_ask(name, peer, group, now) for name, peer in zip(names[1:], first_ranks[1:], strict=True))
    if dist.get_rank(group) in first_ranks:
        _answer(group, now)
    return ()


def _ask(name: str, peer: int, group: dist.ProcessGroup, now: Callable[[], float]) -> ClockOffset:
    answers = []
    for _ in range(MESSAGES):
        times = torch.zeros(2, dtype=torch.float64)
        t0 = now()
        dist.send(times, peer, group=group)
        dist.recv(times, peer, group=group)
        t3 = now()
        t1, t2 = times.tolist()
        answers.append(ClockOffset(name, ((t1 - t0) + (t2 - t3)) / 2, (t3 - t0) - (t2 - t1)))
    return min(answers, key=lambda answer: answer.round_trip_s)


def _answer(group: dist.ProcessGroup, now: Callable[[], float]) -> None:
    for _ in range(MESSAGES):
        times = torch.zeros(2, dtype=torch.float64)
        dist.recv(times, 0, group=group)
        received = now()
        dist.send(torch.tensor([received, now()], dtype=torch.float64), 0, group=group)


def measured_gemm_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, seconds: float = 1.0) -> float:
    """Returns the FLOP/s of the fastest product of two ``size`` x ``size`` matrices: 2 ``size``³ / time.

    Repeats for ``seconds``, so that a short disturbance by another process does not lower the result.
    """
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    until = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < until:
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2.0 * size**3 / best
