"""Selects the ports for training, and the nearest NIC for each GPU, on the same rail on every node.

A job exports one filter for all nodes, as an exclusion: ``NCCL_IB_HCA=^=mlx5_4,mlx5_5``. A list of ports to use would
have to be equal on all nodes, so one defective port on one of 128 nodes would change or remove it. NCCL itself skips
ports that are down. If most nodes use a port for training and one node cannot use it, that node is defective.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hpc_train.machine.network.facts import FLAPS, Gpu, Nic, NodeFacts, Port, distance, once_per_machine
from hpc_train.machine.network.rdma import NIC_RATE_GBPS
from hpc_train.machine.sysfs import natural

Kind = TypeVar("Kind", str, float)


@dataclass(frozen=True)
class PortVerdict:
    """Holds whether a port is used for training; ``usable`` is None if the state of the port is unknown."""

    nic: str
    port: Port
    usable: bool | None
    reason: str

    @property
    def name(self) -> str:
        return f"{self.nic}:{self.port.number}"

    @property
    def excluded(self) -> bool:
        """Returns whether the port could carry data but must not be used."""
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

    A port is excluded if it is not up, or if it is far from every GPU while each GPU has a near NIC. A remaining port
    is excluded if its link layer or rate differs from the group of ports with the most total bandwidth. Such ports
    serve storage or management, and one of them among the rails would slow down all of them. Two kinds of ports are not
    excluded:

    - the only near NIC of a GPU, if its link negotiated a low rate. The node is defective, but NCCL would otherwise
      connect this GPU over the NIC of another GPU.
    - a port that carries the default route, if it is like the rails. On a flat network the route uses one of the rails,
      and on diskless nodes it uses IP over InfiniBand.
    """
    active = [(nic, port) for nic in facts.nics for port in nic.ports if port.active]
    # IP over InfiniBand does not make a port a management port
    default = {interface.name for interface in facts.interfaces if interface.default_route}
    routed = {
        nic.name for nic, port in active if port.link_layer == "Ethernet" and default.intersection(nic.interfaces)
    }
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
    """Returns the NICs with a usable port in natural order. If no port is known to be usable or unusable, returns the
    NICs with unknown ports."""
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
    """Matches each GPU to a NIC, the nearest pairs first. Among equally near NICs, it takes the one with the fewest
    GPUs.

    If several NICs are equally far (across sockets, or on a virtual PCI bus), they cannot be distinguished, and the GPU
    is not matched.
    """
    nics = usable_nics(facts)
    load: Counter[str] = Counter()
    matches_by_gpu: dict[str, Match] = {}
    near = {gpu.name: _nearest(facts, gpu, nics) for gpu in facts.gpus}
    for gpu in sorted(facts.gpus, key=lambda gpu: (near[gpu.name][0], gpu.index)):
        _, path_type, candidates = near[gpu.name]
        if path_type is None or (path_type == "SYS" and len(candidates) > 1):
            reason = f"all {len(nics)} NICs are equally far: {path_type}"
            if not nics:
                reason = "no NIC has a usable port" if facts.nics else "no RDMA NIC was found"
            elif path_type is None:
                reason = "its links to the NICs are unknown"
            matches_by_gpu[gpu.name] = Match(gpu.name, None, path_type, None, reason)
            continue
        taken = min(candidates, key=lambda nic: (load[nic.name], not _same_numa(facts, gpu, nic), natural(nic.name)))
        load[taken.name] += 1
        reason = f"it is the nearest of {len(nics)}"
        if len(candidates) > 1:
            reason += f", one of {len(candidates)} equally near"
        matches_by_gpu[gpu.name] = Match(gpu.name, taken.name, path_type, None, reason)
    rails = {name: rail for rail, name in enumerate(sorted(load, key=natural))}
    matches = (matches_by_gpu[gpu.name] for gpu in facts.gpus)
    return tuple(replace(matched, rail=rails.get(matched.nic or "")) for matched in matches)


@once_per_machine
def beyond_gpu_direct(facts: NodeFacts) -> tuple[Match, ...]:
    """Returns the GPUs whose NIC is so far away that NCCL does not use GPUDirect RDMA by default.

    NCCL uses GPUDirect RDMA up to PXB, and on Grace over NVLink-C2C (``ncclTopoCheckGdr`` in NCCL's src/graph/paths.cc,
    2026).
    """
    if any(re.search(r"GH200|GB[23]00", gpu.model or "") for gpu in facts.gpus):
        return ()
    return tuple(matched for matched in match(facts) if matched.path_type in ("PHB", "NODE", "SYS"))


def several_node_nvlink(facts: NodeFacts) -> bool:
    """Returns whether NVLink can connect this model of GPU between nodes, as in GB200 NVL72."""
    return any(re.search(r"GB[23]00", gpu.model or "") for gpu in facts.gpus)


def different_rails(nodes: Sequence[NodeFacts]) -> tuple[str, ...]:
    """Returns a line for each node whose GPUs are matched to other rails than those of the first node, so that
    collectives would cross rails.
    """
    orders = [[matched.rail for matched in match(facts)] for facts in nodes]
    return tuple(
        f"{facts.node}: rails {order}, {nodes[0].node}: {orders[0]}"
        for facts, order in zip(nodes, orders, strict=True)
        if order != orders[0]
    )


@dataclass(frozen=True)
class _Vote:
    """The link layer and the rate of the rails, and the names of the NICs at that rate, of the far NICs, and of the
    NICs with the default route.
    """

    layer: str | None
    rate: float | None
    rails: frozenset[str]
    far: frozenset[str]
    routed: frozenset[str]


_NEAR = ("PIX", "PXB")


def _far_from_every_gpu(facts: NodeFacts, active: set[str]) -> set[str]:
    """Returns the NICs that a host bridge separates from every GPU, if each GPU has a nearer NIC, even if that is down.

    Returns an empty set if no ``active`` NIC would remain.
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
    """Returns the link layer, or the rate, whose ports have the most total bandwidth; ties go to the higher rate. Thus
    neither one faster port nor two slow ports outweigh the rails. If no rate is known, the number of ports decides.
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
        reason = f"its link layer is {port.link_layer or 'unknown'}, but that of most ports is {vote.layer}"
        return None if port.link_layer is None else False, reason
    odd = port.rate_gbps is not None and vote.rate is not None and port.rate_gbps != vote.rate
    if odd and (gpu := _only_near_gpu(facts, nic, vote)) is not None:
        rates = f"{port.rate_gbps:g} Gb/s and the others at {vote.rate:g} Gb/s"
        return True, f"it is the rail of {gpu}, but runs at {rates}"
    if nic.name in vote.routed:
        rails = vote.rails - {nic.name}

        def has_nearer_rail(gpu: Gpu) -> bool:
            link = facts.link(gpu.name, nic.name)
            near = [distance(path) for rail in rails if (path := facts.link(gpu.name, rail)) is not None]
            return link is not None and min(near, default=math.inf) < distance(link)

        if odd or (facts.gpus and all(map(has_nearer_rail, facts.gpus))):
            return False, f"the default route goes over {', '.join(nic.interfaces)}, so it serves management"
    if odd:
        return False, f"its rate is {port.rate_gbps:g} Gb/s, but that of most ports is {vote.rate:g} Gb/s"
    return True, "it is active"


def _only_near_gpu(facts: NodeFacts, nic: Nic, vote: _Vote) -> str | None:
    """Returns the GPU whose only near NIC is ``nic``, if the rails are near other GPUs and of the same model."""
    rails = [other for other in facts.nics if other.name in vote.rails and other.name != nic.name]
    if not rails or {other.model for other in rails} != {nic.model} or nic.name in vote.routed:
        return None
    near_rails = {gpu.name: [rail for rail in rails if facts.link(gpu.name, rail.name) in _NEAR] for gpu in facts.gpus}
    if not any(near_rails.values()):
        return None
    gpus = [name for name, near in near_rails.items() if not near and facts.link(name, nic.name) in _NEAR]
    return gpus[0] if gpus else None


def _nearest(facts: NodeFacts, gpu: Gpu, nics: Sequence[Nic]) -> tuple[int, str | None, list[Nic]]:
    """Returns the distance and path type of the nearest NICs, and those NICs."""
    path_types = {nic.name: path_type for nic in nics if (path_type := facts.link(gpu.name, nic.name)) is not None}
    if not path_types:
        return len(nics) + 100, None, []
    path_type = min(path_types.values(), key=distance)
    return distance(path_type), path_type, [nic for nic in nics if path_types.get(nic.name) == path_type]


def _same_numa(facts: NodeFacts, gpu: Gpu, nic: Nic) -> bool:
    """Returns whether both are on the same NUMA node, according to the kernel, or else according to the GPUs near the
    NIC."""
    if nic.numa_node is not None:
        return nic.numa_node in gpu.numa_nodes
    neighbors = [other for other in facts.gpus if facts.link(other.name, nic.name) in ("PIX", "PXB")]
    return any(set(other.numa_nodes) & set(gpu.numa_nodes) for other in neighbors)


SHOWN = 8  # the most defective nodes that are named


@dataclass(frozen=True)
class PortFilter:
    """The ports that a job leaves out.

    Attributes:
        excluded: names for NCCL_IB_HCA, with the port number if the NIC has several ports.
        reason: why they are left out.
        disputed: a line for each port that serves training only on some nodes, which is therefore not left out.
    """

    excluded: tuple[str, ...]
    reason: str
    disputed: tuple[str, ...]

    @property
    def value(self) -> str:
        """Returns the value of NCCL_IB_HCA. Names are exact, because mlx5_1 alone would also match mlx5_10."""
        return "^=" + ",".join(self.excluded)


@dataclass(frozen=True)
class _Seen:
    """Describes a port of a node. ``kind`` is equal on nodes with the same hardware."""

    node: str
    kind: tuple[str, ...]
    verdict: PortVerdict


def port_filter(nodes: Sequence[NodeFacts]) -> PortFilter:
    """Returns the ports that are left out on all nodes of the job."""
    excluded: list[PortVerdict] = []
    disputed = []
    for ports in _by_port(nodes).values():
        out = [seen for seen in ports if seen.verdict.excluded]
        used = [seen for seen in ports if seen.verdict.usable]
        if not out:
            continue
        same = len({seen.kind for seen in (*out, *used)}) == 1
        if not used or (same and len(out) > len(used)):
            excluded.append(out[0].verdict)
        elif not same or len(out) == len(used):
            where = f"{out[0].node} leaves it out ({out[0].verdict.reason})"
            disputed.append(f"whether {out[0].verdict.name} serves training: {used[0].node} uses it, and {where}")
    several = {verdict.nic for facts in nodes for verdict in judge_ports(facts) if verdict.port.number > 1}
    names = tuple(verdict.name if verdict.nic in several else verdict.nic for verdict in excluded)
    reasons: dict[str, list[str]] = {}
    for name, verdict in zip(names, excluded, strict=True):
        reasons.setdefault(verdict.reason, []).append(name)
    text = "; ".join(f"{', '.join(group)}: {reason}" for reason, group in reasons.items())
    return PortFilter(names, text, tuple(disputed))


@dataclass(frozen=True)
class SickNode:
    """A node with defective ports, and a line for each port."""

    name: str
    defects: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{self.name} is unfit: {'; '.join(self.defects)}"

    @property
    def fix(self) -> str:
        return f"check cable and switch port, and set cluster.exclude={self.name} until then"


def sick_nodes(nodes: Sequence[NodeFacts]) -> tuple[SickNode, ...]:
    """Returns the nodes on which a port that most nodes of their kind use is missing, down, slow or left out."""
    defects_by_node: dict[str, list[str]] = {}
    for kind in dict.fromkeys(_kind(facts) for facts in nodes):
        alike = [facts for facts in nodes if _kind(facts) == kind]
        for name, ports in _by_port(alike).items():
            used = [seen for seen in ports if seen.verdict.usable]
            if len(alike) > 1 and len(used) * 2 >= len(alike):
                for node, defect in _defects(alike, name, ports, used):
                    defects_by_node.setdefault(node, []).append(defect)
    return tuple(SickNode(node, tuple(defects)) for node, defects in defects_by_node.items())


def sick_lines(nodes: Sequence[NodeFacts]) -> tuple[str, ...]:
    """Returns a line with the fix for each of the first ``SHOWN`` sick nodes, and the number of the others."""
    sick = sick_nodes(nodes)
    rest = [f"{len(sick) - SHOWN} more nodes have such ports"] if len(sick) > SHOWN else []
    return (*(f"{sick_node.text}: {sick_node.fix}" for sick_node in sick[:SHOWN]), *rest)


def _defects(
    nodes: Sequence[NodeFacts], name: str, ports: Sequence[_Seen], used: Sequence[_Seen]
) -> Iterator[tuple[str, str]]:
    """Yields (node, defect) for the port ``name``, which the nodes in ``used`` use."""
    rates = Counter(seen.verdict.port.rate_gbps for seen in used if seen.verdict.port.rate_gbps is not None)
    rate = max(rates, key=lambda rate: (rates[rate], rate), default=None)  # the most common rate
    verdicts = {seen.node: seen.verdict for seen in ports}
    others = f"{len(used)} of {len(nodes)} nodes use"
    for facts in nodes:
        node = facts.node or "?"
        verdict = verdicts.get(node)
        if verdict is None:
            yield node, f"it has no {name}, which {others}"
        elif verdict.port.active is False:
            state = " and ".join(filter(None, (verdict.port.state, verdict.port.physical_state)))
            yield node, f"{name} is {state}, which {others}"
        elif rate is not None and (verdict.port.rate_gbps or rate) < rate:
            yield node, f"{name} runs at {verdict.port.rate_gbps:g} Gb/s, on the other nodes at {rate:g}"
        elif verdict.excluded:
            yield node, f"{name} is left out, because {verdict.reason}; {others} it"


def _by_port(nodes: Sequence[NodeFacts]) -> dict[str, list[_Seen]]:
    """Returns the ports of the nodes by name, in the order of the first node that has the name."""
    ports: dict[str, list[_Seen]] = {}
    for facts in nodes:
        kind = _kind(facts)
        for verdict in judge_ports(facts):
            ports.setdefault(verdict.name, []).append(_Seen(facts.node or "?", kind, verdict))
    return ports


@once_per_machine
def _kind(facts: NodeFacts) -> tuple[str, ...]:
    """Returns the models of the GPUs, which defects of a port do not change."""
    return tuple(sorted({gpu.model or "" for gpu in facts.gpus}))
