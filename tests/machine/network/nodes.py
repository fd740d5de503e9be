"""Nodes as values, to be changed port by port: shorter than trees like ``/sys`` where only the decision is tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpc_train.machine.network.facts import Gpu, GpuLink, Interface, Nic, NodeFacts, Port


@dataclass(frozen=True)
class Card:
    """One port of a NIC. ``near``: the GPUs below its switch; ``far``: the path type to the others."""

    rate: float = 400
    layer: str = "InfiniBand"
    near: tuple[int, ...] = ()
    far: str = "SYS"
    model: str = "MT4129"
    state: str = "ACTIVE"
    physical: str = "LINKUP"
    interface: str | None = None
    port: int = 1
    downs: int = 0
    gid: int | None = None
    kind: str = "mellanox"


@dataclass(frozen=True)
class Site:
    """A kind of node: ``cards`` by name, interfaces as ``name: Gb/s``, and the interface with the default route."""

    gpus: int = 8
    model: str = "NVIDIA H100 80GB HBM3"
    cards: Mapping[str, Card] = field(default_factory=dict)
    interfaces: Mapping[str, float] = field(default_factory=lambda: {"eno1": 10})
    default: str = "eno1"
    cloud: str | None = None

    def node(self, name: str = "n1", lost: Sequence[str] = (), **changed: Card) -> NodeFacts:
        """Returns a node without the NICs ``lost`` and with other cards under the names in ``changed``."""
        cards = {name: card for name, card in (dict(self.cards) | changed).items() if name.split(":")[0] not in lost}
        names = tuple(dict.fromkeys(name.split(":")[0] for name in cards))
        speeds = dict(self.interfaces) | {card.interface: card.rate for card in cards.values() if card.interface}
        return NodeFacts(
            node=name,
            gpus=tuple(Gpu(index, model=self.model) for index in range(self.gpus)),
            nics=tuple(_nic(nic, [card for own, card in cards.items() if own.split(":")[0] == nic]) for nic in names),
            interfaces=tuple(Interface(face, True, speed, face == self.default) for face, speed in speeds.items()),
            links=tuple(
                GpuLink(f"GPU{gpu}", nic, "PIX" if gpu in cards[nic].near else cards[nic].far)
                for nic in names
                for gpu in range(self.gpus)
                if nic in cards and cards[nic].far
            ),
            site=self.cloud,
        )

    def nodes(self, count: int, *sick: NodeFacts) -> list[NodeFacts]:
        """Returns ``count`` nodes, the last of which are ``sick``."""
        healthy = self.node()
        return [replace(healthy, node=f"n{number}") for number in range(1, count + 1 - len(sick))] + list(sick)


def _nic(name: str, cards: Sequence[Card]) -> Nic:
    first = cards[0]
    ports = tuple(
        Port(card.port, card.state, card.physical, card.layer, card.rate, card.downs, card.gid) for card in cards
    )
    return Nic(name, first.kind, first.model, interfaces=tuple(filter(None, (c.interface for c in cards))), ports=ports)


def rails(count: int, **same: object) -> dict[str, Card]:
    """Returns ``mlx5_0`` … with a GPU each."""
    return {f"mlx5_{gpu}": Card(near=(gpu,), **same) for gpu in range(count)}  # type: ignore[arg-type]


H200 = Site(
    model="NVIDIA H200",
    cards={f"mlx5_{i}": Card(near=(gpu,)) for gpu, i in enumerate((0, 3, 4, 5, 6, 9, 10, 11))}
    | {f"mlx5_{i}": Card(rate=200, model="MT4123") for i in (1, 2)},
)
DOWN = {"state": "DOWN", "physical": "POLLING"}
