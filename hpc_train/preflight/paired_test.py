"""Which node is slow: all nodes exchange data in pairs, in rounds with other partners, and a slow one shows in each.

One pair alone does not tell which of the two it is. No torch: who meets whom, and what follows from the rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

ROUNDS = 3  # so that each node meets two others, also where one of them sits out
SLOW = 0.85  # of the median of the pairs without the node
SLOW_ON_CPUS = 0.5  # over gloo, where whatever else the cores do moves a rate by a third
TWICE = 2  # different partners with whom a node must be slow


@dataclass(frozen=True)
class PairRate:
    """Bytes/s in each direction between two nodes, over all of their ranks together."""

    nodes: tuple[str, str]
    rate: float

    def partner(self, node: str) -> str:
        return self.nodes[1] if self.nodes[0] == node else self.nodes[0]


@dataclass(frozen=True)
class SlowNode:
    """``rate``: the median of its pairs; ``usual``: of the pairs without it; both in bytes/s."""

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
    """Pairs of ``count`` nodes, round by round: no pair twice, each node at most once in a round (circle method)."""
    places = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(min(ROUNDS, len(places) - 1)):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def slow_nodes(pairs: Sequence[PairRate], slow: float = SLOW) -> tuple[SlowNode, ...]:
    """The nodes that are slow with two different partners at least, and with most of their partners.

    Args:
        slow: below this share of the other pairs' rate a pair is slow.
    """
    found = []
    for node in dict.fromkeys(name for pair in pairs for name in pair.nodes):
        own = [pair for pair in pairs if node in pair.nodes]
        others = [pair.rate for pair in pairs if node not in pair.nodes]
        if not others:
            continue
        usual, rate = median(others), median(pair.rate for pair in own)
        partners = tuple(pair.partner(node) for pair in own if pair.rate < slow * usual)
        if len(set(partners)) >= TWICE and rate < slow * usual:
            found.append(SlowNode(node, rate, usual, partners))
    return tuple(found)


def best_of(*passes: Sequence[PairRate]) -> tuple[PairRate, ...]:
    """The best rate of each pair: what is slow once may have met other work."""
    best: dict[tuple[str, str], float] = {}
    for pair in (pair for one in passes for pair in one):
        best[pair.nodes] = max(pair.rate, best.get(pair.nodes, 0.0))
    return tuple(PairRate(nodes, rate) for nodes, rate in best.items())
