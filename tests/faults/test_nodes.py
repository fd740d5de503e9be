"""Nodes that are lost, on a real Slurm of four: a spare, fewer nodes, the batch host, and what Slurm itself does.

The run takes whatever number of ranks it gets, with the same weights in the end, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.on_slurm import (
    OnSlurm,
    environment_of,
    kill_agent,
    kill_node,
    restore,
    skip_unless_long,
    undisturbed,
)
from tests.slurm.cluster import Cluster, running
from tests.slurm.runs import events

STEPS = 40
ASKED = f"train.steps={STEPS}"
SPARE = ["cluster.nodes=2", "elastic.spares=1", "elastic.min_nodes=1", ASKED]
long = skip_unless_long("minutes on a real Slurm")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A cluster of its own: its nodes are killed."""
    with running() as started:
        yield started


@pytest.fixture
def cluster(nodes: Cluster) -> Cluster:
    restore(nodes)
    return nodes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the undisturbed run, as their SHA-256."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), STEPS)


def test_a_spare_takes_over_and_then_fewer_nodes_go_on(cluster: Cluster, tmp_path: Path, whole: str) -> None:
    """In a job by hand."""
    on = OnSlurm.by_hand(cluster, tmp_path, "multi_node.sbatch", ["--nodes=3", "--time=15"], *SPARE)
    on.wait_for_step(7)
    first, second = on.nodes_of("started")[0]
    kill_agent(cluster, second)
    on.wait_for_attempt(1)
    (spare,) = on.nodes_of("spare_used")[0]
    assert on.nodes_of("started")[1] == [first, spare]
    kill_node(cluster, spare)
    on.wait_for_event("shrunk")
    on.finished(STEPS, whole)
    assert on.nodes_of("started")[2] == [first]
    assert on.told("node_lost") == [("node_lost", 1, second), ("node_lost", 1, spare)]
    assert on.shown("Restarts") == "0", "all of it in one start of the job"


def test_a_job_whose_batch_host_is_lost_runs_again(cluster: Cluster, tmp_path: Path, whole: str) -> None:
    on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=2", "elastic.min_nodes=1", ASKED)
    on.wait_for_step(7)
    kill_node(cluster, on.shown("BatchHost"))
    on.finished(STEPS, whole)
    assert on.shown("Restarts") == "1"
    assert [len(started) for started in on.nodes_of("started")] == [2, 2], "the full size again"


@pytest.mark.parametrize("hand", [True, False])
@long
def test_the_only_agent_is_killed(cluster: Cluster, tmp_path: Path, whole: str, hand: bool) -> None:
    """The batch script starts another step of the job."""
    if hand:
        on = OnSlurm.by_hand(cluster, tmp_path, "single_node.sbatch", ["--time=15"], ASKED)
    else:
        on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=1", ASKED)
    on.wait_for_step(7)
    kill_agent(cluster, on.nodes_of("started")[0][0])
    on.finished(STEPS, whole)
    assert on.shown("Restarts") == "0"


@long
def test_the_agent_with_the_hub_is_killed(cluster: Cluster, tmp_path: Path, whole: str) -> None:
    """One of those that are left has the job requeued."""
    on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=2", ASKED)
    on.wait_for_step(7)
    kill_agent(cluster, on.nodes_of("started")[0][0])
    on.finished(STEPS, whole)


@long
def test_three_nodes_at_once(cluster: Cluster, tmp_path: Path, whole: str) -> None:
    on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=4", "elastic.min_nodes=1", ASKED)
    on.wait_for_step(7)
    kill_agent(cluster, *on.nodes_of("started")[0][1:])
    on.finished(STEPS, whole)
    assert len(events(on.run, "restarted")) == 1, "one decision"


@long
def test_scontrol_requeue_by_a_person(cluster: Cluster, tmp_path: Path, whole: str) -> None:
    on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=2", ASKED)
    on.wait_for_step(7)
    cluster.call("scontrol", "requeue", on.job)
    on.finished(STEPS, whole)
    assert on.shown("Restarts") == "1"


@long
def test_a_controller_that_is_away_costs_nothing(cluster: Cluster, tmp_path: Path, whole: str) -> None:
    on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=3", "elastic.min_nodes=1", ASKED)
    on.wait_for_step(7)
    (controller,) = [one for one in psutil.process_iter() if one.name() == "slurmctld" and environment_of(one, cluster)]
    controller.suspend()
    try:
        kill_agent(cluster, on.nodes_of("started")[0][1])
        on.wait_for_event("shrunk")
        time.sleep(30)
    finally:
        controller.resume()
    on.finished(STEPS, whole)
    assert len(events(on.run, "restarted")) == 1
