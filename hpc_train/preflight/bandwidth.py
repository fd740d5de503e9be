"""Computes bandwidths of collectives as nccl-tests defines them, determines the bandwidths that a job should reach, and
finds slow nodes. It does not import torch.

With S bytes in t seconds over n ranks, the algorithm bandwidth is S / t. The bus bandwidth is the algorithm bandwidth
times a factor, the share of S that must cross the slowest link, so that it is comparable with the link's rate for any n
(nccl-tests, doc/PERFORMANCE.md). For an all-gather and a reduce-scatter, S is the size of the full buffer, not of the
part of one rank. For an all-to-all, S is what a rank sends, with the part for itself.

A single pair does not show which of its nodes is slow. Nodes therefore exchange data in pairs over several rounds: a
slow node is slow with every partner. An unknown expected bandwidth is None and is not compared with measurements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from hpc_train.machine.network.facts import NodeFacts, by_machine, with_local_facts
from hpc_train.machine.network.rails import match, usable_nics
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import DamagedFile

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,  # all ranks send to the next rank at once
}
OPERATIONS = tuple(FACTORS)


@dataclass(frozen=True)
class Rate:
    """Holds a measurement. ``seconds`` is the mean over ``repeats`` runs on the slowest rank; ``wrong`` is the number
    of wrong elements."""

    operation: str
    ranks: int
    bytes: int
    seconds: float
    repeats: int
    wrong: int

    @property
    def algorithm(self) -> float:
        return self.bytes / self.seconds

    @property
    def bus(self) -> float:
        return self.algorithm * FACTORS[self.operation](self.ranks)


ROUNDS = 3  # each node has at least two partners, even if it pauses in one round
SLOW = 0.85  # a rate is slow below this share of the median rate of the pairs without the node
SLOW_ON_CPUS = 0.5  # the same over gloo, where other load changes a rate by a third
MIN_PARTNERS = 2  # a slow node must be slow with this many different partners


@dataclass(frozen=True)
class PairRate:
    """The rate in bytes/s in each direction between two nodes, summed over their ranks."""

    nodes: tuple[str, str]
    rate: float


@dataclass(frozen=True)
class SlowNode:
    """Describes a slow node. ``rate`` is the median rate of its pairs in bytes/s, ``usual`` the median rate of the
    other pairs."""

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
    """Returns the pairs of ``count`` nodes in each round. No pair is repeated, and a node is in at most one pair per
    round (circle method)."""
    positions: list[int | None] = [*range(count)]
    if count % 2:
        positions.append(None)  # the node that is paired with None pauses
    schedule = []
    for _ in range(min(ROUNDS, len(positions) - 1)):
        half = len(positions) // 2
        pairs = zip(positions[:half], reversed(positions[half:]), strict=True)
        schedule.append([(a, b) for a, b in pairs if a is not None and b is not None])
        positions = [positions[0], positions[-1], *positions[1:-1]]
    return schedule


def slow_nodes(pairs: Sequence[PairRate], slow: float = SLOW) -> tuple[SlowNode, ...]:
    """Returns the nodes that are slow with at least two different partners and with most of their partners. A pair is
    slow below the share ``slow`` of the rate of the other pairs."""
    results = []
    for node in dict.fromkeys(name for pair in pairs for name in pair.nodes):
        node_pairs = [pair for pair in pairs if node in pair.nodes]
        others = [pair.rate for pair in pairs if node not in pair.nodes]
        if not others:
            continue
        usual = median(others)
        rate = median(pair.rate for pair in node_pairs)
        partners = tuple(name for pair in node_pairs if pair.rate < slow * usual for name in pair.nodes if name != node)
        if len(set(partners)) >= MIN_PARTNERS and rate < slow * usual:
            results.append(SlowNode(node, rate, usual, partners))
    return tuple(results)


def best_of(*passes: Sequence[PairRate]) -> tuple[PairRate, ...]:
    """Returns the best rate of each pair, because a single slow result may be caused by other load."""
    best: dict[tuple[str, str], float] = {}
    for pair in (pair for rates in passes for pair in rates):
        best[pair.nodes] = max(pair.rate, best.get(pair.nodes, 0.0))
    return tuple(PairRate(nodes, rate) for nodes, rate in best.items())


# Minimum NVLinks per pair, and bus bandwidth in bytes/s of large messages over all 8 GPUs of an NVSwitch node, as
# required by the acceptance tests of GPU clouds
IN_NODE = {"H200": (18, 431e9), "H100": (18, 460e9), "A100": (12, 228e9), "V100": (1, 110e9)}
# Share of the rate of a node's ports that an all-reduce reaches: 64 H100 on 8 x 400 Gb/s reach 373 to 386 of 400 GB/s
OF_LINE_RATE = 0.92


@dataclass(frozen=True)
class Expected:
    """Holds the expected bus bandwidth in bytes/s, and its source."""

    bus: float
    reason: str


@dataclass(frozen=True)
class ExpectedBandwidths:
    """Expected all-reduce bandwidths: in the node, over one rail (all rails at once), and over all ranks."""

    node: Expected | None = None
    rail: Expected | None = None
    world: Expected | None = None


def expected_bandwidths(nodes: Sequence[NodeFacts], gpus_per_node: int) -> ExpectedBandwidths:
    """Returns the expected bandwidths of a job on all GPUs of ``nodes``, where the slowest node counts. They are
    unknown if the job uses fewer GPUs.
    """
    if not nodes or gpus_per_node == 0 or any(len(facts.gpus) != gpus_per_node for facts in nodes):
        return ExpectedBandwidths()
    machines = [alike[0] for alike in by_machine(nodes)]
    inside = _slowest([_in_node(facts) for facts in machines])
    if len(nodes) == 1:
        return ExpectedBandwidths(node=inside, world=inside)
    between, rail = (_slowest(per_machine) for per_machine in zip(*map(_between_nodes, machines), strict=True))
    world = between
    if between is not None and inside is not None and inside.bus < between.bus:
        world = inside
    return ExpectedBandwidths(inside, rail, world)


def _slowest(expectations: Sequence[Expected | None]) -> Expected | None:
    """Returns the lowest expected bandwidth; None if one is unknown."""
    present = [expected for expected in expectations if expected is not None]
    if len(present) < len(expectations):
        return None
    return min(present, key=lambda expected: expected.bus, default=None)


def _in_node(facts: NodeFacts) -> Expected | None:
    links = [facts.link(a.name, b.name) or "" for a, b in itertools.combinations(facts.gpus, 2)]
    for model, (least, bus) in IN_NODE.items():
        if len(facts.gpus) == 8 and all(model in (gpu.model or "") for gpu in facts.gpus):
            if all(link.startswith("NV") and int(link[2:]) >= least for link in links):
                return Expected(bus, f"8 {model} with NVLink")
            return None
    return None


def _between_nodes(facts: NodeFacts) -> tuple[Expected | None, Expected | None]:
    """Returns the expected bandwidths over all ranks and over one rail; None if the rate of a NIC is unknown."""
    names = {matched.nic for matched in match(facts)}
    nics = [nic for nic in usable_nics(facts) if nic.name in names]
    rates = [[port.rate_gbps for port in nic.ports if port.active] for nic in nics]
    if not names or len(nics) < len(names) or not all(rates):
        return None, None
    total = 0.0
    for rate in itertools.chain(*rates):
        if rate is None:
            return None, None
        total += rate
    bus = OF_LINE_RATE * total * 1e9 / 8
    reason = f"{OF_LINE_RATE:.0%} of {len(nics)} NICs with {total:g} Gb/s in total"
    return Expected(bus, reason), Expected(bus / len(facts.gpus), f"{reason}, shared by {len(facts.gpus)} GPUs")


def read_fabric(run: RunDirectory) -> tuple[NodeFacts, ...]:
    """Returns the facts of the run's nodes; empty if they were not recorded or the record is damaged."""
    try:
        record = run.fabric_record()
        machines = [NodeFacts.from_json(machine["facts"]) for machine in record["machines"]]
        return tuple(with_local_facts(machines[node["machine"]], node["name"], node) for node in record["nodes"])
    except (FileNotFoundError, DamagedFile, LookupError, TypeError, AttributeError, ValueError):
        return ()
