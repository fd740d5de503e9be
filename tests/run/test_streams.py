"""Output that cannot be written ends no process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.launch.executors.allocation import run_in_foreground
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from tests.config.composing import config_of

PROGRAM = """
import os, sys
from hpc_train.run.streams import nonfailing_streams, open_closed_streams, replace_unencodable
open_closed_streams()
replace_unencodable()
file = open(sys.argv[1], "w")
os.system("echo a child of this process")
with nonfailing_streams():
    print("loss 4.2 \\u00b7 1,234 tokens/s", flush=True)
    print("a warning \\u00b7", file=sys.stderr, flush=True)
    sys.stdout.close()
    print("after the end", flush=True)
file.write("whole")
"""


@pytest.mark.parametrize("closed", ["", ">&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full"])
def test_a_process_goes_on(closed: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    command = f'exec "$0" -c "$1" {file} {closed}'
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "whole", "no output of a child is in a file of its parent"
    if not closed:
        assert "loss 4.2 ? 1,234 tokens/s" in done.stdout


def test_a_full_disk_behind_standard_output_does_not_end_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ended = RunDirectory(tmp_path / "run"), []
    freeze(config_of(f"run.root={tmp_path}", "run.name=run"), run)
    monkeypatch.setattr("hpc_train.elastic.agent.run_agent", lambda run, tick, begun: ended.append(run) or 0)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run_in_foreground(run, None) == 0
    assert ended == [run]
