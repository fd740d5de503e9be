"""Reads what ``ibstat``, ``ibstatus``, ``ibv_devinfo`` and ``ibdev2netdev`` print.

For a recording from another site, or where ``/sys`` is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from hpc_train.cluster.fabric.facts import Nic, Port
from hpc_train.cluster.fabric.rdma import kind_of, natural, parse_rate, parse_state

# how each tool begins a device and a port
_DEVICE = re.compile(
    r"^(?:CA:? '(?P<ca>[^']+)'|hca_id:\s*(?P<hca>\S+)|Infiniband device '(?P<ib>[^']+)' port (?P<port>\d+))"
)
_PORT = re.compile(r"^\s*(?:Port (?P<ca>\d+):|port:\s*(?P<hca>\d+))\s*$")
_NETDEV = re.compile(r"^(?P<name>\S+)\s+port\s+(?P<port>\d+)\s+==>\s+(?P<interface>\S+)")
_VALUE = re.compile(r"^\s*([A-Za-z_ ]+?):\s*(.+?)\s*$")
_PORT_FIELDS = dict.fromkeys(("physical state", "phys state", "phys_state"), "physical_state") | {"state": "state"}


def parse_rdma_text(text: str) -> tuple[Nic, ...]:
    """The devices that the text of one of these tools names, in natural order; () where it names none.

    ``(Down)`` of ibdev2netdev is the network interface's state and says nothing about the port.
    """
    nics: dict[str, Nic] = {}
    for name, port, field, value in _values(text):
        nic = nics.setdefault(name, Nic(name, kind_of(name)))
        if port is None:
            nics[name] = _with_device_field(nic, field, value)
        else:
            nics[name] = _with_port_field(nic, port, field, value)
    return tuple(sorted(nics.values(), key=lambda nic: natural(nic.name)))


def _values(text: str) -> Iterator[tuple[str, int | None, str, str]]:
    """(device, port, field, value) in the order of the text; an empty field where a device or a port begins."""
    name: str | None = None
    port: int | None = None
    for line in text.splitlines():
        if found := _NETDEV.match(line):
            yield found["name"], None, "interface", found["interface"]
        elif found := _DEVICE.match(line):
            name = found["ca"] or found["hca"] or found["ib"]
            port = int(found["port"]) if found["port"] else None
            yield name, port, "", ""
        elif name is None:
            continue
        elif found := _PORT.match(line):
            port = int(found["ca"] or found["hca"])
            yield name, port, "", ""
        elif found := _VALUE.match(line):
            yield name, port, found[1].strip().lower(), found[2]


def _with_device_field(nic: Nic, field: str, value: str) -> Nic:
    if field == "ca type":
        return replace(nic, card=value)
    if field == "vendor_part_id":  # 4129 is the card that the driver calls MT4129
        return replace(nic, card=f"MT{value}" if value.isdigit() and nic.kind == "mellanox" else nic.card)
    if field == "interface":
        return replace(nic, interfaces=(*nic.interfaces, value))
    return nic


def _with_port_field(nic: Nic, number: int, field: str, value: str) -> Nic:
    port = next((port for port in nic.ports if port.number == number), Port(number))
    if field in _PORT_FIELDS:
        port = replace(port, **{_PORT_FIELDS[field]: parse_state(value)})  # type: ignore[arg-type]
    elif field == "rate":
        port = replace(port, rate_gbps=parse_rate(value))
    elif field in ("link layer", "link_layer"):
        port = replace(port, link_layer=value)
    others = tuple(other for other in nic.ports if other.number != number)
    return replace(nic, ports=tuple(sorted((*others, port), key=lambda port: port.number)))
