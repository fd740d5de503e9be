"""Measures the clocks of the ranks, how fast the ranks compute and exchange data on any backend, and whether each
computes the same numbers as the others.

Cheap and local measurements of the preflight come first. Stages that would begin after the time limit are skipped and
reported. Unless stated otherwise, all functions are collective.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hpc_train.parallel.checksums import position_checksum
from hpc_train.parallel.mesh import Mesh, all_gather_tensor, reduce_scatter_tensor, synchronize
from hpc_train.preflight.bandwidth import PairRate, Rate, best_of, rounds, slow_nodes
from hpc_train.preflight.checks import Bandwidths, BurnIn, ClockOffset, RankFacts, slow_devices
from hpc_train.preflight.nccl_log import Transport

FIRST_BYTES = 256 << 10  # the size of the first all-reduce
GROWTH = 16  # the factor between the sizes of successive all-reduces, within the time of a stage
COPIES = 8  # the number of copies of a message that must fit into GPU memory
AGAIN = 5  # the repeated matrix products take this many times as long as the first ones
EXCHANGES = 3  # exchanges of a pair per round; the fastest counts
LEAST_EXCHANGE = 1 << 20  # bytes; more than a link buffers
COPY_BYTES = 64 << 20
COPIES_TO_GPU = 5  # the fastest copy counts
BURN_IN_SIZE = {"cpu": 256, "cuda": 4096}  # rows and columns of the products
LEAST_REPEATS = 2  # of each computation of the burn-in
MESSAGES = 8  # messages per node; the one with the shortest round trip counts
_PERIOD = 13  # period of the test pattern, whose sums are exact in float32
_MOST_REPEATS = 20  # as nccl-tests does
_BYTES = 4  # of a float32


@dataclass(frozen=True)
class Ranks:
    """A process group and the device of this rank."""

    group: dist.ProcessGroup
    device: torch.device

    @classmethod
    def world(cls, device: torch.device) -> Ranks:
        group = dist.group.WORLD
        assert group is not None, "join() has initialized it"
        return cls(group, device)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank % self.size)

    def largest(self, value: float) -> float:
        """Returns the maximum of the values of all ranks, after all ranks have arrived."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return float(tensor.item())


def measure(operation: str, size: int, ranks: Ranks, seconds: float) -> Rate:
    """Measures one operation of ``size`` bytes, rounded up to whole elements of each rank.

    The first run is verified and serves as warm-up. Then the operation is repeated for about ``seconds``, at most 20
    times; the time of the slowest rank counts.
    """
    elements = -(-size // (_BYTES * ranks.size)) * ranks.size
    run, result, expected = _CASES[operation](elements, ranks)

    def timed(repeats: int) -> float:
        """Returns the seconds of one run on the slowest rank. The result is the same on all ranks."""
        synchronize(ranks.device)
        ranks.largest(0.0)
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(ranks.device)
        return ranks.largest((time.perf_counter() - began) / repeats)

    first_s = timed(1)
    wrong = int(ranks.largest(float((result != expected).sum().item())))
    repeats = max(1, min(_MOST_REPEATS, int(seconds / first_s)))
    return Rate(operation, ranks.size, elements * _BYTES, timed(repeats), repeats, wrong)


# a function that runs an operation, the buffer of its result, and the expected content after the first run
_Case = tuple[Callable[[], object], Tensor, Tensor]


def _pattern(elements: int, ranks: Ranks) -> Tensor:
    return torch.arange(elements, device=ranks.device, dtype=torch.float32) % _PERIOD


def _summed(elements: int, ranks: Ranks) -> Tensor:
    """Returns the sum over ranks of their buffers: the pattern plus the rank number."""
    return ranks.size * _pattern(elements, ranks) + ranks.size * (ranks.size - 1) // 2


def _all_reduce(elements: int, ranks: Ranks) -> _Case:
    buffer = _pattern(elements, ranks) + ranks.rank
    return lambda: dist.all_reduce(buffer, group=ranks.group), buffer, _summed(elements, ranks)


def _reduce_scatter(elements: int, ranks: Ranks) -> _Case:
    source = _pattern(elements, ranks) + ranks.rank
    part = torch.zeros(elements // ranks.size, device=ranks.device)
    expected = _summed(elements, ranks).chunk(ranks.size)[ranks.rank]
    return lambda: reduce_scatter_tensor(part, source, group=ranks.group), part, expected


def _all_gather(elements: int, ranks: Ranks) -> _Case:
    share = elements // ranks.size
    part = _pattern(share, ranks) + ranks.rank
    gathered = torch.zeros(elements, device=ranks.device)
    expected = torch.cat([_pattern(share, ranks) + rank for rank in range(ranks.size)])
    return lambda: all_gather_tensor(gathered, part, group=ranks.group), gathered, expected


def _all_to_all(elements: int, ranks: Ranks) -> _Case:
    sent = _pattern(elements, ranks) + ranks.rank
    received = torch.zeros_like(sent)
    part = _pattern(elements, ranks).chunk(ranks.size)[ranks.rank]
    expected = torch.cat([part + rank for rank in range(ranks.size)])
    return lambda: dist.all_to_all_single(received, sent, group=ranks.group), received, expected


def _broadcast(elements: int, ranks: Ranks) -> _Case:
    expected = _pattern(elements, ranks)
    first = ranks.global_rank(0)
    buffer = torch.zeros_like(expected)
    if ranks.rank == 0:
        buffer.copy_(expected)
    return lambda: dist.broadcast(buffer, first, group=ranks.group), buffer, expected


def _send_recv(elements: int, ranks: Ranks) -> _Case:
    sent = _pattern(elements, ranks) + ranks.rank
    received = torch.zeros_like(sent)
    after = ranks.global_rank(ranks.rank + 1)
    before = ranks.global_rank(ranks.rank - 1)

    def run() -> None:
        _exchange(sent, after, received, before, ranks.group)

    return run, received, _pattern(elements, ranks) + (ranks.rank - 1) % ranks.size


_CASES: dict[str, Callable[[int, Ranks], _Case]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}


def _exchange(sent: Tensor, target: int, received: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Sends to the global rank ``target`` and receives from ``source`` at the same time."""
    operations = [
        dist.P2POp(dist.isend, sent, target, group=group),
        dist.P2POp(dist.irecv, received, source, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


@dataclass(frozen=True)
class Effort:
    """Sets the extent of the measurements. ``bytes`` is the size of the largest message; no stage begins after
    ``limit_s``."""

    gemm_s: float
    gemm_size: int
    burn_in_s: float
    stage_s: float
    bytes: int
    limit_s: float


def effort(mode: str, crew: Crew) -> Effort:
    """Returns the effort of the modes ``quick`` and ``full``, with messages that fit into all GPUs several times."""
    # on CPUs, a product takes less than a time slice, so other processes do not disturb the fastest product
    size = 256
    burn_in_s = 0.1
    largest = 4 << 20
    cuda = crew.mesh.device.type == "cuda"
    if cuda:
        size = 8192
        burn_in_s = 2.0
        largest = 1 << 30
    chosen = Effort(0.1, size, burn_in_s, 0.25, largest, 20.0)
    if mode == "full":
        chosen = Effort(1.0, size, 5 * burn_in_s, 1.0, 4 * largest, 120.0)
    if cuda:
        free, _ = torch.cuda.mem_get_info(crew.mesh.device)
        least_free = int(-crew.world.largest(-float(free)))
        chosen = replace(chosen, bytes=min(chosen.bytes, least_free // COPIES))
    return chosen


@dataclass(frozen=True)
class Crew:
    """The ranks of a job by node: rank = node position x ``per_node`` + local rank. Only rank 0 knows the names of
    ``nodes``."""

    mesh: Mesh
    nodes: tuple[str, ...]
    per_node: int

    @property
    def count(self) -> int:
        return -(-self.mesh.layout.world_size // self.per_node)

    @property
    def node_position(self) -> int:
        return self.mesh.rank // self.per_node

    @property
    def local(self) -> int:
        return self.mesh.rank % self.per_node

    @property
    def world(self) -> Ranks:
        return Ranks.world(self.mesh.device)

    def agree(self, on_first: bool) -> bool:
        return self.world.largest(float(on_first and self.mesh.rank == 0)) > 0


def to_first(value: Any, mesh: Mesh) -> list[Any]:
    """Returns the values of all ranks on rank 0, and [] on the others. If each rank received the facts of all ranks, it
    would get 8 MB with 8,000 ranks.
    """
    gathered: list[Any] = []
    if mesh.rank == 0:
        gathered = [None] * mesh.layout.world_size
    dist.gather_object(value, gathered or None, group=mesh.control, group_dst=0)
    return gathered


@dataclass(frozen=True)
class Measured:
    """The results of the measurements, complete on rank 0. Other ranks have only the bandwidth over all ranks and
    ``left_out``."""

    ranks: tuple[RankFacts, ...]
    clocks: tuple[ClockOffset, ...]
    bandwidths: Bandwidths
    left_out: tuple[str, ...]


def measure_all(
    crew: Crew, facts: RankFacts, effort: Effort, transport: Callable[[], Transport | None], now: Callable[[], float]
) -> Measured:
    """Measures everything except the paired test.

    Args:
        facts: the facts of this rank, without measurements and ``transport``.
        transport: reads NCCL's log, which is complete only after the first collectives.
        now: the clock of this node in seconds since the epoch.
    """
    mesh = crew.mesh
    began = time.monotonic()
    clocks = clock_offsets(crew.nodes, range(0, mesh.layout.world_size, crew.per_node), mesh.control, now)
    facts = replace(
        facts,
        gemm=_gemm(crew, effort.gemm_size, effort.gemm_s),
        burn_in=burn_in(facts.device, mesh.device, effort.burn_in_s),
    )
    if mesh.device.type == "cuda":
        facts = replace(facts, copy=copy_rate(mesh.device, mesh.control))
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
    # slow ranks are measured again and the better result counts: a GPU may have been idle before, a CPU busy
    if crew.agree(bool(slow_devices(ranks))):
        again = to_first(_gemm(crew, effort.gemm_size, AGAIN * effort.gemm_s), mesh)
        ranks = tuple(replace(rank, gemm=max(rank.gemm, flops)) for rank, flops in zip(ranks, again, strict=True))
    return Measured(ranks, clocks, bandwidths, tuple(left_out))


def _in_node(crew: Crew, effort: Effort, bandwidths: Bandwidths) -> Bandwidths:
    if crew.per_node == 1 or crew.count == 1:
        return bandwidths  # there is one rank per node, or the only node has all ranks
    first = crew.node_position * crew.per_node
    bus = to_first(_bandwidth_among(crew, range(first, first + crew.per_node), effort), crew.mesh)
    return replace(bandwidths, nodes=dict(zip(crew.nodes, bus[:: crew.per_node], strict=True)))


def _over_rails(crew: Crew, effort: Effort, bandwidths: Bandwidths) -> Bandwidths:
    if crew.per_node == 1 or crew.count == 1:
        return bandwidths  # the only rail equals the group of all ranks
    rail = range(crew.local, crew.mesh.layout.world_size, crew.per_node)
    bus = to_first(_bandwidth_among(crew, rail, effort), crew.mesh)
    return replace(bandwidths, rails=tuple(bus[: crew.per_node]))


def _over_all(crew: Crew, effort: Effort, bandwidths: Bandwidths) -> Bandwidths:
    if crew.world.size == 1:
        return bandwidths
    return replace(bandwidths, world=_all_reduce_bandwidth(crew.world, effort))


def _bandwidth_among(crew: Crew, ranks: Sequence[int], effort: Effort) -> float:
    """Measures an all-reduce in a temporary group. The groups are a partition of all ranks, and all ranks call this
    function at the same time, each with its group, since NCCL splits the communicator of all ranks.
    """
    group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc="preflight")
    bus = _all_reduce_bandwidth(Ranks(group, crew.mesh.device), effort)
    dist.barrier(group=crew.mesh.control)  # so that no rank closes a connection from which another rank still reads
    dist.destroy_process_group(group)
    return bus


def _all_reduce_bandwidth(ranks: Ranks, effort: Effort) -> float:
    """Returns the best bus bandwidth over growing sizes in bytes/s."""
    rate = measure("all_reduce", FIRST_BYTES, ranks, 0.0)
    best = rate.bus
    while rate.bytes * GROWTH <= effort.bytes and rate.seconds * GROWTH < effort.stage_s:
        rate = measure("all_reduce", rate.bytes * GROWTH, ranks, effort.stage_s / 4)
        best = max(best, rate.bus)
    return best


def paired_test(crew: Crew, world_bus: float, effort: Effort) -> tuple[PairRate, ...]:
    """Exchanges data between all nodes in pairs, and repeats it if a node seems slow. Rank 0 receives the rates.
    ``world_bus`` is the all-reduce bandwidth in bytes/s, from which the message size is chosen."""
    size = int(min(effort.bytes, max(LEAST_EXCHANGE, world_bus * effort.stage_s / 8)))
    first_pass = _all_pairs(crew, size)
    if crew.agree(bool(slow_nodes(first_pass))):
        return best_of(first_pass, _all_pairs(crew, size))
    return first_pass


def _all_pairs(crew: Crew, size: int) -> tuple[PairRate, ...]:
    """Exchanges ``size`` bytes between equal local ranks of two nodes, for each pair of nodes."""
    elements = size // 4 // crew.per_node
    sent = torch.zeros(elements, device=crew.mesh.device)
    received = torch.zeros_like(sent)
    exchanges: list[tuple[tuple[int, int], float]] = []
    for pairs in rounds(crew.count):
        dist.barrier(group=crew.mesh.control)
        pair = next((pair for pair in pairs if crew.node_position in pair), None)
        if pair is None:
            continue
        peer = (sum(pair) - crew.node_position) * crew.per_node + crew.local
        seconds = float("inf")
        for _ in range(EXCHANGES):
            began = time.perf_counter()
            _exchange(sent, peer, received, peer, crew.world.group)
            if crew.mesh.device.type == "cuda":
                torch.cuda.synchronize(crew.mesh.device)
            seconds = min(seconds, time.perf_counter() - began)
        exchanges.append((pair, seconds))
    slowest: dict[tuple[int, int], float] = {}
    for pair, seconds in (exchange for rank in to_first(exchanges, crew.mesh) for exchange in rank):
        first, second = sorted(pair)
        slowest[first, second] = max(seconds, slowest.get((first, second), 0.0))
    return tuple(
        PairRate((crew.nodes[first], crew.nodes[second]), elements * 4 * crew.per_node / seconds)
        for (first, second), seconds in slowest.items()
    )


def _gemm(crew: Crew, size: int, seconds: float) -> float:
    """Returns the FLOP/s of the device of this rank; on CPUs, of one core."""
    device = crew.mesh.device
    if device.type == "cuda":
        return measured_gemm_flops(device, torch.bfloat16, size, seconds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads would wait for each other while other processes run
    flops = measured_gemm_flops(device, torch.float32, size, seconds)
    torch.set_num_threads(threads)
    return flops


def measured_gemm_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, seconds: float = 1.0) -> float:
    """Returns the FLOP/s of the fastest product of two ``size`` x ``size`` matrices: 2 ``size``³ / time.

    The product is repeated for ``seconds``, so that a short disturbance by another process does not lower the result.
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


_LEFT = (1, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0)  # factors of the products of integers
_RIGHT = (2, -1, 1, -2, 0, 1, 2, -1, -2, 1, 0, -1, 2)
_BLOCKS = 64  # partial sums are at most 64 x (2 + 2) = 256, so that bfloat16 holds them without rounding


def burn_in(name: str, device: torch.device, seconds: float) -> BurnIn:
    """Repeats computations of training for ``seconds`` and hashes the bits of their results.

    All inputs are computed from integers, so that they are the same everywhere. On CPUs, one core of this rank after
    another computes, so that the bits do not depend on the number of threads.

    Args:
        name: the model of the device.
    """
    hashes: dict[str, tuple[str, ...]] = {}
    known = {}
    cores = sorted(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = _computations(device)
        for case, (compute, expected) in cases.items():
            if expected is not None:
                known[case] = f"{int(position_checksum(expected)) % 2**64:016x}"
            until = time.perf_counter() + seconds / len(cases)
            results: list[str] = []
            while len(results) < LEAST_REPEATS or time.perf_counter() < until:
                if device.type == "cpu":
                    os.sched_setaffinity(0, {cores[len(results) % len(cores)]})
                results.append(f"{int(position_checksum(compute())) % 2**64:016x}")
            hashes[case] = tuple(dict.fromkeys(results))
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
    return BurnIn(_kind(name, device), hashes, known)


def _computations(device: torch.device) -> dict[str, tuple[Callable[[], Tensor], Tensor | None]]:
    """Returns the name of each computation -> the function, and its result on the CPU if it needs no rounding.

    With P = 13, a[i, k] = l[(i + k) mod P] and b[k, j] = r[(k + j) mod P], the element (i, j) of a product is the
    number of blocks times the sum over m of l[(m + i - j) mod P] r[m].
    """
    size = BURN_IN_SIZE[device.type]
    inner = _PERIOD * _BLOCKS
    rows = torch.arange(size, device=device)
    columns = torch.arange(inner, device=device)
    places = (rows[:, None] + columns) % _PERIOD
    left = torch.tensor(_LEFT, device=device)[places]
    right = torch.tensor(_RIGHT, device=device)[places].T
    sums = [
        _BLOCKS * sum(_LEFT[(place + shift) % _PERIOD] * _RIGHT[place] for place in range(_PERIOD))
        for shift in range(_PERIOD)
    ]
    product = torch.tensor(sums)[(torch.arange(size)[:, None] - torch.arange(size)) % _PERIOD]
    drawn = (torch.arange(size * inner, device=device) * 48271 % 65521 - 32760) / 32768
    fractions = drawn.view(size, inner)
    heads = fractions[: size // 4, :256].reshape(1, size // 4, 4, 64).transpose(1, 2).to(torch.bfloat16)
    cases: dict[str, tuple[Callable[[], Tensor], Tensor | None]] = {
        "attention": (
            lambda: functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
            None,
        ),
        "an elementwise chain": (lambda: functional.gelu((fractions * fractions.tanh()).exp() + 1).rsqrt(), None),
        "a sum": (lambda: fractions.sum(0), None),
        "a sum of integers": (lambda: right.float().sum(0), torch.full((size,), float(_BLOCKS * sum(_RIGHT)))),
    }
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])
    for dtype in dtypes:
        words = f"{dtype}".removeprefix("torch.")
        cases[f"a product in {words}"] = (_product(fractions.to(dtype), fractions.T.to(dtype)), None)
        cases[f"a product of integers in {words}"] = (_product(left.to(dtype), right.to(dtype)), product.to(dtype))
    return cases


def _product(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.mm(left, right)


def _kind(name: str, device: torch.device) -> str:
    """Returns what determines the kernels of a device, which is called ``name``."""
    parts = [name]
    if device.type == "cuda":
        parts.append(f"{torch.cuda.get_device_properties(device).multi_processor_count} multiprocessors")
    else:
        processor = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]  # models of virtual machines share a name
        facts = re.findall(r"^(?:flags|Features|cpu family|model|CPU part)\s*:.*$", processor, re.MULTILINE)
        instructions = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:8]
        parts.append(f"{torch.backends.cpu.get_cpu_capability()}, instructions {instructions}")
    parts.append(f"torch {torch.__version__}")
    if torch.version.cuda is not None and device.type == "cuda":
        parts.append(f"CUDA {torch.version.cuda}")
        with suppress(OSError, AttributeError):  # the products have loaded the library
            library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.partition('.')[0]}")
            numbers = [ctypes.c_int() for _ in range(3)]
            for index, number in enumerate(numbers):
                library.cublasGetProperty(index, ctypes.byref(number))
            parts.append(f"cuBLAS {'.'.join(str(number.value) for number in numbers)}")
    return ", ".join(parts)


def copy_rate(device: torch.device, control: dist.ProcessGroup) -> float:
    """Returns the bytes/s from pinned host memory to the GPU of this rank. All ranks copy at the same time."""
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


def clock_offsets(
    names: Sequence[str], first_ranks: Sequence[int], group: dist.ProcessGroup, now: Callable[[], float]
) -> tuple[ClockOffset, ...]:
    """Compares the clocks of all nodes with the clock of rank 0, one node at a time, over ``group`` on the CPU.

    Let t0 and t3 be the times at which rank 0 sends and receives, and t1 and t2 the times at which the other rank
    receives and sends. Then the other clock is ((t1 - t0) + (t2 - t3)) / 2 ahead, with an error of at most half the
    round trip (NTP, RFC 5905, sec. 8).

    Args:
        names: the names of the nodes, on rank 0.
        first_ranks: one rank of each node, in the order of ``names``; 0 for the first node.
        now: returns seconds since the epoch.

    Returns:
        The offsets of all nodes except the first on rank 0; () on the other ranks.
    """
    rank = dist.get_rank(group)
    if rank == 0:
        return tuple(_offset(name, peer, group, now) for name, peer in zip(names[1:], first_ranks[1:], strict=True))
    if rank in first_ranks:
        for _ in range(MESSAGES):
            dist.recv(torch.zeros(2, dtype=torch.float64), 0, group=group)
            received = now()
            dist.send(torch.tensor([received, now()], dtype=torch.float64), 0, group=group)
    return ()


def _offset(name: str, peer: int, group: dist.ProcessGroup, now: Callable[[], float]) -> ClockOffset:
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
