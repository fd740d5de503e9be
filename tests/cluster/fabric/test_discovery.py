"""Facts read from trees as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cluster.fabric.discovery import discover, merge, read_tree
from hpc_train.cluster.fabric.facts import NodeFacts
from hpc_train.cluster.fabric.masks import cpu_masks
from hpc_train.cluster.fabric.matrix import parse_matrix
from hpc_train.cluster.fabric.rails import different_rails, judge_ports, match, port_warnings, usable_nics
from hpc_train.cluster.fabric.rdma import parse_rate, parse_state, read_rdma
from hpc_train.cluster.fabric.rdma_text import parse_rdma_text
from tests.cluster.fabric.machines import Machine, hgx, matrix, switch

IBSTAT = """CA 'mlx5_10'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 200
\t\tLink layer: InfiniBand
CA 'mlx5_9'
\tCA type: MT4125
\tPort 1:
\t\tState: Initializing
\t\tPhysical state: LinkUp
\t\tRate: 100
\t\tLink layer: Ethernet
\tPort 2:
\t\tState: Down
\t\tPhysical state: Polling
ibpanic: [77] main: stat of IB device 'mlx5_8' failed: No such file or directory
"""


def tree(machine: Machine) -> NodeFacts:
    return read_tree(machine.root / "sys", machine.root / "proc")


def test_eight_rails_and_two_storage_ports(tmp_path: Path) -> None:
    facts = tree(hgx(tmp_path))
    assert [gpu.model for gpu in facts.gpus] == ["NVIDIA H100 80GB HBM3"] * 8
    assert [gpu.numa_nodes for gpu in facts.gpus] == [(0,)] * 4 + [(1,)] * 4
    assert facts.link("GPU0", "mlx5_0") == "PIX" and facts.link("GPU0", "mlx5_1") == "PHB"
    assert facts.link("GPU0", "mlx5_9") == "SYS"
    assert [matched.nic for matched in match(facts)] == [f"mlx5_{i}" for i in (0, 1, 2, 3, 6, 7, 8, 9)]
    assert [matched.rail for matched in match(facts)] == list(range(8))
    left_out = [verdict.nic for verdict in judge_ports(facts) if not verdict.usable]
    assert left_out == ["mlx5_4", "mlx5_5"]
    assert [len(mask.cpus or ()) for mask in cpu_masks(facts)] == [24] * 8
    assert cpu_masks(facts)[1].cpus == (*range(12, 24), *range(108, 120))


def test_ports_that_are_left_out(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    place = "pci0000:{0:02x}/0000:{0:02x}:00.0/0000:{0:02x}:01.0"
    for i in range(4):
        machine.card(f"mlx5_{i}", place.format(i), 0)
    machine.card("mlx5_4", place.format(4), 0, state="2: INIT")
    machine.card("mlx5_5", place.format(5), 0, layer="Ethernet", interface="ens1")
    machine.card("mlx5_6", place.format(6), 0, rate="200 Gb/sec (4X HDR)")
    machine.card("mlx5_7", place.format(7), 0, state="1: DOWN", physical="2: Polling", rate="10 Gb/sec (4X SDR)")
    machine.card("mlx5_8", place.format(8), 0, interface="ib8")
    machine.write("proc/net/route", "Iface\tDestination\nib8\t00000000")
    reasons = {verdict.nic: verdict.reason for verdict in judge_ports(tree(machine)) if not verdict.usable}
    assert list(reasons) == [f"mlx5_{i}" for i in range(4, 9)]
    for nic, word in (("4", "INIT"), ("5", "link layer"), ("6", "200 Gb/s"), ("7", "POLLING"), ("8", "default route")):
        assert word in reasons[f"mlx5_{nic}"]
    assert [nic.name for nic in usable_nics(tree(machine))] == [f"mlx5_{i}" for i in range(4)]
    warnings = "\n".join(port_warnings(tree(machine)))
    for word in (
        "mlx5_6 port 1 came up at 200 Gb/s, its card can do 400",
        "mlx5_4 port 1 is INIT",
        "mlx5_7 port 1 is polling",
    ):
        assert word in warnings


def test_a_machine_where_sysfs_is_silent(tmp_path: Path) -> None:
    facts = read_tree(tmp_path / "sys", tmp_path / "proc")
    assert facts == NodeFacts()
    assert match(facts) == () and cpu_masks(facts) == ()


def test_a_virtual_machine_without_numa_numbers(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.numa({0: "0-23", 1: "24-47"})
    machine.gpu("pci0000:00/0000:00:02.0/0000:01:00.0", -1)
    machine.write("sys/devices/pci0000:00/0000:00:02.0/numa_node", -1)
    machine.write("sys/devices/pci0000:00/0000:00:02.0/local_cpulist", "0-23")
    machine.gpu("pci0001:00/0001:00:02.0", -1)
    facts = tree(machine)
    assert facts.gpus[0].cpus == tuple(range(24)) and facts.gpus[0].numa_nodes == ()
    assert facts.gpus[1].cpus == () and "the CPUs near GPU1" in facts.unknown
    filled = merge(facts, parse_matrix(matrix(["GPU0", "GPU1"], {}, {"GPU0": "0-23", "GPU1": "24-47"}, "PHB")))
    assert filled.gpus[1].cpus == tuple(range(24, 48)) and "the CPUs near GPU1" not in filled.unknown
    assert filled.link("GPU0", "GPU1") == "PHB"


def test_gpu_memory_as_a_numa_node_of_its_own(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.numa(
        {0: "0-71", 1: "72-143", 2: "", 10: ""},
        {0: "10 40 80 120", 1: "40 10 120 80", 2: "80 120 10 200", 10: "120 80 200 10"},
    )
    machine.gpu("pci0009:01/0009:01:00.0", 2, "NVIDIA GB200")
    machine.gpu("pci0019:01/0019:01:00.0", 10, "NVIDIA GB200")
    assert [gpu.cpus[0] for gpu in tree(machine).gpus] == [0, 72]


def test_the_matrix_does_not_overrule_the_bus(tmp_path: Path) -> None:
    seen = tree(hgx(tmp_path, nics=False))
    names = [gpu.name for gpu in seen.gpus]
    merged = merge(seen, parse_matrix(matrix(names, {("GPU0", "GPU1"): "SYS"}, {}, "NV18")))
    assert merged.link("GPU0", "GPU1") is None and merged.link("GPU0", "GPU2") == "NV18"
    assert any("GPU0 and GPU1" in note for note in merged.unknown)
    fewer = merge(seen, parse_matrix(matrix(names[:7], {}, {}, "NV18")))
    assert "the GPUs: /sys shows 8, the matrix 7" in fewer.unknown


def test_roce_addresses(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    unset = "0000:0000:0000:0000:0000:0000:0000:0000"
    gids = {
        0: ("IB/RoCE v1", "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"),
        1: ("RoCE v2", "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"),
        2: ("IB/RoCE v1", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
        3: ("RoCE v2", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
        4: ("RoCE v2", unset),
    }
    machine.card("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", 0, layer="Ethernet", gids=gids)
    assert read_rdma(tmp_path / "sys")[0].ports[0].roce_v2_gid == 3


def test_families_of_cards(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for i, (name, vendor) in enumerate(
        [("rdmap16s27", "0x1d0f"), ("cxi0", "0x17db"), ("hfi1_0", "0x8086"), ("bnxt_re0", "0x14e4")]
    ):
        machine.card(name, f"pci0000:{i:02x}/0000:{i:02x}:01.0", 0, vendor=vendor, card="", layer="Unspecified")
    kinds = {nic.name: nic.kind for nic in read_rdma(tmp_path / "sys")}
    assert kinds == {"rdmap16s27": "efa", "cxi0": "slingshot", "hfi1_0": "omnipath", "bnxt_re0": "other"}


def test_what_ibstat_and_its_kin_print() -> None:
    nine, ten = parse_rdma_text(IBSTAT)
    assert (nine.name, nine.card, [port.state for port in nine.ports]) == ("mlx5_9", "MT4125", ["INIT", "DOWN"])
    assert nine.ports[1].link_layer is None and nine.ports[1].physical_state == "POLLING"
    assert ten.ports[0].rate_gbps == 200 and ten.ports[0].active
    ibstatus = (
        "Infiniband device 'mlx5_0' port 1 status:\n\tstate:\t\t 4: ACTIVE\n\tphys state:\t 5: LinkUp\n"
        "\trate:\t\t 100 Gb/sec (4X EDR)\n\tlink_layer:\t InfiniBand\n"
    )
    assert parse_rdma_text(ibstatus)[0].ports[0].rate_gbps == 100
    devinfo = "hca_id:\troce0\n\tvendor_part_id:\t4129\n\t\tport:\t1\n\t\t\tstate:\t\tPORT_DOWN (1)\n"
    assert parse_rdma_text(devinfo)[0].ports[0].state == "DOWN"
    healthy = parse_rdma_text("mlx5_0   port  1  ==>  ibp26s0   (Down)\n")[0]
    assert healthy.interfaces == ("ibp26s0",) and healthy.ports == ()


@pytest.mark.parametrize(
    ("text", "state"),
    [("4: ACTIVE", "ACTIVE"), ("Initializing", "INIT"), ("PORT_ACTIVE (4)", "ACTIVE"), ("", None), (None, None)],
)
def test_states(text: str | None, state: str | None) -> None:
    assert parse_state(text) == state


@pytest.mark.parametrize(
    ("text", "rate"), [("2.5 Gb/sec (1X SDR)", 2.5), ("400", 400), ("fast", None), (None, None), ("1.2.3", None)]
)
def test_rates(text: str | None, rate: float | None) -> None:
    assert parse_rate(text) == rate


def test_nodes_with_other_rails_are_named(tmp_path: Path) -> None:
    good = tree(hgx(tmp_path / "a"))
    broken = Machine(tmp_path / "b")
    for i in range(8):
        broken.gpu(switch(i // 4 * 8 + 1, i % 4 + 1, 1), i // 4)
        broken.card(f"mlx5_{i}", switch(i // 4 * 8 + 1, 4 - i % 4, 2), i // 4)
    assert different_rails([good, good]) == ()
    assert len(different_rails([good, tree(broken)])) == 1


def test_this_machine() -> None:
    facts = discover()
    assert facts.node and facts.allowed
    assert NodeFacts.from_json(facts.to_json()) == facts
