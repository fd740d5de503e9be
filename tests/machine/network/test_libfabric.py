"""EFA and Slingshot: the plugin, the guard against TCP, and the variables that sites publish."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hpc_train.config.conf_files import config_directory
from hpc_train.machine.environment import Variable
from hpc_train.machine.network.decision import FabricDecision, FabricJob, decide
from hpc_train.machine.network.facts import NodeFacts, Setting
from hpc_train.machine.network.libfabric import SLINGSHOT, find_plugin
from tests.machine.network.nodes import Card, Site

ALPS = Site(
    gpus=4,
    model="NVIDIA GH200 120GB",
    cards={f"cxi{i}": Card(200, "Ethernet", interface=f"hsn{i}", kind="slingshot", far="SYS") for i in range(4)},
    interfaces={"nmn0": 25},
    default="nmn0",
)
POLARIS = replace(ALPS, model="NVIDIA A100-SXM4-40GB")
P5 = Site(cards={f"rdmap{i}s0": Card(100, "Unspecified", near=(i,), kind="efa") for i in range(8)}, cloud="aws")
# the variables that HPE, CSCS, Isambard-AI, Sigma2 or ALCF publish for NCCL on Slingshot, as of May 2026
PUBLISHED = {
    "NCCL_NET": "AWS Libfabric",
    "NCCL_NET_GDR_LEVEL": "PHB",
    "NCCL_CROSS_NIC": "1",
    "NCCL_SOCKET_IFNAME": "hsn",
    "FI_MR_CACHE_MONITOR": "userfaultfd",
    "FI_CXI_DISABLE_HOST_REGISTER": "1",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",
    "FI_CXI_DEFAULT_TX_SIZE": "2048",
    "FI_CXI_RX_MATCH_MODE": "hybrid",
    "FI_CXI_RDZV_EAGER_SIZE": "0",
    "FI_CXI_RDZV_GET_MIN": "0",
    "FI_CXI_RDZV_THRESHOLD": "0",
}


def with_plugin(nodes: list[NodeFacts], *paths: str | None) -> list[NodeFacts]:
    return [replace(facts, net_plugin=path) for facts, path in zip(nodes, paths, strict=True)]


def exported(decision: FabricDecision) -> dict[str, str]:
    names = ("NCCL_", "FI_")
    return {v.name: v.value for v in decision.variables if v.name.startswith(names) and v.name != "NCCL_DEBUG"}


def test_slingshot_gets_what_sites_publish() -> None:
    nodes = with_plugin(POLARIS.nodes(2), "/opt/lib/libnccl-net.so", "/opt/lib/libnccl-net.so")
    decision = decide(nodes, FabricJob(2, 4, (2, 27)), {})
    assert exported(decision) == PUBLISHED and decision.unknown == ()
    assert all("(" in variable.reason for variable in SLINGSHOT if variable.name != "NCCL_SOCKET_IFNAME"), "no source"
    grace = decide(with_plugin(ALPS.nodes(2), "/p", "/p"), FabricJob(2, 4, (2, 27)), {})
    assert exported(grace) == PUBLISHED | {"NCCL_PROTO": "^LL128"}
    assert decide(ALPS.nodes(1), FabricJob(1, 4, (2, 27)), {}).fabric == "one_node", "where NCCL_NET costs time"


def test_the_profile_says_what_detection_says() -> None:
    path = config_directory() / "cluster/fabric/slingshot.yaml"
    assert yaml.safe_load(path.read_text())["variables"] == PUBLISHED


@pytest.mark.parametrize("site", [ALPS, P5], ids=["slingshot", "efa"])
def test_nodes_without_the_plugin_are_named(site: Site) -> None:
    decision = decide(with_plugin(site.nodes(2), "/p", ""), FabricJob(2, 4, (2, 27)), {})
    assert len(decision.unknown) == 1 and "aws-ofi-nccl on n2: lib*ccl-net*.so* is in no folder" in decision.unknown[0]
    assert exported(decision)["NCCL_NET"] == "AWS Libfabric", "NCCL fails instead of using TCP"
    recorded = decide(site.nodes(2), FabricJob(2, 4, (2, 27)), {})
    assert recorded.unknown == ("whether NCCL finds the plugin aws-ofi-nccl; without it NCCL refuses to start",)


@pytest.mark.parametrize("site", [ALPS, P5], ids=["slingshot", "efa"])
def test_the_user_may_choose_tcp_or_another_plugin(site: Site) -> None:
    nodes = with_plugin(site.nodes(2), "", "")
    tcp = decide(nodes, FabricJob(2, 4), {"NCCL_NET": Setting("NCCL_NET", "Socket", "the environment")})
    assert "NCCL_NET" not in exported(tcp) and tcp.unknown == ()
    profile = (Variable("NCCL_NET", "Socket", "the site profile x"),)
    assert decide(nodes, FabricJob(2, 4, None, profile), {}).unknown == ()
    plugin = {"NCCL_NET_PLUGIN": Setting("NCCL_NET_PLUGIN", "mine", "the environment")}
    assert "NCCL_NET" not in exported(decide(nodes, FabricJob(2, 4), plugin))


def test_the_plugin_is_searched_where_the_loader_looks(tmp_path: Path) -> None:
    assert find_plugin({}, tmp_path) == ""
    for folder, name in (
        ("usr/lib/x86_64-linux-gnu", "libnccl-net-ofi.so"),
        ("opt/amazon/ofi-nccl/lib", "libnccl-net.so"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).touch()
        assert find_plugin({}, tmp_path) == str(tmp_path / folder / name)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/libnccl-net.so.0").touch()
    found = find_plugin({"LD_LIBRARY_PATH": f":{tmp_path}/missing:{tmp_path}/own"}, tmp_path)
    assert found == f"{tmp_path}/own/libnccl-net.so.0"
