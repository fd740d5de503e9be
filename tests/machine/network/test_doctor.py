"""``doctor`` on recordings, as a supporter from another site would use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.cli import run
from tests.doors.schema import check_output
from tests.machine.network.machines import hgx, matrix

KEYS = {
    "gpus", "nics", "links", "limits", "gpu_direct", "versions", "gpu_nics", "masks", "environment", "not_set",
    "unknown",
}  # fmt: skip


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[dict[str, str]]]:
    assert run(["doctor", "--json", *arguments]) == 0
    printed = capsys.readouterr().out
    check_output(["doctor"], printed)
    found = json.loads(printed)
    assert set(found) >= KEYS
    return found


def test_a_recorded_tree_and_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hgx(tmp_path / "root")
    names = [f"GPU{i}" for i in range(8)]
    (tmp_path / "topo").write_text(matrix(names, {}, dict.fromkeys(names, "0-47,96-143"), "NV18"))
    both = doctor(capsys, "--sysfs", str(tmp_path / "root"), "--topo", str(tmp_path / "topo"), "--nccl", "2.21.5")
    assert [found["nic"] for found in both["gpu_nics"]][4] == "mlx5_6"
    assert both["masks"][0]["cpus"] == "0-11,96-107"
    assert "NCCL_IB_HCA" in {variable["name"] for variable in both["environment"]}
    links = {(link["a"], link["b"]): link["path_type"] for link in both["links"]}
    assert links["GPU0", "GPU7"] == "NV18"
    tree_alone = doctor(capsys, "--sysfs", str(tmp_path / "root/sys"))
    assert tree_alone["gpu_nics"] == both["gpu_nics"]
    cards_alone = doctor(capsys, "--sysfs", str(tmp_path / "root/sys/class/infiniband"))
    assert len(cards_alone["nics"]) == 10 and cards_alone["gpus"] == []
    matrix_alone = doctor(capsys, "--topo", str(tmp_path / "topo"))
    assert matrix_alone["nics"] == [] and matrix_alone["unknown"]


def test_text_for_people_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hgx(tmp_path)
    assert run(["doctor", "--sysfs", str(tmp_path)]) == 0
    assert "mlx5_4:1 400 Gb/s InfiniBand: left out" in capsys.readouterr().out.replace("\n", " ")
    for wrong in (["--sysfs", "/nonexistent"], ["--topo", "/nonexistent"], ["--nccl", "new"]):
        assert run(["doctor", *wrong]) == 2
        message = capsys.readouterr().err
        assert "fix:" in message and "Traceback" not in message
