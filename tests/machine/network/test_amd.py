"""Nodes with AMD GPUs: what is seen of them, the binding of ranks, RCCL's variables, and the output of rocm-smi."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.bench.doctor.node import check_gpus, check_software
from hpc_train.machine.health.finding import ERROR, OK, WARNING
from hpc_train.machine.network.decision import FabricJob, decide
from hpc_train.machine.network.discovery import read_gpu_direct, read_tree
from hpc_train.machine.network.facts import NodeFacts, Setting, format_cpu_list, parse_cpu_list
from hpc_train.machine.network.node import read_recording
from hpc_train.machine.network.rails import match
from hpc_train.machine.network.rank_binding import bindings, devices
from hpc_train.machine.network.smi import is_rocm_smi, parse_showtopo
from hpc_train.run.rows import check_fields
from tests.machine.amd_nodes import MI300X, AmdMachine, lumi
from tests.machine.network.machines import Machine

# LUMI AI guide, chapter 5: the nearest cores of each GCD; the first core of each L3 cache is the system's
LUMI_CORES = ("49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47")


@pytest.fixture
def facts(tmp_path: Path) -> NodeFacts:
    """A LUMI-G node: each NIC is attached to the second device of an MI250X."""
    lumi(tmp_path)
    machine = Machine(tmp_path)
    machine.numa({node: f"{16 * node}-{16 * node + 15},{64 + 16 * node}-{79 + 16 * node}" for node in range(4)})
    machine.cores([f"{core},{core + 64}" for core in range(64)])
    for number, (bus, numa) in enumerate(((0xC6, 3), (0xCE, 1), (0xD6, 0), (0xDE, 2))):
        place = f"pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.0/0000:{bus + 1:02x}:00.0"
        nic = machine.pci(place, numa, vendor="0x17db")
        (nic / f"net/hsn{number}").mkdir(parents=True)
        machine.interface(f"hsn{number}", nic, 200_000)
        machine.link(f"sys/class/cxi/cxi{number}/device", nic)
    seen = read_tree(tmp_path / "sys", tmp_path / "proc")
    return replace(seen, node="nid005000", visible=tuple("01234567"), route="hsn0", automatic="hsn0")


def test_what_is_seen(facts: NodeFacts) -> None:
    assert [gpu.model for gpu in facts.gpus] == ["AMD Instinct MI250X"] * 8
    assert [gpu.numa_nodes for gpu in facts.gpus] == [(3,), (3,), (1,), (1,), (0,), (0,), (2,), (2,)]
    assert {facts.link(a.name, b.name) for a in facts.gpus for b in facts.gpus if a is not b} == {"XGMI"}
    assert NodeFacts.from_json(facts.to_json()) == facts
    check_fields(facts)  # what the rendezvous server accepts
    found = [(matched.nic, matched.path_type) for matched in match(facts)]
    nics = ("cxi0", "cxi0", "cxi1", "cxi1", "cxi2", "cxi2", "cxi3", "cxi3")
    assert found == list(zip(nics, ("NODE", "PIX") * 4, strict=True))


def test_ranks_are_bound_as_lumi_advises(facts: NodeFacts) -> None:
    allowed = {cpu for core in LUMI_CORES for cpu in parse_cpu_list(core)}
    job = replace(facts, allowed=tuple(sorted(allowed)))
    assert tuple(format_cpu_list(bound.cpus or ()) for bound in bindings(job, 8)) == LUMI_CORES
    assert [device.gpu and device.gpu.pci for device in devices(replace(job, visible=("5", "2")))] == [
        "0000:d6:00.0",
        "0000:c9:00.0",
    ]


def test_the_variables_of_rccl_on_slingshot(facts: NodeFacts) -> None:
    decision = decide([facts, facts], FabricJob(2, 8), {})
    assert decision.fabric == "slingshot"
    # as OLCF and LUMI write them for RCCL
    assert {variable.name: variable.value for variable in decision.variables} == {
        "NCCL_SOCKET_IFNAME": "hsn",
        "NCCL_CROSS_NIC": "1",
        "FI_MR_CACHE_MONITOR": "userfaultfd",
        "FI_CXI_DISABLE_HOST_REGISTER": "1",
        "FI_CXI_DEFAULT_CQ_SIZE": "131072",
        "FI_CXI_DEFAULT_TX_SIZE": "2048",
        "FI_CXI_RX_MATCH_MODE": "hybrid",
        "FI_CXI_RDZV_EAGER_SIZE": "0",
        "FI_CXI_RDZV_GET_MIN": "0",
        "FI_CXI_RDZV_THRESHOLD": "0",
        "NCCL_NET": "AWS Libfabric",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_TIMING": "1",
    }
    left = {alone.name for alone in decision.not_set}
    assert {"FI_CXI_RDZV_PROTO", "CXI_FORK_SAFE"} <= left
    assert not left & {"CUDA_DEVICE_ORDER", "NCCL_NVLS_ENABLE"}
    module = {"NCCL_NET_PLUGIN": Setting("NCCL_NET_PLUGIN", "/opt/plugin/librccl-net.so", "the environment")}
    assert "NCCL_NET" not in {one.name for one in decide([facts, facts], FabricJob(2, 8), module).variables}
    reasons = {alone.name: alone.reason for alone in decision.not_set}
    assert "LUMI-AI-Guide#97" in reasons["NCCL_NET_GDR_LEVEL"]
    own = {"NCCL_CROSS_NIC": Setting("NCCL_CROSS_NIC", "0", "the environment")}
    chosen = decide([facts, facts], FabricJob(2, 8), own)
    assert "NCCL_CROSS_NIC" not in {variable.name for variable in chosen.variables}
    one_node = decide([facts], FabricJob(1, 8), {})
    assert not any(variable.name.startswith("FI_") for variable in one_node.variables)


def test_mi300x_with_infiniband(tmp_path: Path) -> None:
    """NCCL's decisions hold for RCCL."""
    amd, machine = AmdMachine(tmp_path), Machine(tmp_path)
    for number in range(8):
        amd.gpu(MI300X, 0x05 + 0x10 * number, number // 4)
        place = f"pci0000:{4 + 16 * number:02x}/0000:{4 + 16 * number:02x}:01.0/0000:{8 + 16 * number:02x}:00.0"
        machine.card(f"mlx5_{number}", place, number // 4, layer="Ethernet")
    seen = read_tree(tmp_path / "sys", tmp_path / "proc")
    assert [matched.nic for matched in match(seen)] == [f"mlx5_{number}" for number in range(8)]
    decision = decide([seen, seen], FabricJob(2, 8), {})
    assert decision.fabric == "roce"
    assert not any(variable.name.startswith(("FI_", "CUDA_")) for variable in decision.variables)
    assert read_gpu_direct(tmp_path / "sys", tmp_path / "proc") is None
    machine.write("sys/kernel/memory_peers/amdkfd/version", "1.0")
    assert read_gpu_direct(tmp_path / "sys", tmp_path / "proc") == "amdkfd"


def test_doctor_shows_them(facts: NodeFacts, tmp_path: Path) -> None:
    balancing = tmp_path / "numa_balancing"
    balancing.write_text("0\n")
    (finding,) = check_gpus(facts, "auto", balancing)
    assert (finding.level, finding.text) == (OK, "8 x AMD Instinct MI250X, 8 visible")

    (hidden,) = check_gpus(replace(facts, visible=()), "auto", balancing)
    assert hidden.level == WARNING and hidden.fix.startswith("ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES or CUDA_VIS")

    balancing.write_text("1\n")
    assert "numa_balancing" in [*check_gpus(facts, "auto", balancing)][1].text

    def verdict(torch: str) -> list[str]:
        return [one.text for one in check_software(replace(facts, versions=(("torch", torch),))) if one.level != OK]

    assert verdict("2.9.0+rocm6.4") == []
    assert verdict("2.9.0+cu128") == ["torch 2.9.0+cu128 is built without ROCm, but the node has AMD GPUs"]
    assert verdict("2.9.0+cpu") == ["torch 2.9.0+cpu is built without ROCm, but the node has AMD GPUs"]
    found = [one for one in check_software(replace(facts, versions=(("torch", "2.9.0+cpu"),))) if one.level == ERROR]
    assert "install torch with ROCm" in found[0].fix


def printed(titles_and_cells: dict[str, list[list[str]]], numa: list[int], label: str = "GPU[{}]\t\t") -> str:
    """The output of rocm-smi --showtopo; its layout and data as in the outputs cited below."""
    lines = ["", " ROCm System Management Interface ".center(90, "=")]
    for title, rows in titles_and_cells.items():
        names = [f"GPU{number}" for number in range(len(rows))]
        lines += [f" {title} ".center(90, "="), "       " + "".join(name.ljust(13) for name in names)]
        lines += [name.ljust(7) + "".join(map(_padded, row)) for name, row in zip(names, rows, strict=True)]
        lines.append("")
    lines.append(" Numa Nodes ".center(90, "="))
    for number, node in enumerate(numa):
        lines += [f"{label.format(number)}: (Topology) Numa {what}: {node}" for what in ("Node", "Affinity")]
    return "\n".join([*lines, " End of ROCm SMI Log ".center(90, "="), ""])


def _padded(cell: str) -> str:
    return cell.ljust(13)


def matrices(size: int, together: int) -> dict[str, list[list[str]]]:
    """Three matrices of ``size`` GPUs, of which ``together`` have links over Infinity Fabric."""

    def cells(near: str, far: str) -> list[list[str]]:
        return [
            ["0" if i == j else near if i // together == j // together else far for j in range(size)]
            for i in range(size)
        ]

    return {
        "Weight between two GPUs": cells("15", "72"),
        "Hops between two GPUs": cells("1", "3"),
        "Link Type between two GPUs": cells("XGMI", "PCIE"),
    }


# LUMI (rocm-smi 5, NUMA nodes as in its documentation), 8 x MI308X with ROCm 7 (a warning above the matrices), two
# groups of four MI210, four MI100 on PCIe (rocm_smi_lib issue 108), and the label of ROCm 5.5
LUMI = printed(matrices(8, 8), [3, 3, 1, 1, 0, 0, 2, 2])
MI308X = printed(matrices(8, 8), [0, 0, 0, 0, 1, 1, 1, 1]).replace(
    "=\n=", "=\nWARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status\n\n=", 1
)
MI210 = printed(matrices(8, 4), [0, 0, 0, 0, 1, 1, 1, 1])
MI100 = printed(matrices(4, 1), [0, 0, 1, 1])
OLD = printed(matrices(4, 4), [0, 1, 2, 3], label="GPU {}          ")


@pytest.mark.parametrize(
    ("text", "numa", "links"),
    [
        (LUMI, [3, 3, 1, 1, 0, 0, 2, 2], {"XGMI": 28}),
        (MI308X, [0, 0, 0, 0, 1, 1, 1, 1], {"XGMI": 28}),
        (MI210, [0, 0, 0, 0, 1, 1, 1, 1], {"XGMI": 12, "SYS": 16}),
        (MI100, [0, 0, 1, 1], {"SYS": 4}),  # within a NUMA node the bridges are not shown
        (OLD, [0, 1, 2, 3], {"XGMI": 6}),
    ],
)
def test_rocm_smi(tmp_path: Path, text: str, numa: list[int], links: dict[str, int]) -> None:
    (tmp_path / "topo").write_text(text)
    facts = read_recording(None, tmp_path / "topo")
    assert [gpu.numa_nodes for gpu in facts.gpus] == [(node,) for node in numa]
    kinds = [link.path_type for link in facts.links]
    assert {kind: kinds.count(kind) for kind in kinds} == links
    assert len(facts.unknown) == 1 and facts.unknown[0].startswith("the NICs and their distance")
    for added in (text.replace("\n", "\r\n"), "$ rocm-smi --showtopo\n" + text):
        assert is_rocm_smi(added) and parse_showtopo(added) == facts


def test_rocm_smi_in_pieces(tmp_path: Path) -> None:
    """What cannot be read is unknown, and never taken for nvidia-smi's matrix."""
    (tmp_path / "topo").write_text(LUMI[: LUMI.index("Link Type") - 40])
    refused = read_recording(None, tmp_path / "topo")
    assert refused.gpus == () and "use the output of rocm-smi --showtopo" in refused.unknown[0]
    cut = parse_showtopo(LUMI[: LUMI.index("GPU5   XGMI")])
    assert len(cut.gpus) == 8 and len(cut.links) == 25  # GPU5 to GPU7 appear in the rows of the others only
    assert {"the row of GPU6 in the matrix of link types is missing", "the NUMA node of GPU0"} <= set(cut.unknown)
    assert parse_showtopo("").gpus == ()


def test_rocm_smi_agrees_with_sys(facts: NodeFacts, tmp_path: Path) -> None:
    (tmp_path / "topo").write_text(LUMI)
    merged = read_recording(tmp_path, tmp_path / "topo")
    assert [gpu.model for gpu in merged.gpus] == ["AMD Instinct MI250X"] * 8
    assert set(merged.links) == set(facts.links)
    assert not any("the link of" in note for note in merged.unknown)
