"""Compares the ports of all nodes of a job: which ports the job leaves out, and which nodes have a defective port.

A job exports one filter for all nodes, as an exclusion: ``NCCL_IB_HCA=^=mlx5_4,mlx5_5``. A list of what to use would
have to be equal on all nodes, so one defective port on one of 128 nodes would change or remove it. NCCL skips ports
that are down by itself. A port that most nodes use for training and one node cannot use is a defect of that node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.network.machines import once_per_machine
from hpc_train.machine.network.rails import PortVerdict, judge_ports

SHOWN = 8  # defective nodes that are named


@dataclass(frozen=True)
class PortFilter:
    """The ports that a job leaves out.

    Attributes:
        excluded: names for NCCL_IB_HCA, with the port number if the NIC has several ports.
        reason: why they are left out.
        disputed: a line per port that serves training on some nodes only, which is therefore not left out.
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
    """Describes a port of one node. ``kind`` is equal on nodes of the same hardware."""

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
    return PortFilter(names, _reasons(zip(names, excluded, strict=True)), tuple(disputed))


@dataclass(frozen=True)
class SickNode:
    """A node with defective ports, and a line for each of them."""

    name: str
    defects: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"{self.name} is unfit: {'; '.join(self.defects)}"

    @property
    def fix(self) -> str:
        return f"check cable and switch port, and set cluster.exclude={self.name} until then"


def sick_nodes(nodes: Sequence[NodeFacts]) -> tuple[SickNode, ...]:
    """Returns the nodes that lack a port which most nodes of their kind use, or have it slow."""
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
    """Yields (node, defect) for the port ``name``, which the nodes ``used`` use."""
    rate = _usual(seen.verdict.port.rate_gbps for seen in used)
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
    """Returns what the nodes have under each port's name, in the order of the first node that has it."""
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


def _usual(rates: Iterable[float | None]) -> float | None:
    """Returns the rate of most nodes, or the highest of equally common ones."""
    counts = Counter(rate for rate in rates if rate is not None)
    return max(counts, key=lambda rate: (counts[rate], rate), default=None)


def _reasons(named: Iterable[tuple[str, PortVerdict]]) -> str:
    names: dict[str, list[str]] = {}
    for name, verdict in named:
        names.setdefault(verdict.reason, []).append(name)
    return "; ".join(f"{', '.join(group)}: {reason}" for reason, group in names.items())
