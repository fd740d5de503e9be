"""The health of InfiniBand and RoCE ports: error counters, partition keys and the MTU, from ``/sys``.

The counters are those of the InfiniBand specification (PortCounters). They grow from the last reset on, so a rate
decides: at least ``MIN_ERRORS`` events, the default threshold of infiniband-diags, and one per day since boot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.machine.sysfs import read_text

SUBJECT = "port health"
MIN_ERRORS = 10
DAY_S = 86400.0
MEMBER = 0x8000  # bit of a partition key: full member; limited members cannot reach each other
BEST_ROCE_MTU = 4200  # bytes of the interface's MTU for RoCE packets of 4096 bytes


@dataclass(frozen=True)
class PortState:
    """Describes an active port. A value is None if the driver does not show it.

    Attributes:
        keys: its partition keys; NCCL uses the first (NCCL_IB_PKEY=0).
        mtu: the MTU in bytes of the network interface of a RoCE port.
    """

    device: str
    number: int
    layer: str = "InfiniBand"
    symbol_errors: int | None = None
    recoveries: int | None = None
    receive_errors: int | None = None
    keys: tuple[int, ...] = ()
    mtu: int | None = None

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"


def read_ports(rdma: Path = Path("/sys/class/infiniband")) -> tuple[PortState, ...]:
    """Returns the active ports below ``rdma``, in the order of their names."""
    ports = sorted(rdma.glob("*/ports/*"), key=lambda path: (len(path.parts[-3]), path.parts[-3], path.name))
    return tuple(_port(path) for path in ports if "ACTIVE" in read_text(path / "state") and path.name.isdigit())


def _port(path: Path) -> PortState:
    layer = read_text(path / "link_layer")
    mtus = [int(text) for text in map(read_text, path.parent.parent.glob("device/net/*/mtu")) if text.isdigit()]
    return PortState(
        device=path.parts[-3],
        number=int(path.name),
        layer=layer or "InfiniBand",
        symbol_errors=_count(path / "counters/symbol_error"),
        recoveries=_count(path / "counters/link_error_recovery"),
        receive_errors=_count(path / "counters/port_rcv_errors"),
        keys=tuple(_keys(path / "pkeys")) if layer != "Ethernet" else (),
        mtu=max(mtus) if mtus and layer == "Ethernet" else None,
    )


def _count(path: Path) -> int | None:
    text = read_text(path)
    if text.isdigit():
        return int(text)
    return None


def _keys(folder: Path) -> Iterator[int]:
    """Yields the keys in the order of their index; the key 0 marks an empty entry."""
    index = 0
    while text := read_text(folder / str(index)):
        yield int(text, 16)
        index += 1


def judge_ports(ports: Sequence[PortState], node: str, uptime_s: float) -> Iterator[Finding]:
    """Reports what is wrong with ``ports``, or that nothing is."""
    findings = [finding for port in ports for finding in (*_errors(port, node, uptime_s), *_access(port))]
    if ports and not findings:
        keys = sorted({f"{port.keys[0]:#06x}" for port in ports if port.keys})
        text = f"{len(ports)} active ports without errors" + (f", partition key {', '.join(keys)}" if keys else "")
        findings = [Finding(SUBJECT, OK, text)]
    yield from findings


def _errors(port: PortState, node: str, uptime_s: float) -> Iterator[Finding]:
    least = max(MIN_ERRORS, uptime_s / DAY_S)
    counters = {"symbol errors": port.symbol_errors, "link recoveries": port.recoveries}
    counters["received packets with errors"] = port.receive_errors if port.layer == "InfiniBand" else None
    bad = [f"{count} {name}" for name, count in counters.items() if count is not None and count >= least]
    if bad:
        fix = (
            f"cluster.exclude={node}; for the staff: clean or replace the cable or transceiver, then reset the counters"
        )
        yield Finding(SUBJECT, WARNING, f"{port.name}: {', '.join(bad)} since its counters were reset", fix)


def _access(port: PortState) -> Iterator[Finding]:
    """Checks the partition key that NCCL uses and the MTU."""
    if port.keys and not port.keys[0]:
        others = next((index for index, key in enumerate(port.keys) if key & MEMBER), None)
        if others is None:
            fix = "ask the site"
        else:
            fix = f"set NCCL_IB_PKEY={others}, or ask the site"
        yield Finding(SUBJECT, ERROR, f"{port.name}: it has no partition key at index 0, which NCCL uses", fix)
    elif port.keys and not port.keys[0] & MEMBER:
        text = (
            f"{port.name}: it is a limited member of its partition ({port.keys[0]:#06x}); two such nodes cannot connect"
        )
        full = next((index for index, key in enumerate(port.keys) if key & MEMBER), None)
        if full is None:
            fix = "ask the site for full membership"
        else:
            fix = f"set NCCL_IB_PKEY={full}"
        yield Finding(SUBJECT, ERROR, text, fix)
    if port.mtu is not None and port.mtu < BEST_ROCE_MTU:
        text = f"{port.name}: the MTU of its interface is {port.mtu}, so RoCE packets are smaller than 4096 bytes"
        yield Finding(SUBJECT, WARNING, text, "ask the site for an MTU of 9000 on hosts and switches")
