"""Replicas of local steps lose a worker and a node, and the others go on in their processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from tests.elastic.entries import start_agent
from tests.elastic.test_agent import alive, end, marks, of_node, until
from tests.train.runs import frozen

LONG_FORM = pytest.mark.long_form(60)
TRAIN = "trains", "hpc_train.elastic.rendezvous.store:serve"


def steps(run: RunDirectory) -> list[int]:
    return [line["step"] for line in run.read_all_metrics()]


def named(run: RunDirectory, name: str) -> list[Any]:
    return [event for event in run.read_events() if event.name == name]


def pids(run: RunDirectory, attempt: int) -> list[int]:
    """The processes of all ranks of an attempt."""

    def of_attempt() -> list[int]:
        found = marks(run, 4) or []
        return [int(pid) for pid, number in found if int(number) == attempt]

    until(lambda: len(of_attempt()) == 4)
    return of_attempt()


@pytest.mark.parametrize(
    "strategy",
    [("strategy.shard=1",), pytest.param(("strategy.shard=2", "strategy.data_parallel=zero3"), marks=[LONG_FORM])],
    ids=["four", "two"],
)
def test_the_others_go_on_without_a_lost_node(tmp_path: Path, strategy: tuple[str, ...]) -> None:
    """Each of the two nodes has one or two replicas. A worker of the second is killed, which joins again, and then its
    agent."""
    run = frozen(
        tmp_path / "run", "+strategy=dp", "strategy.local_steps=5", *strategy, "batch.global_size=8",
        "train.steps=100000", "elastic.min_nodes=1", "cluster.cpu_workers=2", "cluster.nodes=2",
    )  # fmt: skip
    first, second = agents = [start_agent(run.path, *TRAIN, **of_node(number)) for number in (0, 1)]
    try:
        go_on_twice(run, first, second)
    finally:
        for agent in agents:
            agent.kill()


def go_on_twice(run: RunDirectory, first: Popen[str], second: Popen[str]) -> None:
    until(lambda: len(steps(run)) > 5)
    os.kill(pids(run, 0)[2], signal.SIGKILL)
    until(lambda: named(run, "resized"))
    (loss,) = named(run, "replica_lost")
    assert (loss["class"], loss["nodes"]) == ("killed", ["127.0.0.2"])
    resumed = until(lambda: named(run, "resumed"))[0]
    taken = [line["step"] for line in run.read_all_metrics() if line["attempt"] == 0]
    assert resumed["step"] >= taken[-1], "no step is repeated"

    until(lambda: steps(run)[-1] > resumed["step"] + 5)
    left = pids(run, 1)[:2]
    os.killpg(second.pid, signal.SIGKILL)
    until(lambda: len(named(run, "replica_lost")) == 2)
    lost_at = steps(run)[-1]
    until(lambda: steps(run)[-1] > lost_at + 10)
    assert all(map(alive, left))
    first.send_signal(signal.SIGUSR1)
    assert end(first)[0] == Exit.STOPPED
    assert len(named(run, "started")) == 2
    assert named(run, "training_stopped")[-1]["step"] == steps(run)[-1]
    assert steps(run) == sorted(set(steps(run)))
    assert len(steps(run)) >= steps(run)[-1] - 4, "the lines of the steps in which the loss is noticed"
