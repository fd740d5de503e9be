"""Groups the nodes of a job by machine: most nodes differ only in names and counters.

A decision over thousands of nodes takes each distinct machine once. Of each node only its own facts are kept: its name,
the UUIDs of its GPUs, the names of its visible devices, and how often its links went down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hpc_train.machine.network.facts import FLAPS, Gpu, Nic, NodeFacts, Port

Result = TypeVar("Result")


def once_per_machine(function: Callable[[NodeFacts], Result]) -> Callable[[NodeFacts], Result]:
    """Computes ``function`` once for all nodes of a machine, so its result must not depend on a node's own facts."""

    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def cached(facts: NodeFacts) -> Result:
        if name not in facts.results:
            facts.results[name] = function(facts)
        result: Result = facts.results[name]
        return result

    return cached


def by_machine(nodes: Iterable[NodeFacts]) -> list[list[NodeFacts]]:
    """Returns the nodes of each machine; nodes that were not added to the same ``Machines`` count as different."""
    machines: dict[int, list[NodeFacts]] = {}
    for facts in nodes:
        machines.setdefault(id(facts.results), []).append(facts)
    return list(machines.values())


@dataclass
class Machines:
    """The distinct machines among the nodes that were added."""

    _first: dict[NodeFacts, NodeFacts] = field(default_factory=dict)  # hardware -> first node

    def add(self, facts: NodeFacts) -> NodeFacts:
        """Returns equal facts that share memory and results with the first node of the same machine."""
        first = self._first.setdefault(_hardware(facts), facts)
        if first is facts:
            return facts
        return with_local_facts(first, facts.node, local_facts(facts, first))


def _hardware(facts: NodeFacts) -> NodeFacts:
    """Returns the facts without the node's own ones; equal for nodes of the same machine."""
    names = {gpu.uuid: f"GPU-{gpu.index:04d}" for gpu in facts.gpus}
    names |= {uuid: f"MIG-{gpu.index:04d}-{i:04d}" for gpu in facts.gpus for i, uuid in enumerate(gpu.slices)}
    gpus = (
        replace(gpu, uuid=gpu.uuid and names[gpu.uuid], slices=tuple(names[uuid] for uuid in gpu.slices))
        for gpu in facts.gpus
    )
    return replace(
        facts,
        node=None,
        gpus=tuple(gpus),
        nics=tuple(_with_ports(nic, _without_few_flaps) for nic in facts.nics),
        visible=tuple(names.get(name, name) for name in facts.visible),
    )


def _without_few_flaps(port: Port) -> Port:
    """Removes a number of link-down events that no decision depends on."""
    if 0 < (port.link_downed or 0) < FLAPS:
        return replace(port, link_downed=0)
    return port


def _with_ports(nic: Nic, change: Callable[[Port], Port]) -> Nic:
    ports = tuple(map(change, nic.ports))
    if ports == nic.ports:
        return nic
    return replace(nic, ports=ports)


def local_facts(facts: NodeFacts, machine: NodeFacts) -> dict[str, Any]:
    """Returns as JSON what a node does not share with ``machine``, another node of the same machine: the ``uuids`` of
    its GPUs, ``link_downed`` by port, and the names of ``visible`` devices and ``slices`` if they differ.
    """
    downs = {f"{nic.name}:{port.number}": port.link_downed for nic in facts.nics for port in nic.ports}
    local: dict[str, Any] = {
        "uuids": [gpu.uuid for gpu in facts.gpus],
        "link_downed": {name: count for name, count in downs.items() if count},
    }
    slices, others = ([list(gpu.slices) for gpu in node.gpus] for node in (facts, machine))
    if slices != others:
        local |= {"slices": slices}
    return local | ({} if facts.visible == machine.visible else {"visible": list(facts.visible)})


def with_local_facts(machine: NodeFacts, name: str | None, local: dict[str, Any]) -> NodeFacts:
    """Returns the facts of the node ``name`` of the same ``machine``, with which it shares results."""

    def gpu(base: Gpu, uuid: str | None, slices: Sequence[str]) -> Gpu:
        return replace(base, uuid=uuid, slices=tuple(slices))

    def nic(base: Nic) -> Nic:
        return _with_ports(
            base, lambda port: _with_downs(port, local["link_downed"].get(f"{base.name}:{port.number}", 0))
        )

    slices = local.get("slices", [gpu_facts.slices for gpu_facts in machine.gpus])
    facts = replace(
        machine,
        node=name,
        gpus=tuple(map(gpu, machine.gpus, local["uuids"], slices)),
        nics=tuple(map(nic, machine.nics)),
        visible=tuple(local.get("visible", machine.visible)),
    )
    facts.__dict__["results"] = machine.results
    return facts


def _with_downs(port: Port, count: int) -> Port:
    if port.link_downed in (None, count):
        return port
    return replace(port, link_downed=count)
