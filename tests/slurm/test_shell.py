"""A shell full of variables that Slurm's commands read, and answers of sbatch that are lost, on a real Slurm."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hpc_train.launch.script import ENVIRONMENT
from hpc_train.schedulers.slurm import client
from tests.slurm.cluster import Cluster, wait_for

LEFT_OVER = {
    "SBATCH_ARRAY_INX": "0-1",  # two tasks of one run
    "SBATCH_WAIT": "1",  # sbatch waits for the end
    "SBATCH_GPUS_PER_TASK": "1",  # refused
    "SLURM_HINT": "x",  # refused
    "SLURM_MEM_PER_NODE": "9999999",  # refused by srun
    "SLURM_MEM_PER_CPU": "100",
}
OF_SRUN = {
    "SLURM_CPU_BIND": "map_cpu:0",  # all ranks on one core
    "SLURM_TRES_PER_TASK": "cpu=1",
    "SLURM_TIMELIMIT": "0",
    "SLURM_STDOUTMODE": "none",
    "SRUN_CONTAINER": "/nowhere",
    "SQUEUE_PARTITION": "gpu",  # hides the job
    "SQUEUE_STATES": "PENDING",
    "SCANCEL_INTERACTIVE": "1",  # asks
}
SCRIPT = f"""#!/bin/bash
{ENVIRONMENT}
squeue --noheader --jobs="$SLURM_JOB_ID" --format='state %T'
srun --ntasks=1 bash -c 'echo cores $(nproc); env | grep ^SLURM_CPU_BIND= || true'
"""


def test_a_dirty_shell_changes_no_job_and_a_lost_answer_loses_none(
    plain: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(SCRIPT)
    for name, value in plain.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    asked = ["--partition=cpu", "--cpus-per-task=2", "--time=2"]
    by_hand = client.run(
        ["sbatch", "--parsable", *asked, "--output=by_hand.out", str(script)],
        environment={**os.environ, **OF_SRUN},
    ).strip()
    for name, value in {**LEFT_OVER, **OF_SRUN}.items():
        monkeypatch.setenv(name, value)
    ours = client.submit([*asked, "--output=ours.out"], SCRIPT, f"hpc_train-job:{tmp_path}/ours")
    tools = tmp_path / "bin"
    tools.mkdir()
    wrapper = tools / "sbatch"
    wrapper.write_text(
        f'#!/bin/sh\n{shutil.which("sbatch")} "$@" > /dev/null\n'
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2\nexit 1\n"
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    lost = client.submit([*asked, "--array=0-1", "--hold"], SCRIPT, f"hpc_train-job:{tmp_path}/lost")
    state = client.job_state(f"{lost}_1")
    assert state is not None and state.is_alive
    client.cancel([lost])
    for job_id in (by_hand, ours):
        assert plain.wait_for_state(job_id, "COMPLETED", "FAILED") == "COMPLETED"
    for name in ("by_hand", "ours"):
        wait_for(f"{name}.out", (tmp_path / f"{name}.out").exists, 20)
        lines = (tmp_path / f"{name}.out").read_text().splitlines()
        assert lines[:2] == ["state RUNNING", "cores 2"], name
        assert "SLURM_CPU_BIND=quiet,map_cpu:0" not in lines, name
