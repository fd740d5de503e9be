"""Nodes that are lost, on a real Slurm of four: a spare, fewer nodes, the batch host, and what Slurm itself does.

A lost node looks as one without power: its slurmd, its step daemons and all processes of its tasks are gone at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpc_train.run.directory import RunDirectory
from tests.slurm.cluster import Cluster, running, wait_for
from tests.slurm.runs import SLOW, detail, events, job_id, wait_for_step

LONG = os.environ.get("HPC_TRAIN_LONG") == "1"
long = pytest.mark.skipif(not LONG, reason="minutes on a real Slurm: HPC_TRAIN_LONG=1")

CASE = [*SLOW, "cluster.cpu_workers=1", "batch.global_size=12", "checkpoint.every=5", "run.name=run"]
PATIENCE_S = 480.0  # on a machine that is busy with other tests, workers take minutes to start


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A cluster of its own: its nodes are killed."""
    with running() as started:
        yield started


@pytest.fixture
def cluster(nodes: Cluster) -> Cluster:
    """All four nodes are up again."""
    for node in ("n1", "n2", "n3", "n4"):
        if not daemons(nodes, node):
            subprocess.run(["slurmd", "-N", node], env=nodes.environment, check=True, stdin=subprocess.DEVNULL)
            nodes.call("scontrol", "update", f"nodename={node}", "state=resume")
    wait_for("four idle nodes", lambda: len(idle(nodes)) == 4, PATIENCE_S)
    return nodes


def idle(cluster: Cluster) -> list[str]:
    return cluster.call("sinfo", "-h", "-N", "-p", "gpu", "-t", "idle", "-o", "%N").stdout.split()


def own(process: psutil.Process, cluster: Cluster) -> dict[str, str]:
    """The environment of a process of this cluster; empty for any other process."""
    try:
        environment = process.environ()
    except psutil.Error:
        return {}
    return environment if environment.get("SLURM_CONF") == cluster.environment["SLURM_CONF"] else {}


def daemons(cluster: Cluster, node: str) -> list[psutil.Process]:
    named = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["slurmd", "-N", node]]
    return [process for process in named if own(process, cluster)]


def tasks(cluster: Cluster, node: str) -> list[psutil.Process]:
    """All processes that a job has on ``node``."""
    return [one for one in psutil.process_iter() if own(one, cluster).get("SLURMD_NODENAME") == node]


def kill_node(cluster: Cluster, node: str) -> None:
    found = tasks(cluster, node)
    parents = {parent for one in found if (parent := one.parent()) is not None and parent.name() == "slurmstepd"}
    for process in [*daemons(cluster, node), *parents, *found]:
        kill(process.pid)


def kill_agent(cluster: Cluster, node: str) -> None:
    agents = [one for one in tasks(cluster, node) if one.name() != "srun" and "agent" in one.cmdline()]
    kill(min(agents, key=lambda one: one.create_time()).pid)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def names(run: Path, event: str) -> list[list[str]]:
    return [found["nodes"] for found in events(run, event)]


def wait_for_event(run: Path, event: str, count: int = 1) -> None:
    wait_for(f"{event} in {run}", lambda: len(events(run, event)) >= count, PATIENCE_S)


def wait_for_attempt_step(run: Path, attempt: int) -> None:
    """Until ``attempt`` has taken steps and saved one."""
    file = RunDirectory(run).metrics_file(attempt)
    wait_for(f"steps of attempt {attempt}", lambda: file.exists() and file.read_text().count("\n") > 6, PATIENCE_S)


def finished(process: subprocess.Popen[str], run: Path, cluster: Cluster, steps: int) -> None:
    """The run came to its end; steps that were taken twice had the same loss; nothing is left of it."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert cluster.wait_for_state(job_id(run), "COMPLETED", seconds=PATIENCE_S) == "COMPLETED"
    losses = defaultdict(list)
    for line in RunDirectory(run).read_all_metrics():
        losses[line["step"]].append(line["loss"])
    assert sorted(losses) == list(range(1, steps + 1))
    for found in losses.values():
        assert found == pytest.approx([found[0]] * len(found), rel=1e-4)
    wait_for("the end of all processes", lambda: not left(run), 60)


def left(run: Path) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if str(run) in (one.info["cmdline"] or [])]


def test_a_spare_takes_over_and_then_fewer_nodes_go_on(cluster: Cluster, tmp_path: Path) -> None:
    case = [*CASE, "cluster.nodes=2", "elastic.spares=1", "elastic.min_nodes=1", "train.steps=40"]
    process, run = cluster.start(*case, "-m", cwd=tmp_path), tmp_path / "outputs" / "run"
    wait_for_step(run, 7, PATIENCE_S)
    first, second = names(run, "started")[0]
    kill_agent(cluster, second)
    wait_for_attempt_step(run, 1)
    (spare,) = names(run, "spare_used")[0]
    assert names(run, "started")[1] == [first, spare]
    kill_node(cluster, spare)
    wait_for_event(run, "shrunk")
    finished(process, run, cluster, 40)
    assert names(run, "started")[2] == [first]
    assert [event["node"] for event in events(run, "node_lost")] == [second, spare]
    assert detail(cluster, job_id(run), "Restarts") == "0", "all of it in one start of the job"


def test_a_job_whose_batch_host_is_lost_runs_again(cluster: Cluster, tmp_path: Path) -> None:
    case = [*CASE, "cluster.nodes=2", "elastic.min_nodes=1", "train.steps=30"]
    process, run = cluster.start(*case, "-m", cwd=tmp_path), tmp_path / "outputs" / "run"
    wait_for_step(run, 7, PATIENCE_S)
    kill_node(cluster, detail(cluster, job_id(run), "BatchHost"))
    finished(process, run, cluster, 30)
    assert detail(cluster, job_id(run), "Restarts") == "1"
    assert len(names(run, "started")) == 2
    assert len(names(run, "started")[1]) == 2, "the full size again"


@pytest.mark.parametrize("nodes_of_job", [1, 2])
@long
def test_the_agent_with_the_hub_is_killed(cluster: Cluster, tmp_path: Path, nodes_of_job: int) -> None:
    """Of one node: the batch script starts another step of the job. Of several: one that is left has it requeued."""
    case = [*CASE, f"cluster.nodes={nodes_of_job}", "train.steps=30"]
    process, run = cluster.start(*case, "-m", cwd=tmp_path), tmp_path / "outputs" / "run"
    wait_for_step(run, 7, PATIENCE_S)
    kill_agent(cluster, names(run, "started")[0][0])
    finished(process, run, cluster, 30)


@long
def test_three_nodes_at_once(cluster: Cluster, tmp_path: Path) -> None:
    case = [*CASE, "cluster.nodes=4", "elastic.min_nodes=1", "train.steps=40"]
    process, run = cluster.start(*case, "-m", cwd=tmp_path), tmp_path / "outputs" / "run"
    wait_for_step(run, 7, PATIENCE_S)
    for node in names(run, "started")[0][1:]:
        kill_agent(cluster, node)
    finished(process, run, cluster, 40)
    assert len(events(run, "restarted")) == 1, "one decision"


@long
def test_scontrol_requeue_by_a_person(cluster: Cluster, tmp_path: Path) -> None:
    process = cluster.start(*CASE, "cluster.nodes=2", "train.steps=40", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 7, PATIENCE_S)
    cluster.call("scontrol", "requeue", job_id(run))
    finished(process, run, cluster, 40)
    assert detail(cluster, job_id(run), "Restarts") == "1"


@long
def test_a_controller_that_is_away_costs_nothing(cluster: Cluster, tmp_path: Path) -> None:
    process = cluster.start(*CASE, "cluster.nodes=3", "elastic.min_nodes=1", "train.steps=60", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 7, PATIENCE_S)
    (controller,) = [one for one in psutil.process_iter() if one.name() == "slurmctld" and own(one, cluster)]
    controller.suspend()
    try:
        kill_agent(cluster, names(run, "started")[0][1])
        wait_for_event(run, "shrunk")
        time.sleep(30)
    finally:
        controller.resume()
    finished(process, run, cluster, 60)
    assert len(events(run, "restarted")) == 1
