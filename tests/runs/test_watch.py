"""How a job stands, from what lies in its run directory."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from hpc_train.errors import UserError
from hpc_train.launch.submission import Submitted
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import append_line, last_line
from hpc_train.run.lease import add_submission, find_live, refuse_live
from hpc_train.run.requests import record_stop_request, stop_was_requested
from hpc_train.runs.diagnosis import diagnose
from hpc_train.runs.job_status import JobStatuses, View, how_stopped, resume_command, time_left
from hpc_train.runs.job_table import JobTable, plain_line
from hpc_train.runs.lookup import RunHandle, statuses_of
from hpc_train.schedulers.scheduler import PRESENT, JobStatus
from hpc_train.schedulers.slurm.jobs import SlurmJobs
from hpc_train.schedulers.slurm.reasons import JobFacts
from hpc_train.telemetry.progress import speed_column
from tests.launch.jobs import make_job


def submitted(tmp_path: Path, first_attempt: int = 0) -> Submitted:
    job = make_job(tmp_path / "sweep")
    return Submitted(job, "1", first_attempt, job.run.path / "agent.err")


def test_the_states_of_a_job(tmp_path: Path) -> None:
    item = submitted(tmp_path)
    run = item.job.run
    assert item.view(PRESENT) == View("waiting", {}, is_working=False)
    run.claim_attempt()
    assert item.view(PRESENT) == View("starting", {}, steps=100)
    append_line(run.metrics_file(0), {"step": 3, "loss": 2.5})
    assert item.view(PRESENT) == View("running", {"step": 3, "loss": 2.5}, steps=100)
    EventLog.open(run, "agent-n0", 0).write("stopped", exit_code=75)
    assert (item.view(None).state, item.view(None).exit) == ("stopped", 1), "75 needs a checkpoint"
    (run.checkpoints / "step-00000005").mkdir()
    assert (item.view(None).state, item.view(None).exit) == ("stopped", 75)
    assert item.view(None).metrics == {"step": 5, "loss": 2.5}, "two steps after the last line of metrics"
    assert how_stopped(75, run) == "stopped after a checkpoint at step 5; resume with"


def test_a_job_that_is_stopped_before_its_agent_handles_signals_is_cancelled(tmp_path: Path) -> None:
    item = submitted(tmp_path)
    run = item.job.run
    add_submission(run, "this machine", pid=1)
    record_stop_request(run)
    assert (item.view(None).state, item.view(None).exit) == ("cancelled", 1)
    assert item.view(None).message == "stopped before the first step (cancel)"
    add_submission(run, "this machine", pid=1)
    assert (item.view(None).state, item.view(None).exit) == ("failed", 1)


def test_a_stopped_job_is_given_the_time_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the command that follows ``cancel RUN --save``."""
    monkeypatch.setattr("hpc_train.run.lease.POLL_LIVE_S", 0.05)
    run = submitted(tmp_path).job.run
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    add_submission(run, "this machine", pid=process.pid)
    told: list[str] = []
    with pytest.raises(UserError, match=r"is live: process \d+"):
        refuse_live(run, notify=told.append)
    assert told == [], "nobody has stopped it"
    record_stop_request(run)
    with pytest.raises(UserError, match=r"is stopping: process \d+(?s:.*)python -m hpc_train wait "):
        refuse_live(run, notify=told.append, until=0.0)
    threading.Timer(0.2, process.communicate, [b"\n"]).start()
    refuse_live(run, notify=told.append)
    (line,) = told
    assert line.startswith("waiting until the stopped job has ended: process")
    assert find_live(run) is None


def test_a_job_that_slurm_cannot_launch_says_so(tmp_path: Path) -> None:
    """A node cannot create the file of its output."""
    item = submitted(tmp_path)
    view = item.view(JobStatus("FAILED", "JobLaunchFailure"))
    assert (view.state, view.exit) == ("failed", 1)
    assert view.message == "Slurm could not launch the job (JobLaunchFailure)"
    handle = RunHandle(item.job.run, 0, {"job_id": "1", "output": "/scratch/runs/1.out"})
    found = diagnose(handle, {"1": JobStatus("FAILED", "JobLaunchFailure")}, asks_slurm=False)
    assert found.advice[0].startswith("check that the nodes can create files in /scratch/runs, ")


def test_a_batch_script_that_was_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``scancel --batch --signal=KILL``: Slurm ends the agents, which save."""
    item = submitted(tmp_path)
    item.job.run.claim_attempt()
    EventLog.open(item.job.run, "agent-n0", 0).write("stopped", exit_code=75, reason="SIGTERM")
    monkeypatch.setattr("hpc_train.runs.diagnosis.read_facts", lambda job: JobFacts(job, "FAILED", exit_code="0:9"))
    found = diagnose(RunHandle(item.job.run, 0, {"job_id": "1"}), {"1": JobStatus("FAILED")})
    assert found.advice[0].startswith("its batch script was killed by SIGKILL")


def test_jobs_of_two_clusters_with_the_same_id_have_their_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submitted(tmp_path).job.run
    states = {"a": "RUNNING", "b": "PENDING"}
    monkeypatch.setattr(SlurmJobs, "statuses", lambda jobs, ids: {"12": JobStatus(states[jobs.clusters])})
    handles = [RunHandle(run, 0, {"job_id": "12", "clusters": cluster}) for cluster in states]
    statuses = statuses_of(handles, JobStatuses())
    assert [statuses[item.job_key].state for item in handles] == ["RUNNING", "PENDING"]


def test_a_job_whose_run_directory_was_deleted_says_so(tmp_path: Path) -> None:
    item = submitted(tmp_path)
    item.job.run.claim_attempt()
    shutil.rmtree(item.job.run.path)
    view = item.view(None)
    assert (view.state, view.exit) == ("failed", 1)
    assert "was deleted while the job was running" in view.message


def test_a_full_disk_does_not_keep_a_job_from_being_stopped(tmp_path: Path) -> None:
    run = submitted(tmp_path).job.run
    with mock.patch.object(RunDirectory, "update_record", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        record_stop_request(run)
    assert not stop_was_requested(run)


def test_a_job_is_requeued_when_slurm_has_taken_it_back(tmp_path: Path) -> None:
    """Until then it holds its nodes."""
    item = submitted(tmp_path)
    item.job.run.claim_attempt()
    events = EventLog.open(item.job.run, "agent-n0", 0)
    events.write("requeued", step=3)
    events.write("stopped", exit_code=75)
    states = [item.view(JobStatus(state, "BeginTime")).state for state in ("RUNNING", "COMPLETING", "PENDING")]
    assert states == ["to be requeued", "requeued", "requeued, pending (BeginTime)"]


def test_a_job_that_slurm_has_suspended_is_not_running(tmp_path: Path) -> None:
    item = submitted(tmp_path)
    attempt = item.job.run.claim_attempt()
    append_line(item.job.run.metrics_file(attempt), {"step": 3, "loss": 1.0, "time": time.time()})
    assert [item.view(JobStatus(state)).state for state in ("RUNNING", "SUSPENDED")] == ["running", "suspended"]


def test_a_job_that_a_person_has_requeued_and_held_is_not_stopping(tmp_path: Path) -> None:
    item = submitted(tmp_path)
    item.job.run.claim_attempt()
    EventLog.open(item.job.run, "agent-n0", 0).write("stopped", exit_code=75, reason="SIGTERM")
    states = [item.view(JobStatus(state, "JobHeldUser")).state for state in ("COMPLETING", "PENDING")]
    assert states == ["stopping", "held (JobHeldUser)"]


def test_a_job_that_slurm_has_put_back_into_its_queue_is_pending(tmp_path: Path) -> None:
    """Its nodes failed, so no agent has recorded the end of the attempt. What Slurm said before the start is old."""
    item = submitted(tmp_path)
    attempt = item.job.run.claim_attempt()
    append_line(item.job.run.metrics_file(attempt), {"step": 3, "step_s": 0.5, "loss": 1.0, "time": time.time()})
    views = [item.view(JobStatus("PENDING", "BeginTime", queried=time.time() + later)) for later in (-60, 1)]
    assert [(view.state, time_left(view)) for view in views] == [("running", 48.5), ("pending (BeginTime)", None)]
    assert time_left(item.view(JobStatus("SUSPENDED"))) is None


def test_an_earlier_attempt_does_not_count(tmp_path: Path) -> None:
    item = submitted(tmp_path, first_attempt=1)
    item.job.run.claim_attempt()
    EventLog.open(item.job.run, "agent-n0", 0).write("finished", exit_code=0)
    assert item.view(PRESENT).state == "waiting"
    assert item.view(None).exit == 1


def test_a_failure_carries_the_traceback_of_the_node_that_caused_it(tmp_path: Path) -> None:
    item = submitted(tmp_path)
    run = item.job.run
    run.claim_attempt()
    events = EventLog.open(run, "agent-n1", 0)
    cause = {"rank": 5, "node": "n1", "class": "user_error", "message": "no"}
    events.write("worker_failed", traceback="Traceback …\nArithmeticError: no\n", **cause)
    events.write("failed", exit_code=1, **cause)
    view = item.view(None)
    assert (view.state, view.exit) == ("failed", 1)
    assert view.message == "rank 5 on n1 failed (user_error):\nTraceback …\nArithmeticError: no"


def test_an_agent_that_died_leaves_its_output(tmp_path: Path) -> None:
    item = submitted(tmp_path)
    assert "ended before its first step and printed nothing" in item.view(None).message
    run = item.job.run
    run.claim_attempt()
    append_line(run.metrics_file(0), {"step": 3, "loss": 2.5})
    assert "ended after step 3 and printed nothing" in item.view(None).message
    item.agent_output.write_text("something\nno such data\n")
    assert (item.view(None).exit, item.view(None).message) == (1, "something\nno such data")


def test_the_last_whole_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_line(path) == {}
    for step in range(2000):
        append_line(path, {"step": step})
    with path.open("a") as file:
        file.write('{"step": 99')
    assert last_line(path) == {"step": 1999}


def test_the_command_that_resumes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "sweep" / "3")
    overrides = ("+strategy=dp", "data.path=a b", "run.name=sweep")
    command = resume_command(overrides, run, str(tmp_path), submits=True)
    assert command == "python -m hpc_train -m run.name=sweep/3 +strategy=dp 'data.path=a b'"
    command = resume_command(["-cd", "mine", "+strategy=dp"], run, str(tmp_path))
    assert command == "python -m hpc_train -cd mine run.name=sweep/3 +strategy=dp"


def test_table_and_lines(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path, number) for number in range(40)]
    metrics = {"step": 40, "loss": 2.34567, "tokens_per_s": 12345.6, "step_s": 1.5}
    views = [View("done", metrics, 0, steps=100), View("running", metrics, steps=100), *[View("waiting", {})] * 38]
    assert (
        plain_line(jobs[1], views[1])
        == "job 1 · dp · running · step 40/100 · loss 2.3457 · 12,346 tokens/s · 1:30 left"
    )
    images = metrics | {"tokens": 320, "samples": 320}
    assert " · 12,346 samples/s · " in plain_line(jobs[1], View("running", images, steps=100))
    assert speed_column([metrics, {}]) == ("tokens/s", ["12,346", ""])
    assert speed_column([images, {"tokens_per_s": 5.0, "samples_per_s": 5.0}]) == ("samples/s", ["12,346", "5"])
    assert speed_column([images, metrics]) == ("speed", ["12,346 samples/s", "12,346 tokens/s"])
    console = Console(record=True, force_terminal=True, width=100, height=60)
    table = JobTable(jobs, console)
    table.show(views)
    table.close()
    text = console.export_text()
    assert "40 jobs, 1 done, 10 not shown" in text
    assert "2.3457" in text
    plain = Console(record=True, force_terminal=False, width=40)
    lines = JobTable(jobs[:2], plain)
    for _ in range(3):
        lines.show(views[:2])
    assert len(plain.export_text().splitlines()) == 2
