"""Which ports serve training: the default route, and ports that some nodes of a job cannot use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.machine.network.decision import FabricJob, decide
from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.network.rails import judge_ports, match, port_filter, port_warnings, sick_lines
from tests.machine.network.nodes import DOWN, H200, Card, Site, rails


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


RAIL = H200.cards["mlx5_4"]


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize(
    ("change", "lost", "defect"),
    [
        (replace(RAIL, **DOWN), (), "mlx5_4:1 is DOWN and POLLING, which"),
        (replace(RAIL, state="INIT"), (), "mlx5_4:1 is INIT and LINKUP, which"),
        (replace(RAIL, rate=200), (), "mlx5_4:1 runs at 200 Gb/s, on the other nodes at 400"),
        (None, ("mlx5_4",), "it has no mlx5_4:1, which"),
        (replace(RAIL, layer="Ethernet"), (), "mlx5_4:1 is left out, because its link layer is Ethernet"),
    ],
    ids=["down", "no subnet manager", "slow", "lost", "Ethernet"],
)
def test_one_sick_node(count: int, change: Card | None, lost: tuple[str, ...], defect: str) -> None:
    sick = H200.node("sick", lost, **({} if change is None else {"mlx5_4": change}))
    nodes = H200.nodes(count, sick)
    decision = decide(nodes, FabricJob(count, 4, (2, 27)), {})
    exported = {variable.name: variable.value for variable in decision.variables}
    assert exported["NCCL_IB_HCA"] == "^=mlx5_1,mlx5_2"
    assert [note.split(":")[0] for note in decision.unknown] in ([], ["whether mlx5_4"] if count == 2 else [])
    assert "NCCL_IB_HCA" not in {alone.name for alone in decision.not_set}
    (line,) = sick_lines(nodes)
    assert line.startswith(f"sick is unfit: {defect}") and line.endswith("set cluster.exclude=sick until then")


def test_healthy_nodes_and_storage_ports_that_are_down_are_not_sick() -> None:
    assert sick_lines(H200.nodes(4)) == ()
    storage_down = H200.nodes(4, H200.node("n4", mlx5_1=replace(H200.cards["mlx5_1"], **DOWN)))
    assert port_filter(storage_down).excluded == ("mlx5_1", "mlx5_2") and sick_lines(storage_down) == ()
    without = Site(cards=rails(8)).nodes(3)
    assert port_filter(without).excluded == () and port_filter(without).reason == ""


def test_a_node_that_votes_for_its_slow_rails() -> None:
    """Seven of eight rails came up at 200 Gb/s: the node itself takes the healthy one for the odd one out."""
    site = Site(cards=rails(8))
    slow = {name: replace(card, rate=200) for name, card in site.cards.items() if name != "mlx5_0"}
    nodes = site.nodes(4, site.node("n4", **slow))
    assert port_filter(nodes).excluded == ()
    (line,) = sick_lines(nodes)
    assert line.count("runs at 200 Gb/s") == 7 and "mlx5_0" not in line


def test_a_slow_rail_stays_the_rail_of_its_gpu() -> None:
    node = H200.node(mlx5_4=replace(RAIL, rate=200))
    (verdict,) = [verdict for verdict in judge_ports(node) if verdict.nic == "mlx5_4"]
    assert verdict.usable and "the rail of GPU2, but runs at 200 Gb/s" in verdict.reason
    assert [matched.nic for matched in match(node)] == [matched.nic for matched in match(H200.node())]
    assert port_warnings(node) == (
        "mlx5_4 port 1 runs at 200 Gb/s, but its NIC supports 400 Gb/s: check cable and switch",
    )


def test_slow_storage_ports_are_no_defect_of_a_node() -> None:
    storage = {name: replace(card, model="MT4129") for name, card in H200.cards.items() if card.rate == 200}
    assert port_warnings(H200.node(**storage)) == ()


def test_many_sick_nodes_are_counted() -> None:
    sick = [H200.node(f"s{i}", mlx5_4=replace(RAIL, **DOWN)) for i in range(11)]
    lines = sick_lines(H200.nodes(64, *sick))
    assert len(lines) == 9 and lines[-1] == "3 more nodes have such ports"


def test_ports_of_one_card_are_told_apart() -> None:
    """ConnectX-6 VPI with an InfiniBand and an Ethernet port."""
    site = Site(gpus=2, cards={"mlx5_0": Card(near=(0, 1)), "mlx5_0:2": Card(layer="Ethernet", rate=100, port=2)})
    assert port_filter(site.nodes(2)).value == "^=mlx5_0:2"


def test_two_nodes_that_disagree_without_a_defect() -> None:
    one = Site(gpus=0, cards={f"mlx5_{i}": Card() for i in range(4)} | {"mlx5_9": Card(rate=200)})
    other = one.node("n2", mlx5_9=Card(rate=400))
    found = port_filter([one.node("n1"), other])
    assert found.excluded == () and "n2 uses it, and n1 leaves it out" in found.disputed[0]
    decision = decide([one.node("n1"), other], FabricJob(2, 4, (2, 27)), {})
    assert {alone.name: alone.reason for alone in decision.not_set}["NCCL_IB_HCA"] == found.disputed[0]
