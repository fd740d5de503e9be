"""Selects the ports for training, and for each GPU the nearest NIC, on the same rail on every node.

It judges one node by itself. ``port_filter`` compares the verdicts of the nodes of a job.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hpc_train.machine.natural_order import natural
from hpc_train.machine.network.facts import FLAPS, Gpu, Nic, NodeFacts, Port, distance
from hpc_train.machine.network.machines import once_per_machine
from hpc_train.machine.network.rdma import NIC_RATE_GBPS

Kind = TypeVar("Kind", str, float)


@dataclass(frozen=True)
class PortVerdict:
    """Returns whether a port is used for training; ``usable`` is None if its state is unknown."""

    nic: str
    port: Port
    usable: bool | None
    reason: str

    @property
    def name(self) -> str:
        return f"{self.nic}:{self.port.number}"

    @property
    def excluded(self) -> bool:
        """Returns whether the port could carry data, but must not."""
        return self.usable is False and self.port.active is True


@dataclass(frozen=True)
class Match:
    """Holds the NIC of a GPU; ``nic`` is None if there is none or it is ambiguous."""

    gpu: str
    nic: str | None
    path_type: str | None
    rail: int | None
    reason: str


@once_per_machine
def judge_ports(facts: NodeFacts) -> tuple[PortVerdict, ...]:
    """Returns a verdict with the reason for every port of every NIC.

    Excluded are ports that are not up, or are far from every GPU while each GPU has a near NIC; and of the rest those
    whose link layer or rate differs from that of the ports with the most bandwidth in total. These are storage or
    management ports, and one of them among the rails slows all down to its own pace. Two kinds of port are kept:

    - the only near NIC of a GPU, if its link came up slow. The node has a defect, but NCCL would otherwise connect this
      GPU over the NIC of another one.
    - a port that carries the default route, if it equals the rails. On a flat network the route uses one of them, and
      on diskless nodes it uses IP over InfiniBand.
    """
    active = [(nic, port) for nic in facts.nics for port in nic.ports if port.active]
    routed = {nic.name for nic, port in active if _carries_route(facts, nic, port)}
    far = _far_from_every_gpu(facts, {nic.name for nic, _ in active})
    near = [(nic, port) for nic, port in active if nic.name not in far]
    voters = [(nic, port) for nic, port in near if nic.name not in routed] or near
    layer = _carrying_most([port for _, port in voters], lambda port: port.link_layer)
    rate = _carrying_most([port for _, port in voters if port.link_layer == layer], lambda port: port.rate_gbps)
    rails = frozenset(nic.name for nic, port in near if port.link_layer == layer and port.rate_gbps == rate)
    vote = _Vote(layer, rate, rails, frozenset(far), frozenset(routed))
    return tuple(
        PortVerdict(nic.name, port, *_verdict(facts, nic, port, vote)) for nic in facts.nics for port in nic.ports
    )


@once_per_machine
def port_warnings(facts: NodeFacts) -> tuple[str, ...]:
    """Returns the ports that work below their capability, each with a hint."""
    messages = []
    used = {(verdict.nic, verdict.port.number) for verdict in judge_ports(facts) if verdict.usable}
    for nic in facts.nics:
        for port in nic.ports:
            name = f"{nic.name} port {port.number}"
            best = NIC_RATE_GBPS.get(nic.model or "")
            if (nic.name, port.number) not in used and (port.link_layer == "Ethernet" or facts.gpus):
                best = None  # storage and management links may be slower
            if port.active and best is not None and port.rate_gbps is not None and port.rate_gbps < best:
                messages.append(
                    f"{name} runs at {port.rate_gbps:g} Gb/s, but its NIC supports {best} Gb/s: check cable and switch"
                )
            if port.state == "INIT" and port.link_layer == "InfiniBand":
                messages.append(f"{name} is INIT: no subnet manager has configured it")
            if port.physical_state == "POLLING":
                messages.append(f"{name} is polling: the cable is missing, or the other end is down")
            if port.active and (port.link_downed or 0) >= FLAPS:
                messages.append(f"{name} went down {port.link_downed} times since its counters were reset")
    return tuple(messages)


@once_per_machine
def usable_nics(facts: NodeFacts) -> tuple[Nic, ...]:
    """Returns the NICs with a usable port in natural order; all of them if no port's state is known."""
    verdicts = judge_ports(facts)
    usable = {verdict.nic for verdict in verdicts if verdict.usable}
    unseen = {nic.name for nic in facts.nics if not nic.ports} | {v.nic for v in verdicts if v.usable is None}
    chosen = usable or (unseen if not any(verdict.usable is False for verdict in verdicts) else set())
    return tuple(sorted((nic for nic in facts.nics if nic.name in chosen), key=lambda nic: natural(nic.name)))


@once_per_machine
def rate_gbps(facts: NodeFacts) -> float | None:
    """Returns the total rate of a node's usable ports in Gb/s per direction; None if unknown."""
    rates = [verdict.port.rate_gbps for verdict in judge_ports(facts) if verdict.usable]
    known_rates = [rate for rate in rates if rate is not None]
    if known_rates and len(known_rates) == len(rates):
        return sum(known_rates)
    return None


@once_per_machine
def match(facts: NodeFacts) -> tuple[Match, ...]:
    """Matches each GPU to a NIC: near pairs first, sharing a NIC only when all are equally near, in PCI order.

    If several NICs are equally far (across sockets, or on virtual PCI) nothing distinguishes them, and the GPU gets
    none.
    """
    nics = usable_nics(facts)
    load: Counter[str] = Counter()
    matches_by_gpu: dict[str, Match] = {}
    near = {gpu.name: _nearest(facts, gpu, nics) for gpu in facts.gpus}
    for gpu in sorted(facts.gpus, key=lambda gpu: (near[gpu.name][0], gpu.index)):
        _, path_type, candidates = near[gpu.name]
        if path_type is None or (path_type == "SYS" and len(candidates) > 1):
            matches_by_gpu[gpu.name] = Match(gpu.name, None, path_type, None, _why_none(facts, nics, path_type))
            continue
        taken = min(candidates, key=lambda nic: (load[nic.name], not _same_numa(facts, gpu, nic), natural(nic.name)))
        load[taken.name] += 1
        reason = f"it is the nearest of {len(nics)}" + (
            f", one of {len(candidates)} equally near" if len(candidates) > 1 else ""
        )
        matches_by_gpu[gpu.name] = Match(gpu.name, taken.name, path_type, None, reason)
    rails = {name: rail for rail, name in enumerate(sorted(load, key=natural))}
    matches = (matches_by_gpu[gpu.name] for gpu in facts.gpus)
    return tuple(replace(matched, rail=rails.get(matched.nic or "")) for matched in matches)


@once_per_machine
def beyond_gpu_direct(facts: NodeFacts) -> tuple[Match, ...]:
    """Returns the GPUs whose NIC is so far that NCCL does not use GPUDirect RDMA by default.

    NCCL uses it up to PXB, and on Grace over NVLink-C2C (``ncclTopoCheckGdr`` in NCCL's src/graph/paths.cc, 2026).
    """
    if any(re.search(r"GH200|GB[23]00", gpu.model or "") for gpu in facts.gpus):
        return ()
    return tuple(matched for matched in match(facts) if matched.path_type in ("PHB", "NODE", "SYS"))


def several_node_nvlink(facts: NodeFacts) -> bool:
    """Returns whether the GPUs are of a model that NVLink can connect between nodes, as in GB200 NVL72."""
    return any(re.search(r"GB[23]00", gpu.model or "") for gpu in facts.gpus)


def different_rails(nodes: Sequence[NodeFacts]) -> tuple[str, ...]:
    """Returns nodes whose GPUs are matched to other rails than the first node's, where collectives would cross
    rails.
    """
    orders = [[matched.rail for matched in match(facts)] for facts in nodes]
    return tuple(
        f"{facts.node}: rails {order}, {nodes[0].node}: {orders[0]}"
        for facts, order in zip(nodes, orders, strict=True)
        if order != orders[0]
    )


@dataclass(frozen=True)
class _Vote:
    """The link layer and rate of the rails; the names of the NICs at that rate, of far NICs, and of those with the
    default route.
    """

    layer: str | None
    rate: float | None
    rails: frozenset[str]
    far: frozenset[str]
    routed: frozenset[str]


_NEAR = ("PIX", "PXB")


def _carries_route(facts: NodeFacts, nic: Nic, port: Port) -> bool:
    """Returns whether the default route uses the port as Ethernet; IP over InfiniBand does not make it a management
    port.
    """
    interfaces = {interface.name for interface in facts.interfaces if interface.default_route}
    return port.link_layer == "Ethernet" and bool(interfaces.intersection(nic.interfaces))


def _far_from_every_gpu(facts: NodeFacts, active: set[str]) -> set[str]:
    """Returns the NICs beyond a host bridge from every GPU if every GPU has a nearer one, even if that is down.

    Returns none if no ``active`` NIC would remain.
    """
    names = {nic.name for nic in facts.nics}
    near = {gpu.name: {name for name in names if facts.link(gpu.name, name) in _NEAR} for gpu in facts.gpus}
    if not facts.gpus or not all(near.values()):
        return set()
    near_names = set().union(*near.values())
    if near_names & active:
        return names - near_names
    return set()


def _carrying_most(ports: Sequence[Port], of: Callable[[Port], Kind | None]) -> Kind | None:
    """Returns the link layer, or the rate, whose ports have the most bandwidth in total; ties go to the faster. One
    faster port does not outweigh the rails, nor do two slow ones. If no rate is known, the number of ports counts.
    """
    kinds = {kind for port in ports if (kind := of(port)) is not None}

    def weight(kind: Kind) -> tuple[float, int, Kind]:
        rates = [port.rate_gbps or 0.0 for port in ports if of(port) == kind]
        return sum(rates), 0 if any(rates) else len(rates), kind

    return max(kinds, key=weight, default=None)


def _verdict(facts: NodeFacts, nic: Nic, port: Port, vote: _Vote) -> tuple[bool | None, str]:
    if port.active is None:
        return None, "its state is unknown"
    if not port.active:
        return False, f"its state is {port.state}, and its physical state is {port.physical_state or 'unknown'}"
    if nic.name in vote.far:
        return False, "it is far from every GPU, although each GPU has a near NIC, so it serves storage or management"
    if port.link_layer != vote.layer:
        verdict = None if port.link_layer is None else False
        return verdict, f"its link layer is {port.link_layer or 'unknown'}, but that of most ports is {vote.layer}"
    return _verdict_by_rate(facts, nic, port, vote)


def _verdict_by_rate(facts: NodeFacts, nic: Nic, port: Port, vote: _Vote) -> tuple[bool, str]:
    """Judges an active port with the link layer of the rails."""
    odd = port.rate_gbps is not None and vote.rate is not None and port.rate_gbps != vote.rate
    if odd and (gpu := _only_near_gpu(facts, nic, vote)) is not None:
        return (
            True,
            f"it is the rail of {gpu}, but runs at {port.rate_gbps:g} Gb/s and the others at {vote.rate:g} Gb/s",
        )
    if nic.name in vote.routed and (odd or _farther(facts, nic, vote.rails - {nic.name})):
        return False, f"the default route goes over {', '.join(nic.interfaces)}, so it serves management"
    if odd:
        return False, f"its rate is {port.rate_gbps:g} Gb/s, but that of most ports is {vote.rate:g} Gb/s"
    return True, "it is active"


def _only_near_gpu(facts: NodeFacts, nic: Nic, vote: _Vote) -> str | None:
    """Returns the GPU whose only near NIC is ``nic``, if the rails are near other GPUs and of the same model."""
    rails = [other for other in facts.nics if other.name in vote.rails and other.name != nic.name]
    if not rails or {other.model for other in rails} != {nic.model} or nic.name in vote.routed:
        return None
    near_rails = {name: [rail for rail in rails if facts.link(name, rail.name) in _NEAR] for name in _names(facts)}
    if not any(near_rails.values()):
        return None
    gpus = [name for name, near in near_rails.items() if not near and facts.link(name, nic.name) in _NEAR]
    if gpus:
        return gpus[0]
    return None


def _farther(facts: NodeFacts, nic: Nic, others: frozenset[str]) -> bool:
    """Returns whether every GPU has a nearer NIC among ``others``; false if a path is unknown."""
    for name in _names(facts):
        link = facts.link(name, nic.name)
        best = min((distance(path) for other in others if (path := facts.link(name, other)) is not None), default=None)
        if link is None or best is None or best >= distance(link):
            return False
    return bool(facts.gpus)


def _names(facts: NodeFacts) -> list[str]:
    return [gpu.name for gpu in facts.gpus]


def _nearest(facts: NodeFacts, gpu: Gpu, nics: Sequence[Nic]) -> tuple[int, str | None, list[Nic]]:
    """Returns the distance and path type of the nearest NICs, and those NICs."""
    path_types = {nic.name: path_type for nic in nics if (path_type := facts.link(gpu.name, nic.name)) is not None}
    if not path_types:
        return len(nics) + 100, None, []
    path_type = min(path_types.values(), key=distance)
    return distance(path_type), path_type, [nic for nic in nics if path_types.get(nic.name) == path_type]


def _same_numa(facts: NodeFacts, gpu: Gpu, nic: Nic) -> bool:
    """Returns whether both are on one NUMA node, according to the kernel or else to the GPUs next to the NIC."""
    if nic.numa_node is not None:
        return nic.numa_node in gpu.numa_nodes
    neighbors = [other for other in facts.gpus if facts.link(other.name, nic.name) in ("PIX", "PXB")]
    return any(set(other.numa_nodes) & set(gpu.numa_nodes) for other in neighbors)


def _why_none(facts: NodeFacts, nics: Sequence[Nic], path_type: str | None) -> str:
    if not nics:
        if facts.nics:
            return "no NIC has a usable port"
        return "no RDMA NIC was found"
    if path_type is None:
        return "its links to the NICs are unknown"
    return f"all {len(nics)} NICs are equally far: {path_type}"
