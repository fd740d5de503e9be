"""nvidia-smi's matrix in the shapes in which it comes, and the NVLink domain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.machine.network.facts import Gpu, NodeFacts
from hpc_train.machine.network.node import imex_channels, topology_file
from hpc_train.machine.network.smi import parse_matrix, parse_nvlink_domain
from hpc_train.run.rows import check_fields

TABS = (
    "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV4\tPXB\tSYS\t0-7,16-23\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tSYS\tPXB\t8-15,24-31\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe\n\n"
    "NIC Legend:\n\n  NIC0: mlx5_2\n  NIC1: mlx5_10\n"
)
CLEAN = "\n".join(
    [
        "        GPU0    GPU1    mlx5_0  CPU Affinity    NUMA Affinity",
        "GPU0     X      PHB     NODE    0-11            0",
        "GPU1    PHB      X      NODE    0-11            0",
        "mlx5_0  NODE    NODE     X",
    ]
)


def ways(facts: NodeFacts) -> dict[str, str]:
    return {f"{link.a}-{link.b}": link.path_type for link in facts.links}


def cpus(facts: NodeFacts) -> list[int]:
    return [len(gpu.cpus) for gpu in facts.gpus]


def test_tabs_with_a_legend_and_a_column_skipped_twice() -> None:
    facts = parse_matrix(TABS)
    assert [nic.name for nic in facts.nics] == ["mlx5_2", "mlx5_10"]
    assert ways(facts)["GPU0-mlx5_2"] == "PXB" and ways(facts)["GPU1-mlx5_2"] == "SYS"
    assert ways(facts)["GPU0-GPU1"] == "NV4"
    assert facts.gpus[1].cpus == (*range(8, 16), *range(24, 32)) and facts.gpus[1].numa_nodes == (1,)
    assert facts.unknown == ()


def test_columns_of_spaces_and_the_old_name_of_sys() -> None:
    assert ways(parse_matrix(CLEAN)) == {"GPU0-GPU1": "PHB", "GPU0-mlx5_0": "NODE", "GPU1-mlx5_0": "NODE"}
    assert ways(parse_matrix(CLEAN.replace("NODE", "SOC ")))["GPU0-mlx5_0"] == "SYS"


def test_a_blank_cell_is_not_filled_with_its_neighbor() -> None:
    tabs = parse_matrix(TABS.replace("0-7,16-23", ""))
    assert cpus(tabs) == [0, 16] and tabs.gpus[0].numa_nodes == (0,)
    assert tabs.unknown == ("CPU Affinity of GPU0: blank in the matrix",)
    spaces = parse_matrix(CLEAN.replace("0-11            0", "                0"))
    assert cpus(spaces) == [0, 0] and spaces.gpus[0].numa_nodes == (0,)


def test_several_numa_nodes_and_none() -> None:
    many = parse_matrix(TABS.replace("0-7,16-23\t0", "0-7,16-23\t0,3-5"))
    assert many.gpus[0].numa_nodes == (0, 3, 4, 5)
    none = parse_matrix(TABS.replace("0-7,16-23\t0", "0-7,16-23\tN/A"))
    assert none.gpus[0].numa_nodes == () and "NUMA Affinity of GPU0: N/A in the matrix" in none.unknown


def test_one_gpu() -> None:
    facts = parse_matrix("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n")
    assert len(facts.gpus) == 1 and cpus(facts) == [16] and facts.links == ()


def test_a_matrix_that_is_cut_off_keeps_what_is_certain() -> None:
    narrow = "\n".join(line[:30] for line in CLEAN.splitlines())
    facts = parse_matrix(narrow)
    assert ways(facts)["GPU0-GPU1"] == "PHB"
    assert cpus(facts) == [0, 0] and any("CPU Affinity" in note for note in facts.unknown)
    rows_missing = parse_matrix("\n".join(CLEAN.splitlines()[:2]))
    assert ways(rows_missing) == {"GPU0-GPU1": "PHB", "GPU0-mlx5_0": "NODE"}
    assert "the row of GPU1 is missing" in rows_missing.unknown
    heading = parse_matrix(CLEAN.replace("mlx5_0  CPU Affinity    NUMA Affinity", "mlx", 1))
    assert [gpu.index for gpu in heading.gpus] == [0, 1] and "the heading is truncated at 'mlx'" in heading.unknown


def test_a_contradiction_is_not_resolved_by_chance() -> None:
    facts = parse_matrix(TABS.replace("NIC0\tPXB", "NIC0\tPIX"))
    assert "GPU0-mlx5_2" not in ways(facts)
    assert "the link of GPU0 and mlx5_2: PIX or PXB" in facts.unknown


def test_cards_without_a_legend_keep_their_number() -> None:
    facts = parse_matrix(TABS.split("\nLegend", maxsplit=1)[0])
    assert [nic.name for nic in facts.nics] == ["NIC0", "NIC1"] and facts.nics[0].kind is None
    assert "the NIC behind NIC0: it is missing from the legend" in facts.unknown


def test_the_status_of_peer_access_is_no_topology() -> None:
    facts = parse_matrix(" \tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n\nLegend:\n\n  X = Self\n  OK = Status Ok\n")
    assert len(facts.gpus) == 2 and facts.links == ()
    assert any("peer access" in note for note in facts.unknown)


@pytest.mark.parametrize("text", ["", "command not found", "GPU0 is broken", "No devices were found\n"])
def test_no_matrix(text: str) -> None:
    facts = parse_matrix(text)
    assert facts.gpus == () and len(facts.unknown) == 1


UUID = "6f1c2ce4-9b3a-4a5e-8f7d-0f3f2e8d1c11"


def test_imex_channels(tmp_path: Path) -> None:
    assert imex_channels(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/devices").write_text("Character devices:\n195 nvidia\n234 nvidia-caps-imex-channels\n")
    assert imex_channels(tmp_path) == 0, "the driver knows them, but nobody has created one"
    (tmp_path / "dev/nvidia-caps-imex-channels").mkdir(parents=True)
    (tmp_path / "dev/nvidia-caps-imex-channels/channel0").touch()
    assert imex_channels(tmp_path) == 1


@pytest.mark.parametrize(
    ("printed", "domain"),
    [
        (f"{UUID}, 32766\n{UUID}, 32766\n", f"{UUID}.32766"),
        (f"{UUID}, 1\n{UUID}, 2\n", None),
        ("00000000-0000-0000-0000-000000000000, 0\n", None),
        ("N/A, N/A\n", None),
        ('Field "fabric.clusterUuid" is not a valid field to query.\n', None),
        ("", None),
    ],
)
def test_the_nvlink_domain(printed: str, domain: str | None) -> None:
    assert parse_nvlink_domain(printed) == domain


@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("NVIDIA H200", "/opt/microsoft/ndv5-topo.xml"),
        ("NVIDIA H100 80GB HBM3", "/opt/microsoft/ndv5-topo.xml"),
        ("NVIDIA A100-SXM4-40GB", "/opt/microsoft/ndv4-topo.xml"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 NVL", None),
    ],
)
def test_azures_topology_files(tmp_path: Path, model: str, file: str | None) -> None:
    (tmp_path / "opt/microsoft").mkdir(parents=True)
    for name in ("ndv4-topo.xml", "ndv5-topo.xml"):
        (tmp_path / "opt/microsoft" / name).touch()
    facts = NodeFacts(gpus=(Gpu(0, model=model),), site="azure")
    assert topology_file(facts, tmp_path) == file
    assert topology_file(replace(facts, site=None), tmp_path) is None


def test_new_facts_travel_between_nodes() -> None:
    facts = NodeFacts(node="n1", net_plugin="", imex_channels=0, nvlink_domain=f"{UUID}.1")
    assert NodeFacts.from_json(facts.to_json()) == facts
    check_fields(facts)  # what the rendezvous server accepts
