"""What NCCL really uses, from its log with ``NCCL_DEBUG=INFO`` and ``NCCL_DEBUG_SUBSYS=INIT,NET``. No torch.

The lines are those of NCCL 2.4 to 2.30; ``net.cc``, ``net_ib`` and ``net_socket.cc`` of its source print them:

    NCCL version 2.27.3+cuda12.9
    n1:7:19 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
    n1:7:19 [0] NCCL INFO Using network IB
    n1:7:19 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA
    n1:7:19 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SOCKET = "Socket"
_VERSION = re.compile(r"NCCL version (\d[\w.]*)")
_CHOSEN = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_CARDS = re.compile(r"NCCL INFO NET/IB ?: Using (.+)$", re.MULTILINE)
_CARD = re.compile(r"\[\d+\]([\w.-]+:\d+)/")
# the name of a plugin may have a space; behind the number of its device come (relay), /GDRDMA(mode) and /Shared
_NETWORK = re.compile(r" via NET/([^/\n]+)/\d+(\S*)")
_INSIDE = re.compile(r" via (P2P|SHM|direct shared memory)\b")


@dataclass(frozen=True)
class Transport:
    """What one rank's communicators use.

    Attributes:
        networks: of its channels to other nodes, as NCCL names them: ``IB``, ``Socket``, ``AWS Libfabric``; without
            such channels the one that was chosen for them, if any.
        gpu_direct: whether all those channels read GPU memory from the card; None without channels.
        inside: of its channels in the node: ``P2P``, ``SHM``.
        cards: ``mlx5_0:1``, as NCCL numbers them.
    """

    nccl: str | None = None
    networks: tuple[str, ...] = ()
    gpu_direct: bool | None = None
    inside: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()

    @property
    def over_sockets(self) -> bool:
        return SOCKET in self.networks


def parse_transport(log: str) -> Transport:
    """From the log of one rank; what it does not say stays empty."""
    version, channels, chosen = _VERSION.search(log), _NETWORK.findall(log), _CHOSEN.findall(log)
    cards = [card for line in _CARDS.findall(log) for card in _CARD.findall(line)]
    inside = ("SHM" if "shared" in way else way for way in _INSIDE.findall(log))
    return Transport(
        nccl=None if version is None else version[1],
        networks=tuple(dict.fromkeys(name for name, _ in channels)) or tuple(chosen[-1:]),
        gpu_direct=all("/GDRDMA" in rest for _, rest in channels) if channels else None,
        inside=tuple(dict.fromkeys(inside)),
        cards=tuple(dict.fromkeys(cards)),
    )
