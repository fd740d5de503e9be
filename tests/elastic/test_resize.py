"""Whether a run may continue on another number of nodes, and which jobs give nodes back. ``test_coordinator.py`` has
the courses of events, ``test_agent.py`` a run that shrinks, and ``tests/slurm/test_resize.py`` all of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from hpc_train.config.schema import ElasticConfig
from hpc_train.config.values import growing_nodes
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous.addresses import AttemptSpec, ServerAddress
from hpc_train.elastic.rendezvous.server import RendezvousServer
from hpc_train.elastic.resize import Growth, JobNodes, Joiner, growth_of, guest_of, refusal_of
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.machine.allocation import Allocation
from hpc_train.run.directory import RANK_0, RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.requests import ResizeRequest
from hpc_train.schedulers.current import current_job
from hpc_train.telemetry.metrics import MetricsLog
from tests.config.composing import config_of

LAYOUT = Layout(4, 1, 1, 1, "ddp", "1f1b", 1, 1, 1)
RUNNING = AttemptSpec(0, "7.0.0", "7", "n0", 1, 1000.0, "n0", 1, 2, 0, 2, LAYOUT, (0, 1), {}, "random", 60, 2)
GROWS = ("elastic.grow=idle", "elastic.max_nodes=4", "cluster=slurm")


def test_requests_that_are_refused(in_job: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    in_job(scontrol='[ "$2" = job ] && echo ResizeTime=1 || echo SchedulerParameters=bf_max_time=1')
    config = config_of("+strategy=dp")

    def refusal(nodes: int, held: int = 2, min_nodes: int | None = None) -> str:
        changed = replace(config, elastic=ElasticConfig(min_nodes=min_nodes))
        return str(refusal_of(ResizeRequest(nodes, "user", 0.0), changed, RUNNING, current_job(), held))

    assert refusal(1) == "None"
    assert refusal(1, min_nodes=2) == "elastic.min_nodes=2 is the smallest number of nodes"
    assert refusal(1000).startswith("batch.global_size is 32, so some of the 2000"), "no layout"
    assert refusal(3) == "None"
    in_job(scontrol="echo SchedulerParameters=disable_job_shrink,bf_interval=3")
    assert refusal(1) == "the site forbids it (SchedulerParameters=disable_job_shrink)"
    assert refusal(1, held=1) == "None", "only the joiner goes"
    in_job(scontrol='[ "$2" = job ] && echo ResizeTime=1 || echo AccountingStorageType=accounting_storage/none')
    assert refusal(1) == "Slurm without accounting changes the nodes of a job only once"
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    assert refusal(1) == "the agents run in no step of several nodes"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert refusal(3) == "it does not run in a job"


def test_each_job_gives_its_nodes_back(in_job: Callable[..., None], tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    listed = 'case "$2" in --jobs=7) echo "n[0-2]";; *) echo "n[3-5]";; esac'
    shown = 'case "$3" in "n[0-2]") printf "n0\\nn1\\nn2\\n";; *) printf "n3\\nn4\\nn5\\n";; esac'
    in_job(squeue=listed, scontrol=f'[ "$1" = show ] || echo "$*" >> {calls}; {shown}', scancel=f"echo $* >> {calls}")
    nodes = JobNodes(current_job(), 3, [Joiner("8", 3, 3), Joiner("9", 6, 2), Joiner("10", 8, 1)])
    released = [(1, "n1"), (4, "n4"), (6, "n6"), (7, "n7")]
    nodes.note_released([number for number, _ in released])
    assert nodes.held == 2
    assert nodes.release(released) is None
    assert calls.read_text().splitlines() == ["update JobId=7 NodeList=n0,n2", "update JobId=8 NodeList=n3,n5"]
    calls.unlink()
    assert nodes.release([(5, "node 5 (not joined)")]) is None
    assert not calls.exists(), "its job has not got the node"
    assert nodes.release([(3, "n3")]) is None
    assert not calls.exists(), "the batch host of a joiner"
    nodes.cancel_waiting([0, 2, 3, 5])
    assert calls.read_text().split()[-1] == "10", "the others have joined"
    assert [joiner.job_id for joiner in nodes.joiners] == ["8", "9"]


def test_a_run_grows_by_itself_if_the_gain_is_worth_the_change(run: RunDirectory) -> None:
    config = config_of("+strategy=dp", *GROWS, "train.steps=1000")
    assert growth_of(run, config, RUNNING) is None, "what a change costs is not known yet"
    events = EventLog.open(run, RANK_0, 0, 0)
    events.write("resumed", step=90)
    events.write("checkpoint_saved", step=1, seconds=10.0)
    metrics = MetricsLog(run, 0)
    metrics.write({"time": 1030.0, "attempt": 0, "step": 100, "step_s": 1.0})
    request = growth_of(run, config, RUNNING)
    assert request is not None and request.nodes == 4
    assert request.reason == "elastic.grow=idle (saves at most 7:30 of 15:00, costs 0:30)"
    assert growth_of(run, config, replace(RUNNING, nodes=4)) is None
    metrics.write({"time": 1900.0, "attempt": 0, "step": 800, "step_s": 1.0})
    assert growth_of(run, config, RUNNING) is None, "100 s at most, and a change costs 30 s"
    with pytest.raises(UserError, match="does not say up to how many nodes"):
        growing_nodes(config_of("+strategy=dp", *GROWS[::2]))


def test_the_refusal_of_a_joiner_says_what_to_do(run: RunDirectory) -> None:
    alone = Allocation(2, 0, "n5", "8", "8.0.0", "n5")
    server = cast(RendezvousServer, None)  # only a run on one node uses it
    nodes = JobNodes(current_job(), 2)
    node = Node(0, "n5", "n5", None, 0, 1)
    address = ServerAddress("n5", 1, "")
    growth = Growth(run, config_of(), alone, server, address, nodes, lambda _: node, os.environ, lambda _: None)
    with pytest.raises(UserError, match="the joiner cannot be submitted: ") as refused:
        growth.submit(2, ["n5"], is_automatic=False)
    fix = f"`resize {run.path} nodes=N` with fewer nodes, or again when Slurm accepts a job of 2 nodes"
    assert refused.value.fix == fix


def test_the_nodes_of_a_joiner_are_numbered_after_those_of_the_run() -> None:
    alone = Allocation(1, 0, "n5", "8", "8.0.0", "127.0.0.1", ("n5",), "127.0.0.1")
    guest = guest_of(alone, "7.0.1:3")
    assert (guest.nodes, guest.node_rank, guest.launch_id, guest.address) == (4, 3, "7.0.1", "n5")
