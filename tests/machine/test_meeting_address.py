"""The address at which the nodes of a job meet (``cluster.interface``), and where the batch host listens."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from hpc_train.errors import UserError
from hpc_train.machine.allocation import LOOPBACK, Allocation, current_allocation, listening_at, meeting_at

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


def batch_host(address: str, other: str = LOOPBACK) -> Allocation:
    return Allocation(2, 0, "n1", "7", "7.0.0", address, ("n1", other))


def test_the_batch_host_listens_on_the_address_from_which_it_sends_to_the_others() -> None:
    """All of 127.0.0.0/8 is on this machine, and the kernel sends to it from 127.0.0.1."""
    found, doubt = listening_at(batch_host("localhost"), is_chosen=False)
    assert (found.listen_address, found.address, doubt) == (LOOPBACK, LOOPBACK, None)


def test_a_single_node_stays_on_loopback() -> None:
    alone = current_allocation({})
    assert alone.listen_address == LOOPBACK
    assert listening_at(alone, is_chosen=True) == (alone, None)


@pytest.mark.parametrize(
    ("here", "doubt"),
    [
        (batch_host("127.0.0.3"), "its name belongs to 127.0.0.3, but it sends to 127.0.0.1 from 127.0.0.1"),
        (batch_host("203.0.113.7"), "203.0.113.7 resolves to 203.0.113.7, which no interface of this node has"),
        (batch_host(LOOPBACK, "no name"), "there is no route to no name: "),
        (batch_host("no name"), "no name does not resolve on this node: "),
    ],
    ids=["another network", "not here", "no route", "no name"],
)
def test_the_batch_host_listens_on_all_interfaces_in_doubt(here: Allocation, doubt: str) -> None:
    for is_chosen in (False, True):
        if is_chosen and here.address == LOOPBACK:
            continue
        found, said = listening_at(here, is_chosen)
        assert found == here and found.listen_address == ""
        assert said is not None and said.startswith(doubt)


def test_a_name_with_several_addresses_leaves_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(socket.AF_INET, 0, 0, "", (address, 0)) for address in ("10.0.0.1", "10.1.0.1", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answers)
    assert listening_at(batch_host("n1"), is_chosen=True)[1] == "n1 has the addresses 10.0.0.1, 10.1.0.1"


def test_the_chosen_address_needs_no_route_to_the_names_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the nodes may belong to another network than ``cluster.interface``."""
    monkeypatch.setattr("hpc_train.machine.allocation._LOOPBACK_NET", "none")
    chosen = batch_host("127.0.0.3", "no name")
    assert listening_at(chosen, is_chosen=True)[0].listen_address == "127.0.0.3"
    assert listening_at(chosen, is_chosen=False)[0].listen_address == ""
