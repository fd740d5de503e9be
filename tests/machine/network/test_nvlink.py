"""What connects GPUs of several nodes over NVLink, and the file that describes Azure's machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.machine.network.facts import Gpu, NodeFacts
from hpc_train.machine.network.node import imex_channels, topology_file
from hpc_train.machine.network.smi import parse_nvlink_domain
from hpc_train.run.rows import check_fields

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
