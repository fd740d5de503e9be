"""Clusters side by side, and what is left of one whose owner was killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.doors import command
from tests.slurm.cluster import DEVCLUSTER, Cluster, running

OWNER = """
import signal
from tests.slurm.cluster import running
with running("--no-accounting") as cluster:
    print(cluster.environment["SLURM_CONF"], flush=True)
    cluster.call("sbatch", "--wrap=sleep 1000", "--output=/dev/null")
    signal.pause()
"""


def left_of(state: Path) -> list[str]:
    """Processes, lines of /etc/hosts, and the directory itself."""
    found = [str(state)] if state.exists() else []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = [*(process.info["cmdline"] or []), (process.info["environ"] or {}).get("SLURM_CONF", "")]
        if any(f"{state}/" in word for word in words):
            found.append(" ".join(process.info["cmdline"] or [str(process.pid)]))
    return found + [line for line in Path("/etc/hosts").read_text().splitlines() if line.endswith(f" {state}")]


@pytest.mark.long_form(40)  # two more clusters
def test_the_next_run_stops_what_a_killed_one_left(plain: Cluster) -> None:
    same_folder = command.environment(TMPDIR=tempfile.gettempdir())
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=same_folder, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    conf = owner.stdout.readline().strip()
    state = Path(conf).parents[1]
    assert conf != plain.environment["SLURM_CONF"], "two clusters at once"
    assert plain.call("sinfo", "--noheader").returncode == 0
    assert left_of(state)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    with running("--no-accounting") as cluster:
        assert not left_of(state)
        state = Path(cluster.environment["SLURM_CONF"]).parents[1]
        shutil.rmtree(state)
        down = [sys.executable, str(DEVCLUSTER), "down", f"--state={state}"]
        subprocess.run(down, check=True, timeout=120)
        assert not left_of(state), "though its pid files are gone"
    assert plain.call("sinfo", "--noheader").returncode == 0, "the other one was left alone"
