"""The agent with real processes: ends, failures, stop requests, and nobody left behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.commands.submitted import resize
from hpc_train.elastic.agent import ENTRY, STORE
from hpc_train.elastic.agent import _preload as preload
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.files import read_json
from hpc_train.run.processes import MAX_DESCRIPTORS
from hpc_train.run.requests import DUPLICATE_SIGINT_S, record_stop_request
from tests.checkpoint.progress import IN_LONG_FORM
from tests.config.composing import config_of
from tests.elastic.conftest import Freeze, stand_in
from tests.elastic.entries import start_agent
from tests.run.outage import detachable

TWO_NODES = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}


def end(agent: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and standard error of an agent that ends by itself."""
    _, error = agent.communicate(timeout=240)
    return agent.returncode, error


def until(condition: Callable[[], Any], timeout: float = 120) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError


def marks(run: RunDirectory, workers: int = 2) -> list[list[str]] | None:
    """What each worker has noted, its pid first; None until all have."""
    found = [path.read_text().split() for path in sorted(run.path.glob("mark-*"))]
    return found if len(found) == workers and all(found) else None


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def last_event(run: RunDirectory, name: str) -> dict[str, Any]:
    return [event for event in run.read_events() if event["event"] == name][-1]


def test_agents_of_two_nodes_meet_and_all_workers_finish(frozen: Freeze) -> None:
    run = frozen()
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, most))
    agents = [start_agent(run.path, "finish", OMP_NUM_THREADS="7", **of_node(number)) for number in (1, 0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    assert [end(agent) for agent in agents] == [(0, ""), (0, "")]
    found = marks(run, 4)
    assert found is not None
    attempt = read_json(run.attempts / "000.json")
    assert attempt["address"] == "127.0.0.1"
    files = MAX_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, MAX_DESCRIPTORS)
    assert [mark[1:4] for mark in found] == [[str(attempt["port"]), "7", str(files)]] * 4
    (prefix,) = {mark[4] for mark in found}
    assert len(prefix) == 32
    texts = [path for path in run.path.rglob("*") if path.is_file() and not path.name.startswith("mark-")]
    assert not [path for path in texts if prefix.encode() in path.read_bytes()], "only the agents know it"
    logs = sorted(run.logs.glob("*.log"))
    assert [log.name for log in logs] == ["127.0.0.1-000.log", "127.0.0.2-000.log"]
    lines = sorted(line.partition(" ")[2] for log in logs for line in log.read_text().splitlines())
    assert lines == [f"[{rank}] hello from {rank} of 4" for rank in range(4)]
    assert last_event(run, "finished")["exit_code"] == 0
    environment = {row["name"]: row for row in run.record()["environment"]}
    assert environment["OMP_NUM_THREADS"]["reason"] == "set by the user"
    assert [row["name"] for row in run.record()["not_set"]] == ["NCCL_*"]
    (machine,) = run.fabric_record()["machines"]
    settings = [setting["name"] for setting in machine["facts"]["settings"]]
    assert settings == ["OMP_NUM_THREADS", "OMP_WAIT_POLICY"]  # the second is set by tests/conftest.py
    assert len(machine["bindings"]) == 2


def test_a_live_run_shrinks_and_its_job_gives_the_node_back(
    frozen: Freeze, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = frozen()
    calls = tmp_path / "calls"
    shown = 'case "$2" in config) echo;; job) ;; hostnames) printf "n1\\n127.0.0.2\\n";; *)'
    stand_in(tmp_path, squeue="echo n1,127.0.0.2", scontrol=f'{shown} echo "$*" >> {calls};; esac')
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_STEP_NODELIST": "127.0.0.[1-2]"}
    agents = [start_agent(run.path, "stops_and_finishes_when_told", **variables, **of_node(n)) for n in (0, 1)]
    joiner = start_agent(run.path, "until_stopped", **of_node(0) | {"SLURM_JOB_ID": "78", "JOIN": "76.0.0:2"})
    until(lambda: marks(run, 4))
    assert resize([str(run.path), "nodes=2"]) == Exit.REFUSED
    assert "the run trains on as many" in capsys.readouterr().err
    assert resize([str(run.path), "nodes=1"]) == Exit.DONE
    assert "continues on 1 node instead of 2 (the command resize), as dp 2" in capsys.readouterr().out
    assert end(agents[1]) == (0, "")
    assert until(lambda: calls.exists() and calls.read_text()) == "update JobId=77 NodeList=n1\n"
    (run.path / "go").touch()
    assert end(agents[0])[0] == 0
    started = [event for event in run.read_events() if event["event"] in ("started", "resized", "finished")]
    assert [(event["event"], event.get("nodes")) for event in started] == [
        ("started", ["127.0.0.1", "127.0.0.2"]),
        ("started", ["127.0.0.1"]),
        ("resized", 1),
        ("finished", None),
    ]
    assert last_event(run, "resized")["without"] == ["127.0.0.2"]
    assert run.attempt_record(1)["held_nodes"] == 1
    code, error = end(joiner)
    assert code == 0 and "the agent of node 0 published no rendezvous address" in error, "its run has ended"
    assert last_event(run, "left")["seconds"] > 20, "its node counts"


def of_node(number: int) -> dict[str, str]:
    """The environment of an agent on one of two nodes."""
    return TWO_NODES | {"SLURM_NODEID": str(number), "SLURMD_NODENAME": f"127.0.0.{number + 1}"}


FORK_SAFE = """
import importlib, os, sys, numpy, torch
threads = len(os.listdir("/proc/self/task"))
def initializes(*args, **kwargs):
    raise AssertionError("CUDA is initialized or asked: a forked worker could not use it")
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, initializes)
torch.accelerator.is_available = torch.accelerator.current_accelerator = initializes
for module in sys.argv[1:]:
    importlib.import_module(module)
assert len(os.listdir("/proc/self/task")) == threads
"""


@pytest.mark.long_form(12)  # the GPU checks fork workers too
def test_what_the_warm_parent_imports_asks_no_gpu_and_starts_no_threads() -> None:
    modules = preload(config_of("+strategy=pp"), ENTRY, STORE)
    assert "hpc_train.parallel.pipeline.engine" in modules
    subprocess.run([sys.executable, "-c", FORK_SAFE, *modules], check=True)


def test_a_warm_parent_that_dies_while_it_forks_the_store_is_started_again() -> None:
    """It has taken the request, and never answers."""
    script = """if True:
        import os, signal, socket, threading
        from hpc_train.elastic import worker_process
        from hpc_train.elastic.rendezvous.store import Stores
        parent, stores = worker_process.start_warm_parent([]), Stores("tests.elastic.entries:serve")
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        os.kill(parent, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (parent, signal.SIGKILL)).start()
        stores.offer(0, listener)
        stores.serve(0)
        with socket.create_connection(address) as client:
            assert client.recv(7) == b"welcome"
        assert not stores.lost
        assert worker_process.ensure_warm_parent() != parent
        stores.stop()
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


@pytest.mark.parametrize(
    ("entry", "failure", "text", "attempts"),
    [
        ("one_raises", "user_error", "ArithmeticError: rank one cannot count", 1),
        ("one_is_killed", "killed", "the last words of rank one", 3),
        ("one_exits", "exited", "exited early with code 0", 3),
        ("one_gpu_fails_in_the_watchdog", "device_error", "CUDA error: uncorrectable ECC error encountered", 3),
    ],
)
@pytest.mark.long_form(5)  # the next test, and the classes and the restarts in test_workers and test_coordinator
def test_the_first_real_failure_is_reported_and_no_attempt_is_wasted(
    frozen: Freeze, entry: str, failure: str, text: str, attempts: int
) -> None:
    run = frozen()
    code, error = end(start_agent(run.path, entry))
    assert code == (93 if attempts == 3 else 1)
    assert text in error
    assert "rank 1 on" in error
    assert "Connection closed by peer" not in error
    event = last_event(run, "worker_failed")
    assert (event["rank"], event["class"]) == (1, failure)
    assert text in event["traceback"]
    assert last_event(run, "stopped_retrying" if attempts == 3 else "failed")["exit_code"] == code
    assert run.newest_attempt() == attempts - 1


def test_a_restart_reports_the_first_failure_and_waits_for_the_processes_that_a_worker_forked(frozen: Freeze) -> None:
    run = frozen()
    code, error = end(start_agent(run.path, "one_leaves_children"))
    assert (code, run.newest_attempt()) == (0, 1)
    assert [path.name for path in run.path.glob("slept-*")] == ["slept-0.3"], "it was given the time to end"
    (event,) = [event for event in run.read_events() if event["event"] == "worker_failed"]
    assert (event["rank"], event["class"]) == (1, "killed")
    assert "the last words of rank one" in event["traceback"]
    assert "rank 1 on" in error and "Connection closed by peer" not in error


@pytest.mark.long_form(3)  # a detached job in tests/launch
def test_an_agent_that_nobody_listens_to_goes_on(frozen: Freeze) -> None:
    """What started it is gone, and so is the other end of its output."""
    run = frozen()
    agent = start_agent(run.path, "one_is_killed")
    for stream in (agent.stdout, agent.stderr):
        assert stream is not None
        stream.close()
    assert agent.wait(timeout=240) == 93
    assert last_event(run, "stopped_retrying")["exit_code"] == 93


@pytest.mark.long_form(5)  # tests/doors has refusals, and test_on_event the webhook
def test_a_mistake_found_by_a_worker_is_refused_without_a_traceback(frozen: Freeze, tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    run = frozen(on_event=f"cat >> {heard}")
    code, error = end(start_agent(run.path, "one_refuses"))
    assert code == 2
    events = [json.loads(line) for line in heard.read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "worker_failed", "failed"]
    assert events[-1] in run.read_events()
    assert error.splitlines() == ["no such data", "  set in: data.path", "  fix:    another path"]


@pytest.mark.long_form(3)  # test_workers has an import that fails
def test_an_entry_that_cannot_be_imported_is_a_failure_with_its_traceback(frozen: Freeze) -> None:
    code, error = end(start_agent(frozen().path, "tests.elastic.missing:train"))
    assert code == 1
    assert "ModuleNotFoundError: No module named 'tests.elastic.missing'" in error


@pytest.mark.long_form(3)  # test_workers has an import that fails
def test_an_import_that_fails_in_the_warm_parent_fails_the_run_at_once(frozen: Freeze) -> None:
    run = frozen()
    code, error = end(start_agent(run.path, "tests.elastic.failing_import:train", PYTORCH_JIT="maybe"))
    assert (code, run.newest_attempt()) == (2, 0)
    assert error.startswith("torch cannot use PYTORCH_JIT=maybe: ValueError: PYTORCH_JIT must be 0 or 1")
    assert "unset PYTORCH_JIT" in error and "Traceback" not in error


@pytest.mark.long_form(5)  # test_workers has an import that fails
def test_an_import_that_crashes_the_warm_parent_is_not_tried_again(frozen: Freeze) -> None:
    run = frozen()
    code, error = end(start_agent(run.path, "tests.elastic.failing_import:train", CRASH="1", PYTORCH_JIT="1"))
    assert (code, run.newest_attempt()) == (1, 0)
    assert "importing torch crashed: its process was ended by SIGABRT" in error
    assert "LD_LIBRARY_PATH" in error and "out of memory" not in error


def test_no_worker_outlives_an_agent_killed_with_9(frozen: Freeze) -> None:
    run = frozen()
    agent = start_agent(run.path, "never_stops")
    pids = [int(mark[0]) for mark in until(lambda: marks(run))]
    assert lease.is_live(run)
    agent.kill()
    agent.wait()
    until(lambda: not any(alive(pid) for pid in pids))
    assert not lease.is_live(run)


def test_a_stop_request_before_the_agent_handles_signals(frozen: Freeze) -> None:
    """``cancel --save`` while the job starts: its signal ends the agents, and the batch script starts others."""
    run = frozen()
    record_stop_request(run)
    assert end(start_agent(run.path, "until_stopped"))[0] == 75
    assert last_event(run, "stopped")["reason"] == "SIGUSR1"
    assert not marks(run), "no worker has started"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
@pytest.mark.long_form(3, cases=["15", "10", "2"])  # the others are one list
def test_a_stop_request_while_running(frozen: Freeze, number: signal.Signals) -> None:
    run = frozen()
    agent = start_agent(run.path, "until_stopped")
    until(lambda: marks(run))
    os.killpg(agent.pid, number)  # the whole group, as Ctrl-C and scancel do
    assert end(agent) == (75, "")
    assert last_event(run, "stop_requested")["reason"] == number.name
    assert last_event(run, "stopped")["exit_code"] == 75


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3])
@pytest.mark.long_form(5)  # a request before the agent handles signals
def test_a_stop_request_during_start_up_is_not_lost(frozen: Freeze, delay: float) -> None:
    run = frozen()
    agent = start_agent(run.path, "until_stopped")
    until(lambda: lease.is_live(run))
    time.sleep(delay)
    os.killpg(agent.pid, signal.SIGTERM)
    assert end(agent) == (75, "")


def test_a_second_interrupt_kills_at_once(frozen: Freeze) -> None:
    run = frozen()
    agent = start_agent(run.path, "never_stops")
    pids = [int(mark[0]) for mark in until(lambda: marks(run))]
    os.killpg(agent.pid, signal.SIGINT)
    time.sleep(DUPLICATE_SIGINT_S + 0.2)
    assert all(alive(pid) for pid in pids)
    os.killpg(agent.pid, signal.SIGINT)
    code, error = end(agent)
    assert code == 1
    assert "second Ctrl-C" in error
    assert not any(alive(pid) for pid in pids)


@pytest.mark.long_form(4)  # test_file_systems has the same on a file system that hangs
def test_workers_that_do_not_stop_are_killed_after_the_grace(frozen: Freeze) -> None:
    run = frozen(stop_grace_s=0.5)
    agent = start_agent(run.path, "never_stops")
    until(lambda: marks(run))
    agent.terminate()
    code, error = end(agent)
    assert code == 1
    assert "did not stop within 0.5 s of the request" in error


@pytest.mark.long_form(4)  # test_requeue has the budget, and test_coordinator the stop
def test_a_run_that_has_used_up_its_gpu_hours_is_asked_to_stop_and_given_up(frozen: Freeze) -> None:
    run = frozen(max_gpu_hours=7)
    before = EventLog.open(run, "agent-n0", run.claim_attempt())
    before.write("started", world_size=4, gpus=4, launch="7.0.0", job_id="7", began=time.time() - 7200, layout="")
    code, error = end(start_agent(run.path, "until_stopped"))
    assert code == 93
    assert error.startswith("given up: the run has used 8.0 GPU-hours (run.max_gpu_hours=7)")
    assert last_event(run, "stop_requested")["reason"] == "run.max_gpu_hours"


FEW_FILES = """
import resource, sys
from pathlib import Path
from hpc_train.elastic.agent import AgentOptions, run_agent
from hpc_train.run.directory import RunDirectory
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 40))
sys.exit(run_agent(RunDirectory(Path(sys.argv[1])), AgentOptions("tests.elastic.entries:finish")))
"""


def test_an_agent_that_may_open_too_few_files_says_what_to_do(frozen: Freeze) -> None:
    call = [sys.executable, "-c", FEW_FILES, str(frozen().path)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("a process may open 40 files at a time, which is too few\n")
    assert "ulimit -Hn: 40" in done.stderr and "`ulimit -n 65536`" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long_form(5)  # test_file_systems has a restart on a full disk
def test_a_restart_while_the_event_log_cannot_be_written(frozen: Freeze) -> None:
    run = frozen()
    outage = detachable(run.events)
    agent = start_agent(run.path, "one_is_killed_when_told")
    until(lambda: marks(run))
    with outage():
        (run.path / "go").touch()
        until(lambda: run.newest_attempt() == 1 or agent.poll() is not None)
    code, error = end(agent)
    assert code == 0, error
    assert "cannot write the event log; it is kept in memory until it can be written: [Errno 2]" in error
    assert "the event log can be written again; what was kept in memory is written" in error
    assert "Traceback" not in error
    reported = [event["event"] for event in run.read_events()]
    assert "file_system_failed" in reported
    reported.remove("file_system_failed")
    assert reported == ["started", "worker_failed", "started", "restarted", "finished"]


@pytest.mark.long_form(6)  # tests/elastic/test_file_systems.py
def test_a_restart_waits_for_a_file_system_that_is_away(frozen: Freeze) -> None:
    run = frozen()
    outage = detachable(run.attempts)
    agent = start_agent(run.path, "one_is_killed_when_told")
    pids = [int(mark[0]) for mark in until(lambda: marks(run))]
    with outage():
        (run.path / "go").touch()
        until(lambda: not any(alive(pid) for pid in pids))
        time.sleep(1.0)  # the next attempt is claimed right after that
    code, error = end(agent)
    assert code == 0, error
    assert sorted(path.name for path in run.attempts.glob("[0-9]*.json")) == ["000.json", "001.json"]


@pytest.mark.parametrize(("nodes", "requested"), [(1, "auto"), (2, 2)])
@pytest.mark.long_form(8, cases=["2-2"])  # test_coordinator has several nodes
def test_gpus_that_no_node_can_use_refuse_the_run(frozen: Freeze, nodes: int, requested: int | str) -> None:
    """Slurm has allocated two GPUs on each node, and the agents see none."""
    run = frozen(gpus_per_node=requested)
    agents = [start_agent(run.path, "finish", **gpus_of_slurm(node, nodes)) for node in reversed(range(nodes))]
    *others, (code, error) = [end(agent) for agent in agents]
    assert [found for found, _ in others] == [2] * (nodes - 1)
    assert code == 2
    names = "nodes 127.0.0.1, 127.0.0.2 cannot use their" if nodes > 1 else "node 127.0.0.1 cannot use its"
    claim = "2 are allocated to the step" if requested == "auto" else "2 GPUs per node are requested"
    first, where, fix = error.splitlines()
    assert first.startswith(f"{names} GPUs: {claim}, and the process ")
    assert where == "  set in: cluster.gpus_per_node"
    assert "cluster.gpus_per_node=0 trains on the CPU" in fix
    assert [(event["event"], event.get("exit_code")) for event in run.read_events()][-1] == ("failed", 2)
    assert not any(event["event"] == "started" for event in run.read_events())


@pytest.mark.long_form(8)  # the job whose nodes all cannot use them
def test_a_node_that_cannot_use_its_gpus_is_a_fault_of_the_node(frozen: Freeze) -> None:
    """The other node has none allocated, and has CPU workers."""
    run = frozen(gpus_per_node="auto")
    lease.add_submission(run, "script", job_id="77")
    agents = [
        start_agent(run.path, "finish", **gpus_of_slurm(0, 2, "")),
        start_agent(run.path, "finish", **gpus_of_slurm(1, 2)),
    ]
    assert [end(agent)[0] for agent in agents] == [75, 75]
    event = last_event(run, "worker_failed")
    assert (event["class"], event["node"]) == ("unfit_node", "127.0.0.2")
    assert event["message"].startswith("node 127.0.0.2 cannot use its GPUs: 2 are allocated to the step")
    assert last_event(run, "requeued")["exclude"] == ["127.0.0.2"]


def gpus_of_slurm(node: int, nodes: int, gpus: str = "0,1") -> dict[str, str]:
    """The environment of the agent of a node whose step has ``gpus``."""
    step = of_node(node) | {"SLURM_STEP_NUM_NODES": str(nodes)}
    given = {"SLURM_STEP_GPUS": gpus, "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    return step | given


@pytest.mark.long_form(7)  # tests/run/test_lease.py
def test_a_live_run_refuses_a_second_agent(frozen: Freeze) -> None:
    run = frozen()
    agent = start_agent(run.path, "until_stopped")
    until(lambda: marks(run))
    code, error = end(start_agent(run.path, "finish"))
    assert code == 2
    assert "is live" in error
    agent.terminate()
    assert end(agent)[0] == 75


STEPS = 100_000
GROWTH_BYTES = 4 << 20  # an agent that reads all lines at each look grows by 0.6 MB per 1,000 steps


@IN_LONG_FORM  # test_progress has a look that reads only what is new
@pytest.mark.timeout(3600)
def test_an_agent_does_not_grow_with_the_steps(frozen: Freeze) -> None:
    run = frozen(workers=1)
    agent = start_agent(run.path, "logs_many_steps", FOREGROUND="1", STEPS=str(STEPS))
    _, error = agent.communicate(timeout=3600)
    assert agent.returncode == 0, error
    found = json.loads((run.path / "mark-0").read_text().partition(" ")[2])
    print(f"{STEPS} steps, after each tenth: {found}")
    first, last = found[len(found) // 2 - 1], found[-1]
    assert last["memory"] - first["memory"] < GROWTH_BYTES
    assert last["threads"] == first["threads"]
    assert last["files"] <= first["files"] + 1  # a lock that is being taken
    assert run.read_metrics()[-1]["step"] == STEPS
