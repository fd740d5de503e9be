"""What the preflight compares and what samples the utilization, with a torch that claims to be built with ROCm."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpc_train.preflight import run
from hpc_train.preflight.checks import check_shared_gpu


@pytest.fixture(autouse=True)
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text("6.12.12\n")
    monkeypatch.setattr(torch.version, "hip", "6.4.43482-0f2d60242")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    monkeypatch.setattr(run, "_DRIVER", tmp_path / "none")
    monkeypatch.setattr(run, "_AMD_DRIVER", tmp_path / "version")


def test_versions() -> None:
    found = run.versions(cuda=True)
    assert (found["rccl"], found["driver"]) == ("2.22.3", "6.12.12")
    assert "nccl" not in found


def test_gpus_without_a_serial_number_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(*buses: int) -> list[run.RankFacts]:
        found = []
        for rank, bus in enumerate(buses):
            gpu = SimpleNamespace(
                uuid="0", name="AMD Instinct MI250X", pci_domain_id=0, pci_bus_id=bus, pci_device_id=0
            )
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
            found.append(run.rank_facts(rank, "n1", "hash", torch.device("cuda", 0)))
        return found

    assert not list(check_shared_gpu(ranks(0xC1, 0xC6)))
    (finding,) = check_shared_gpu(ranks(0xC1, 0xC1))
    assert "ranks 0, 1 share the GPU 0 at 00:c1:00" in finding.message
