"""Derives the all-reduce bandwidths that a job should reach from the hardware of its nodes. No torch.

An unknown expected value is None, and no measurement is compared with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.network.machines import by_machine, with_local_facts
from hpc_train.machine.network.rails import match, usable_nics
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import DamagedFile

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
    """Returns the expected bandwidths of a job on all GPUs of ``nodes``; the slowest node counts. Unknown for fewer
    GPUs.
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


def read_fabric(run: RunDirectory) -> tuple[NodeFacts, ...]:
    """Returns the facts of the run's nodes; empty if they were not recorded, or the record is damaged."""
    try:
        record = run.json(run.fabric)
        machines = [NodeFacts.from_json(machine["facts"]) for machine in record["machines"]]
        return tuple(with_local_facts(machines[node["machine"]], node["name"], node) for node in record["nodes"])
    except (FileNotFoundError, DamagedFile, LookupError, TypeError, AttributeError, ValueError):
        return ()


def _in_node(facts: NodeFacts) -> Expected | None:
    links = [facts.link(a.name, b.name) or "" for a, b in itertools.combinations(facts.gpus, 2)]
    for model, (least, bus) in IN_NODE.items():
        if links and all(model in (gpu.model or "") for gpu in facts.gpus):
            complete = len(facts.gpus) == 8 and all(link.startswith("NV") and int(link[2:]) >= least for link in links)
            if complete:
                return Expected(bus, f"8 {model} with NVLink")
            return None
    return None


def _between_nodes(facts: NodeFacts) -> tuple[Expected | None, Expected | None]:
    """Returns the expected bandwidths over all ranks and over one rail."""
    names = {matched.nic for matched in match(facts)}
    rates = [_rate(facts, name) for name in names]
    known_rates = [rate for rate in rates if rate is not None]
    if not known_rates or len(known_rates) < len(rates):
        return None, None
    bus = OF_LINE_RATE * sum(known_rates) * 1e9 / 8
    reason = f"{OF_LINE_RATE:.0%} of {len(known_rates)} NICs with {sum(known_rates):g} Gb/s in total"
    return Expected(bus, reason), Expected(bus / len(facts.gpus), f"{reason}, shared by {len(facts.gpus)} GPUs")


def _rate(facts: NodeFacts, name: str | None) -> float | None:
    """Returns the rate of a NIC's active ports in Gb/s; None if unknown."""
    nic = next((nic for nic in usable_nics(facts) if nic.name == name), None)
    rates = []
    if nic is not None:
        rates = [port.rate_gbps for port in nic.ports if port.active]
    if rates and None not in rates:
        return sum(rate for rate in rates if rate is not None)
    return None


def _slowest(expectations: Sequence[Expected | None]) -> Expected | None:
    present = [one for one in expectations if one is not None]
    if present and len(present) == len(expectations):
        return min(present, key=lambda expected: expected.bus)
    return None
