"""Temporary directories: a process removes its own, and those that killed processes of the user have left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_train.bench.measuring import run_benchmark
from hpc_train.elastic.script import node_local_folder
from hpc_train.machine.temporary import BENCH
from hpc_train.run.directory import RunDirectory
from tests.config.composing import config_of

AGENT = """if True:
    import multiprocessing, sys
    from hpc_train.elastic.worker_process import _claim_socket_folder
    from hpc_train.elastic.script import node_local_folder
    with node_local_folder() as progress:
        _claim_socket_folder()
        print(multiprocessing.current_process()._config["tempdir"], progress, sep="\\n", flush=True)
        sys.stdin.read()
"""


def agent(folder: Path) -> tuple[subprocess.Popen[str], list[Path]]:
    """Starts a process with the folder of its sockets and that of its scripts' progress."""
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, [Path(process.stdout.readline().strip()) for _ in range(2)]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A directory with a short name, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder:
        yield Path(folder)


def test_what_a_killed_agent_left_is_removed_and_nothing_else(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [temporary / name for name in ("pymp-abcdefgh", "hpc_train-bench-kept", "hpc_train-progress-old")]
    for folder in others:
        folder.mkdir()
    killed, left = agent(temporary)
    living, kept = agent(temporary)
    assert all(folder.is_dir() for folder in left), "its agent lives"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert all(folder.is_dir() for folder in left), "nobody has removed them"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with node_local_folder() as own:
        assert sorted(temporary.iterdir()) == sorted([*others, *kept, own])
    living.communicate("")
    assert living.returncode == 0
    assert sorted(temporary.iterdir()) == sorted(others)


class Refused(Exception):
    """Ends a benchmark before its workers start."""


@dataclass
class EndsAtOnce:
    """A request that ends its benchmark, after a log was written or before."""

    logs: bool

    def write(self, run: RunDirectory) -> None:
        if self.logs:
            run.logs.mkdir(exist_ok=True)
            (run.logs / "rank-0.log").touch()
        raise Refused


def test_the_directory_of_a_benchmark_stays_only_if_a_message_names_its_log(tmp_path: Path) -> None:
    for logs in (True, False):
        with pytest.raises(Refused):
            run_benchmark(config_of("cluster=local"), EndsAtOnce(logs), "unused:entry", tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(BENCH) and (folder / "logs" / "rank-0.log").exists()


def test_names_of_sockets_stay_short(tmp_path: Path) -> None:
    temporary = tmp_path / ("t" * 100)
    temporary.mkdir()
    process, (sockets, progress) = agent(temporary)
    assert sockets.parent == Path("/tmp") and progress.parent == temporary
    process.communicate("")
    assert not sockets.exists() and list(temporary.iterdir()) == []
