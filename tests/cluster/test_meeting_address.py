"""``cluster.interface``: the address at which the nodes of a job meet."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from hpc_train.cluster.allocation import LOOPBACK, Allocation, meeting_at
from hpc_train.errors import UserError

NODE = Allocation(2, 0, "jwb0001.juwels", "7", "7.0.0", "jwb0001.juwels")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three interfaces, and a name service that knows one other name of the node."""

    def address(text: str, family: int = socket.AF_INET) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    found = {
        "lo": [address("127.0.0.1")],
        "eth0": [address("10.0.0.1")],
        "ib0": [address("fe80::1", socket.AF_INET6), address("10.1.0.1")],
        "ib1": [address("fe80::2", socket.AF_INET6)],
    }

    def resolve(name: str) -> str:
        if name != "jwb0001i":
            raise socket.gaierror(-2, "Name or service not known")
        return "10.1.0.1"

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(socket, "gethostbyname", resolve)


@pytest.mark.usefixtures("network")
def test_the_address_where_nodes_meet() -> None:
    assert meeting_at(NODE, None) == NODE
    assert meeting_at(NODE, "ib0").address == "10.1.0.1"
    assert meeting_at(NODE, "{host}i").address == "jwb0001i"
    alone = Allocation(1, 0, "n1", None, "n1.1", LOOPBACK)
    assert meeting_at(alone, "ib0") == alone, "a single node needs no network"


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("interface", "what", "fix"),
    [
        ("ib7", "jwb0001.juwels has no such interface with an IPv4 address, only eth0, ib0", "cluster.interface=eth0"),
        ("ib1", "has no such interface with an IPv4 address", "cluster.interface=eth0"),
        ("lo", "has no such interface with an IPv4 address", "cluster.interface=eth0"),
        ("{host}-ib0", "the host name jwb0001-ib0 does not resolve: Name or service not known", "getent hosts"),
    ],
)
def test_an_interface_or_name_that_does_not_exist(interface: str, what: str, fix: str) -> None:
    with pytest.raises(UserError) as refused:
        meeting_at(NODE, interface)
    assert what in str(refused.value) and fix in str(refused.value) and "cluster.interface" in str(refused.value)
