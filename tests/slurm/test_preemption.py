"""Jobs whose nodes others take: they save, wait, and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doors.command import REPOSITORY
from tests.report.test_page import check
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import (
    ONE_NODE,
    SLOW,
    TWO_BY_TWO,
    detail,
    events,
    every_step,
    job_id,
    wait_for_step,
    wandb_ids,
    why,
    with_python,
)

SCRIPT = REPOSITORY / "slurm" / "preemptible.sbatch"
TAKE_ALL = ["sbatch", "--parsable", "--nodes=4", "--exclusive", "--wrap=sleep 2"]


@pytest.mark.beside
def test_preemption_loses_no_step_and_keeps_the_wandb_run(contended: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *TWO_BY_TWO, "train.steps=40", "telemetry.wandb.mode=offline", "cluster.partition=preempt"]
    process = contended.start(*case, "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 3)
    urgent = contended.call(*TAKE_ALL, cwd=tmp_path)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert contended.state(urgent.stdout.strip()) == "COMPLETED"
    assert every_step(run) == list(range(1, 41)), "each step was taken once"
    assert len(set(wandb_ids(run))) == 1
    assert detail(contended, job_id(run), "Restarts") == "1"
    words = " ".join(check((run / "report.html").read_text()).words.split())
    assert "nothing failed" in words and "requeues 1 " in words and "over 2 jobs" in words


@pytest.mark.beside
@pytest.mark.long_form(40)  # a submitted job above
def test_so_does_one_of_the_batch_script(contended: Cluster, tmp_path: Path) -> None:
    cluster = with_python(contended)
    run = tmp_path / "outputs" / "run"
    options = ["--parsable", "--partition=preempt", "--nodes=1-2", str(SCRIPT)]
    arguments = [*SLOW, "train.steps=30", "cluster.cpu_workers=2", "run.name=run"]
    job = cluster.call("sbatch", *options, *arguments, cwd=tmp_path).stdout.strip()
    wait_for_step(run, 3)
    urgent = cluster.call(*TAKE_ALL, cwd=tmp_path)
    ended = cluster.wait_for_state(job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", seconds=240)
    assert ended == "COMPLETED", "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert cluster.state(urgent.stdout.strip()) == "COMPLETED"
    assert every_step(run) == list(range(1, 31)), "each step was taken once"
    assert {event["attempt"] for event in events(run, "started")} == {0, 1}
    assert detail(cluster, job, "Restarts") == "1"


@pytest.mark.beside
@pytest.mark.long_form(30)  # tests/faults/test_nodes.py loses nodes
def test_a_node_that_an_administrator_sets_down_is_told_with_the_reason(contended: Cluster, tmp_path: Path) -> None:
    conf = Path(contended.environment["SLURM_CONF"])
    as_it_was = conf.read_text()
    conf.write_text(as_it_was.replace("ReturnToService=2", "ReturnToService=1"))  # it stays down, as on most sites
    node = ""
    try:
        contended.call("scontrol", "reconfigure")
        case = [*SLOW, *ONE_NODE, "train.steps=600", "launch.detach=true"]
        assert contended.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path).returncode == 0
        run = tmp_path / "outputs" / "run"
        wait_for_step(run, 2)
        (node,) = events(run, "started")[0]["nodes"]
        contended.call("scontrol", "update", f"nodename={node}", "state=down", "reason=bad dimm")
        wait_for("the second start", lambda: bool(events(run, "requeued_by_slurm")), 120)
        found = why(contended, tmp_path)
    finally:
        conf.write_text(as_it_was)
        contended.call("scontrol", "reconfigure")
        contended.call("scontrol", "update", f"nodename={node}", "state=resume")
    assert (found["cause"]["kind"], found["cause"]["node"]) == ("node_lost", node)
    assert found["cause"]["message"] == f"Slurm requeued the job: node {node} is down (bad dimm)"
