"""One page on the last failure, from event logs as agents and workers write them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_train.commands import status, why
from hpc_train.elastic.nodes import NodeFailures
from hpc_train.launch.diagnosis import excluded_nodes, find_cause
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.run.exits import RESPONSES, Failure
from hpc_train.run.files import append_line
from hpc_train.run.freeze import freeze
from tests.launch.jobs import make_job

TRACEBACK = 'Traceback (most recent call last):\n  File "model.py", line 7, in forward\nValueError: too wide'


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A frozen run whose first attempt, on two nodes, has got to step 20."""
    job = make_job(tmp_path / "sweep")
    freeze(job.config, job.run)
    lease.add_submission(job.run, "somewhere", first_attempt=0)
    job.run.claim_attempt()
    began = time.time() - 30
    for number in range(2):
        log = EventLog.open(job.run, f"agent-n{number}", 0)
        log.write("started", layout="dp", world_size=4, gpus=0, launch="7.0.0", job_id=None, began=began)
    for step in (1, 10, 20):
        line = {"time": began + step, "step": step, "attempt": 0, "world_size": 4, "step_s": 1.0, "save_s": 0.0}
        append_line(job.run.metrics_file(0), line | {"peak_memory_bytes": 3 * 2**30})
    return job.run


def agent(run: RunDirectory, number: int = 0) -> EventLog:
    return EventLog.open(run, f"agent-n{number}", 0)


def fail(run: RunDirectory, node: int, rank: int, kind: Failure, **details: Any) -> None:
    told = {"rank": rank, "node": f"n{node}", "class": kind, "message": f"{kind} of rank {rank}"} | details
    agent(run, node).write("worker_failed", **told)
    agent(run, node).write("failed", exit_code=1, **told | {"traceback": None})


def page(run: RunDirectory, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert why.main([str(run.path), *options]) == 0
    return capsys.readouterr().out


def test_the_cause_is_told_and_not_its_echo(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    fail(run, 0, 1, Failure.COMMUNICATION, traceback="Connection closed by peer")
    fail(run, 1, 3, Failure.USER_ERROR, traceback=TRACEBACK)
    text = page(run, capsys)
    assert "failure\n  user_error, rank 3 on n1, in attempt 0" in text
    assert "ValueError: too wide" in text
    assert RESPONSES[Failure.USER_ERROR].advice in text
    assert "peak of rank 0 in the metrics: 3 GiB" in text
    assert "lost by the failure: 20 logged steps" in text
    assert "time\n  useful" in text


def test_json_has_all_of_it(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    fail(run, 1, 3, Failure.OUT_OF_MEMORY, traceback=TRACEBACK)
    found = json.loads(page(run, capsys, "--json"))
    assert (found["cause"]["kind"], found["cause"]["rank"], found["cause"]["node"]) == ("out_of_memory", 3, "n1")
    assert (found["exit_code"], found["slurm"], found["waiting"]) == (1, None, None)
    assert found["advice"][0] == RESPONSES[Failure.OUT_OF_MEMORY].advice
    assert found["checkpoint"]["lost_steps"] == 20
    assert found["ledger"]["lost_s"] > 0


def test_a_hang_names_the_rank_and_where_the_stacks_are(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    agent(run, 0).write("hang_detected", step=20, rank=None, message="no rank is behind the others", stacks="n0.txt")
    agent(run, 1).write("hang_detected", step=20, rank=2, node="n1", message="rank 2 is stopped", stacks="n1.txt")
    fail(run, 1, 2, Failure.HANG, traceback="rank 2 is stopped\nFile loop.py, line 3")
    text = page(run, capsys)
    assert "hang, rank 2 on n1, in attempt 0" in text
    assert "File loop.py, line 3" in text
    assert ".txt" in text.partition("stacks of all ranks: ")[2].partition("\n")[0]


def test_what_was_done_stands_in_its_order(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    agent(run, 1).write("node_lost", rank=None, node="n1", message="silent for 6 s")
    agent(run).write("shrunk", nodes=1, reason="node_lost")
    rank = EventLog.open(run, "rank-0000", 1, 0)
    agent_again = EventLog.open(run, "agent-n0", 1)
    agent_again.write("started", layout="dp", world_size=2, gpus=0, launch="7.0.0", job_id=None, began=time.time())
    rank.write("resumed", step=20)
    agent_again.write("finished", exit_code=0)
    run.claim_attempt()
    text = page(run, capsys)
    assert "done; it recovered from the failure below" in text
    assert "earlier failure\n  node_lost, node n1" in text
    done = text.partition("recovery actions\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split("  ")[3] for line in done] == ["node_lost", "shrunk", "resumed"]
    assert "what to do" not in text


@pytest.mark.parametrize(("failure", "resumes"), [(Failure.DEVICE, True), (Failure.KERNEL, False)])
def test_an_error_of_a_gpu_is_told_with_what_to_do(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], failure: Failure, resumes: bool
) -> None:
    fail(run, 1, 3, failure, traceback=TRACEBACK)
    text = page(run, capsys)
    assert f"{failure}, rank 3 on n1" in text
    assert RESPONSES[failure].advice in text
    assert (f"hpc_train resume {run.path}" in text) == resumes


def test_a_node_that_failed_twice_is_shown_with_the_command_for_the_staff(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = NodeFailures(run, 3600)
    failures.note("n3", "node_lost")
    failures.note("n4", "killed")
    failures.note("n4", "hang")
    (node,) = excluded_nodes(run, exclude_hours=1)
    assert (node.node, node.failures) == ("n4", ("killed", "hang"))
    assert abs(node.until - time.time() - 3600) < 600
    drain = "scontrol update nodename=n4 state=drain reason='2 failures: killed, hang'"
    assert drain in page(run, capsys).partition("excluded nodes\n")[2]
    assert status.main([str(run.path)]) == 0
    assert drain in capsys.readouterr().out
    failures.note("n2", "device_error", times=2)
    first, _ = excluded_nodes(run, exclude_hours=1)
    assert first.words.startswith("n2 failed once (device_error) and is excluded until ")
    assert "state=drain reason='failure: device_error'" in first.words
    assert excluded_nodes(run, exclude_hours=0) == []


def test_a_run_that_is_fine_says_so(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    agent(run).write("finished", exit_code=0)
    agent(run, 1).write("finished", exit_code=0)
    text = page(run, capsys)
    assert text.splitlines()[0].endswith("done; nothing failed")
    assert "failure" not in text


def test_every_class_of_failure_has_its_advice() -> None:
    assert {failure for failure in Failure if RESPONSES[failure].advice} == set(Failure)


def test_nothing_failed_in_an_empty_log() -> None:
    assert find_cause([]) is None
