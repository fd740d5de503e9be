"""Machine files, and the time of collectives on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_train.errors import UserError
from hpc_train.planner.collectives import Group, all_reduce, gather, group_of, message
from hpc_train.planner.machine import SHIPPED, read_machine, shipped


@pytest.mark.parametrize("name", shipped())
def test_shipped_files_are_complete_and_state_their_sources(name: str) -> None:
    machine = read_machine(name)
    assert machine.rates.memory_bytes > 10e9 and machine.peak("fp16") > 1e14
    assert all(figure.source for figure in machine.figures.values())


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
        ({"launch_s": None}, "it lacks launch_s"),
        ({"memory_byte": {}}, "memory_byte is unknown"),
        ({"memory_bytes": {"value": -1, "kind": "table", "source": "x"}}, "memory_bytes is -1"),
        ({"memory_bytes": {"value": 0, "kind": "table", "source": "x"}}, "memory_bytes is 0"),
        ({"memory_bytes": 34e9}, "memory_bytes is 34"),
        ({"watts": {"value": 300, "kind": "guessed", "source": "x"}}, "the kind of watts is 'guessed'"),
    ],
)
def test_a_wrong_file_is_refused_with_the_number(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_machine(own_file(tmp_path, **changes))


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
    assert message(size, True, rates) > message(size, False, rates) > 0
    assert all_reduce(size, Group(1, 1), rates) == 0
