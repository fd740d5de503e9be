"""Reads the RDMA devices of a node from ``/sys/class/infiniband``, which needs no privileges and no tool, or from the
recorded output of ``ibstat``, ``ibstatus``, ``ibv_devinfo`` or ``ibdev2netdev``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from hpc_train.machine.network.facts import Nic, Port
from hpc_train.machine.sysfs import natural, read_number, read_text

# the highest rate in Gb/s of each NIC type that Mellanox drivers report; a port below it has negotiated a low rate
NIC_RATE_GBPS = {
    "MT4099": 56,  # ConnectX-3
    "MT4103": 56,  # ConnectX-3 Pro
    "MT4115": 100,  # ConnectX-4
    "MT4119": 100,  # ConnectX-5
    "MT4121": 100,  # ConnectX-5 Ex
    "MT4123": 200,  # ConnectX-6
    "MT4125": 100,  # ConnectX-6 Dx
    "MT4129": 400,  # ConnectX-7
    "MT4131": 800,  # ConnectX-8
}
_KINDS = (
    (r"mlx[45]_\w+|(roce|ib)[pPosx]\w+", "mellanox"),  # also named by PCI location (udev's rdma-persistent-naming)
    (r"efa_\d+|rdma[pPosx]\w+", "efa"),
    (r"cxi\d+", "slingshot"),
    (r"hfi\w+|opa[pPosx]\w+", "omnipath"),
    (r"(bnxt_re|irdma|erdma|qedr|rxe|siw|ionic|hns|cxgb4|mana|usnic|iw[pPosx])_?\w*", "other"),
)
_AMAZON = "0x1d0f"
_LINK_LOCAL = "fe80:"
_UNSET = "0000:0000:0000:0000:0000:0000:0000:0000"


def kind_of(name: str) -> str | None:
    """Returns the family of an RDMA device from its name; None if unknown."""
    return next((kind for pattern, kind in _KINDS if re.fullmatch(pattern, name)), None)


def read_rdma(sysfs: Path) -> tuple[Nic, ...]:
    """Returns the RDMA devices under ``sysfs`` in natural order; () if there are none. ``sysfs`` is a directory with
    ``class/infiniband``, usually ``/sys``, or a copy of ``class/infiniband`` alone."""
    root = next((path for path in (sysfs / "class/infiniband", sysfs / "infiniband") if path.is_dir()), sysfs)
    nics = {ports.parent.name: _nic(ports.parent) for ports in root.glob("*/ports") if ports.is_dir()}
    for device in (sysfs / "class/cxi").glob("*"):
        if device.is_dir():
            nics.setdefault(device.name, _slingshot(sysfs, device))
    return tuple(nics[name] for name in sorted(nics, key=natural))


def parse_state(text: str) -> str | None:
    """Normalizes a state: ``4: ACTIVE``, ``Active`` and ``PORT_ACTIVE (4)`` become ``ACTIVE``, ``Initializing`` becomes
    ``INIT``. Returns None for an empty text.
    """
    word = re.sub(r"^\d+:|\(\d+\)$|^PORT_", "", text.strip()).strip().upper()
    return {"INITIALIZING": "INIT", "LINK_UP": "LINKUP"}.get(word, word) or None


def parse_rate(text: str) -> float | None:
    """Returns the rate in Gb/s of a text such as ``400 Gb/sec (4X NDR)``, or ``200`` or ``40 (FDR10)`` as ibstat prints
    it."""
    match = re.match(r"(\d+\.?\d*|\.\d+)(\s*Gb/sec|(\s*\(\w+\))?$)", text)
    if match:
        return float(match[1])
    return None


def _nic(device: Path) -> Nic:
    ports = sorted((path for path in device.glob("ports/*") if path.is_dir()), key=lambda path: natural(path.name))
    return Nic(
        name=device.name,
        kind="efa" if read_text(device / "device/vendor") == _AMAZON else kind_of(device.name),
        model=read_text(device / "hca_type") or None,
        pci=_pci_address(device / "device"),
        numa_node=read_number(device / "device/numa_node"),
        interfaces=_interfaces(device),
        ports=tuple(map(_port, ports)),
    )


def _interfaces(device: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in device.glob("device/net/*") if path.is_dir()))


def _slingshot(sysfs: Path, device: Path) -> Nic:
    """Returns a Cassini NIC. The kernel does not list it as an RDMA device; its port is the network interface
    ``hsn*``."""
    names = _interfaces(device)
    states = {read_text(sysfs / "class/net" / name / "operstate") for name in names}
    speeds = [speed for name in names if (speed := read_number(sysfs / "class/net" / name / "speed"))]
    state = None
    if "up" in states:
        state = "ACTIVE"
    elif "down" in states:
        state = "DOWN"
    port = Port(1, state, link_layer="Ethernet", rate_gbps=max(speeds) / 1000 if speeds else None)
    numa = read_number(device / "device/numa_node")
    return Nic(device.name, "slingshot", None, _pci_address(device / "device"), numa, names, (port,))


def _port(path: Path) -> Port:
    layer = read_text(path / "link_layer")
    return Port(
        number=int(path.name) if path.name.isdigit() else 0,
        state=parse_state(read_text(path / "state")),
        physical_state=parse_state(read_text(path / "phys_state")),
        link_layer=layer or None,
        rate_gbps=parse_rate(read_text(path / "rate")),
        link_downed=read_number(path / "counters/link_downed"),
        roce_v2_gid=_roce_v2_gid(path) if layer == "Ethernet" else None,
    )


def _roce_v2_gid(port: Path) -> int | None:
    """Returns the index of the first RoCE v2 entry with a routable address, preferring IPv4 addresses."""
    entries = []
    for entry in port.glob("gid_attrs/types/*"):
        gid = read_text(port / "gids" / entry.name) or _UNSET
        if entry.name.isdigit() and gid != _UNSET and read_text(entry) == "RoCE v2":
            is_ipv4 = gid.startswith("0000:0000:0000:0000:0000:ffff")
            entries.append((gid.startswith(_LINK_LOCAL), not is_ipv4, int(entry.name)))
    if entries:
        return min(entries)[-1]
    return None


def _pci_address(link: Path) -> str | None:
    """Returns the address from the name of the link's target, even if the target was not copied, or else from the
    device's uevent.
    """
    slot = re.search(r"^PCI_SLOT_NAME=(\S+)$", read_text(link / "uevent"), re.MULTILINE)
    names = (link.resolve().name, slot[1] if slot else "")
    return next((name for name in names if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name)), None)


# the lines with which each tool introduces a device and a port
_DEVICE = re.compile(
    r"^(?:CA:? '(?P<ca>[^']+)'|hca_id:\s*(?P<hca>\S+)|Infiniband device '(?P<ib>[^']+)' port (?P<port>\d+))"
)
_PORT = re.compile(r"^\s*(?:Port (?P<ca>\d+):|port:\s*(?P<hca>\d+))\s*$")
_NETDEV = re.compile(r"^(?P<name>\S+)\s+port\s+(?P<port>\d+)\s+==>\s+(?P<interface>\S+)")
_VALUE = re.compile(r"^\s*([A-Za-z_ ]+?):\s*(.+?)\s*$")
_PORT_FIELDS = dict.fromkeys(("physical state", "phys state", "phys_state"), "physical_state") | {"state": "state"}


def parse_rdma_text(text: str) -> tuple[Nic, ...]:
    """Returns the devices in the output of one of these tools, in natural order; () if there are none.

    ``(Down)`` in ibdev2netdev's output is the state of the network interface, not of the port.
    """
    nics: dict[str, Nic] = {}
    ports: dict[str, dict[int, Port]] = {}
    name: str | None = None
    number: int | None = None
    for line in text.splitlines():
        if match := _NETDEV.match(line):
            nic = nics.setdefault(match["name"], Nic(match["name"], kind_of(match["name"])))
            nics[nic.name] = replace(nic, interfaces=(*nic.interfaces, match["interface"]))
        elif match := _DEVICE.match(line):
            name = match["ca"] or match["hca"] or match["ib"]
            nics.setdefault(name, Nic(name, kind_of(name)))
            number = int(match["port"]) if match["port"] else None
        elif match := _PORT.match(line):
            number = int(match["ca"] or match["hca"])
        elif name is not None and (match := _VALUE.match(line)):
            field = match[1].strip().lower()
            value = match[2]
            if number is not None:
                port = ports.setdefault(name, {}).setdefault(number, Port(number))
                if field in _PORT_FIELDS:
                    port = replace(port, **{_PORT_FIELDS[field]: parse_state(value)})  # type: ignore[arg-type]
                elif field == "rate":
                    port = replace(port, rate_gbps=parse_rate(value))
                elif field in ("link layer", "link_layer"):
                    port = replace(port, link_layer=value)
                ports[name][number] = port
            elif field == "ca type":
                nics[name] = replace(nics[name], model=value)
            elif field == "vendor_part_id" and value.isdigit() and nics[name].kind == "mellanox":
                nics[name] = replace(nics[name], model=f"MT{value}")  # the driver reports 4129 as MT4129
        if name is not None and number is not None:
            ports.setdefault(name, {}).setdefault(number, Port(number))
    numbered = {name: tuple(port for _, port in sorted(of_nic.items())) for name, of_nic in ports.items()}
    return tuple(replace(nics[name], ports=numbered.get(name, ())) for name in sorted(nics, key=natural))
