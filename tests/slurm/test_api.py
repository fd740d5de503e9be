"""``hpc_train.submit`` on a login node: to Slurm, read back while the job runs, and cancelled."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.runs import ONE_NODE, SLOW

SCRIPT = """
import json, sys, time
import hpc_train

run = hpc_train.submit(json.loads(sys.argv[1]))
while not run.metrics():
    time.sleep(0.5)
running = run.status()
cancelled = run.cancel(save=True)
ended = run.wait(timeout=200)
assert not {"torch", "wandb"} & set(sys.modules)
print(json.dumps([run.job_id, running.state, running.exit_code, cancelled, ended.exit_code, len(run.checkpoints())]))
"""


@pytest.mark.beside
@pytest.mark.long_form(30)  # test_commands.py does it with commands
def test_a_run_is_submitted_watched_and_cancelled_from_python(cluster: Cluster, tmp_path: Path) -> None:
    overrides = json.dumps([*SLOW, *ONE_NODE, "train.steps=10000", "run.name=run"])
    done = cluster.call(sys.executable, "-c", SCRIPT, overrides, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    job_id, *rest = json.loads(done.stdout)
    assert int(job_id) > 0
    assert rest == ["running", None, True, 75, 1]
