"""Reads the RDMA devices of a node from ``/sys/class/infiniband``, which needs no privileges and no tool.

If ``/sys`` is hidden, and for recordings, it also parses the output of ``ibstat``, ``ibstatus``, ``ibv_devinfo`` and
``ibdev2netdev``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hpc_train.machine.network.facts import Nic, Port
from hpc_train.machine.sysfs import natural

# highest rate in Gb/s per NIC type as reported by Mellanox drivers; a port below it negotiated a low rate
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
_RATE = re.compile(r"([\d.]+)\s*Gb/sec")
_LINK_LOCAL = "fe80:"
_UNSET = "0000:0000:0000:0000:0000:0000:0000:0000"


def kind_of(name: str) -> str | None:
    """Returns the family of an RDMA device from its name; None if unknown."""
    return next((kind for pattern, kind in _KINDS if re.fullmatch(pattern, name)), None)


def read_rdma(sysfs: Path) -> tuple[Nic, ...]:
    """Returns the RDMA devices under ``sysfs`` in natural order; () without any.

    Args:
        sysfs: a directory with ``class/infiniband``, usually ``/sys``, or a copy of that part alone.
    """
    root = next((path for path in (sysfs / "class/infiniband", sysfs / "infiniband") if path.is_dir()), sysfs)
    nics = {device.name: _nic(device) for device in _directories(root) if (device / "ports").is_dir()}
    for device in _directories(sysfs / "class/cxi"):
        nics.setdefault(device.name, _slingshot(sysfs, device))
    return tuple(nics[name] for name in sorted(nics, key=natural))


def read_text(path: Path) -> str | None:
    """Returns the content of a small file; None if it is unreadable or empty."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def parse_state(text: str | None) -> str | None:
    """Normalizes a state: ``4: ACTIVE``, ``Active``, ``PORT_ACTIVE (4)`` are all ``ACTIVE``; ``Initializing`` is
    ``INIT``.
    """
    if text is None:
        return None
    word = re.sub(r"^\d+:|\(\d+\)$|^PORT_", "", text.strip()).strip().upper()
    return {"INITIALIZING": "INIT", "LINK_UP": "LINKUP"}.get(word, word) or None


def parse_rate(text: str | None) -> float | None:
    """Returns the Gb/s of ``400 Gb/sec (4X NDR)``, or of a number as ibstat prints it, ``200`` or ``40 (FDR10)``."""
    match = _RATE.match(text or "") or re.fullmatch(r"([\d.]+)(?:\s*\(\w+\))?", text or "")
    try:
        if match:
            return float(match[1])
        return None
    except ValueError:
        return None


def _nic(device: Path) -> Nic:
    vendor = read_text(device / "device/vendor")
    return Nic(
        name=device.name,
        kind="efa" if vendor == _AMAZON else kind_of(device.name),
        model=read_text(device / "hca_type"),
        pci=_pci_address(device / "device"),
        numa_node=_number(device / "device/numa_node"),
        interfaces=tuple(sorted(path.name for path in _directories(device / "device/net"))),
        ports=tuple(
            _port(path) for path in sorted(_directories(device / "ports"), key=lambda path: natural(path.name))
        ),
    )


def _slingshot(sysfs: Path, device: Path) -> Nic:
    """Returns a Cassini NIC, which is not an  of the kernel; its port is the network interface ``hsn*``."""
    names = tuple(sorted(path.name for path in _directories(device / "device/net")))
    states = {read_text(sysfs / "class/net" / name / "operstate") for name in names}
    speeds = [speed for name in names if (speed := _number(sysfs / "class/net" / name / "speed"))]
    if "up" in states:
        state = "ACTIVE"
    elif "down" in states:
        state = "DOWN"
    else:
        state = None
    port = Port(1, state, link_layer="Ethernet", rate_gbps=max(speeds) / 1000 if speeds else None)
    numa = _number(device / "device/numa_node")
    return Nic(device.name, "slingshot", None, _pci_address(device / "device"), numa, names, (port,))


def _port(path: Path) -> Port:
    layer = read_text(path / "link_layer")
    return Port(
        number=int(path.name) if path.name.isdigit() else 0,
        state=parse_state(read_text(path / "state")),
        physical_state=parse_state(read_text(path / "phys_state")),
        link_layer=layer,
        rate_gbps=parse_rate(read_text(path / "rate")),
        link_downed=_number(path / "counters/link_downed"),
        roce_v2_gid=_roce_v2_gid(path) if layer == "Ethernet" else None,
    )


def _roce_v2_gid(port: Path) -> int | None:
    """Returns the index of the first RoCE v2 entry with a routable address, preferring IPv4 addresses."""
    entries = []
    for entry in sorted(_files(port / "gid_attrs/types"), key=lambda path: natural(path.name)):
        gid = read_text(port / "gids" / entry.name) or _UNSET
        if read_text(entry) == "RoCE v2" and entry.name.isdigit() and gid != _UNSET:
            entries.append(
                (gid.startswith(_LINK_LOCAL), not gid.startswith("0000:0000:0000:0000:0000:ffff"), int(entry.name))
            )
    if entries:
        return min(entries)[-1]
    return None


def _pci_address(link: Path) -> str | None:
    """Returns the address from the link's target, even if the target was not copied; otherwise from the device's
    uevent.
    """
    slot = re.search(r"^PCI_SLOT_NAME=(\S+)$", read_text(link / "uevent") or "", re.MULTILINE)
    names = (link.resolve().name, slot[1] if slot else "")
    return next((name for name in names if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", name)), None)


def _number(path: Path) -> int | None:
    """Returns a count of 0 or more; None for -1, with which the kernel marks unknown values."""
    text = read_text(path)
    if text is not None and text.isdigit():
        return int(text)
    return None


def _directories(path: Path) -> list[Path]:
    return [entry for entry in _entries(path) if entry.is_dir()]


def _files(path: Path) -> list[Path]:
    return [entry for entry in _entries(path) if entry.is_file()]


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


# how each tool introduces a device and a port
_DEVICE = re.compile(
    r"^(?:CA:? '(?P<ca>[^']+)'|hca_id:\s*(?P<hca>\S+)|Infiniband device '(?P<ib>[^']+)' port (?P<port>\d+))"
)
_PORT = re.compile(r"^\s*(?:Port (?P<ca>\d+):|port:\s*(?P<hca>\d+))\s*$")
_NETDEV = re.compile(r"^(?P<name>\S+)\s+port\s+(?P<port>\d+)\s+==>\s+(?P<interface>\S+)")
_VALUE = re.compile(r"^\s*([A-Za-z_ ]+?):\s*(.+?)\s*$")
_PORT_FIELDS = dict.fromkeys(("physical state", "phys state", "phys_state"), "physical_state") | {"state": "state"}


def parse_rdma_text(text: str) -> tuple[Nic, ...]:
    """Returns the devices named in the output of one of these tools, in natural order; () if it names none.

    ``(Down)`` in ibdev2netdev's output is the state of the network interface, not of the port.
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
    """Yields (device, port, field, value) in the order of the text; an empty field where a device or port begins."""
    name: str | None = None
    port: int | None = None
    for line in text.splitlines():
        if match := _NETDEV.match(line):
            yield match["name"], None, "interface", match["interface"]
        elif match := _DEVICE.match(line):
            name = match["ca"] or match["hca"] or match["ib"]
            port = int(match["port"]) if match["port"] else None
            yield name, port, "", ""
        elif name is None:
            continue
        elif match := _PORT.match(line):
            port = int(match["ca"] or match["hca"])
            yield name, port, "", ""
        elif match := _VALUE.match(line):
            yield name, port, match[1].strip().lower(), match[2]


def _with_device_field(nic: Nic, field: str, value: str) -> Nic:
    if field == "ca type":
        return replace(nic, model=value)
    if field == "vendor_part_id":  # the driver reports 4129 as MT4129
        return replace(nic, model=f"MT{value}" if value.isdigit() and nic.kind == "mellanox" else nic.model)
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
