"""``logs`` over several attempts of one job, as the agents write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.commands import logs
from hpc_train.elastic.workers import WorkerLog
from hpc_train.errors import UserError
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.file_writer import FileWriter
from hpc_train.run.freeze import freeze
from tests.launch.jobs import make_job


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two ranks on two nodes: rank 1 fails in attempt 0, which is restarted; attempt 1 comes to its end."""
    job = make_job(tmp_path / "sweep")
    freeze(job.config, job.run)
    lease.add_submission(job.run, "somewhere", first_attempt=0)
    for attempt in range(2):
        job.run.claim_attempt()
        for rank in range(2):
            log = WorkerLog(job.run.logs / f"n{rank}-{attempt:03d}.log", FileWriter("the output"))
            log.write(rank, f"rank {rank} in attempt {attempt}\n".encode())
            log.close()
    events = EventLog.open(job.run, "agent-n1", 0)
    cause = {"rank": 1, "node": "n1", "class": "killed", "message": "killed by SIGKILL"}
    events.write("worker_failed", traceback="killed by SIGKILL\nlast output:\nall is well", **cause)
    events.write("restarted", reason="killed")
    for node in range(2):
        EventLog.open(job.run, f"agent-n{node}", 1).write("finished", exit_code=0)
    return job.run


OUTPUT = """\
step 1/100, loss 5.5
/x/user.py:7: UserWarning: the default will change
  warnings.warn("the default will change")
[rank1]:[W1123 13:55:27.123456 ProcessGroup.cpp:12] Warning: slow
n0:12:13 [0] NCCL WARN Call to ibv_create_cq failed
INFO:user:errors are rare
2026-01-01 00:00:00 - user - ERROR - no such file
Traceback (most recent call last):
  File "x.py", line 1, in <module>
user.Trouble: no

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "x.py", line 2, in <module>
ValueError: no
step 2/100, loss 5.4
"""
LEVELS = ["i", "w", "w", "w", "w", "i", "e", "e", "e", "e", "e", "e", "e", "e", "e", "e", "i"]


def test_the_lines_of_a_level_and_those_above_it(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rank has its own place in a traceback: the lines of two ranks are mixed."""
    log = WorkerLog(run.logs / "n0-002.log", FileWriter("the output"))
    for line in OUTPUT.splitlines(keepends=True):
        log.write(1, line.encode())
        log.write(2, b"step\n")
    log.close()
    every = ["--attempt", "2", "--rank", "1-2,7"]
    lines = OUTPUT.splitlines()
    for level, kept in (("info", "iwe"), ("warning", "we"), ("error", "e")):
        expected = [line for line, of in zip(lines, LEVELS, strict=True) if of in kept]
        assert [line for line in printed(run, capsys, *every, "--level", level) if line != "step"] == expected
    assert logs.main([str(run.path), *every, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    own = [row for row in rows if row["rank"] == 1]
    assert [(row["level"][0], row["text"]) for row in own] == list(zip(LEVELS, lines, strict=True))
    with pytest.raises(UserError, match="--rank must be all or ranks"):
        logs.main([str(run.path), "--rank", "1-"])


def printed(run: RunDirectory, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    assert logs.main([str(run.path), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.partition("] ")[2] if "] " in line else line for line in lines]


FAILURE = ["attempt 0: rank 1 on n1 failed (killed):", "killed by SIGKILL", "last output:", "all is well", ""]


def test_the_newest_attempt_and_rank_0_by_default(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(run, capsys) == ["rank 0 in attempt 1"]


def test_an_attempt_that_was_restarted_has_its_failure_on_top(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(run, capsys, "--attempt", "0") == [*FAILURE, "rank 0 in attempt 0"]
    assert printed(run, capsys, "--attempt", "0", "--rank", "1") == [*FAILURE, "rank 1 in attempt 0"]


def test_following_goes_from_attempt_to_attempt(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(run, capsys, "--attempt", "0", "--rank", "all", "-f")
    assert sorted(found[:2]) == ["rank 0 in attempt 0", "rank 1 in attempt 0"]
    assert found[2:7] == FAILURE
    assert sorted(found[7:]) == ["rank 0 in attempt 1", "rank 1 in attempt 1"]
