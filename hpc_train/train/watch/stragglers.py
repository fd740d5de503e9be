"""Combines the measurements of all ranks into metrics, and finds a straggler across nodes.

Ranks leave a collective at the same time, so the rank that arrives last waits the least. Waiting times do not depend on
the clocks of the nodes. Only the ranks of the same pipeline stage are compared, since stages do different work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Generic, TypeVar

from hpc_train.layout.layout import Layout

IN_A_ROW = 3  # lines of metrics; the first line of an attempt does not count, as it includes the start-up


@dataclass(frozen=True)
class SlowRank:
    """Describes a rank on ``node`` for which the other ranks of its stage wait during ``share`` of the time."""

    rank: int
    node: str
    share: float

    def details(self) -> dict[str, Any]:
        """Returns the details of the event."""
        message = f"the other ranks wait for rank {self.rank} on {self.node} {self.share:.0%} of the time"
        return {"rank": self.rank, "node": self.node, "share": round(self.share, 3), "message": message}


@dataclass
class SlowRankWatch:
    """Checks the times of all ranks with every line of metrics of an attempt.

    Attributes:
        nodes: the node of each rank.
    """

    layout: Layout
    nodes: Sequence[str]
    _lines: int = field(default=0, init=False)
    _ranks: Streak[int] = field(default_factory=lambda: Streak(IN_A_ROW), init=False)

    def look(self, rows: Sequence[RankTimes]) -> SlowRank | None:
        """Returns a rank that was the straggler in the last ``IN_A_ROW`` lines and was not reported before."""
        self._lines += 1
        slow = find_slow_rank(rows, self.layout) if self._lines > 1 else None
        rank, share = slow or (None, 0.0)
        if not self._ranks.confirms(rank) or rank is None:
            return None
        return SlowRank(rank, self.nodes[rank], share)


def find_slow_rank(rows: Sequence[RankTimes], layout: Layout) -> tuple[int, float] | None:
    """Returns the rank for which the other ranks of its stage wait the longest, and the share of the time; None if
    there is no straggler."""
    slow = []
    for begin, end in stages(layout):
        waits = {rank: wait for rank in range(begin, end) if (wait := rows[rank].communication_s) is not None}
        if end - begin < 2 or len(waits) < end - begin:
            continue
        least, following, *_ = sorted(waits, key=lambda rank: waits[rank])
        late_s = median(wait for rank, wait in waits.items() if rank != least) - waits[least]
        share = late_s / rows[least].seconds
        if share >= LEAST_SHARE and waits[following] - waits[least] >= LEAST_BLAME * late_s:
            slow.append((least, share))
    return max(slow, key=lambda late: late[1], default=None)


@dataclass(frozen=True)
class RankTimes:
    """Holds the sums of one rank over ``steps`` steps. Unknown values are None.

    Attributes:
        seconds: elapsed time without pauses for evaluation and saves.
        data_s: time spent waiting for the next batch.
        communication_s, bubble_s, steps_s: see ``step_clock.StepTimes``.
        memory_bytes: peak memory since the start.
        gpu_util: share of the time in which a kernel ran on its GPU.
        rdma_sent, rdma_received, net_sent, net_received: the traffic of its node in bytes; only on the first rank of a
            node.
    """

    seconds: float
    steps: int
    data_s: float
    memory_bytes: int
    communication_s: float | None = None
    bubble_s: float | None = None
    gpu_util: float | None = None
    rdma_sent: int | None = None
    rdma_received: int | None = None
    net_sent: int | None = None
    net_received: int | None = None
    steps_s: float | None = None

    @property
    def busy_s(self) -> float:
        """Returns the remaining time: computation and, on a GPU, waiting for the host."""
        return max(0.0, self.seconds - self.data_s - (self.communication_s or 0.0) - (self.bubble_s or 0.0))


TRAFFIC = {  # key of the metrics -> field
    "rdma_tx_bytes": "rdma_sent",
    "rdma_rx_bytes": "rdma_received",
    "net_tx_bytes": "net_sent",
    "net_rx_bytes": "net_received",
}


def over_ranks(rows: Sequence[RankTimes], layout: Layout) -> dict[str, float]:
    """Returns metric name -> value, without metrics for which the value of a rank is missing.

    - data_wait_share, comm_share, bubble_share: shares of the time, averaged over the ranks.
    - compute_imbalance: the longest computation time of a rank divided by the mean over all ranks.
    - arrival_skew_s: per step, the time between the arrival of the first and the last rank of a stage at collectives.
      Ranks leave a collective at the same time, so this is the difference of their waiting times.
    - peak_memory_bytes: the maximum over the ranks; memory_imbalance: this maximum divided by the mean.
    - gpu_util: the mean over the ranks.
    - host_share: the share of the time in which data was available and the GPU ran no kernel.
    - rdma_tx_bytes, rdma_rx_bytes, net_tx_bytes, net_rx_bytes: bytes per step, summed over the nodes.
    """
    data_share = fmean(row.data_s / row.seconds for row in rows)
    metrics: dict[str, float | None] = {
        "data_wait_share": data_share,
        "comm_share": _mean([row.communication_s for row in rows], [row.seconds for row in rows]),
        "bubble_share": _mean([row.bubble_s for row in rows], [row.seconds for row in rows]),
        "peak_memory_bytes": max(row.memory_bytes for row in rows),
        "gpu_util": _mean([row.gpu_util for row in rows], [1.0 for _ in rows]),
    }
    for key, name in TRAFFIC.items():
        of_nodes = [value for row in rows if (value := getattr(row, name)) is not None]
        if of_nodes:
            metrics[key] = sum(of_nodes) / max(1, rows[0].steps)
    if len(rows) > 1:
        metrics["memory_imbalance"] = _over_mean([row.memory_bytes for row in rows])
    if len(rows) > 1 and metrics["comm_share"] is not None:
        metrics["compute_imbalance"] = _over_mean([row.busy_s for row in rows])
        skews = []
        for begin, end in stages(layout):
            waits = [row.communication_s or 0.0 for row in rows[begin:end]]
            skews.append((max(waits) - min(waits)) / max(1, rows[begin].steps))
        metrics["arrival_skew_s"] = max(skews)
    if metrics["gpu_util"] is not None:
        metrics["host_share"] = max(0.0, 1.0 - metrics["gpu_util"] - data_share)
    return {key: value for key, value in metrics.items() if value is not None}


def stages(layout: Layout) -> list[tuple[int, int]]:
    """Returns (begin, end) of the ranks at each position in the pipeline. These ranks do the same work."""
    ranks = layout.replica.stage_ranks
    return [(begin, begin + ranks) for begin in range(0, layout.world_size, ranks)]


def _mean(values: Sequence[float | None], totals: Sequence[float]) -> float | None:
    """Returns the mean of the shares; None if the value of a rank is missing."""
    shares = [value / total for value, total in zip(values, totals, strict=True) if value is not None]
    return fmean(shares) if len(shares) == len(values) else None


def _over_mean(values: Sequence[float]) -> float:
    return max(values) / max(fmean(values), 1e-12)


T = TypeVar("T")

# A straggler is a rank for which the others wait. The searches within a node and across nodes both use these limits.
LEAST_SHARE = 0.2  # the minimum share of the time for which the others wait
LEAST_BLAME = 0.75  # the minimum share of the wait that this rank alone causes; on a busy machine, every rank is late


@dataclass
class Streak(Generic[T]):
    """Confirms a finding once, after it has been the same ``length`` times in a row."""

    length: int
    confirmed: set[T] = field(default_factory=set, init=False)
    _last: T | None = field(default=None, init=False)
    _count: int = field(default=0, init=False)

    def confirms(self, finding: T | None) -> bool:
        """Returns whether the new ``finding`` is confirmed now for the first time. None interrupts the streak."""
        if finding != self._last:
            self._count = 0
        self._count += 1
        self._last = finding
        if finding is None or self._count < self.length or finding in self.confirmed:
            return False
        self.confirmed.add(finding)
        return True
