"""Neighbors in the network are neighbors in rank, and an unsuitable allocation is reported."""

from __future__ import annotations

import itertools

import pytest

from hpc_train.elastic.nodes import Node, in_order_of_rank
from hpc_train.layout.layout import Layout
from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.placement import (
    Network,
    has_blocks,
    judge,
    mapping,
    network_of,
    node_order,
    parse_switch_sizes,
    segment,
    switch_address,
    with_nvlink_domain,
)


def ordered(*addresses: str) -> list[str]:
    return [addresses[index] for index in node_order(addresses)]


def test_nodes_of_a_switch_come_together_and_the_first_node_stays_first() -> None:
    addresses = ["s.rack2.n1", "s.rack1.n2", "s.rack2.n3", "s.rack1.n4"]
    assert node_order(addresses) == (0, 2, 1, 3)


def test_every_level_of_the_tree_counts_and_names_are_in_natural_order() -> None:
    assert ordered("a.y.n10", "b.x.n1", "a.x.n2", "a.y.n9", "b.x.n11", "b.x.n3", "a.x.n20") == [
        "a.y.n10", "a.y.n9", "a.x.n2", "a.x.n20", "b.x.n1", "b.x.n3", "b.x.n11"
    ]  # fmt: skip


def test_blocks_are_in_natural_order_after_the_first_one() -> None:
    assert ordered("b9.n3", "b10.n4", "b9.n1", "b8.n20", "b8.n7") == ["b9.n3", "b9.n1", "b8.n7", "b8.n20", "b10.n4"]


def test_a_torus_is_followed_along_neighboring_coordinates() -> None:
    names = [f"t1:{x}:{y}:{z}.n{x}{y}{z}" for x, y, z in itertools.product(range(2), range(3), range(4))]
    found = ordered(*names)
    assert set(found) == set(names)
    places = [tuple(map(int, name.partition(".")[0].split(":")[1:])) for name in found]
    steps = [sum(abs(a - b) for a, b in zip(one, two, strict=True)) for one, two in itertools.pairwise(places)]
    assert set(steps) == {1}


def test_the_path_through_a_torus_starts_at_the_first_node_and_other_tori_follow() -> None:
    found = ordered("t2:0:0:10.e", "t1:0:0:0.a", "t2:0:0:9.d", "t2:0:0:11.f", "t1:0:0:1.b")
    assert found == ["t2:0:0:10.e", "t2:0:0:11.f", "t2:0:0:9.d", "t1:0:0:0.a", "t1:0:0:1.b"]


@pytest.mark.parametrize(
    ("address", "pattern", "expected"),
    [
        ("n1", "node", None),
        ("n1.site.org", "node", None),
        ("", "", None),
        ("spine.rack1.n1", "switch.switch.node", "spine.rack1.n1"),
        ("b8.n1", "block.node", "b8.n1"),
        ("t1:0:3:2.n1", "torus:x:y:z.node", "t1:0:3:2.n1"),
    ],
)
def test_a_site_that_describes_no_network_names_the_node_alone(
    address: str, pattern: str, expected: str | None
) -> None:
    variables = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert switch_address(variables) == expected
    assert has_blocks(variables) == pattern.startswith("block")


def test_the_mapping_in_words() -> None:
    layout = Layout(2, 2, 2, 1, "ddp", "1f1b", 1, 4, 1)
    assert mapping(layout, ["n1", "n2"], 4) == [
        "n1: ranks 0-3: pp 0, dp 0-1, tp 0-1",
        "n2: ranks 4-7: pp 1, dp 0-1, tp 0-1",
    ]


def test_nodes_of_an_nvlink_domain_come_together_without_a_description_of_switches() -> None:
    assert with_nvlink_domain("spine.rack1.n1", "n1", "u.1") == "spine.rack1.u.1.n1"
    assert with_nvlink_domain(None, "n1", "u.1") == "u.1.n1"
    assert with_nvlink_domain(None, "n1", None) is None
    facts = [NodeFacts(nvlink_domain=f"u.{number % 2}") for number in range(4)]
    nodes = [Node(number, f"n{number}", "", None, 4, 4, facts[number]) for number in range(4)]
    assert [node.number for node in in_order_of_rank(nodes)] == [0, 2, 1, 3]


TREE = """SwitchName=rack1 Level=0 LinkSpeed=1 Nodes=n[1-8]
SwitchName=rack2 Level=0 LinkSpeed=1 Nodes=n[9-16,20]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[1-16,20] Switches=rack[1-2]
"""
BLOCKS = "BlockName=b1 BlockIndex=0 Nodes=g[1-18] BlockSize=18\nAggregatedBlock=b[1-2] BlockIndex=2 Nodes=g[1-36]\n"


def test_the_sizes_of_switches_and_blocks() -> None:
    assert parse_switch_sizes(TREE) == {"rack1": 8, "rack2": 9}
    assert parse_switch_sizes(BLOCKS) == {"b1": 18}
    assert parse_switch_sizes("") == {}


def layout(pp: int, dp: int) -> Layout:
    return Layout(dp, pp, 1, 1, "ddp", "1f1b", 1, 4, 1)


def racks(*counts: int) -> list[str]:
    return [f"spine.r{rack}.n{rack}{node}" for rack, count in enumerate(counts) for node in range(count)]


@pytest.mark.parametrize(
    ("counts", "sizes", "pp", "expected"),
    [
        ((4, 4), {}, 2, []),  # a stage on each switch
        ((4, 4), {}, 1, []),  # no switch is known to hold eight
        ((4, 4), {"r0": 16, "r1": 16}, 1, ["group (8 nodes) straddles r0 and r1", "extra.switches=1@00:30:00"]),
        ((2, 4), {}, 2, ["group of pipeline rank 0 (3 nodes) straddles r0 and r1", "extra.switches=1@"]),
        (
            (2, 2, 2, 1, 1),
            {"r0": 18},
            2,
            ["8 nodes are scattered over 5 switches", "pipeline rank 0", "pipeline rank 1", "extra.switches=1@"],
        ),
        ((1, 1, 1), {}, 1, ["3 nodes are scattered over 3 switches (r0 1, r1 1, r2 1)", "extra.switches=1@"]),
    ],
)
def test_a_scattered_allocation_is_reported(
    counts: tuple[int, ...], sizes: dict[str, int], pp: int, expected: list[str]
) -> None:
    network = network_of(racks(*counts), sizes)
    assert network is not None
    nodes = sum(counts)
    found = judge(network, layout(pp, nodes * 4 // pp), 4, blocks=False, switches=None)
    assert len(found) == len(expected)
    assert all(words in line for words, line in zip(expected, found, strict=True))


def test_one_switch_and_a_torus_are_not_judged() -> None:
    assert network_of(racks(4), {}) is None
    assert network_of(["t1:0:0:0.a", "t1:0:0:1.b"], {}) is None


def test_blocks_and_a_request_for_switches_have_other_fixes() -> None:
    network = Network(("b1", "b2"), 18)
    assert "+cluster.extra.segment=2" in judge(network, layout(1, 8), 4, blocks=True, switches=None)[-1]
    shards = Layout(64, 1, 1, 48, "zero3", "1f1b", 1, 4, 1)
    assert segment(shards, 4, 16, 9) == 4, "divides the 12 nodes of a shard group and the job"
    assert "max_switch_wait" in judge(network, layout(1, 8), 4, blocks=False, switches="1@00:10:00")[-1]
