"""Runs that continue on other numbers of nodes while they train, on a real Slurm. ``tests/elastic/test_coordinator.py``
has the decisions, and ``tests/elastic/test_agent.py`` a run that shrinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doors import command
from tests.slurm.cluster import Cluster, reconfigured, wait_for
from tests.slurm.runs import ONE_WORKER, SLOW, events, every_step, job_id, losses, steps, wait_for_step


def joiners(cluster: Cluster, *states: str) -> list[str]:
    found = cluster.call("squeue", "--noheader", "--name=run-joiner", f"--states={','.join(states)}", "--format=%i")
    return found.stdout.split()


def resize(cluster: Cluster, cwd: Path, nodes: int, wait: int = 120) -> str:
    done = cluster.hpc_train("resize", "run", f"nodes={nodes}", f"--wait={wait}", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(cluster: Cluster, cwd: Path, *overrides: str) -> Path:
    done = cluster.hpc_train(*overrides, "launch.detach=true", "run.name=run", "-m", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    run = cwd / "outputs" / "run"
    wait_for_step(run, 3)
    return run


def undisturbed(cwd: Path, *overrides: str) -> list[float]:
    """Returns the losses of the same run on this machine."""
    done = command.hpc_train(*overrides, "cluster=local", "run.name=whole", cwd=cwd, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(cwd / "outputs" / "whole")


@pytest.mark.timeout(900)
@pytest.mark.long_form(100)  # tests/elastic/test_coordinator.py
def test_a_run_grows_and_shrinks_and_loses_no_step(cluster: Cluster, tmp_path: Path) -> None:
    fast = ["+model.args.seconds=0.05", "train.steps=400", "train.reproducible=any_world_size"]
    case = [*SLOW, *ONE_WORKER, *fast]
    run = start(cluster, tmp_path, *case)
    for nodes in (4, 2, 3, 1):
        assert f"continues on {nodes} nodes instead of" in resize(cluster, tmp_path, nodes)
        wait_for_step(run, steps(run)[-1] + 2)
    wait_for("the nodes to be free", lambda: not joiners(cluster, "RUNNING"), 60)
    assert cluster.wait_for_state(job_id(run), "COMPLETED", "FAILED") == "COMPLETED"
    assert every_step(run) == list(range(1, 401)), "each step was taken once"
    assert [event["steps"] for event in events(run, "resized")] == [0, 0, 0, 0]
    assert losses(run) == undisturbed(tmp_path, *case, "cluster.cpu_workers=2"), "bitwise the same"


@pytest.mark.long_form(90)  # tests/elastic/test_coordinator.py
def test_a_joiner_that_never_starts_is_cancelled_with_the_run(cluster: Cluster, tmp_path: Path) -> None:
    run = start(cluster, tmp_path, *SLOW, *ONE_WORKER, "train.steps=300")
    cluster.call("sbatch", "--exclusive", "--nodes=3", "--output=/dev/null", "--wrap=sleep 600", cwd=tmp_path)
    assert "adds 1 when it starts" in resize(cluster, tmp_path, 2, wait=30)
    (first,) = joiners(cluster, "PENDING")
    assert "instead of 2; the run trains on 1; job" in resize(cluster, tmp_path, 3, wait=30)
    (second,) = joiners(cluster, "PENDING")
    assert first != second
    assert cluster.wait_for_state(job_id(run), "COMPLETED", "FAILED") == "COMPLETED"
    wait_for("the joiner to be cancelled", lambda: not joiners(cluster, "PENDING"), 20)
    assert every_step(run) == list(range(1, 301))


@pytest.mark.timeout(600)
@pytest.mark.long_form(120)  # tests/elastic/test_resize.py
def test_a_run_takes_idle_nodes_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    grows = ["elastic.grow=idle", "elastic.max_nodes=3", "train.steps=3000"]
    run = start(cluster, tmp_path, *SLOW, *ONE_WORKER, *grows)
    wait_for("a joiner", lambda: bool(events(run, "resized")), 240)
    assert "elastic.grow=idle (saves at most" in events(run, "resize_requested")[0]["message"]
    (joiner,) = joiners(cluster, "RUNNING")
    assert cluster.call("squeue", "-h", "-j", joiner, "-O", "nice").stdout.split() == ["1000000"]
    assert cluster.hpc_train("cancel", "run", cwd=tmp_path).returncode == 0
    wait_for("both jobs to end", lambda: not joiners(cluster, "RUNNING", "COMPLETING"), 90)


@pytest.mark.long_form(60)  # tests/elastic/test_agent.py
def test_a_site_that_forbids_it_keeps_the_nodes(plain: Cluster, tmp_path: Path) -> None:
    run = start(plain, tmp_path, *SLOW, "cluster.nodes=2", "cluster.cpu_workers=1", "train.steps=60")

    def forbid(conf: str) -> str:
        return conf.replace("SchedulerParameters=", "SchedulerParameters=disable_job_shrink,")

    with reconfigured(plain, forbid):
        done = plain.hpc_train("resize", "run", "nodes=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "not resized: the site forbids it (SchedulerParameters=disable_job_shrink)" in done.stderr
    resize(plain, tmp_path, 1)
    wait_for("the node to be free", lambda: plain.call("squeue", "-ho", "%D").stdout.split() == ["1"], 30)
    assert plain.wait_for_state(job_id(run), "COMPLETED", "FAILED") == "COMPLETED"
    assert every_step(run) == list(range(1, 61))
