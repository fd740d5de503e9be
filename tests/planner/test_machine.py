"""Machine files, and the time of collectives on them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import UserError
from hpc_train.planner.machine import SHIPPED, parse_machine, read_machine, shipped
from hpc_train.planner.passes import Group, all_reduce, gather, group_of, load, message
from tests.planner.published.tables import rows


@pytest.mark.parametrize("name", shipped())
def test_shipped_files_are_complete_and_state_their_sources(name: str) -> None:
    machine = read_machine(name)
    assert machine.rates.cores or (machine.rates.memory_bytes > 10e9 and machine.peak("fp16") > 1e14)
    assert all(figure.source for figure in machine.figures.values())


# the quantities of tests/planner/published/hardware.csv that state a figure, and its value in their unit
QUANTITIES = {
    "bf16_flops": ("bf16_tflops", 1e12), "fp16_flops": ("fp16_tflops", 1e12), "fp32_flops": ("fp32_tflops", 1e12),
    "fp8_flops": ("fp8_tflops", 1e12),
    "memory_bytes_per_s": ("hbm_copy", 1e9), "host_bytes_per_s": ("host_to_device", 1e9),
    "node_bytes_per_s": ("busbw", 1e9), "fabric_bytes_per_s": ("nic", 1e9),
}  # fmt: skip
GPUS = {"a100-40": "A100-40GB", "a100-80": "A100-80GB", "h100": "H100-80GB"}


@pytest.mark.parametrize("name", [name for name in shipped() if name != "cpu"])
def test_figures_from_tables_have_an_address_and_its_value(name: str) -> None:
    of_gpu = [row for row in rows("hardware") if row["gpu"] == GPUS.get(name, name.upper())]
    checked = 0
    for key, figure in read_machine(name).figures.items():
        assert (figure.kind == "table") == figure.source.startswith("https://"), (key, figure)
        stated = [row for row in of_gpu if key in QUANTITIES and row["quantity"].startswith(QUANTITIES[key][0])]
        here = [row for row in stated if row["url"] == figure.source.split()[0]]
        if figure.kind == "table" and key in QUANTITIES:
            assert figure.value * devices_of_card(name) in [float(row["value"]) * QUANTITIES[key][1] for row in here], (
                key,
                figure,
            )
            checked += 1
        assert figure.kind == "table" or not stated or key == "node_bytes_per_s", f"{key} stands in hardware.csv"
        if key == "memory_bytes":
            size = float(next(row["value"] for row in of_gpu if row["quantity"] == "memory")) / devices_of_card(name)
            assert size * 0.99e9 <= figure.value <= size * 2**30
    assert checked >= 2


def devices_of_card(name: str) -> int:
    """Returns how many devices share what hardware.csv states."""
    return 2 if name == "mi250x" else 1


def own_file(folder: Path, **changes: Any) -> str:
    content = json.loads((SHIPPED / "v100.json").read_text())
    for name, value in changes.items():
        if value is None:
            del content["figures"][name]
        else:
            content["figures"][name] = value
    path = folder / "own.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"launch_s": None}, "the machine file lacks launch_s"),
        ({"memory_byte": {}}, "memory_byte is not a number of a machine"),
        ({"memory_bytes": {"value": -1, "kind": "table", "source": "x"}}, "memory_bytes is -1"),
        ({"memory_bytes": {"value": 0, "kind": "table", "source": "x"}}, "memory_bytes is 0"),
        ({"memory_bytes": 34e9}, "memory_bytes is 34"),
        (
            {"host_bytes_per_s": {"value": 300, "kind": "guessed", "source": "x"}},
            "the kind of host_bytes_per_s is 'guessed'",
        ),
        ({"host_bytes_per_s": {"value": True, "kind": "table", "source": "x"}}, "host_bytes_per_s is .*True"),
        ({"fabric_bytes_per_s": {"value": 0, "kind": "table", "source": "x"}}, "fabric_bytes_per_s is 0"),
        ({"attention_share": {"value": 0, "kind": "table", "source": "x"}}, "attention_share is 0"),
        ({"matmul_share": {"value": 70, "kind": "table", "source": "x"}}, "matmul_share is 70"),
        ({"devices_per_node": {"value": 7.5, "kind": "table", "source": "x"}}, "devices_per_node is 7.5"),
    ],
)
def test_a_wrong_file_is_refused_with_the_number(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_machine(own_file(tmp_path, **changes))


def test_the_ranks_of_a_node_share_cpus_but_not_gpus(tmp_path: Path) -> None:
    gpus = read_machine("h100")
    assert gpus.shared_by(2) is gpus
    cpus = read_machine(own_file(tmp_path, cores={"value": 4, "kind": "measured", "source": "x"}))
    half, single = cpus.shared_by(16), cpus.shared_by(1)
    for name in ("fp32_flops", "memory_bytes", "node_bytes_per_s"):
        of_eight = getattr(cpus.rates, name)
        assert getattr(half.rates, name) == pytest.approx(of_eight / 2)
        assert getattr(single.rates, name) == pytest.approx(of_eight * 8)
    assert half.devices_per_node == 16 and single.devices_per_node == 1
    assert half.rates.launch_s == pytest.approx(2 * cpus.rates.launch_s), "twice as many ranks per core"
    assert single.rates.launch_s == pytest.approx(cpus.rates.launch_s / 2), "a core of its own"
    assert half.rates.matmul_share == cpus.rates.matmul_share
    assert parse_machine(asdict(half), "here") == half


def test_unknown_machines_and_number_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no machine is called 'h10'") as error:
        read_machine("h10")
    assert "h100" in str(error.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_machine(str(tmp_path / "missing.json"))
    with pytest.raises(UserError, match="do not compute in bf16"):
        read_machine("v100").peak("bf16")


def test_collectives_move_the_bytes_of_rings_over_the_slowest_link() -> None:
    rates = read_machine("h100").rates
    within, across = group_of(8, 1, 8), group_of(32, 1, 8)
    assert (within, across, group_of(4, 8, 8)) == (Group(8, 8), Group(32, 8), Group(4, 1))
    size = 8e9
    assert gather(size, within, rates) == pytest.approx(7 / 8 * size / rates.node_bytes_per_s, rel=1e-2)
    assert all_reduce(size, within, rates) == pytest.approx(2 * gather(size, within, rates), rel=1e-2)
    slowest = min(8 * rates.fabric_bytes_per_s, rates.node_bytes_per_s)
    assert gather(size, across, rates) == pytest.approx(31 / 32 * size / slowest, rel=1e-2)
    alone = group_of(4, 8, 8)
    assert gather(size, alone, rates) == pytest.approx(3 / 4 * size / rates.fabric_bytes_per_s, rel=1e-2)
    assert gather(0, group_of(512, 1, 8), rates) > 5 * gather(0, group_of(64, 1, 8), rates), "a ring of nodes"
    assert all_reduce(0, group_of(512, 1, 8), rates) < gather(0, group_of(512, 1, 8), rates) / 3, "a tree"
    assert load(within, rates) == 1 and load(alone, rates) == rates.fabric_bytes_per_s / rates.node_bytes_per_s
    assert message(size, True, rates) > message(size, False, rates) > 0
    assert all_reduce(size, Group(1, 1), rates) == 0
