"""The folder of multiprocessing's sockets: an agent removes its own, and those that killed agents have left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

CLAIM = """if True:
    import multiprocessing, sys
    from hpc_train.elastic.worker_process import _claim_socket_folder
    _claim_socket_folder()
    print(multiprocessing.current_process()._config["tempdir"], flush=True)
    sys.stdin.read()
"""


def agent(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory with a short name, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder:
        yield Path(folder)


def test_what_a_killed_agent_left_is_removed_and_no_other(temporary: Path) -> None:
    other_program = temporary / "pymp-abcdefgh"
    other_program.mkdir()
    killed, left = agent(temporary)
    living, kept = agent(temporary)
    assert left.is_dir(), "its agent lives"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert left.is_dir(), "nobody has removed it"
    third, own = agent(temporary)
    assert sorted(temporary.iterdir()) == sorted([other_program, kept, own])
    for process in (living, third):
        process.communicate("")
        assert process.returncode == 0
    assert list(temporary.iterdir()) == [other_program]
    killed.communicate()


def test_names_of_sockets_stay_short(tmp_path: Path) -> None:
    temporary = tmp_path / ("t" * 100)
    temporary.mkdir()
    process, folder = agent(temporary)
    assert folder.parent == Path("/tmp")
    process.communicate("")
    assert not folder.exists() and list(temporary.iterdir()) == []
