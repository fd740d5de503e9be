"""The table of job states, and what becomes of commands of Slurm that are missing, do not respond, or refuse."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_train.launch.diagnosis import BY_STATE
from hpc_train.launch.job_status import JobStatus
from hpc_train.slurm import client
from hpc_train.slurm.client import Problem, SlurmError
from hpc_train.slurm.states import STATES, Phase, state_of

# base states and flags of https://slurm.schedmd.com/job_state_codes.html
WAITING = {
    "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "LAUNCH_FAILED",
    "RECONFIG_FAIL", "EXPEDITING", "REVOKED",
}  # fmt: skip
EXECUTING = {
    "CONFIGURING", "POWER_UP_NODE", "RUNNING", "RESIZING", "SIGNALING", "UPDATE_DB", "COMPLETING", "STAGE_OUT",
}  # fmt: skip
FROZEN = {"SUSPENDED", "STOPPED"}
OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
}  # fmt: skip
HELD = {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "LAUNCH_FAILED", "RECONFIG_FAIL"}


def test_the_table_has_every_documented_state() -> None:
    assert set(STATES) == WAITING | EXECUTING | FROZEN | OVER | {client.FORGOTTEN}
    assert set(BY_STATE) <= OVER


@pytest.mark.parametrize("name", sorted(STATES))
def test_what_a_state_means(name: str) -> None:
    state = state_of(name)
    assert state.is_alive == (name not in OVER | {client.FORGOTTEN})
    assert state.holds_nodes == (name in EXECUTING | FROZEN)
    assert state.may_execute == (name in EXECUTING)
    assert state.held == (name in HELD)
    assert state.ended_well == (name == "COMPLETED")
    assert state.by_itself == (name in ("COMPLETED", "FAILED", client.FORGOTTEN))
    assert JobStatus(name).present == state.is_alive


@pytest.mark.parametrize("name", ["", "A_STATE_OF_A_LATER_SLURM"])
def test_a_job_in_an_unknown_state_counts_as_alive(name: str) -> None:
    state = state_of(name)
    assert state.is_alive and state.holds_nodes and state.may_execute
    assert not state.ended_well


def test_a_state_with_an_addition() -> None:
    assert state_of("CANCELLED by 1000").phase is Phase.ENDED


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(client, "REPEAT_AFTER_S", 0.01)
    return tmp_path


def command(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/bin/sh\n{script}\n")
    (tools / name).chmod(0o755)


@pytest.mark.parametrize(
    ("script", "problem", "said"),
    [
        ("echo 'scancel: error: Access/permission denied' >&2; exit 1", Problem.REFUSED, "permission denied"),
        ("echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", Problem.SILENT, "controller"),
        ("sleep 10", Problem.SILENT, "no answer within 0.2 s"),
    ],
)
def test_commands_that_fail(tools: Path, script: str, problem: Problem, said: str) -> None:
    command(tools, "scontrol", script)
    with pytest.raises(SlurmError, match=said) as caught:
        client.run(["scontrol", "ping"], timeout_s=0.2 if "sleep" in script else client.QUERY_S)
    assert caught.value.problem is problem
    assert caught.value.fix


def test_a_command_that_is_missing() -> None:
    with pytest.raises(SlurmError) as caught:
        client.run(["no-such-scontrol"])
    assert caught.value.problem is Problem.MISSING
    assert client.query(["no-such-scontrol"]) is None


@pytest.mark.parametrize(
    ("said", "calls"), [("Unable to contact slurm controller", 2), ("Access/permission denied", 1)]
)
def test_a_cancellation_is_repeated_once_where_the_controller_does_not_respond(
    tools: Path, said: str, calls: int
) -> None:
    command(tools, "scancel", f"echo \"$@\" >> {tools}/calls; echo '{said}' >&2; exit 1")
    with pytest.raises(SlurmError, match=said):
        client.cancel(["7", "8"], signal="USR1")
    assert (tools / "calls").read_text().splitlines() == ["--signal=USR1 7 8"] * calls


def test_a_submission_is_sent_once_and_without_the_surrounding_job(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tools, "sbatch", f"env >> {tools}/env; cat > {tools}/script; echo '41;cluster'")
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SBATCH_PARTITION", "SLURM_CONF"):
        monkeypatch.setenv(name, "7")
    assert client.submit(["--nodes=1"], "#!/bin/sh\n") == "41"
    handed = [line for line in (tools / "env").read_text().splitlines() if line.startswith(("SLURM", "SBATCH"))]
    assert handed == ["SLURM_CONF=7"]
    command(tools, "sbatch", f"echo >> {tools}/calls; echo 'Socket timed out on send/recv operation' >&2; exit 1")
    with pytest.raises(SlurmError):
        client.submit([], "")
    assert len((tools / "calls").read_text().splitlines()) == 1


def test_only_the_client_runs_commands_of_slurm() -> None:
    """Also ``submitit``'s executor runs sbatch, with our options; a step of an allocation is no question to Slurm."""
    package = Path(client.__file__).parents[1]
    others = [path for path in package.rglob("*.py") if path != Path(client.__file__)]
    text = {path.relative_to(package).as_posix(): path.read_text() for path in others}
    running = {
        name for name, words in text.items() if "subprocess.run(" in words or "subprocess.check_output(" in words
    }
    assert running == {
        "bench/preflight.py", "cluster/gpus.py", "cluster/storage.py", "fabric/discovery.py",
        "fabric/nvidia_smi.py", "plan/tried_code.py", "planner/traced.py", "run/record.py", "run/snapshot.py",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shown", "since", "expected"),
    [
        ("RunTime=00:00:05\n   SuspendTime=2026-11-23T07:05:23 SecsPreSuspend=3", "2026-11-23T07:04:58", True),
        ("SuspendTime=2026-11-23T07:05:23", "2026-11-23T07:06:10", True),  # the clocks differ
        ("SuspendTime=2026-11-23T07:05:23", "2026-11-23T09:00:00", False),  # an earlier time
        ("SuspendTime=None SecsPreSuspend=0", "2026-11-23T07:05:00", False),
        ("", "2026-11-23T07:05:00", False),
    ],
)
def test_whether_slurm_suspended_the_job(
    tools: Path, monkeypatch: pytest.MonkeyPatch, shown: str, since: str, expected: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    command(tools, "scontrol", f"echo '{shown}'")
    assert client.was_suspended(time.mktime(time.strptime(since, "%Y-%m-%dT%H:%M:%S"))) == expected


def test_nodes_that_are_down_or_cannot_be_used(tools: Path) -> None:
    command(tools, "sinfo", "echo 'n1|down*|Not responding'; echo 'n2|idle|none'; echo 'n3|drained|bad dimm'")
    assert client.unavailable_nodes(["n1", "n2", "n3"]) == {"n1": "down (Not responding)"}
    command(tools, "sinfo", "echo 'n1 down*'; echo 'n2 idle'; echo 'n3 drained'; echo 'n4 mixed'")
    assert client.usable_nodes("cpu") == {"n2", "n4"}
    command(tools, "sinfo", "exit 1")
    assert client.unavailable_nodes(["n1"]) == {}
    assert client.usable_nodes("cpu") is None
