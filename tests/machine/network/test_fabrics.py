"""Sites and their accidents: what the workers get on each, what is said to be unknown, and which nodes are sick.

The decisions were written by hand from the documentation of NCCL and of the sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hpc_train.machine.network.decision import FabricJob, decide
from hpc_train.machine.network.facts import Nic, NodeFacts
from hpc_train.machine.network.rails import sick_lines
from tests.machine.network.nodes import DOWN, H200, Card, Site, rails
from tests.machine.network.test_libfabric import ALPS, P5, POLARIS, PUBLISHED

GENERAL = {"CUDA_DEVICE_ORDER", "NCCL_DEBUG", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_FR_BUFFER_SIZE"}
GENERAL |= {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_TIMING"}
GUARD = {"NCCL_NET": "AWS Libfabric"}
STORAGE = {"NCCL_IB_HCA": "^=mlx5_1,mlx5_2"}
PATIENCE = {"NCCL_IB_TIMEOUT": "22"}
FOUR_BY_FOUR = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
RAIL, STORAGE_PORT = H200.cards["mlx5_4"], H200.cards["mlx5_1"]
A100 = "NVIDIA A100-SXM4-80GB"


@dataclass(frozen=True)
class Case:
    """Nodes and the decision on them.

    Attributes:
        gets: the variables besides those that every job has.
        unknown: the beginning of each line on what is unknown.
        sick: the beginning of each line on a sick node.
        because: words of the reasons for variables that are not set.
    """

    nodes: Sequence[NodeFacts]
    fabric: str
    gets: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    sick: tuple[str, ...] = ()
    because: Mapping[str, str] = field(default_factory=dict)
    nccl: tuple[int, ...] | None = (2, 27)
    gpus: int = 4


def all_of(nodes: Sequence[NodeFacts], **facts: Any) -> list[NodeFacts]:
    return [replace(node, **facts) for node in nodes]


def ethernet(speed: float, model: str = "NVIDIA L40S", **more: Any) -> Site:
    return Site(gpus=4, model=model, interfaces={"ens1": speed}, default="ens1", **more)


DGX_A100 = Site(
    model=A100,
    cards={f"mlx5_{i}": Card(200, near=(gpu,)) for gpu, i in enumerate((0, 1, 2, 3, 6, 7, 8, 9))}
    | {f"mlx5_{i}": Card(200, "Ethernet", interface=f"ens{i}") for i in (4, 5)},
)
LEONARDO = Site(
    gpus=4,
    model="NVIDIA A100-SXM-64GB",
    cards={name: replace(card, interface=name.replace("mlx5_", "ib")) for name, card in rails(4, rate=200).items()},
    interfaces={},
    default="ib0",
)
FLAT_ROCE = Site(
    cards={
        name: replace(card, interface=name.replace("mlx5_", "eth"), far="NODE", gid=3)
        for name, card in rails(8, layer="Ethernet").items()
    },
    interfaces={},
    default="eth0",
)
PCIE = Site(
    gpus=8,
    model="NVIDIA L40S",
    cards={f"mlx5_{i}": Card(200, "Ethernet", far="PHB" if i == 0 else "SYS", gid=3) for i in range(2)},
)
GB200 = Site(gpus=4, model="NVIDIA GB200", cards={f"mlx5_{i}": Card(far="SYS") for i in range(4)})
MANAGED = Site(cards=rails(8, layer="Ethernet") | {"mlx5_8": Card(25, "Ethernet", interface="eth8")}, default="eth8")
MIXED_PORTS = Site(gpus=2, cards={"mlx5_0": Card(near=(0, 1)), "mlx5_0:2": Card(100, "Ethernet", port=2)})
DUAL = Site(gpus=2, cards={"mlx5_0": Card(100, "Ethernet", (0, 1)), "mlx5_0:2": Card(100, "Ethernet", (0, 1), port=2)})
NO_IMEX = "n1, n2 cannot open /dev/nvidia-caps-imex-channels/channel*"
LOST = Site(gpus=8, cards={}, interfaces={"eno1": 25})

HEALTHY = {
    "DGX A100: storage over Ethernet": Case(DGX_A100.nodes(4), "infiniband", {"NCCL_IB_HCA": "^=mlx5_4,mlx5_5"}),
    "eight rails and nothing else": Case(
        Site(cards=rails(8)).nodes(4),
        "infiniband",
        because={
            "NCCL_IB_HCA": "no active port must be excluded",
            "NCCL_NET_GDR_LEVEL": "NCCL uses GPUDirect, because",
        },
    ),
    "eight H200 and two slower storage ports": Case(H200.nodes(16), "infiniband", STORAGE),
    "diskless nodes with IP over InfiniBand": Case(LEONARDO.nodes(8), "infiniband"),
    "a NIC across the socket": Case(
        Site(gpus=2, cards={"mlx5_0": Card(100, far="SYS")}).nodes(2),
        "infiniband",
        because={"NCCL_NET_GDR_LEVEL": "GPU and NIC are SYS here, where NCCL does not use GPUDirect: measure with SYS"},
    ),
    "PCIe cards with RoCE": Case(
        PCIE.nodes(2), "roce", because={"NCCL_NET_GDR_LEVEL": "GPU and NIC are PHB here", "NCCL_IB_TC": "traffic class"}
    ),
    "RoCE with an old NCCL": Case(PCIE.nodes(2), "roce", {"NCCL_IB_GID_INDEX": "3"}, nccl=(2, 19)),
    "RoCE with different addresses": Case(
        [PCIE.node("n1"), PCIE.node("n2", mlx5_0=replace(PCIE.cards["mlx5_0"], gid=5))],
        "roce",
        because={"NCCL_IB_GID_INDEX": "the ports have no common RoCE v2 entry"},
        nccl=(2, 19),
    ),
    "RoCE with an unknown NCCL": Case(PCIE.nodes(2), "roce", unknown=("the version of NCCL",), nccl=None),
    "10 Gb/s Ethernet": Case(ethernet(10).nodes(2), "ethernet", because={"NCCL_IB_DISABLE": "at most 1.25 GB/s"}),
    "25 Gb/s Ethernet": Case(ethernet(25).nodes(2), "ethernet", FOUR_BY_FOUR),
    "100 Gb/s Ethernet": Case(ethernet(100).nodes(2), "ethernet", FOUR_BY_FOUR),
    "200 Gb/s Ethernet": Case(ethernet(200).nodes(2), "ethernet"),
    "EFA with its plugin": Case(all_of(P5.nodes(2), net_plugin="/opt/p"), "efa", GUARD),
    "EFA of a recording": Case(P5.nodes(2), "efa", GUARD, ("whether NCCL finds the plugin aws-ofi-nccl; without",)),
    "Slingshot with A100": Case(all_of(POLARIS.nodes(2), net_plugin="/opt/p"), "slingshot", PUBLISHED),
    "Slingshot with Grace-Hopper": Case(
        all_of(ALPS.nodes(2), net_plugin="/opt/p"),
        "slingshot",
        PUBLISHED | {"NCCL_PROTO": "^LL128"},
        because={"FI_CXI_RDZV_PROTO": "--network=disable_rdzv_get"},
    ),
    "Slingshot whose NICs a container hides": Case(
        all_of(Site(gpus=4, interfaces={"hsn0": 200, "hsn1": 200}).nodes(2), net_plugin=""),
        "slingshot",
        PUBLISHED,
        ("whether NCCL finds the plugin aws-ofi-nccl on n1, n2",),
    ),
    "Azure's H200": Case(
        all_of(Site(cards=rails(8), cloud="azure").nodes(2), topology_file="/opt/microsoft/ndv5-topo.xml"),
        "infiniband",
        {"NCCL_TOPO_FILE": "/opt/microsoft/ndv5-topo.xml"},
        because={"NCCL_NET_GDR_LEVEL": "NCCL reads the distance between GPU and NIC from a topology file"},
    ),
    "Google's A3 Mega": Case(
        ethernet(200, "NVIDIA H100 80GB HBM3", cloud="gcp").nodes(2),
        "ethernet",
        unknown=("the settings of Google's NCCL plugin",),
        because={"NCCL_SOCKET_NTHREADS": "NCCL chooses the values"},
    ),
    "Google's A3 Ultra": Case(
        Site(model="NVIDIA H200", cards=rails(8, layer="Ethernet"), cloud="gcp").nodes(2),
        "roce",
        unknown=("the settings of Google's NCCL plugin",),
    ),
    "Google's A2": Case(ethernet(100, A100, cloud="gcp").nodes(2), "ethernet"),
    "Oracle's RoCE rails and two management ports": Case(
        Site(
            cards={f"mlx5_{i}": Card(200, "Ethernet", (i // 2,)) for i in range(16)}
            | {f"mlx5_{i}": Card(50, "Ethernet", interface=f"eth{i}") for i in (16, 17)}
        ).nodes(2),
        "roce",
        {"NCCL_IB_HCA": "^=mlx5_16,mlx5_17"},
        nccl=(2, 27),
    ),
    "GB200 with IMEX channels": Case(
        all_of(GB200.nodes(2), imex_channels=1, nvlink_domain="u.1"),
        "infiniband",
        because={"NCCL_MNNVL_ENABLE": "NCCL detects NVLink between nodes, and each has an IMEX channel"},
    ),
    "GB200 without IMEX channels": Case(
        all_of(GB200.nodes(2), imex_channels=0),
        "infiniband",
        unknown=("whether NVLink connects the nodes; " + NO_IMEX,),
        because={"NCCL_MNNVL_ENABLE": NO_IMEX},
    ),
    "GB200 in two racks": Case(
        [replace(GB200.node(f"n{i}"), imex_channels=1, nvlink_domain=f"u.{i}") for i in (1, 2)],
        "infiniband",
        because={"NCCL_MNNVL_ENABLE": "these are in 2 NVLink domains"},
    ),
    "no GPUs": Case(Site(gpus=0).nodes(2), "cpu", gpus=0, because={"NCCL_*": "all traffic uses gloo"}),
    "one node": Case(H200.nodes(1), "one_node", {"GLOO_SOCKET_IFNAME": "lo"}),
}
ODD = {
    "a flat RoCE network whose route uses a rail": Case(FLAT_ROCE.nodes(4), "roce"),
    "a management port among RoCE rails": Case(MANAGED.nodes(4), "roce", {"NCCL_IB_HCA": "^=mlx5_8"}),
    "Broadcom for management, Mellanox for training": Case(
        Site(cards=rails(8) | {"bnxt_re0": Card(100, "Ethernet", model="BCM57508", interface="eth0")}).nodes(4),
        "infiniband",
        {"NCCL_IB_HCA": "^=bnxt_re0"},
    ),
    "Broadcom for storage at the rate of the rails": Case(
        Site(cards=rails(8, layer="Ethernet") | {f"bnxt_re{i}": Card(400, "Ethernet") for i in range(2)}).nodes(4),
        "roce",
        {"NCCL_IB_HCA": "^=bnxt_re0,bnxt_re1"},
    ),
    "Intel with the default route beside InfiniBand": Case(
        Site(
            gpus=2,
            cards={"mlx5_0": Card(200, far="PHB"), "irdma0": Card(100, "Ethernet", far="PHB", interface="eth0")},
            default="eth0",
        ).nodes(2),
        "infiniband",
        {"NCCL_IB_HCA": "^=irdma0"},
    ),
    "an InfiniBand and an Ethernet port of one card": Case(
        MIXED_PORTS.nodes(2), "infiniband", {"NCCL_IB_HCA": "^=mlx5_0:2"}
    ),
    "both ports of a card": Case(DUAL.nodes(2), "roce", because={"NCCL_IB_MERGE_NICS": "merges the ports"}),
    "all ports down": Case(
        Site(gpus=4, cards=rails(4, **DOWN), interfaces={"eno1": 25}).nodes(2), "ethernet", FOUR_BY_FOUR
    ),
    "NICs of which only the names are known": Case(
        [NodeFacts(node=name, gpus=H200.node().gpus, nics=(Nic("mlx5_0"),)) for name in ("n1", "n2")],
        "unknown",
        unknown=("the network between the nodes",),
        because={"NCCL_SOCKET_IFNAME": "it is not known which interface", "NCCL_NET_GDR_LEVEL": "paths are unknown"},
    ),
    "host names that lead to another network": Case(
        all_of(LEONARDO.nodes(4), route="ib0", automatic="eno1"),
        "infiniband",
        {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ib0", "TP_SOCKET_IFNAME": "ib0"},
    ),
    "host names that lead to the right network": Case(
        all_of(LEONARDO.nodes(4), route="ib0", automatic="ib0"),
        "infiniband",
        because={"NCCL_SOCKET_IFNAME": "the automatic choice leads to the other nodes"},
    ),
    "interfaces with different names": Case(
        [replace(LEONARDO.node(f"n{i}"), route=f"ib{i}", automatic="eno1") for i in range(2)],
        "infiniband",
        unknown=("one network interface for all nodes",),
        because={"NCCL_SOCKET_IFNAME": "different names"},
    ),
    "two kinds of node": Case(
        [*H200.nodes(2), *(Site(model=A100, cards=rails(8, rate=200)).node(f"a{i}") for i in range(2))],
        "infiniband",
        unknown=("whether mlx5_1:1 serves training", "whether mlx5_2:1 serves training"),
        because={"NCCL_IB_HCA": "a0 uses it, and n1 leaves it out"},
    ),
}
SICK = {
    "a storage port of 16 nodes came up faster": Case(
        H200.nodes(16, H200.node("fast", mlx5_1=replace(STORAGE_PORT, rate=400))), "infiniband", STORAGE
    ),
    "all rails of one node are slow": Case(
        H200.nodes(
            16, H200.node("bad", **{name: replace(c, rate=200) for name, c in H200.cards.items() if c.rate == 400})
        ),
        "infiniband",
        STORAGE,
        sick=("bad is unfit: mlx5_0:1 runs at 200 Gb/s, on the other nodes at 400; mlx5_3:1 runs at 200",),
    ),
    "five rails of one node are down": Case(
        H200.nodes(16, H200.node("bad", **{f"mlx5_{i}": replace(RAIL, **DOWN) for i in (4, 5, 6, 9, 10)})),
        "infiniband",
        STORAGE,
        sick=("bad is unfit: mlx5_4:1 is DOWN and POLLING, which 15 of 16 nodes use; mlx5_5:1",),
    ),
    "two sick nodes": Case(
        H200.nodes(8, H200.node("b1", mlx5_4=replace(RAIL, state="INIT")), H200.node("b2", lost=("mlx5_5",))),
        "infiniband",
        STORAGE,
        sick=("b1 is unfit: mlx5_4:1 is INIT and LINKUP", "b2 is unfit: it has no mlx5_5:1"),
    ),
    "a link that flaps": Case(
        H200.nodes(4, H200.node("flaps", mlx5_4=replace(RAIL, downs=40))), "infiniband", STORAGE | PATIENCE
    ),
    "more than a thousand GPUs": Case(H200.nodes(128), "infiniband", STORAGE | PATIENCE, gpus=8),
    "a slow rail of a flat RoCE network": Case(
        FLAT_ROCE.nodes(16, FLAT_ROCE.node("bad", mlx5_3=replace(FLAT_ROCE.cards["mlx5_3"], rate=100))),
        "roce",
        sick=("bad is unfit: mlx5_3:1 runs at 100 Gb/s",),
    ),
    "a Slingshot NIC of one node is down": Case(
        all_of(
            POLARIS.nodes(8, POLARIS.node("bad", cxi1=replace(POLARIS.cards["cxi1"], state="DOWN"))), net_plugin="/p"
        ),
        "slingshot",
        PUBLISHED,
        sick=("bad is unfit: cxi1:1 is DOWN",),
    ),
    "a node without any NIC": Case(
        H200.nodes(4, replace(LOST.node("bad"), gpus=H200.node().gpus)),
        "infiniband",
        STORAGE,
        sick=("bad is unfit: it has no mlx5_0:1",),
    ),
}
CASES = HEALTHY | ODD | SICK


@pytest.mark.parametrize("name", CASES)
def test_the_decision(name: str) -> None:
    case = CASES[name]
    decision = decide(case.nodes, FabricJob(len(case.nodes), case.gpus, case.nccl), {})
    assert decision.fabric == case.fabric
    gets = {variable.name: variable.value for variable in decision.variables if variable.name not in GENERAL}
    assert gets == dict(case.gets)
    assert len(decision.unknown) == len(case.unknown), decision.unknown
    assert all(line.startswith(begin) for line, begin in zip(decision.unknown, case.unknown, strict=True))
    left = {alone.name: alone.reason for alone in decision.not_set}
    assert all(words in left[variable] for variable, words in case.because.items()), left
    assert not set(left) & set(gets)
    sick = sick_lines(case.nodes) if len(case.nodes) > 1 else ()
    assert len(sick) == len(case.sick), sick
    assert all(line.startswith(begin) for line, begin in zip(sick, case.sick, strict=True)), sick
