"""One page on the last failure, from event logs as agents and workers write them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_train.commands import status, why
from hpc_train.elastic.nodes import NodeFailures
from hpc_train.report.page.verdict import headline
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory, rank_writer
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import RESPONSES, Failure
from hpc_train.run.file_writer import Outage
from hpc_train.run.files import append_line
from hpc_train.run.freeze import freeze
from hpc_train.run.requests import request_hold
from hpc_train.runs import diagnosis
from hpc_train.runs.diagnosis import diagnose, excluded_nodes, explain_nccl, find_cause
from hpc_train.runs.job_status import view_of
from hpc_train.runs.lookup import find_run
from hpc_train.schedulers.scheduler import JobStatus
from hpc_train.schedulers.slurm.records import NodeState
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
    reported = {"rank": rank, "node": f"n{node}", "class": kind, "message": f"{kind} of rank {rank}"} | details
    agent(run, node).write("worker_failed", **reported)
    agent(run, node).write("failed", exit_code=1, **reported | {"traceback": None})


def page(run: RunDirectory, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert why.main([str(run.path), *options]) == 0
    return capsys.readouterr().out


def test_what_the_gpus_reported_is_told(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    evidence = ["GPU health: GPU1: 2 uncorrectable memory errors (ECC)", "kernel log: Xid 48 of the GPU at 0000:3a:00"]
    fail(run, 1, 3, Failure.DEVICE, traceback="ECC", gpus=evidence)
    text = page(run, capsys)
    assert "\n".join(f"  after the failure: {line}" for line in evidence) in text
    assert json.loads(page(run, capsys, "--json"))["cause"]["gpus"] == evidence


def test_the_cause_is_told_and_not_its_echo(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    fail(run, 0, 1, Failure.COMMUNICATION, traceback="Connection closed by peer")
    fail(run, 1, 3, Failure.USER_ERROR, traceback=TRACEBACK)
    text = page(run, capsys)
    assert "failure\n  user_error, rank 3 on n1, in attempt 0" in text
    assert "ValueError: too wide" in text
    assert RESPONSES[Failure.USER_ERROR].advice in text
    assert "peak of rank 0 in the metrics: 3 GiB" in text
    assert "lost: 20 steps" in text
    assert "time\n  useful" in text


def test_a_refusal_is_told_once(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    message = "data.path has no item\n  set in: data.path\n  fix:    data.path=DIR"
    fail(run, 0, 0, Failure.REFUSED, message=message, traceback=f"UserError: {message}")
    text = page(run, capsys)
    assert text.count("data.path has no item") == 1
    assert text.count("fix:") == 1
    assert "what to do\n  data.path=DIR\n" in text


def test_the_fix_of_a_node_that_refused_the_run_is_what_to_do(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "n0 has no network interface nope\n  set in: GLOO_SOCKET_IFNAME\n  fix:    unset GLOO_SOCKET_IFNAME"
    agent(run).write("failed", exit_code=2, message=message, rank=None, node="n0")
    text = page(run, capsys)
    assert "what to do\n  unset GLOO_SOCKET_IFNAME\n" in text


def test_a_divergence_is_told_once_and_not_resumed(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    message = "no gradient was finite in the last 50 steps"
    fail(run, 0, 0, Failure.NAN, message=message, traceback=message)
    text = page(run, capsys)
    assert text.count(message) == 1
    assert "hpc_train resume" not in text, "the same settings diverge again"


def test_a_kill_is_told_once(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    killed = "killed by SIGKILL"
    fail(run, 1, 3, Failure.KILLED, message=killed, traceback=f"{killed}\nlast output:\nall is well")
    text = page(run, capsys).partition("what happened")[0]
    assert text.count(killed) == 1
    assert f": {killed}\n  last output:\n  all is well\n" in text


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


def test_a_collective_that_timed_out_says_where_the_stacks_of_the_others_are(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    fail(run, 0, 1, Failure.COMMUNICATION, traceback="Timed out waiting 60000ms")
    agent(run, 0).write("collective_timed_out", rank=1, message="a collective timed out on rank 1", stacks="n0.txt")
    assert "stacks of all ranks: n0.txt" in page(run, capsys).replace("\n", " ").replace("  ", " ")


def test_what_was_done_stands_in_its_order(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    agent(run, 1).write("node_lost", rank=None, node="n1", message="silent for 6 s")
    agent(run).write("shrunk", nodes=1, reason="node_lost")
    rank = EventLog.open(run, "rank-0000", 1, 0)
    agent_again = EventLog.open(run, "agent-n0", 1)
    agent_again.write("started", layout="dp", world_size=2, gpus=0, launch="7.0.0", job_id=None, began=time.time())
    rank.write("resumed", step=20)
    agent_again.write("resize_requested", nodes=2, before=1, reason="user ada", message="user ada asked for 2 nodes")
    agent_again.write("finished", exit_code=0)
    run.claim_attempt()
    text = page(run, capsys)
    assert "done; it recovered from the failure below" in text
    assert "earlier failure\n  node_lost, node n1" in text
    done = text.partition("what happened\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split("  ")[3] for line in done] == ["node_lost", "shrunk", "resumed", "resize_requested"]
    assert done[-1].endswith(": user ada asked for 2 nodes"), "the message contains the reason"
    assert "what to do" not in text


def test_a_node_that_only_slurm_has_lost_is_told(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    agent_again = EventLog.open(run, "agent-n2", 1)
    agent_again.write("started", layout="dp", world_size=4, gpus=0, launch="7.0.1", job_id=None, began=time.time())
    lost = {
        "class": Failure.NODE_LOST,
        "rank": None,
        "node": "n1",
        "message": "Slurm requeued the job: node n1 is down",
    }
    agent_again.write("requeued_by_slurm", **lost)
    agent_again.write("finished", exit_code=0)
    run.claim_attempt()
    text = page(run, capsys)
    assert "done; it recovered from the failure below" in text
    assert "node_lost, node n1, in attempt 0 at" in text
    assert "Slurm requeued the job: node n1 is down" in text


@pytest.mark.parametrize(("failure", "resumes"), [(Failure.DEVICE, True), (Failure.KERNEL, False)])
def test_an_error_of_a_gpu_is_told_with_what_to_do(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], failure: Failure, resumes: bool
) -> None:
    fail(run, 1, 3, failure, traceback=TRACEBACK)
    text = page(run, capsys)
    assert f"{failure}, rank 3 on n1" in text
    assert RESPONSES[failure].advice in text
    assert (f"hpc_train resume {run.path}   starts again: there is no checkpoint" in text) == resumes


COMPLETION = (
    "n1:3468:3905 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.216.210.236<54862> with "
    "status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fd00::ff22 remoteGidsfd00::ff1f"
)
REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a "
    "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error\nLast error:\n"
    "socketProgressOpt: Call to recv from 172.1.1.1<33759> failed : Connection reset by peer"
)


def test_nccls_warnings_are_shown_and_explained(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    fail(run, 1, 3, Failure.COMMUNICATION, traceback=REMOTE)
    assert "NCCL: the other process ended, or the connection to it was lost" in page(run, capsys)
    with (run.logs / "n1-000.log").open("a") as log:
        log.write(f"2026-01-31T12:00:00.000 [2] {COMPLETION.replace('status=12', 'status=5')}\n")
        log.write(f"2026-01-31T12:00:00.000 [3] {COMPLETION}\n")
    text = page(run, capsys)
    assert f"NCCL on this rank: {COMPLETION}" in text and "status=5" not in text
    assert "NCCL: InfiniBand error 12 (retry counter exceeded)" in text
    assert "NCCL_IB_TIMEOUT=22" in text.partition("what to do\n")[2].splitlines()[0]
    own = run.logs / "nccl" / "000-rank-0003.log"
    own.parent.mkdir()
    own.write_text(f"n1:1:2 [3] NCCL INFO Using network IB\n\n{COMPLETION.replace('status=12', 'status=13')}\n")
    found = json.loads(page(run, capsys, "--json"))
    assert [line.partition("status=")[2][:2] for line in found["cause"]["nccl"]] == ["13", "12"]


@pytest.mark.parametrize(
    ("message", "meaning"),
    [  # as NCCL 2.9 to 2.30 and torch print them, from public reports
        (COMPLETION, "error 12"),
        ("NCCL WARN NET/IB : Got completion from peer 1.2.3.4<4> with error 12, opcode 0, len 0, vendor err 129", "12"),
        ("NCCL WARN NET/IB: Got completion from peer 1.2.3.4<4> with status=IBV_WC_RETRY_EXC_ERR(12) opcode", "12"),
        (COMPLETION.replace("status=12", "status=13"), "error 13"),
        (COMPLETION.replace("status=12", "status=4"), "error 4 or 10"),
        ("init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and rank 0 both on CUDA device 1000", "the same GPU"),
        (
            "NCCL error in: NCCLUtils.hpp:275, invalid usage\nLast error:\nDuplicate GPU detected : rank 1",
            "the same GPU",
        ),
        ("shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-fjwOOB to 5967876 bytes", "/dev/shm"),
        ("NCCL WARN Error while creating shared memory segment nccl-shm-recv-14-1-2-3 (size 9637888)", "/dev/shm"),
        ("NCCL WARN Call to posix_fallocate failed : No space left on device", "/dev/shm"),
        ("NCCL WARN Error: network AWS Libfabric not found.", "plugin"),
        ("plugin/net.cc:349 NCCL WARN Failed to initialize any NET plugin", "plugin"),
        ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "lock memory"),
        ("NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1", "be set up"),
        ("NCCL WARN Bootstrap : no socket interface found", "interface"),
        ("NCCL WARN socketStartConnect: Connect to 10.0.0.1<4> failed : Connection refused", "cannot connect"),
        ("NCCL WARN ncclOsSocketPollConnect to 10.0.0.1<4> failed with error Connection timed out", "timed out"),
        ("NCCL WARN Mismatched NCCL version detected : rank 1 version 22703 rank 0 version 22105", "versions"),
        ("NCCL WARN Detected mixed local Net device counts across ranks (min 7, max 8).", "network devices"),
        ("include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'", "no GPU memory"),
        ("NCCL WARN Cuda failure 700 'an illegal memory access was encountered'", "a CUDA call"),
        ("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3", "a CUDA call"),
        ("misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer n2<42830>", "process ended"),
        ("NCCL error in: NCCLUtils.hpp:275, invalid usage (run with NCCL_DEBUG=WARN for details)", "arguments"),
        ("NCCL error in: NCCLUtils.hpp:275, unhandled system error, NCCL version 2.20.5", "a system call"),
        ("NCCL error in: NCCLUtils.hpp:275, internal error - please report this issue", "inconsistent"),
    ],
)
def test_messages_of_nccl(message: str, meaning: str) -> None:
    problem = explain_nccl(message)
    assert problem is not None and meaning in problem.meaning and problem.fix


@pytest.mark.parametrize("text", ["", "Connection closed by peer [127.0.0.1]:4", "NCCL version 2.27.3+cuda12.9"])
def test_other_messages_are_not_explained(text: str) -> None:
    assert explain_nccl(text) is None


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


def test_a_silence_is_told_until_a_step_is_logged(run: RunDirectory) -> None:
    told = "no step for 1:00: first_step, rank 0, net.py:7 in forward"
    agent(run).write("no_progress", step=20, rank=0, phase="first_step", message=told)
    status_of = partial(view_of, run, 0, JobStatus("RUNNING"), run.path / "output")
    assert (status_of().state, status_of().message) == ("running", told)
    found = diagnose(find_run(str(run.path), "why"), asks_slurm=False)
    assert headline(replace(found, exit_code=None, message=told, waiting=None)).endswith(f"; {told}")
    append_line(run.metrics_file(0), {"time": time.time() + 1, "step": 21, "attempt": 0, "world_size": 4})
    assert status_of().message == ""
    agent(run).write("resize_requested", nodes=7, before=2, reason="user", message="job 8 adds 5 when it starts")
    assert status_of().message == "job 8 adds 5 when it starts"
    agent(run).write("resize_refused", nodes=7, reason="user", message="job 8 has ended before its nodes joined")
    assert status_of().message == ""
    request = request_hold(run, 3, 600.0)
    rank = EventLog.open(run, rank_writer(3), 0, 3)
    about = {"requested": request.time, "node": "n1"}
    rank.write("held", step=21, path="/tmp/debug-3-1", message="rank 3 on n1 is held after step 21", **about)
    assert status_of().message == "rank 3 on n1 is held after step 21"
    rank.write("released", step=21, seconds=2.0, reason="the debugger was left", **about)
    assert status_of().message == ""


# as Slurm 22.05 prints them, for nodes that it powers down and up
POWERED = """\
n1|idle~|none
n2|idle%|none
n3|idle!|none
n4|allocated#|none
n5|down~|ResumeTimeout reached
n6|down*|Not responding
"""
CLOUD = "n7|down#|(Code:InsufficientInstanceCapacity)Failure when resuming nodes\n"  # as AWS ParallelCluster writes it


def test_nodes_that_slurm_powers_up_and_those_that_it_could_not(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = NodeState.read_all(POWERED + CLOUD)
    assert [node.words for node in nodes[:4]] == [
        "n1 idle~ (powered down)", "n2 idle% (powering down)", "n3 idle! (about to be powered down)",
        "n4 allocated# (starting)",
    ]  # fmt: skip
    assert [node.node for node in nodes if node.is_usable] == ["n1", "n2", "n3", "n4"]
    assert [node.node for node in nodes if node.was_not_powered_up] == ["n5", "n7"]
    asked: list[list[str]] = []

    def node_states(selection: list[str]) -> list[NodeState]:
        asked.append(selection)
        return nodes

    monkeypatch.setattr(diagnosis, "node_states", node_states)
    monkeypatch.setattr(diagnosis, "read_facts", lambda job_id: None)
    lease.add_submission(run, "Slurm", first_attempt=1, job_id="12")
    item = find_run(str(run.path), "why")
    starting = JobStatus("CONFIGURING", "None")
    found = diagnose(item, {item.job_key: starting})
    assert found.waiting is not None
    assert "Slurm requeues it" in found.waiting.words
    assert found.state == "configuring, its nodes start"
    found = diagnose(item, {item.job_key: JobStatus("PENDING", "BeginTime")})
    assert found.waiting is not None
    assert "could not power up n5 down~ (powered down, ResumeTimeout reached), n7 down# (" in found.waiting.words
    assert "the cloud may lack such machines" in found.waiting.fix
    assert asked == [[]]


def test_a_run_that_is_fine_says_so(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    agent(run).write("finished", exit_code=0)
    agent(run, 1).write("finished", exit_code=0)
    text = page(run, capsys)
    assert text.splitlines()[0].endswith("done; nothing failed")
    assert "failure" not in text


@pytest.mark.parametrize("then", [None, "hang_detected", "node_lost", "worker_failed"])
def test_a_file_system_that_was_frozen_is_told(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], then: str | None
) -> None:
    log = agent(run)
    if then is not None:
        log.write(then, **{"class": "user_error"} if then == "worker_failed" else {}, message="the consequence")
    log.write_outage(Outage(31.0, "the file system did not respond for 31 s"))
    log.write("requeued", reason="the rendezvous server cannot continue")
    agent(run, 1).write("finished", exit_code=0)
    text = page(run, capsys)
    assert "nothing failed" not in text.splitlines()[0]
    cause = text.partition("earlier failure\n")[2].splitlines()[0]
    if then == "worker_failed":
        assert "the consequence" in cause, "the code failed, whatever the file system did"
    else:
        assert cause.strip().startswith("file_system, node ") and "could not be written for 31 s" in cause


def test_every_class_of_failure_has_its_advice() -> None:
    assert {failure for failure in Failure if RESPONSES[failure].advice} == set(Failure)


def test_nothing_failed_in_an_empty_log() -> None:
    assert find_cause([]) is None
