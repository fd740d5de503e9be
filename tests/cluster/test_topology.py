"""Nodes of one switch are neighbours in rank, whatever order Slurm numbers them in."""

from __future__ import annotations

from hpc_train.cluster.allocation import mapping, node_order, switch_address
from hpc_train.plan.layout import Layout


def test_nodes_of_a_switch_come_together_and_the_first_node_stays_first() -> None:
    addresses = ["s.rack2.n1", "s.rack1.n2", "s.rack2.n3", "s.rack1.n4"]
    assert node_order(addresses) == (0, 2, 1, 3)


def test_every_level_of_the_tree_counts_and_names_are_in_natural_order() -> None:
    addresses = ["a.y.n10", "b.x.n1", "a.x.n2", "a.y.n9", "b.x.n11", "b.x.n3", "a.x.n20"]
    assert [addresses[index] for index in node_order(addresses)] == [
        "a.y.n10", "a.y.n9", "a.x.n2", "a.x.n20", "b.x.n1", "b.x.n3", "b.x.n11"
    ]  # fmt: skip


def test_a_site_without_switches_names_the_node_alone() -> None:
    assert switch_address({"SLURM_TOPOLOGY_ADDR": "n1"}) is None
    assert switch_address({}) is None
    assert switch_address({"SLURM_TOPOLOGY_ADDR": "spine.rack1.n1"}) == "spine.rack1.n1"


def test_the_mapping_in_words() -> None:
    layout = Layout(2, 2, 2, 1, "ddp", "1f1b", 1, 4, 1)
    assert mapping(layout, ["n1", "n2"], 4) == [
        "n1: ranks 0-3: pp 0, dp 0-1, tp 0-1",
        "n2: ranks 4-7: pp 1, dp 0-1, tp 0-1",
    ]
