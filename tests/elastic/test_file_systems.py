"""Agents and their server on file systems that are full, hang, or stay away."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.elastic import agent_loop, nodes
from hpc_train.elastic.agent_loop import DeletionWatch
from hpc_train.elastic.decision import Budget, RestartDecision
from hpc_train.elastic.nodes import NodeFailures
from hpc_train.elastic.rendezvous import client
from hpc_train.elastic.rendezvous.messages import Leave, Start
from hpc_train.elastic.requeue import JobEnd
from hpc_train.run import files
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Action, Exit
from hpc_train.run.files import BackgroundCall, in_time, read_json
from tests.elastic.conftest import Freeze
from tests.elastic.entries import start_agent
from tests.elastic.test_agent import alive, end, last_event, marks, until
from tests.elastic.test_hub import SILENT_S, Served, order_of
from tests.elastic.test_requeue import attempts_of
from tests.run.outage import detachable, disk_that_can_hang, fill, small_disk


def test_a_restart_on_a_full_disk(frozen: Freeze, tmp_path: Path) -> None:
    """What it cannot write is written when there is room."""
    with small_disk(tmp_path / "run", kilobytes=1024):
        run = frozen()
        (run.path / "go").touch()
        (run.path / "go-again").touch()
        agent = start_agent(run.path, "one_is_killed_when_told_twice")
        until(lambda: marks(run))
        ballast = fill(run.path)
        (run.path / "go").unlink()
        until(lambda: run.newest_attempt() == 1 or agent.poll() is not None)
        ballast.unlink()
        (run.path / "go-again").unlink()
        code, error = end(agent)
        assert code == 0, error
        assert "Traceback" not in error
        assert "it is kept in memory until it can be written: [Errno 28]" in error
        reported = [event["event"] for event in run.read_events()]
        if "file_system_failed" in reported:  # not if the first events fit into what was allocated already
            reported.remove("file_system_failed")
        assert reported == ["started", "worker_failed", "started", "restarted", "finished"]
        assert read_json(run.attempts / "001.json")["attempt"] == 1


def test_an_agent_acts_while_its_file_system_hangs(frozen: Freeze, tmp_path: Path) -> None:
    """Workers that do not stop are killed after the grace, which only the agent's own thread does."""
    with disk_that_can_hang(tmp_path / "run") as hang:
        run = frozen(stop_grace_s=0.5)
        agent = start_agent(run.path, "never_stops")
        pids = [int(mark[0]) for mark in until(lambda: marks(run))]
        with hang():
            agent.terminate()
            until(lambda: not any(alive(pid) for pid in pids), timeout=60)
        code, error = end(agent)
        assert code == 1, error
        assert "did not stop within 0.5 s of the request" in last_event(run, "worker_failed")["message"]
        assert last_event(run, "stop_requested")["reason"] == "SIGTERM"


def test_a_server_sends_heartbeats_while_it_waits_for_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "SERVER_BUSY_S", 0.0)
    served, returns = Served(tmp_path, 1), threading.Event()
    begin = served.hub._begin

    def hangs(start: Start) -> dict[str, Any]:
        returns.wait(60)
        return begin(start)

    served.hub._begin = hangs
    link = served.link(0)
    time.sleep(1.5 * SILENT_S)  # an agent whose server is silent for SILENT_S gives it up
    assert not link.lost
    returns.set()
    assert order_of(link)["kind"] == "start"


def test_a_job_whose_run_directory_stays_away_is_requeued_by_slurm(
    run: RunDirectory, in_job: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker for the batch script cannot be written."""
    monkeypatch.setattr(files, "PATIENCE_S", 0.2)
    monkeypatch.setattr(in_time, "__defaults__", (0.5,))
    calls = tmp_path / "calls"
    in_job(squeue="echo RUNNING 100", scontrol=f'[ "$1" = show ] || echo "$*" >> {calls}')
    with detachable(run.attempts)():
        assert leave(run, 0) is Exit.STOPPED
        assert calls.read_text().splitlines() == ["requeue incomplete 7"]
        assert leave(run, 3) is Exit.FAILED, "elastic.max_requeues=3"
        assert calls.read_text().splitlines() == ["requeue incomplete 7"]
    events = [(event["event"], str(event.get("reason", event.get("message")))) for event in run.read_events()]
    assert [name for name, _ in events] == ["requeued", "stopped", "failed"]
    assert events[0][1].startswith("lost; the batch script cannot be asked to requeue the job: ")
    assert "the job was already requeued 3 times (elastic.max_requeues)" in events[2][1]


def leave(run: RunDirectory, restart: int) -> Exit:
    """The end of a job that lost a node."""
    attempts = attempts_of(run, JobEnd(run, "7", restart, 0), max_requeues=3)
    code = attempts.leave(Leave(RestartDecision(Action.REQUEUE, "lost")))
    attempts.events.close()
    return Exit(code)


@pytest.mark.long_form(5)  # the next test has the decision
def test_a_run_directory_that_is_deleted_ends_the_job(frozen: Freeze) -> None:
    run = frozen()
    agent = start_agent(run.path, "never_stops")
    until(lambda: marks(run))
    while run.path.exists():  # an agent may write a file meanwhile
        shutil.rmtree(run.path, ignore_errors=True)
    code, error = end(agent)
    assert code == 1, error
    assert f"the run directory {run.path} was deleted, or its config.yaml, while the job was running" in error
    assert "Traceback" not in error
    assert not run.path.exists()


def test_a_file_system_that_is_not_mounted_is_not_taken_for_a_deletion(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_loop, "LOOK_EVERY_S", 0.0)
    run.config.touch()
    watch = DeletionWatch(run)
    run.config.unlink()
    assert [watch.finding() for _ in range(agent_loop.LOOKS - 1)] == [None] * (agent_loop.LOOKS - 1)
    assert "was deleted" in (watch.finding() or "")
    with small_disk(tmp_path / "disk", kilobytes=64) as disk:
        away = RunDirectory(disk / "run")
        away.create()
        away.config.touch()
        watch = DeletionWatch(away)
        assert watch.finding() is None
    assert not away.path.exists()
    assert [watch.finding() for _ in range(9)] == [None] * 9


def test_node_failures_are_known_while_they_cannot_be_written(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "READ_S", 0.2)
    failures = NodeFailures(run, 3600)
    failures.note("n1", "killed")
    with detachable(run.attempts)():
        failures.note("n1", "killed")
        assert failures.failing_nodes() == {"n1"}
    assert failures._writer.close(60)
    assert NodeFailures(run, 3600).failing_nodes() == {"n1"}
    assert failures.failing_nodes() == {"n1"}
    assert len(failures.recent()) == 2, "each is counted once"


def test_a_budget_that_cannot_be_read_is_not_used_up(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: RunDirectory, now: float) -> float:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("hpc_train.elastic.decision.used", fails)
    monkeypatch.setattr(in_time, "__defaults__", (0.2,))
    assert not Budget(run, 9, gpus=4).is_used_up


def test_a_call_that_hangs_is_waited_for_once() -> None:
    returns = threading.Event()
    call = BackgroundCall(lambda: returns.wait(60))
    for _ in range(100):
        with pytest.raises(TimeoutError, match=r"did not respond within 0\.\d* s|within 0 s"):
            call.poll(0.1)
    returns.set()
    assert call.result(60) is True
    with pytest.raises(ZeroDivisionError):
        BackgroundCall(lambda: 1 / 0).result(60)
