"""The default route marks a management port only if the port is the odd one out."""

from __future__ import annotations

from dataclasses import replace

from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.network.rails import judge_ports, match
from tests.machine.network.nodes import Card, Site, rails


def left_out(node: NodeFacts) -> dict[str, str]:
    return {verdict.nic: verdict.reason for verdict in judge_ports(node) if not verdict.usable}


def test_ip_over_infiniband_of_a_diskless_node() -> None:
    cards = {name: replace(card, interface=name.replace("mlx5_", "ib")) for name, card in rails(4, rate=200).items()}
    assert left_out(Site(gpus=4, cards=cards, default="ib0").node()) == {}


def test_a_flat_network_whose_route_uses_one_of_its_rails() -> None:
    cards = {
        name: replace(card, interface=name.replace("mlx5_", "eth"))
        for name, card in rails(8, layer="Ethernet", far="NODE").items()
    }
    node = Site(cards=cards, interfaces={}, default="eth0").node()
    assert left_out(node) == {}
    assert [matched.nic for matched in match(node)] == [f"mlx5_{i}" for i in range(8)]


def test_equal_ports_whose_distance_is_unknown() -> None:
    cards = {f"mlx5_{i}": Card(rate=100, layer="Ethernet", far="", interface=f"eth{i}") for i in range(2)}
    assert left_out(Site(cards=cards, interfaces={}, default="eth0").node()) == {}


def test_a_management_port_of_another_rate() -> None:
    cards = rails(4, layer="Ethernet") | {"mlx5_8": Card(rate=25, layer="Ethernet", far="NODE", interface="eth8")}
    found = left_out(Site(gpus=4, cards=cards, default="eth8").node())
    assert list(found) == ["mlx5_8"]
    near = {name: replace(card, near=(), far="PHB") for name, card in rails(4, layer="Ethernet").items()}
    found = left_out(Site(gpus=4, cards=near | {"mlx5_8": replace(cards["mlx5_8"], far="PHB")}, default="eth8").node())
    assert found == {"mlx5_8": "the default route goes over eth8, so it serves management"}


def test_a_management_port_of_the_same_rate_that_is_farther_from_all_gpus() -> None:
    cards = {f"mlx5_{i}": Card(rate=100, layer="Ethernet", far="PHB") for i in range(2)}
    other = Card(rate=100, layer="Ethernet", far="SYS", interface="eth2")
    found = left_out(Site(gpus=2, cards=cards | {"mlx5_2": other}, default="eth2").node())
    assert found == {"mlx5_2": "the default route goes over eth2, so it serves management"}


def test_the_only_port_carries_the_route() -> None:
    cards = {"mlx5_0": Card(rate=100, layer="Ethernet", far="PHB", interface="eth0")}
    assert left_out(Site(cards=cards, interfaces={}, default="eth0").node()) == {}
