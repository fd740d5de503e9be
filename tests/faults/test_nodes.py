"""Kills nodes and agents on a real Slurm with four nodes. In every case the weights equal those of the undisturbed run
bit for bit, on any number of ranks, and no process, port or shared memory is left.

The following command runs the whole matrix with three trials each, draws the step of each fault from a seed, and prints
a table of the times:

    HPC_TRAIN_LONG=1 HPC_TRAIN_TRIALS=3 HPC_TRAIN_SEED=0 pytest -s tests/faults/test_nodes.py tests/faults/test_slurm.py

After an interruption it continues with the trials that have not passed; ``HPC_TRAIN_LONG_STATE`` is the directory of
that record.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.checkpoint.progress import LONG
from tests.faults.measured import Times
from tests.faults.on_slurm import ASKED, OnSlurm, kill_agent, kill_node, skip_unless_long, worker
from tests.slurm.cluster import Cluster
from tests.slurm.runs import events, steps

TWO = ["cluster.nodes=2", ASKED]
SPARE = [*TWO, "elastic.spares=1", "elastic.min_nodes=1"]
long = skip_unless_long("minutes on a real Slurm")


@pytest.mark.long_form(80, every_share=True)  # test_faults.py kills a rank, tests/elastic has the decisions
def test_a_spare_takes_over_and_then_fewer_nodes_go_on(
    cluster: Cluster, tmp_path: Path, whole: str, step: int, times: Times
) -> None:
    """The job is submitted with sbatch. The short form loses one node."""
    on = OnSlurm.by_hand(cluster, tmp_path, "multi_node.sbatch", ["--nodes=3", "--time=15"], *SPARE)
    on.wait_for_step(step)
    first, second = on.nodes_of("started")[0]
    node_killed = kill_node(cluster, second)
    on.wait_for_event("spare_used")
    (spare,) = on.nodes_of("spare_used")[0]
    teams, lost = [[first, second], [first, spare]], [second]
    if LONG:
        on.wait_for_attempt(1)
        agent_killed = kill_agent(cluster, spare)
        on.wait_for_event("shrunk")
        teams, lost = [*teams, [first]], [*lost, spare]
    on.finished(whole)
    assert on.nodes_of("started") == teams
    assert on.reported("node_lost") == [("node_lost", 1, node) for node in lost]
    assert on.shown("Restarts") == "0", "all of it in one start of the job"
    times.note("node lost (all of it), a spare takes over: first step", on.first_step_after(node_killed))
    if LONG:
        times.note("node lost (its agent), fewer go on: first step", on.first_step_after(agent_killed))


@long
def test_a_job_whose_batch_host_is_lost_runs_again(
    cluster: Cluster, tmp_path: Path, whole: str, step: int, times: Times
) -> None:
    on = OnSlurm.submit(cluster, tmp_path, *TWO, "elastic.min_nodes=1")
    on.wait_for_step(step)
    host = on.shown("BatchHost")
    killed = kill_node(cluster, host)
    if not LONG:  # what Slurm does after SlurmdTimeout
        cluster.call("scontrol", "update", f"nodename={host}", "state=down", "reason=killed")
    on.finished(whole)
    assert on.shown("Restarts") == "1"
    assert [len(started) for started in on.nodes_of("started")] == [2, 2], "the full size again"
    assert on.reported("node_lost") == [("node_lost", None, host)]
    times.note("batch host lost, requeued: first step", on.first_step_after(killed))


@long
def test_the_only_agent_is_killed(
    cluster: Cluster, tmp_path: Path, whole: str, trial: int, step: int, times: Times
) -> None:
    """The batch script, our own or the user's, starts another step of the job."""
    if trial % 2:
        on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=1", ASKED)
    else:
        on = OnSlurm.by_hand(cluster, tmp_path, "single_node.sbatch", ["--time=15"], ASKED)
    on.wait_for_step(step)
    killed = kill_agent(cluster, on.nodes_of("started")[0][0])
    on.finished(whole)
    assert on.shown("Restarts") == "0"
    times.note("the only agent killed, another step of the job: first step", on.first_step_after(killed))


@long
def test_the_agent_with_the_hub_is_killed(
    cluster: Cluster, tmp_path: Path, whole: str, step: int, times: Times
) -> None:
    """One of the remaining agents requeues the job."""
    on = OnSlurm.submit(cluster, tmp_path, *TWO)
    on.wait_for_step(step)
    killed = kill_agent(cluster, on.nodes_of("started")[0][0])
    on.finished(whole)
    times.note("agent with the hub killed, requeued: first step", on.first_step_after(killed))


@long
def test_three_nodes_at_once(cluster: Cluster, tmp_path: Path, whole: str, step: int, times: Times) -> None:
    on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=4", "elastic.min_nodes=1", ASKED)
    on.wait_for_step(step)
    killed = kill_agent(cluster, *on.nodes_of("started")[0][1:])
    on.finished(whole)
    assert len(events(on.run, "restarted")) == 1, "one decision"
    times.note("three of four nodes lost at once: first step", on.first_step_after(killed))


LOCAL_STEPS = 5
LOCAL = [
    f"strategy.local_steps={LOCAL_STEPS}", "strategy.shard=node", "train.reproducible=null", "cluster.nodes=3",
    "elastic.min_nodes=1", ASKED,
]  # fmt: skip


@pytest.mark.long_form(80)  # tests/parallel/test_local_steps.py loses a replica of processes
def test_the_replicas_that_are_left_go_on(cluster: Cluster, tmp_path: Path, step: int, times: Times) -> None:
    """Each of three nodes is a replica that exchanges weights every ``LOCAL_STEPS`` steps."""
    on = OnSlurm.submit(cluster, tmp_path, *LOCAL)
    on.wait_for_step(step)
    nodes = on.nodes_of("started")[0]
    left = worker(cluster, nodes[1])
    killed = kill_node(cluster, nodes[2])
    on.wait_for_event("replica_lost")
    on.wait_for_step(max(steps(on.run)) + 2)
    assert left.is_running()
    on.completed(may_lack=2)  # of the steps in which the replicas notice the loss
    assert on.nodes_of("started") == [nodes]
    assert on.nodes_of("replica_lost") == [[nodes[2]]]
    assert steps(on.run) == sorted(set(steps(on.run))), "no step is repeated"
    lines = RunDirectory(on.run).read_all_metrics()
    first = next(line["time"] for line in lines if line["world_size"] == 2)
    times.note("replica lost, the others go on: first step", first - killed)


@pytest.mark.long_form(80)
def test_a_killed_worker_joins_the_other_replicas_again(
    cluster: Cluster, tmp_path: Path, step: int, times: Times
) -> None:
    on = OnSlurm.submit(cluster, tmp_path, *LOCAL)
    on.wait_for_step(step)
    nodes = on.nodes_of("started")[0]
    worker(cluster, nodes[1]).kill()
    on.completed(may_lack=2)
    assert on.nodes_of("started") == [nodes, nodes]
    assert on.nodes_of("replica_lost") == [[nodes[1]]]
    (resized,) = events(on.run, "resized")
    assert resized["before"] == 2 and resized["steps"] == 0, "no step is repeated"
