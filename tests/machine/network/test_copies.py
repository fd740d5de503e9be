"""Outputs that were copied from a terminal window or redirected on Windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.machine.network.node import read_recording
from hpc_train.machine.network.smi import parse_matrix
from tests.machine.network.machines import matrix
from tests.machine.network.printed import MATRICES

GPUS = [f"GPU{i}" for i in range(8)]
NICS = [f"NIC{i}" for i in range(10)]
WAYS = {(f"GPU{i}", f"GPU{j}"): "NV18" for i in range(8) for j in range(8)} | {
    (f"GPU{i}", f"NIC{i}"): "PIX" for i in range(8)
}
LEGEND = "\nNIC Legend:\n\n" + "".join(f"  NIC{i}: mlx5_{i}\n" for i in range(10))
H200 = matrix([*GPUS, *NICS], WAYS, dict.fromkeys(GPUS, "0-47,96-143\t0"), "NODE").expandtabs() + LEGEND


def wrapped(text: str, width: int, strip: bool) -> str:
    pieces = [line[at : at + width] for line in text.splitlines() for at in range(0, max(1, len(line)), width)]
    return "\n".join(piece.rstrip() if strip else piece for piece in pieces) + "\n"


@pytest.mark.parametrize("strip", [False, True], ids=["as shown", "spaces at the end are gone"])
@pytest.mark.parametrize("width", [80, 100, 120, 132, 160])
def test_a_matrix_wrapped_by_a_terminal(width: int, strip: bool) -> None:
    assert len(parse_matrix(H200).links) == 18 * 17 // 2
    assert parse_matrix(wrapped(H200.replace("\x1b[4m", "").replace("\x1b[0m", ""), width, strip)) == parse_matrix(H200)


@pytest.mark.parametrize("name", MATRICES)
def test_no_wrapped_matrix_shows_anything_that_is_not_there(name: str) -> None:
    text = MATRICES[name].text
    whole = parse_matrix(text)
    for width in (33, 40, 51, 60, 74, 80, 97, 100):
        found = parse_matrix(wrapped(text.expandtabs(), width, strip=True))
        missing: set[object] = {link for link in whole.links if link not in found.links}
        assert set(found.links) <= set(whole.links), width
        for gpu, true in zip(found.gpus, whole.gpus, strict=False):
            assert gpu.cpus in ((), true.cpus) and gpu.numa_nodes in ((), true.numa_nodes), width
            missing |= {gpu.name} if gpu != true else set()
        assert not missing or found.unknown, f"{width}: what is missing is not reported"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "utf-8"])
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
