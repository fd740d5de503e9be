"""The time of collectives and messages between ranks, from the number of bytes and the place of the ranks.

The time of a collective of n ranks on S bytes is ``latency + c (n - 1) / n S / B`` with c = 2 for an all-reduce and 1
for an all-gather or a reduce-scatter, where B is the bus bandwidth (nccl-tests, doc/PERFORMANCE.md). The latency grows
with the logarithm of the ranks of a node. Between nodes, an all-gather or a reduce-scatter is a ring, whose latency
grows with the number of nodes; an all-reduce is a ring or, if it takes less, goes up and down a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from hpc_train.planner.machine import Rates


@dataclass(frozen=True)
class Group:
    """Ranks of a collective.

    Attributes:
        ranks: how many there are.
        per_node: how many of them a node has.
    """

    ranks: int
    per_node: int

    @property
    def spans_nodes(self) -> bool:
        return self.ranks > self.per_node


def group_of(ranks: int, stride: int, devices_per_node: int) -> Group:
    """Returns the group of ``ranks`` ranks whose global numbers are ``stride`` apart."""
    return Group(ranks, max(1, min(ranks, devices_per_node // stride)))


def all_reduce(size: float, group: Group, rates: Rates) -> float:
    """Returns the seconds of an all-reduce of ``size`` bytes."""
    nodes = group.ranks / group.per_node
    return _seconds(2 * size, group, min(2 * log2(nodes), nodes - 1), rates)


def gather(size: float, group: Group, rates: Rates) -> float:
    """Returns the seconds of an all-gather to ``size`` bytes."""
    return _seconds(size, group, group.ranks / group.per_node - 1, rates)


def scatter(size: float, group: Group, rates: Rates) -> float:
    """Returns the seconds of a reduce-scatter of ``size`` bytes."""
    return gather(size / rates.scatter_share, group, rates)


def load(group: Group, rates: Rates) -> float:
    """Returns how busy a collective keeps a device, as a share of a collective within a node."""
    return min(1.0, _bandwidth(group, rates) / rates.node_bytes_per_s)


def message(size: float, between_nodes: bool, rates: Rates) -> float:
    """Returns the seconds of a message of ``size`` bytes to another rank."""
    if between_nodes:
        return rates.fabric_latency_s + size / rates.fabric_bytes_per_s
    return rates.node_latency_s + size / rates.node_bytes_per_s


def _seconds(moved: float, group: Group, hops: float, rates: Rates) -> float:
    """Returns the seconds of a collective that crosses ``hops`` times from node to node."""
    if group.ranks == 1:
        return 0.0
    share = (group.ranks - 1) / group.ranks
    latency = rates.node_latency_s * log2(group.per_node) + rates.fabric_latency_s * hops
    return latency + share * moved / _bandwidth(group, rates)


def _bandwidth(group: Group, rates: Rates) -> float:
    if not group.spans_nodes:
        return rates.node_bytes_per_s
    # the ranks of a node send through as many network ports, but not faster than within the node
    bandwidth = group.per_node * rates.fabric_bytes_per_s
    if group.per_node == 1:
        return bandwidth
    return min(bandwidth, rates.node_bytes_per_s)
