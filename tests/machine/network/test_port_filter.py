"""One filter for all ports of a job, and one node with a defective port, which changes nothing for the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_train.machine.network.decision import FabricJob, decide
from hpc_train.machine.network.rails import judge_ports, match, port_filter, port_warnings, sick_lines
from tests.machine.network.nodes import DOWN, H200, Card, Site, rails

RAIL = H200.cards["mlx5_4"]


@pytest.mark.parametrize("count", [2, 4, 128])
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
