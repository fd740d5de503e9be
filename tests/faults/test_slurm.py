"""Runs under the actions of Slurm and its administrators, and on nodes that are allocated but do not work.

``tests/faults/test_nodes.py`` shows the command that runs all of these tests.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from tests.faults.measured import Times
from tests.faults.on_slurm import (
    ASKED,
    PATIENCE_S,
    STEPS,
    OnSlurm,
    agent,
    environment_of,
    everything,
    kill_agent,
    kill_node,
    signal_all,
    skip_unless_long,
    worker,
)
from tests.other_user import OTHER, as_other
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import events

pytestmark = [skip_unless_long("minutes on a real Slurm"), pytest.mark.timeout(1800)]
TWO = ["cluster.nodes=2", ASKED]
SOON_LOST = "elastic.heartbeat_timeout_s=4"
MODEL = "model._target_=tests.faults.models.OnNode"


def test_a_node_on_which_workers_die_is_left_out(
    cluster: Cluster, tmp_path: Path, whole: str, step: int, times: Times
) -> None:
    """After two attempts the job runs elsewhere."""
    submitted = time.time()
    on = OnSlurm.submit(cluster, tmp_path, *TWO, MODEL, "+model.args.fails=n2")
    on.finished(whole)
    assert on.reported("worker_failed") == [("killed", 1, "n2")] * 2
    (requeued,) = events(on.run, "requeued")
    assert requeued["exclude"] == ["n2"]
    assert "n2" not in on.nodes_of("started")[-1]
    assert "scontrol update nodename=n2 state=drain" in on.why()
    times.note("workers die on one node from the start, requeued elsewhere: first step after submission",
               on.first_step_after(submitted))  # fmt: skip


def test_a_node_on_which_workers_die_is_done_without(cluster: Cluster, tmp_path: Path, whole: str, step: int) -> None:
    on = OnSlurm.submit(
        cluster, tmp_path, "cluster.nodes=3", "elastic.min_nodes=1", ASKED, MODEL, "+model.args.fails=n2"
    )
    on.finished(whole)
    assert on.reported("worker_failed") == [("killed", 1, "n2")] * 2
    assert on.nodes_of("started")[2:] == [["n1", "n3"]]
    assert on.shown("Restarts") == "0"


@pytest.mark.parametrize("bad", ["n1", "n2"])
def test_a_node_on_which_no_agent_starts_is_left_out(
    cluster: Cluster, tmp_path: Path, whole: str, step: int, bad: str
) -> None:
    """n1 is the batch host."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n[ "$SLURMD_NODENAME" != {bad} ] || exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    on = OnSlurm.submit(cluster, tmp_path, *TWO, f"cluster.python={python}", "elastic.join_timeout_s=30")
    on.finished(whole)
    assert [node for _, _, node in on.reported("node_lost")] == [bad]
    (requeued,) = events(on.run, "requeued")
    assert requeued["exclude"] == [bad]
    assert bad not in on.nodes_of("started")[-1]


def test_scontrol_requeue_by_a_person(cluster: Cluster, tmp_path: Path, whole: str, step: int) -> None:
    on = OnSlurm.submit(cluster, tmp_path, *TWO)
    on.wait_for_step(step)
    cluster.call("scontrol", "requeue", on.job)
    on.finished(whole)
    assert on.shown("Restarts") == "1"
    (reported,) = events(on.run, "requeued_by_slurm")
    assert "scontrol requeue" in reported["reason"]


def test_a_requeue_that_slurm_refuses(cluster: Cluster, tmp_path: Path, step: int) -> None:
    on = OnSlurm.submit(cluster, tmp_path, *TWO)
    on.wait_for_step(step)
    cluster.call("scontrol", "update", f"JobId={on.job}", "Requeue=0")
    cluster.call("scancel", "--signal=USR2", on.job)
    output, _ = on.submitter.communicate(timeout=300)  # type: ignore[union-attr]
    assert on.submitter.returncode == Exit.GAVE_UP, output  # type: ignore[union-attr]
    assert "Requeue=0" in output
    assert on.ended() == "FAILED"
    assert on.shown("ExitCode") == "93:0"
    assert "Requeue=0" in on.why()
    on.nothing_left()


def test_a_controller_that_is_away_costs_nothing(cluster: Cluster, tmp_path: Path, whole: str, step: int) -> None:
    on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=3", "elastic.min_nodes=1", ASKED)
    on.wait_for_step(step)
    named = [one for one in everything() if one.info["name"] == "slurmctld"]
    (controller,) = [one for one in named if environment_of(one, cluster)]
    controller.suspend()
    try:
        kill_agent(cluster, on.nodes_of("started")[0][1])
        on.wait_for_event("shrunk")
        time.sleep(30)
    finally:
        controller.resume()
    on.finished(whole)
    assert len(events(on.run, "restarted")) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_a_frozen_node_does_not_hold_the_job(
    cluster: Cluster, tmp_path: Path, whole: str, step: int, times: Times, which: int
) -> None:
    """Its tasks do not end, as when their file system hangs, so neither does srun. Node 0 has the hub."""
    on = OnSlurm.submit(cluster, tmp_path, *TWO, SOON_LOST)
    on.wait_for_step(step)
    node = on.nodes_of("started")[0][which]
    top = agent(cluster, node)
    signal_all([top, *top.children(recursive=True)], signal.SIGSTOP)
    frozen = time.time()
    wait_for("Slurm to be asked for the requeue", lambda: on.shown("Restarts") == "1", 120)
    times.note(f"node {which} frozen: Slurm is asked for the requeue", time.time() - frozen)
    on.finished(whole)
    assert [lost for _, _, lost in on.reported("node_lost")] == [node]
    (requeued,) = events(on.run, "requeued")
    assert requeued["exclude"] == [node], "it looks healthy to Slurm"
    assert node not in on.nodes_of("started")[-1]


def test_a_rank_that_hangs_on_another_node_is_named(
    cluster: Cluster, tmp_path: Path, whole: str, step: int, times: Times
) -> None:
    on = OnSlurm.submit(cluster, tmp_path, *TWO, "elastic.hang_timeout_s=10", "model.args.seconds=0.6")
    on.wait_for_step(step)
    first, second = on.nodes_of("started")[0]
    shown = cluster.hpc_train("stacks", str(on.run), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for rank, node in enumerate((first, second)):
        assert f"--- rank {rank} on {node}" in shown.stdout
    stopped = time.time()
    worker(cluster, second).suspend()
    on.finished(whole)
    assert on.reported("worker_failed") == [("hang", 1, second)]
    times.note("a rank of another node hangs (10 s): first step", on.first_step_after(stopped))
    assert "is stopped by a signal" in on.why()
    stacks = on.run / "logs" / "stacks"
    assert "trainer.py" in (stacks / f"hang-{first}-000.txt").read_text()  # of the node that waits
    assert "process state T" in (stacks / f"hang-{second}-000.txt").read_text()


def test_a_person_looks_into_a_rank_of_another_node(cluster: Cluster, tmp_path: Path, whole: str, step: int) -> None:
    """The command does not see the sockets of the nodes, as on another machine, and starts a step there. Meanwhile
    another user reaches the rank neither by its socket nor by a step."""
    with tempfile.TemporaryDirectory(prefix="hold-") as sockets:
        Path(sockets).chmod(0o755)
        slow = ["model.args.seconds=2", "elastic.hang_timeout_s=60", f"+cluster.env.TMPDIR={sockets}"]
        on = OnSlurm.submit(cluster, tmp_path, *TWO, *slow)
        on.wait_for_step(step)
        _, second = on.nodes_of("started")[0]
        hide = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs hidden {sockets} && exec "$@"', "sh"]
        command = [*hide, sys.executable, "-m", "hpc_train", "debug", str(on.run), "--rank=1", "--json"]
        person = subprocess.Popen(
            command,
            env=cluster.environment,
            cwd=tmp_path,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        held = f"rank 1 on {second} is held after step"
        wait_for("the hold", lambda: held in cluster.hpc_train("status", str(on.run), cwd=tmp_path).stdout, 120)
        (path,) = [event["path"] for event in events(on.run, "held")]
        with pytest.raises(AssertionError, match="PermissionError"):
            as_other(lambda: socket.socket(socket.AF_UNIX).connect(path))
        foreign_step = ["srun", "--overlap", f"--jobid={on.job}", f"--nodelist={second}", "true"]
        refused = subprocess.run(
            foreign_step, env=cluster.environment, user=OTHER, group=OTHER, extra_groups=[], cwd="/", check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        assert refused.returncode != 0
        assert "ccess/permission denied" in refused.stderr
        said, _ = person.communicate("p 'step', self.step\n!import os\np os.environ['SLURMD_NODENAME']\n", timeout=240)
        shown = json.loads(said)
        assert (shown["rank"], shown["node"]) == (1, second)
        assert f"('step', {shown['step']})" in shown["output"]
        assert f"'{second}'" in shown["output"]
        on.finished(whole)
        assert on.reported("worker_failed") == []


def test_a_slow_rank_on_another_node_is_named_and_left_alone(
    cluster: Cluster, tmp_path: Path, whole: str, step: int
) -> None:
    on = OnSlurm.submit(cluster, tmp_path, *TWO, MODEL, "+model.args.slow=n2")
    on.finished(whole)
    assert [(late["rank"], late["node"]) for late in events(on.run, "straggler")] == [(1, "n2")]
    assert on.reported("worker_failed") == []


@pytest.mark.trials(5)
def test_preemption(cluster: Cluster, tmp_path: Path, whole: str, step: int, times: Times) -> None:
    on = OnSlurm.submit(cluster, tmp_path, *TWO, "cluster.partition=preempt")
    on.wait_for_step(step)
    cluster.call("sbatch", "--parsable", "--nodes=4", "--exclusive", "--wrap=sleep 2", cwd=tmp_path)
    preempted = time.time()
    on.finished(whole)
    assert on.shown("Restarts") == "1"
    times.note("preempted, requeued: first step", on.first_step_after(preempted))
    assert sum(1 for _ in RunDirectory(on.run).read_all_metrics()) == STEPS, "no step was taken twice"


def test_grace_that_is_too_short(cluster: Cluster, tmp_path: Path, whole: str, step: int) -> None:
    """A step that takes longer than Slurm waits: the job is killed, and goes on from the checkpoint before."""
    pause = tmp_path / "pause"
    on = OnSlurm.submit(
        cluster, tmp_path, *TWO, "cluster.partition=preempt", MODEL, f"+model.args.pause={pause}",
        "elastic.hang_timeout_s=0",
    )  # fmt: skip
    on.wait_for_step(step)
    pause.touch()
    cluster.call("sbatch", "--parsable", "--nodes=4", "--exclusive", "--wrap=sleep 2", cwd=tmp_path)
    wait_for("the second start", lambda: on.shown("Restarts") == "1", PATIENCE_S)
    pause.unlink()
    on.finished(whole)


@pytest.mark.trials(5)
def test_the_time_limit(cluster: Cluster, tmp_path: Path, whole: str, step: int, times: Times) -> None:
    limit = ["cluster.time=00:02:00", "elastic.stop_grace_s=45", "model.args.seconds=1"]
    on = OnSlurm.submit(cluster, tmp_path, *TWO, *limit)
    on.finished(whole)
    requeued = events(on.run, "requeued")
    assert on.shown("Restarts") == str(len(requeued)) != "0"
    assert sum(1 for _ in RunDirectory(on.run).read_all_metrics()) == STEPS, "no step was taken twice"
    times.note("stopped ahead of the time limit, requeued: first step", on.first_step_after(requeued[0]["time"]))


def test_4_2_1_3_and_4_nodes(cluster: Cluster, tmp_path: Path, whole: str, step: int) -> None:
    """Nodes are lost, and the run goes on with others in its next jobs."""
    sized = [ASKED, "elastic.min_nodes=1", "model.args.seconds=0.4"]
    on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=4", *sized)
    on.wait_for_step(step)
    first, second, *others = on.nodes_of("started")[0]
    kill_agent(cluster, *others)
    on.wait_for_attempt(1)
    kill_agent(cluster, second)
    on.wait_for_attempt(2)
    on.stopped()
    on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=3", *sized)
    on.wait_for_attempt(3)
    on.stopped()
    on = OnSlurm.submit(cluster, tmp_path, "cluster.nodes=4", *sized)
    on.finished(whole)
    assert on.nodes_of("started")[1:3] == [[first, second], [first]]
    assert [len(nodes) for nodes in on.nodes_of("started")] == [4, 2, 1, 3, 4]


def test_a_chain_goes_on_without_its_batch_host(
    cluster: Cluster, tmp_path: Path, whole: str, step: int, times: Times
) -> None:
    """Nothing can be requeued: the job that is left empty ends, and the next one begins."""
    on = OnSlurm.submit(cluster, tmp_path, *TWO, "elastic.min_nodes=1", "launch.chain=3")
    on.wait_for_step(step)
    killed = kill_node(cluster, on.shown("BatchHost"))
    on.job = RunDirectory(on.run).record()["submissions"][-1]["chain"][1]
    on.finished(whole)
    assert [len(nodes) for nodes in on.nodes_of("started")] == [2, 2]
    times.note("batch host lost, the next job of the chain: first step", on.first_step_after(killed))


def test_a_chain_whose_job_gets_nowhere_ends(cluster: Cluster, tmp_path: Path, step: int) -> None:
    """Two jobs are asked to stop before they have taken a step: the third does not begin."""
    pause = tmp_path / "pause"
    pause.touch()
    on = OnSlurm.submit(
        cluster, tmp_path, "cluster.nodes=1", ASKED, "launch.chain=3", MODEL, f"+model.args.pause={pause}",
        "elastic.hang_timeout_s=0", "cluster.time=1", "elastic.stop_grace_s=5",
    )  # fmt: skip
    output, _ = on.submitter.communicate(timeout=600)  # type: ignore[union-attr]
    assert on.submitter.returncode != 0, output  # type: ignore[union-attr]
    ids = RunDirectory(on.run).record()["submissions"][-1]["chain"]
    assert [cluster.wait_for_state(one, "TIMEOUT", "FAILED", "CANCELLED") for one in ids][-1] == "CANCELLED"
    assert len(events(on.run, "started")) <= 2
