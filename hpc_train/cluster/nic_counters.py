"""How many bytes this node has sent and received, by the kernel's own counters. Readable without privileges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
LANES = 4  # port_xmit_data and port_rcv_data count in units of 4 bytes (InfiniBand spec, PortCounters)


@dataclass(frozen=True)
class Traffic:
    """Bytes, by what carried them; None where there is no such card or it does not say.

    Attributes:
        rdma_sent: over RDMA ports (InfiniBand, RoCE); the kernel's network counters do not see these.
        net_sent: over network cards, by way of the kernel; virtual interfaces are left out.
    """

    rdma_sent: int | None = None
    rdma_received: int | None = None
    net_sent: int | None = None
    net_received: int | None = None

    def since(self, before: Traffic) -> Traffic:
        """What came after ``before``; None where a counter has been set back."""
        names = self.__dataclass_fields__
        return Traffic(**{name: _difference(getattr(self, name), getattr(before, name)) for name in names})


def read_traffic(sysfs: Path = SYSFS) -> Traffic:
    """Since the node was started, over all cards."""
    ports = list(sysfs.glob("class/infiniband/*/ports/*/counters"))
    cards = [card / "statistics" for card in sorted(sysfs.glob("class/net/*")) if (card / "device").exists()]
    return Traffic(
        rdma_sent=_total([port / "port_xmit_data" for port in ports], LANES),
        rdma_received=_total([port / "port_rcv_data" for port in ports], LANES),
        net_sent=_total([card / "tx_bytes" for card in cards]),
        net_received=_total([card / "rx_bytes" for card in cards]),
    )


def _total(files: list[Path], unit: int = 1) -> int | None:
    """None where one of them cannot be read: a part of the traffic would look like all of it."""
    values = list(_numbers(files))
    return unit * sum(values) if values and len(values) == len(files) else None


def _numbers(files: list[Path]) -> Iterator[int]:
    for file in files:
        try:
            yield int(file.read_text(encoding="ascii"))
        except (OSError, ValueError):  # some drivers answer with EINVAL, or N/A
            continue


def _difference(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None or now < before else now - before
