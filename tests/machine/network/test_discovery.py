"""Facts read from trees as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.machine.network.discovery import discover, merge, read_tree
from hpc_train.machine.network.facts import UNLIMITED, NodeFacts, NodeLimits
from hpc_train.machine.network.node import read_recording
from hpc_train.machine.network.rails import different_rails, judge_ports, match, port_warnings, usable_nics
from hpc_train.machine.network.rank_binding import cpu_masks
from hpc_train.machine.network.rdma import parse_rate, parse_rdma_text, parse_state, read_rdma
from hpc_train.machine.network.smi import parse_matrix
from hpc_train.run.rows import check_fields
from tests.machine.network.machines import Machine, hgx, matrix, switch

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
    machine.card("mlx5_8", place.format(8), 0, rate="100 Gb/sec (4X EDR)", interface="ens8")
    machine.write("proc/net/route", "Iface\tDestination\nens8\t00000000")
    reasons = {verdict.nic: verdict.reason for verdict in judge_ports(tree(machine)) if not verdict.usable}
    assert list(reasons) == [f"mlx5_{i}" for i in range(4, 9)]
    for nic, word in (("4", "INIT"), ("5", "link layer"), ("6", "200 Gb/s"), ("7", "POLLING"), ("8", "100 Gb/s")):
        assert word in reasons[f"mlx5_{nic}"]
    assert [nic.name for nic in usable_nics(tree(machine))] == [f"mlx5_{i}" for i in range(4)]
    warnings = "\n".join(port_warnings(tree(machine)))
    for word in (
        "mlx5_6 port 1 runs at 200 Gb/s, but its NIC supports 400",
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
    assert (nine.name, nine.model, [port.state for port in nine.ports]) == ("mlx5_9", "MT4125", ["INIT", "DOWN"])
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
    [("4: ACTIVE", "ACTIVE"), ("Initializing", "INIT"), ("PORT_ACTIVE (4)", "ACTIVE"), ("", None)],
)
def test_states(text: str, state: str | None) -> None:
    assert parse_state(text) == state


@pytest.mark.parametrize(
    ("text", "rate"), [("2.5 Gb/sec (1X SDR)", 2.5), ("400", 400), ("fast", None), ("", None), ("1.2.3", None)]
)
def test_rates(text: str, rate: float | None) -> None:
    assert parse_rate(text) == rate


def test_nodes_with_other_rails_are_named(tmp_path: Path) -> None:
    good = tree(hgx(tmp_path / "a"))
    broken = Machine(tmp_path / "b")
    for i in range(8):
        broken.gpu(switch(i // 4 * 8 + 1, i % 4 + 1, 1), i // 4)
        broken.card(f"mlx5_{i}", switch(i // 4 * 8 + 1, 4 - i % 4, 2), i // 4)
    assert different_rails([good, good]) == ()
    assert len(different_rails([good, tree(broken)])) == 1


def test_a_default_route_over_a_bond(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for i in range(3):
        rate = "100 Gb/sec (4X EDR)" if i == 0 else "25 Gb/sec (1X EDR)"
        machine.card(f"mlx5_{i}", f"pci0000:0{i}/0000:0{i}:01.0", 0, layer="Ethernet", interface=f"ens{i}", rate=rate)
    for below in ("ens1", "ens2"):
        machine.write(f"sys/class/net/bond0/lower_{below}/mtu", 9000)
    machine.write("sys/class/net/bond0.7/lower_bond0/mtu", 9000)
    machine.write("proc/net/route", "Iface\tDestination\nbond0.7\t00000000")
    assert [verdict.usable for verdict in judge_ports(tree(machine))] == [True, False, False]
    machine.write("sys/class/net/bond0/lower_ens0/mtu", 9000)
    machine.write("sys/class/infiniband/mlx5_0/ports/1/rate", "25 Gb/sec (1X EDR)")
    assert [verdict.usable for verdict in judge_ports(tree(machine))] == [True] * 3, "there is no other network"


def test_rails_beside_faster_storage(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for i in range(2):
        machine.gpu(switch(1, i + 1, 1), 0)
        machine.card(f"mlx5_{i}", switch(1, i + 1, 2), 0, rate="200 Gb/sec (2X NDR)")
        machine.card(f"mlx5_{i + 2}", f"pci0000:0{i + 2}/0000:0{i + 2}:01.0", 0)
    assert [verdict.usable for verdict in judge_ports(tree(machine))] == [True, True, False, False]


def test_slingshot_cards(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for i in range(2):
        machine.gpu(switch(1, i + 1, 1), 0)
        directory = machine.pci(switch(1, i + 1, 2), 0, vendor="0x17db")
        (directory / f"net/hsn{i}").mkdir(parents=True)
        machine.interface(f"hsn{i}", directory, 200_000)
        machine.link(f"sys/class/cxi/cxi{i}/device", directory)
    facts = tree(machine)
    assert [(nic.name, nic.kind, nic.interfaces) for nic in facts.nics] == [
        ("cxi0", "slingshot", ("hsn0",)),
        ("cxi1", "slingshot", ("hsn1",)),
    ]
    assert [port.rate_gbps for nic in facts.nics for port in nic.ports if port.active] == [200, 200]
    assert [(matched.nic, matched.path_type) for matched in match(facts)] == [("cxi0", "PIX"), ("cxi1", "PIX")]


def test_azure_has_a_pci_domain_for_each_device(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.numa({0: "0-23", 1: "24-47"})
    bus = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/4750-000{0}/pci{1}:00/{1}:00:00.0"
    for i in (1, 2):
        machine.gpu(bus.format(i, f"000{i}"), i - 1, "NVIDIA A100-SXM4-80GB")
        machine.card(f"mlx5_ib{i - 1}", bus.format(i, f"010{i}"), i - 1, card="MT4124")
    facts = tree(machine)
    assert [gpu.pci for gpu in facts.gpus] == ["0001:00:00.0", "0002:00:00.0"]
    assert facts.link("GPU0", "mlx5_ib0") == "NODE" and facts.link("GPU0", "mlx5_ib1") == "SYS"
    assert [matched.nic for matched in match(facts)] == ["mlx5_ib0", "mlx5_ib1"]


def test_a_copy_that_has_links_and_not_what_they_lead_to(tmp_path: Path) -> None:
    for i in range(2):
        place = Path(f"../../../devices/pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:0{i}.0/0000:8{i + 3}:00.0")
        device = tmp_path / f"sys/class/infiniband/mlx5_{i}"
        (device / "ports/1").mkdir(parents=True)
        (device / "device").symlink_to(place)
        (tmp_path / "sys/bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"sys/bus/pci/devices/0000:8{i + 3}:00.0").symlink_to(place)
    facts = read_tree(tmp_path / "sys", tmp_path / "proc")
    assert [nic.pci for nic in facts.nics] == ["0000:83:00.0", "0000:84:00.0"]
    assert facts.link("mlx5_0", "mlx5_1") == "PIX"
    (tmp_path / "copied/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (tmp_path / "copied/class/infiniband/mlx5_0/device").mkdir()
    (tmp_path / "copied/class/infiniband/mlx5_0/device/uevent").write_text("DRIVER=mlx5\nPCI_SLOT_NAME=0000:1a:00.0\n")
    assert read_rdma(tmp_path / "copied")[0].pci == "0000:1a:00.0", "links were followed when it was copied"


def test_a_bridge_that_names_all_cpus_says_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.numa({0: "0-23", 1: "24-47"})
    machine.gpu("pci0000:00/0000:00:02.0/0000:01:00.0", -1)
    machine.write("sys/devices/pci0000:00/0000:00:02.0/numa_node", -1)
    machine.write("sys/devices/pci0000:00/0000:00:02.0/local_cpulist", "0-47")
    assert tree(machine).gpus[0].cpus == ()


def test_what_the_matrix_cannot_say_of_the_cards_in_sysfs(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.gpu(switch(1, 1, 1), 0)
    machine.card("mlx5_0", switch(1, 1, 2), 0)
    reported = parse_matrix("\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t0-3\t0\nNIC0\tSYS\t X\n")
    facts = merge(tree(machine), reported)
    assert [nic.name for nic in facts.nics] == ["mlx5_0"] and facts.link("GPU0", "mlx5_0") == "PIX"
    assert any("the NIC behind NIC0" in note for note in facts.unknown)


def test_limits_and_the_cpuset_of_the_process(tmp_path: Path) -> None:
    machine = hgx(tmp_path)
    assert tree(machine).limits == NodeLimits() and tree(machine).allowed == ()
    machine.write(
        "proc/self/status", "Name:\tcat\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3,96-99\nMems_allowed_list:\t0"
    )
    machine.write(
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max open files            1024                 524288               files     \n"
        "Max locked memory         unlimited            unlimited            bytes     ",
    )
    assert tree(machine).limits == NodeLimits(UNLIMITED, 1024, 524288)
    masks = [mask.cpus for mask in cpu_masks(tree(machine))]
    assert masks[:4] == [(0, 96), (1, 97), (2, 98), (3, 99)] and masks[4:] == [None] * 4


def test_whether_cards_read_gpu_memory(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    assert tree(machine).gpu_direct is None
    machine.write("sys/module/nvidia/version", "570.133.20")
    machine.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Fri")
    machine.write("proc/sys/kernel/osrelease", "5.14.0-503.el9.x86_64")
    assert tree(machine).gpu_direct == "none"
    machine.write(
        "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  R"
    )
    assert tree(machine).gpu_direct == "DMA-BUF"
    machine.write("proc/sys/kernel/osrelease", "4.18.0-553.el8.x86_64")
    assert tree(machine).gpu_direct == "none"
    machine.write("sys/module/nvidia_peermem/refcnt", "0")
    assert tree(machine).gpu_direct == "nvidia_peermem"
    facts = read_recording(tmp_path, None)
    assert dict(facts.versions) == {"driver": "570.133.20", "kernel": "4.18.0-553.el8.x86_64"}


def test_this_machine() -> None:
    facts = discover()
    assert facts.node and facts.allowed and facts.limits.open_files and facts.limits.shared_memory
    assert NodeFacts.from_json(facts.to_json()) == facts
    check_fields(facts)  # what the rendezvous server accepts
