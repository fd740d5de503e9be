"""The GPUs of a node as NVML describes them, next to what ``/sys`` shows, and copies of both in other encodings."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.machine.health.gpu_health import GpuReading, GpuState
from hpc_train.machine.network.facts import Gpu, NodeFacts
from hpc_train.machine.network.node import filled, read_recording
from hpc_train.machine.network.smi import parse_matrix
from hpc_train.run.rows import check_fields
from tests.machine.network.machines import matrix
from tests.machine.network.printed import MATRICES

A100 = "NVIDIA A100-SXM4-40GB"
FIRST = GpuState(0, "0000:01:00.0", A100, "GPU-1")
WORN = GpuState(
    1,
    "0000:81:00.0",
    A100,
    "GPU-0",
    rows_pending=True,
    uncorrected=3,
    slowdowns=("the driver finds it too warm", "the power supply requests it"),
    pcie_width=8,
    pcie_max_width=16,
    slices=("MIG-0-0", "MIG-0-2"),
)


def test_what_is_wrong_with_a_gpu_is_told() -> None:
    good, worn = filled([], GpuReading((FIRST, WORN)))
    assert good.problems == ()
    assert worn.problems == (
        "3 uncorrectable memory errors (ECC) since the driver was loaded",
        "memory rows wait to be remapped",
        "its clocks are reduced: the driver finds it too warm and the power supply requests it",
        "its PCIe link has 8 of 16 lanes",
    )
    facts = NodeFacts("n1", (worn,), visible=("0",))
    assert NodeFacts.from_json(facts.to_json()) == facts
    check_fields(facts)  # what the rendezvous server accepts


def test_what_sys_shows_counts_first() -> None:
    reported = GpuReading((FIRST, WORN))
    seen = Gpu(0, "0000:81:00.0", uuid="GPU-seen", cpus=(1, 2))
    (found,) = filled([seen], reported)
    assert (found.uuid, found.cpus, found.model) == ("GPU-seen", (1, 2), A100)
    assert found.slices == ("MIG-0-0", "MIG-0-2")
    other = Gpu(0, "0000:02:00.0")
    assert filled([other], reported) == (other,)


GPUS = [f"GPU{i}" for i in range(8)]
NICS = [f"NIC{i}" for i in range(10)]
WAYS = {(f"GPU{i}", f"GPU{j}"): "NV18" for i in range(8) for j in range(8)} | {
    (f"GPU{i}", f"NIC{i}"): "PIX" for i in range(8)
}
LEGEND = "\nNIC Legend:\n\n" + "".join(f"  NIC{i}: mlx5_{i}\n" for i in range(10))
H200 = matrix([*GPUS, *NICS], WAYS, dict.fromkeys(GPUS, "0-47,96-143\t0"), "NODE").expandtabs() + LEGEND


def wrapped(text: str, width: int) -> str:
    pieces = [line[at : at + width] for line in text.splitlines() for at in range(0, max(1, len(line)), width)]
    return "\n".join(map(str.rstrip, pieces)) + "\n"


@pytest.mark.parametrize("width", [80, 132, 160])
def test_a_matrix_wrapped_by_a_terminal_is_refused(width: int) -> None:
    assert len(parse_matrix(H200).links) == 18 * 17 // 2
    found = parse_matrix(wrapped(H200.replace("\x1b[4m", "").replace("\x1b[0m", ""), width))
    assert found.gpus == () and "its lines are wrapped" in found.unknown[0]


@pytest.mark.parametrize("name", MATRICES)
def test_no_wrapped_matrix_shows_anything_that_is_not_there(name: str) -> None:
    text = MATRICES[name].text
    whole = parse_matrix(text)
    for width in (33, 40, 51, 60, 74, 80, 97, 100):
        found = parse_matrix(wrapped(text.expandtabs(), width))
        missing: set[object] = {link for link in whole.links if link not in found.links}
        assert set(found.links) <= set(whole.links), width
        for gpu, true in zip(found.gpus, whole.gpus, strict=False):
            assert gpu.cpus in ((), true.cpus) and gpu.numa_nodes in ((), true.numa_nodes), width
            missing |= {gpu.name} if gpu != true else set()
        assert not missing or found.unknown, f"{width}: what is missing is not reported"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "utf-8"])
def test_files_of_a_windows_shell(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "topo.txt"
    file.write_bytes(H200.replace("\n", "\r\n").encode(encoding))
    assert read_recording(None, file) == parse_matrix(H200)
    file.write_bytes("CA 'mlx5_0'\r\n\tPort 1:\r\n\t\tState: Active\r\n\t\tRate: 400\r\n".encode(encoding))
    (nic,) = read_recording(None, None, file).nics
    assert nic.name == "mlx5_0" and nic.ports[0].rate_gbps == 400


@pytest.mark.parametrize("content", [b"", b"\0", b"\xff\xfe", b"\xff\xfeG", b"\0G\0P", bytes(range(256))])
def test_no_bytes_make_it_fail(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "topo.txt"
    file.write_bytes(content)
    assert read_recording(None, file).gpus == ()
    assert read_recording(None, None, file).nics == ()
