"""Measures the speed of collectives over a process group on any backend, and verifies their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.parallel.mesh import all_gather_tensor, reduce_scatter_tensor, synchronize
from hpc_train.preflight.bandwidth import Rate

_PERIOD = 13  # period of the test pattern, whose sums are exact in float32
_MOST_REPEATS = 20  # as nccl-tests does
_BYTES = 4  # of a float32


@dataclass(frozen=True)
class Ranks:
    """A process group as seen from one of its ranks."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank % self.size)

    def largest(self, value: float) -> float:
        """Returns the maximum of all ranks' values after all ranks have arrived. Collective."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return float(tensor.item())


@dataclass(frozen=True)
class _Case:
    """An operation with its buffers. ``expected`` is the content of ``result`` after the first ``run``."""

    run: Callable[[], object]
    result: Tensor
    expected: Tensor


def measure(operation: str, size: int, ranks: Ranks, seconds: float) -> Rate:
    """Measures one operation of ``size`` bytes, rounded up to whole elements of each rank. Collective.

    The first run is verified and serves as warm-up. Then the operation is repeated for about ``seconds``, at most 20
    times; the time is that of the slowest rank.
    """
    elements = -(-size // (_BYTES * ranks.size)) * ranks.size
    case = _CASES[operation](elements, ranks)
    once = _timed(case.run, 1, ranks)
    wrong = int(ranks.largest(float((case.result != case.expected).sum().item())))
    repeats = max(1, min(_MOST_REPEATS, int(seconds / once)))
    return Rate(operation, ranks.size, elements * _BYTES, _timed(case.run, repeats, ranks), repeats, wrong)


def _timed(run: Callable[[], object], repeats: int, ranks: Ranks) -> float:
    """Returns the seconds of one run on the slowest rank, the same on all ranks. Collective."""
    synchronize(ranks.device)
    ranks.largest(0.0)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize(ranks.device)
    return ranks.largest((time.perf_counter() - began) / repeats)


def _pattern(elements: int, ranks: Ranks) -> Tensor:
    return torch.arange(elements, device=ranks.device, dtype=torch.float32) % _PERIOD


def _summed(elements: int, ranks: Ranks) -> Tensor:
    """Returns the sum over ranks of their buffers: the pattern plus the rank number."""
    return ranks.size * _pattern(elements, ranks) + ranks.size * (ranks.size - 1) // 2


def _all_reduce(elements: int, ranks: Ranks) -> _Case:
    buffer = _pattern(elements, ranks) + ranks.rank
    return _Case(lambda: dist.all_reduce(buffer, group=ranks.group), buffer, _summed(elements, ranks))


def _reduce_scatter_case(elements: int, ranks: Ranks) -> _Case:
    source = _pattern(elements, ranks) + ranks.rank
    part = torch.zeros(elements // ranks.size, device=ranks.device)
    expected = _summed(elements, ranks).chunk(ranks.size)[ranks.rank]
    return _Case(lambda: reduce_scatter_tensor(part, source, group=ranks.group), part, expected)


def _all_gather_case(elements: int, ranks: Ranks) -> _Case:
    share = elements // ranks.size
    part = _pattern(share, ranks) + ranks.rank
    gathered = torch.zeros(elements, device=ranks.device)
    expected = torch.cat([_pattern(share, ranks) + rank for rank in range(ranks.size)])
    return _Case(lambda: all_gather_tensor(gathered, part, group=ranks.group), gathered, expected)


def _broadcast(elements: int, ranks: Ranks) -> _Case:
    expected = _pattern(elements, ranks)
    first = ranks.global_rank(0)
    buffer = expected.clone() if ranks.rank == 0 else torch.zeros_like(expected)
    return _Case(lambda: dist.broadcast(buffer, first, group=ranks.group), buffer, expected)


def _send_recv(elements: int, ranks: Ranks) -> _Case:
    sent = _pattern(elements, ranks) + ranks.rank
    received = torch.zeros_like(sent)
    after, before = ranks.global_rank(ranks.rank + 1), ranks.global_rank(ranks.rank - 1)

    def run() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, after, group=ranks.group),
            dist.P2POp(dist.irecv, received, before, group=ranks.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return _Case(run, received, _pattern(elements, ranks) + (ranks.rank - 1) % ranks.size)


_CASES: dict[str, Callable[[int, Ranks], _Case]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter_case,
    "all_gather": _all_gather_case,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}
