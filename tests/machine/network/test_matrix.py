"""nvidia-smi's matrix in the shapes in which it comes."""

from __future__ import annotations

import pytest

from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.network.smi import parse_matrix

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


def test_spaces_colors_labels_and_the_old_name_of_sys_change_nothing() -> None:
    expected = parse_matrix(CLEAN)
    assert ways(expected) == {"GPU0-GPU1": "PHB", "GPU0-mlx5_0": "NODE", "GPU1-mlx5_0": "NODE"}
    colored = CLEAN.replace("GPU0    GPU1    mlx5_0", "\x1b[4mGPU0\x1b[0m    GPU1    mlx5_0")
    commented = "\n".join(f"# {line}" for line in CLEAN.splitlines())
    echoed = "$ nvidia-smi topo -m\n" + CLEAN.replace("\n", "\r\n")
    for text in (colored, commented, echoed):
        assert parse_matrix(text) == expected
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
