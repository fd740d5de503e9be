"""Defines the bandwidths of collectives as nccl-tests does, and finds slow nodes from the bandwidths of pairs of nodes.

With S bytes in t seconds over n ranks the algorithm bandwidth is S / t. The bus bandwidth is that times a factor, the
share of S that must cross the slowest link, so that it is comparable with the link's rate for any n (nccl-tests,
doc/PERFORMANCE.md). For an all-gather and a reduce-scatter, S is the size of the whole buffer, not of one rank's part.

One pair alone does not show which of its nodes is slow. Nodes therefore exchange data in pairs over several rounds: a
slow node is slow with every partner. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,  # all ranks send to the next rank at once
}
OPERATIONS = tuple(FACTORS)


@dataclass(frozen=True)
class Rate:
    """Holds a measurement. ``seconds`` is the mean of ``repeats`` on the slowest rank; ``wrong`` elements differed."""

    operation: str
    ranks: int
    bytes: int
    seconds: float
    repeats: int
    wrong: int

    @property
    def algorithm(self) -> float:
        """Returns the algorithm bandwidth in bytes/s."""
        return self.bytes / self.seconds

    @property
    def bus(self) -> float:
        """Bus bandwidth in bytes/s."""
        return self.algorithm * FACTORS[self.operation](self.ranks)


ROUNDS = 3  # each node meets two others, even if one round leaves it out
SLOW = 0.85  # share of the median of the pairs without the node
SLOW_ON_CPUS = 0.5  # over gloo, where other load changes a rate by a third
MIN_PARTNERS = 2  # different partners with which a node must be slow


@dataclass(frozen=True)
class PairRate:
    """Bytes/s in each direction between two nodes, summed over their ranks."""

    nodes: tuple[str, str]
    rate: float

    def partner(self, node: str) -> str:
        if self.nodes[0] == node:
            return self.nodes[1]
        return self.nodes[0]


@dataclass(frozen=True)
class SlowNode:
    """Describes a slow node. ``rate`` is the median of its pairs in bytes/s, ``usual`` that of the others."""

    node: str
    rate: float
    usual: float
    partners: tuple[str, ...]

    @property
    def words(self) -> str:
        return (
            f"{self.node}: {self.rate / 1e9:.3g} GB/s with {' and '.join(self.partners)}, {self.usual / 1e9:.3g} GB/s "
            "between the others"
        )


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Returns pairs of ``count`` nodes by round: no pair twice, each node at most once per round (circle method)."""
    positions = [*range(count), *([None] if count % 2 else [])]
    schedule = []
    for _ in range(min(ROUNDS, len(positions) - 1)):
        half = len(positions) // 2
        pairs = zip(positions[:half], reversed(positions[half:]), strict=True)
        schedule.append([(a, b) for a, b in pairs if a is not None and b is not None])
        positions = [positions[0], positions[-1], *positions[1:-1]]
    return schedule


def slow_nodes(pairs: Sequence[PairRate], slow: float = SLOW) -> tuple[SlowNode, ...]:
    """Returns the nodes that are slow with at least two different partners and with most of their partners.

    Args:
        slow: share of the other pairs' rate below which a pair is slow.
    """
    results = []
    for node in dict.fromkeys(name for pair in pairs for name in pair.nodes):
        node_pairs = [pair for pair in pairs if node in pair.nodes]
        others = [pair.rate for pair in pairs if node not in pair.nodes]
        if not others:
            continue
        usual = median(others)
        rate = median(pair.rate for pair in node_pairs)
        partners = tuple(pair.partner(node) for pair in node_pairs if pair.rate < slow * usual)
        if len(set(partners)) >= MIN_PARTNERS and rate < slow * usual:
            results.append(SlowNode(node, rate, usual, partners))
    return tuple(results)


def best_of(*passes: Sequence[PairRate]) -> tuple[PairRate, ...]:
    """Returns the best rate of each pair, because a single slow result may be caused by other load."""
    best: dict[tuple[str, str], float] = {}
    for pair in (pair for rates in passes for pair in rates):
        best[pair.nodes] = max(pair.rate, best.get(pair.nodes, 0.0))
    return tuple(PairRate(nodes, rate) for nodes, rate in best.items())
