"""A compiled run whose worker is killed and whose job is requeued on a real Slurm compiles nothing a second time."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.faults.on_slurm import PATIENCE_S, skip_unless_long, worker
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import events, job_id, steps

STEPS = 150  # enough that a step after each fault is left
CASE = [
    "+strategy=zero3", "cluster=slurm", "cluster.nodes=2", "cluster.cpu_workers=1",
    "cluster.preflight_action.slow_device=warn", "train.compile=true", "model.n_layers=2", f"train.steps={STEPS}",
    "checkpoint.every=5", "telemetry.log_every=1", "telemetry.wandb.mode=disabled", "run.name=run",
]  # fmt: skip


@pytest.mark.timeout(1200)
@skip_unless_long("minutes on a real Slurm")
def test_a_compiled_run_compiles_nothing_again(cluster: Cluster, tmp_path: Path) -> None:
    process, run = cluster.start(*CASE, "-m", cwd=tmp_path), tmp_path / "outputs" / "run"
    wait_for("the first steps", lambda: max(steps(run), default=0) >= 12, PATIENCE_S)
    worker(cluster, events(run, "started")[0]["nodes"][1]).kill()
    of_second = RunDirectory(run).metrics_file(1)
    wait_for("a second attempt", lambda: of_second.exists() and of_second.read_text().count("\n") > 6, PATIENCE_S)
    cluster.call("scontrol", "requeue", job_id(run))
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    first, *others = events(run, "first_step")
    assert first["compiled"] > 0 and len(others) == 2
    for other in others:
        assert (other["compiled"], other["cache_loaded"]) == (0, True)
        assert other["reused"] == first["compiled"] + first["reused"]
    losses: dict[int, set[float]] = {}
    for line in RunDirectory(run).read_all_metrics():
        losses.setdefault(line["step"], set()).add(line["loss"])
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert max(map(len, losses.values())) == 1, "a repeated step has a different loss"
