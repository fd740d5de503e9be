"""Detached jobs: the command returns, the job goes on, and its run is live until it has ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from hpc_train.run.lease import find_live
from tests.doors.command import TINY, hpc_train


@pytest.mark.long_form(10)  # tests/slurm/test_jobs.py leaves a detached run
def test_a_detached_job_finishes_alone(tmp_path: Path) -> None:
    pause = tmp_path / "pause"
    pause.touch()
    slow = ["model=custom", "model._target_=tests.faults.models.OnNode", f"+model.args.pause={pause}"]
    small = [part for part in TINY if not part.startswith("model.")]
    arguments = ["+strategy=dp", "cluster.cpu_workers=1", *small, *slow, "run.name=run"]
    left = hpc_train(*arguments, "launch.detach=true", "-m", cwd=tmp_path)
    assert left.returncode == 0, left.stdout + left.stderr
    run = RunDirectory(tmp_path / "outputs" / "run")
    assert f"{run.path}" in left.stdout
    assert "hpc_train cancel outputs/" in left.stdout
    refused = hpc_train(*arguments, "-m", cwd=tmp_path)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "is live" in refused.stderr
    pause.unlink()
    deadline = time.monotonic() + 120
    while find_live(run) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [line["step"] for line in run.read_metrics()] == list(range(1, 7))
    assert [event["exit_code"] for event in run.read_events() if "exit_code" in event] == [0]
