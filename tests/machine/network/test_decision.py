"""The environment for the kinds of machine that there are, and who has the last word on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.machine.environment import Variable
from hpc_train.machine.network.decision import FabricDecision, FabricJob, decide
from hpc_train.machine.network.discovery import read_tree
from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.network.libfabric import SLINGSHOT
from hpc_train.machine.network.nccl_settings import merged, read_conf, settings, settings_of_communication, warnings
from hpc_train.machine.network.node import topology_file
from tests.machine.network.machines import Machine, hgx, switch

GENERAL = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "NCCL_DEBUG": "WARN",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_ENABLE_TIMING": "1",
}
STAGES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
GUARD = Variable("NCCL_NET", "AWS Libfabric", "")
ROCE_GIDS = {3: ("RoCE v2", "0000:0000:0000:0000:0000:ffff:0a00:0001")}


def dgx_a100(root: Path) -> Machine:
    machine = Machine(root)
    for i in range(8):
        machine.gpu(switch(i // 2 + 1, 1, i % 2), i // 2, "NVIDIA A100-SXM4-80GB")
        machine.card(f"mlx5_{i}", switch(i // 2 + 1, 1, i % 2 + 2), i // 2, rate="200 Gb/sec (4X HDR)")
    return machine


def roce(root: Path) -> Machine:
    machine = Machine(root)
    for i in range(4):
        machine.gpu(switch(1, i + 1, 1), 0)
        machine.card(f"mlx5_{i}", switch(1, i + 1, 2), 0, layer="Ethernet", gids=ROCE_GIDS)
    return machine


def efa(root: Path) -> Machine:
    machine = Machine(root)
    for i in range(8):
        machine.gpu(switch(1, i + 1, 1), 0)
        machine.card(
            f"rdmap{i}s0", switch(1, i + 1, 2), 0, vendor="0x1d0f", card="", layer="Unspecified", rate="100 Gb/sec"
        )
    return machine


def slingshot(root: Path) -> Machine:
    machine = Machine(root)
    for i in range(4):
        machine.gpu(switch(1, i + 1, 1), 0)
        machine.interface(f"hsn{i}", machine.pci(switch(1, i + 1, 2), 0, vendor="0x17db"), 200_000)
    return machine


def azure(root: Path) -> Machine:
    machine = dgx_a100(root)
    machine.write("sys/class/dmi/id/chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77")
    return machine


def azure_with_file(root: Path) -> Machine:
    machine = azure(root)
    machine.write("opt/microsoft/ndv4-topo.xml", "<system/>")
    return machine


def gb200(root: Path) -> Machine:
    machine = Machine(root)
    for i in range(4):
        machine.gpu(f"pci00{i}9:01/00{i}9:01:00.0", 0, "NVIDIA GB200")
        machine.card(f"mlx5_{i}", f"pci00{i}0:01/00{i}0:01:00.0", 0)
    return machine


def pcie_box(root: Path) -> Machine:
    machine = Machine(root)
    for i in range(4):
        machine.gpu(f"pci0000:0{i}/0000:0{i}:01.0/0000:1{i}:00.0", 0, "NVIDIA L40S")
    machine.ethernet("ens1", "pci0000:07/0000:07:01.0/0000:17:00.0", 25_000)
    return machine


def cpu_only(root: Path) -> Machine:
    machine = Machine(root)
    machine.ethernet("ens1", "pci0000:07/0000:07:01.0/0000:17:00.0", 25_000)
    return machine


def facts_of(build: Callable[[Path], Machine], root: Path) -> NodeFacts:
    machine = build(root)
    return read_tree(machine.root / "sys", machine.root / "proc")


def exported(decision: FabricDecision) -> dict[str, str]:
    return {variable.name: variable.value for variable in decision.variables}


@pytest.mark.parametrize(
    ("build", "nccl", "fabric", "besides"),
    [
        (dgx_a100, (2, 21, 5), "infiniband", {}),
        (hgx, (2, 21, 5), "infiniband", {"NCCL_IB_HCA": "^=mlx5_4,mlx5_5"}),
        (roce, (2, 20, 3), "roce", {"NCCL_IB_GID_INDEX": "3"}),
        (roce, (2, 21, 0), "roce", {}),
        (roce, None, "roce", {}),
        (efa, (2, 26), "efa", {"NCCL_NET": "AWS Libfabric"}),
        (slingshot, (2, 26), "slingshot", {variable.name: variable.value for variable in (GUARD, *SLINGSHOT)}),
        (azure, (2, 26), "infiniband", {}),
        (gb200, (2, 26), "infiniband", {}),
        (pcie_box, (2, 26), "ethernet", {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}),
    ],
)
def test_golden(
    tmp_path: Path, build: Callable[[Path], Machine], nccl: tuple[int, ...] | None, fabric: str, besides: dict[str, str]
) -> None:
    facts = facts_of(build, tmp_path)
    decision = decide([facts, facts], FabricJob(2, len(facts.gpus), nccl), {})
    assert decision.fabric == fabric
    assert exported(decision) == GENERAL | besides
    names = [alone.name for alone in decision.not_set]
    assert len(names) == len(set(names)) and not set(names) & set(exported(decision))
    assert any("the version of NCCL" in note for note in decision.unknown) == (nccl is None)
    one_node = decide([facts], FabricJob(1, len(facts.gpus), nccl, has_stages=True), {})
    assert exported(one_node) == GENERAL | STAGES | {"GLOO_SOCKET_IFNAME": "lo"} and one_node.fabric == "one_node"


@pytest.mark.parametrize(
    "build",
    [dgx_a100, hgx, roce, efa, slingshot, azure_with_file, gb200, pcie_box, cpu_only],
    ids=lambda build: build.__name__,
)
def test_the_user_wins_at_each_site_and_place(tmp_path: Path, build: Callable[[Path], Machine]) -> None:
    """Every other variable is set by the user, in the environment, in the own or in the system's file."""
    machine = build(tmp_path / "machine")
    facts = read_tree(machine.root / "sys", machine.root / "proc")
    facts = replace(facts, node="n1", topology_file=topology_file(facts, machine.root), route="ens1", automatic="lo")
    job = FabricJob(256, len(facts.gpus), (2, 20), has_stages=True)  # so large and old that what can be set is
    ours = exported(decide([facts], job, {}))
    home, system, chosen = tmp_path / "home", tmp_path / "nccl.conf", tmp_path / "chosen.conf"
    home.mkdir()
    for kept in (0, 1):
        own = dict.fromkeys(sorted(ours)[kept::2], "the user's")
        lines = "".join(f"{name}={value}\n" for name, value in own.items())
        for place in ("the environment", str(home / ".nccl.conf"), str(chosen), str(system)):
            for file in (home / ".nccl.conf", chosen, system):
                file.write_text(lines if place == str(file) else "")
            environment = own if place == "the environment" else {}
            pointer = {"NCCL_CONF_FILE": str(chosen)} if place == str(chosen) else {}
            decision = decide([facts], job, settings(environment | pointer, home, system))
            assert exported(decision) == {name: value for name, value in ours.items() if name not in own}
            reported = {alone.name: alone.reason for alone in decision.not_set}
            for name in own:
                assert reported[name] == f"already set to the user's by {place}, which takes precedence"


def test_without_gpus_nothing_of_nccl(tmp_path: Path) -> None:
    facts = facts_of(cpu_only, tmp_path)
    right = replace(facts, node="n1", route="ens1", automatic="ens1")
    assert exported(decide([right, right], FabricJob(2, 0), {})) == {"TORCH_FR_BUFFER_SIZE": "2000"}
    assert [alone.name for alone in decide([right, right], FabricJob(2, 0), {}).not_set] == ["NCCL_*"]


def test_the_interface_is_named_where_the_host_name_leads_elsewhere(tmp_path: Path) -> None:
    facts = replace(facts_of(cpu_only, tmp_path), node="n1", route="ens1", automatic="ens1")
    first = replace(facts, node="n0", route="lo", automatic="lo")  # 127.0.1.1 in its /etc/hosts
    decision = decide([first, facts], FabricJob(2, 0), {})
    assert exported(decision) == {
        "GLOO_SOCKET_IFNAME": "ens1",
        "TP_SOCKET_IFNAME": "ens1",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    assert "lo on n0" in decision.variables[0].reason
    gpus = decide([first, facts], FabricJob(2, 4), {})
    assert exported(gpus)["NCCL_SOCKET_IFNAME"] == "=ens1"
    other = replace(facts, route="eth7")
    differs = decide([first, facts, other], FabricJob(3, 0), {})
    assert "GLOO_SOCKET_IFNAME" not in exported(differs)
    assert any("different names" in note for note in differs.unknown)
    same_machine = replace(facts, route="lo", automatic="ens1")
    assert "GLOO_SOCKET_IFNAME" not in exported(decide([same_machine] * 2, FabricJob(2, 0), {}))


def test_the_topology_file_of_a_virtual_machine(tmp_path: Path) -> None:
    facts = facts_of(azure, tmp_path)
    assert facts.site == "azure"
    assert topology_file(facts, tmp_path) is None
    file = tmp_path / "opt/microsoft/ndv4-topo.xml"
    file.parent.mkdir(parents=True)
    file.touch()
    facts = replace(facts, topology_file=topology_file(facts, tmp_path))
    assert exported(decide([facts], FabricJob(2, 8, (2, 26)), {}))["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv4-topo.xml"
    pcie = replace(facts, gpus=tuple(replace(gpu, model="NVIDIA A100 80GB PCIe") for gpu in facts.gpus))
    assert topology_file(pcie, tmp_path) is None, "of another series of machines"
    without = replace(facts, topology_file=None)
    assert "NCCL_TOPO_FILE" not in exported(decide([facts, without], FabricJob(2, 8, (2, 26)), {}))


def test_large_jobs_and_flapping_links_get_patience(tmp_path: Path) -> None:
    facts = facts_of(dgx_a100, tmp_path)
    patience = {"NCCL_IB_TIMEOUT": "22"}
    assert exported(decide([facts], FabricJob(128, 8, (2, 26)), {})) == GENERAL | patience
    machine = dgx_a100(tmp_path / "flapping")
    machine.write("sys/class/infiniband/mlx5_3/ports/1/counters/link_downed", 255)
    flapping = read_tree(machine.root / "sys", machine.root / "proc")
    decision = decide([facts, flapping], FabricJob(2, 8, (2, 26)), {})
    assert exported(decision) == GENERAL | patience
    reasons = {variable.name: variable.reason for variable in decision.variables}
    assert "mlx5_3 went down 255 times" in reasons["NCCL_IB_TIMEOUT"]


def test_cards_that_are_all_down_leave_the_ethernet(tmp_path: Path) -> None:
    machine = pcie_box(tmp_path)
    machine.card("mlx5_0", "pci0000:08/0000:08:01.0", 0, state="1: DOWN", physical="3: Disabled")
    facts = read_tree(machine.root / "sys", machine.root / "proc")
    decision = decide([facts], FabricJob(2, 4, (2, 26)), {})
    assert decision.fabric == "ethernet"
    reported = {alone.name: alone.reason for alone in decision.not_set}
    assert "25 Gb/s Ethernet carries at most 3.12 GB/s" in reported["NCCL_IB_DISABLE"]


def test_a_port_that_serves_training_on_nodes_of_one_kind_only_is_left_in(tmp_path: Path) -> None:
    one = replace(facts_of(hgx, tmp_path / "a"), node="h1")
    other = replace(facts_of(dgx_a100, tmp_path / "b"), node="a1")
    decision = decide([one, one, other], FabricJob(3, 8, (2, 26)), {})
    assert "NCCL_IB_HCA" not in exported(decision)
    assert any(note.startswith("whether mlx5_4:1 serves training: a1 uses it, and h1") for note in decision.unknown)


def test_the_user_wins_at_each_of_three_places(tmp_path: Path) -> None:
    facts = facts_of(hgx, tmp_path / "machine")
    home, system = tmp_path / "home", tmp_path / "nccl.conf"
    home.mkdir()
    (home / ".nccl.conf").write_text("NCCL_IB_HCA==mlx5_0 # all of this is the value\nNCCL_DEBUG=INFO\n")
    system.write_text("# NCCL_ALGO=Ring\n #NCCL_PROTO=LL\nNCCL_DEBUG=TRACE\nCUDA_DEVICE_ORDER=FASTEST_FIRST\n")
    found = settings({"NCCL_DEBUG": "VERSION"}, home, system)
    assert found["NCCL_DEBUG"].value == "VERSION"
    assert found["NCCL_IB_HCA"].value == "=mlx5_0 # all of this is the value"
    assert "NCCL_ALGO" not in found
    decision = decide([facts], FabricJob(2, 8, (2, 26)), found)
    assert set(exported(decision)) == {
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_ENABLE_TIMING",
    }
    reasons = {alone.name: alone.reason for alone in decision.not_set}
    assert "the environment" in reasons["NCCL_DEBUG"]
    assert str(home) in reasons["NCCL_IB_HCA"]
    assert str(system) in reasons["CUDA_DEVICE_ORDER"]
    other = tmp_path / "other.conf"
    other.write_text("NCCL_IB_HCA=mlx5\n")
    chosen = settings({"NCCL_CONF_FILE": str(other)}, home, system)
    assert chosen["NCCL_IB_HCA"].value == "mlx5" and chosen["NCCL_DEBUG"].value == "TRACE"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_a_setting_of_the_allocator_under_any_name_replaces_ours(name: str, tmp_path: Path) -> None:
    found, _ = merged({"n1": settings_of_communication({name: "max_split_size_mb:64"}), "n2": ()})
    decision = decide([facts_of(hgx, tmp_path)], FabricJob(1, 8, (2, 26)), found)
    assert not any("ALLOC_CONF" in variable.name for variable in decision.variables)


def test_a_job_without_gpus_leaves_the_allocator_alone(tmp_path: Path) -> None:
    decision = decide([facts_of(hgx, tmp_path)], FabricJob(1, 0), {})
    assert not any("ALLOC_CONF" in variable.name for variable in decision.variables)


def test_what_is_set_on_any_node_counts_for_all(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    one = settings_of_communication(home | {"NCCL_IB_HCA": "=mlx5_0", "WANDB_API_KEY": "secret", "OMP_PLACES": "cores"})
    assert [setting.name for setting in one] == ["NCCL_IB_HCA", "OMP_PLACES"]
    other = settings_of_communication(home | {"OMP_PLACES": "cores"})
    found, reported = merged({"n1": one, "n2": other})
    assert reported == ["NCCL_IB_HCA is not the same on all nodes: =mlx5_0 on n1, not set on n2"]
    decision = decide([facts_of(hgx, tmp_path)] * 2, FabricJob(2, 8, (2, 26)), found)
    assert "NCCL_IB_HCA" not in exported(decision)


def test_only_a_profile_sets_what_is_for_debugging(tmp_path: Path) -> None:
    profile = (Variable("NCCL_CROSS_NIC", "0", "rails are separate networks here"),)
    facts = facts_of(dgx_a100, tmp_path)
    decision = decide([facts], replace(FabricJob(2, 8, (2, 26)), profile=profile), {})
    assert exported(decision)["NCCL_CROSS_NIC"] == "0"
    assert "NCCL_CROSS_NIC" not in [alone.name for alone in decision.not_set]


def test_old_names_and_transports_turned_off_are_told() -> None:
    found = settings(
        {"NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_P2P_LEVEL": "4", "NCCL_IB_DISABLE": "1", "NCCL_IB_TIMEOUT": "32"},
        Path("/nonexistent"),
        Path("/nonexistent"),
    )
    reported = "\n".join(warnings(found))
    for word in (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "the level must be",
        "disables a transport",
        "makes NCCL wait forever",
    ):
        assert word in reported
    assert warnings(settings({}, Path("/nonexistent"), Path("/nonexistent"))) == []


def test_a_conf_file_is_read_as_nccl_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "nccl.conf"
    path.write_text("NCCL_A=1=2\nnot a line\n#NCCL_B=3\nNCCL_C=\n")
    assert read_conf(path) == {"NCCL_A": "1=2", "NCCL_C": ""}
    assert read_conf(tmp_path / "missing") == {}
