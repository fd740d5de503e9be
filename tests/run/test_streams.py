"""Output that cannot be written ends no process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
