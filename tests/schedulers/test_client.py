"""The table of job states, and what becomes of commands of Slurm that are missing, do not respond, or refuse."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from hpc_train.runs.diagnosis import BY_STATE
from hpc_train.schedulers.scheduler import JobStatus
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.client import Controller, LostAnswer, Problem, SlurmError
from hpc_train.schedulers.slurm.jobs import SlurmJob
from hpc_train.schedulers.states import STATES, Phase, state_of
from tests.schedulers.test_variables import command

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


def test_a_job_that_slurm_does_not_know_has_no_state_from_which_a_requeue_follows(tools: Path) -> None:
    command(tools, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert SlurmJob("7", 0, 0).is_running() is None


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
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SBATCH_WAIT", "SBATCH_PARTITION", "SLURM_CONF"):
        monkeypatch.setenv(name, "7")
    assert client.submit(["--nodes=1"], "#!/bin/sh\n", "mine") == "41"
    handed = {line for line in (tools / "env").read_text().splitlines() if line.startswith(("SLURM", "SBATCH"))}
    assert handed == {"SLURM_CONF=7", "SBATCH_PARTITION=7"}
    command(tools, "sbatch", f"echo >> {tools}/calls; {LOST}")
    command(tools, "squeue", "true")
    with pytest.raises(LostAnswer):
        client.submit([], "", "mine")
    assert len((tools / "calls").read_text().splitlines()) == 1


LOST = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"


@pytest.mark.parametrize(
    "printed",
    [
        "100042",
        "100042;tier1",
        "Submitted batch job 100042",
        "Submitted batch job 100042 on cluster tier1",
        "Welcome! this is job 7 of 20 today\nSubmitted batch job 100042",
        "sbatch: checking your quota: 12 of 20\n100042;tier1\nhave a nice day, job 3",
        "17\nSubmitted batch job 100042",
    ],
)
def test_the_id_among_the_words_of_a_site(printed: str) -> None:
    assert client.job_in_answer(f"{printed}\n") == "100042"


@pytest.mark.parametrize("printed", ["", "accepted", "17\n100042", "Submitted batch job 1\nSubmitted batch job 2"])
def test_an_answer_without_one_id_is_no_answer(printed: str) -> None:
    with pytest.raises(SlurmError, match="does not print the id of one job"):
        client.job_in_answer(printed)


QUEUE = "echo '40_0|RUNNING|N/A|mine|None'; echo '41|RUNNING|N/A|other|None'; echo '43|CANCELLED|N/A|mine|None'"


@pytest.mark.parametrize("answer", [LOST, "echo queued", "echo 17; echo 42", "echo 17; echo quota >&2; exit 1"])
def test_a_job_whose_answer_is_lost_is_found_by_its_comment(
    tools: Path, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    """It appears at the second look, and an earlier job with the same comment is not taken for it."""
    command(tools, "sbatch", answer)
    command(
        tools, "squeue", f"{QUEUE}; [ ! -e {tools}/asked ] || echo '42_[0-3]|PENDING|N/A|mine|None'; : > {tools}/asked"
    )

    def send() -> str:
        return client.job_in_answer(client.run(["sbatch"]))

    assert client.submitted_job(send, "mine", ["40"]) == "42"
    assert "its job 42 is in the queue" in capsys.readouterr().err


def test_a_lost_answer_says_how_to_look_for_the_job(tools: Path) -> None:
    command(tools, "sbatch", LOST)
    command(tools, "squeue", QUEUE)
    with pytest.raises(LostAnswer, match="squeue shows no job of this submission") as caught:
        client.submit([], "", "a run")
    assert "squeue --me" in caught.value.fix and "grep -F 'a run'" in caught.value.fix
    command(tools, "squeue", LOST)
    with pytest.raises(LostAnswer, match="squeue does not respond either, and the job may be queued"):
        client.submit([], "", "a run")


def test_a_refusal_and_a_failed_connection_are_not_looked_for(tools: Path) -> None:
    command(tools, "squeue", f": > {tools}/asked")
    for said in ("Invalid partition name specified", "Unable to contact slurm controller (connect failure)"):
        command(tools, "sbatch", f"echo '{said}' >&2; exit 1")
        with pytest.raises(SlurmError, match=re.escape(said)):
            client.submit([], "", "mine")
    assert not (tools / "asked").exists()


def test_an_interrupted_submission_is_cancelled_and_so_are_its_doubles(tools: Path) -> None:
    command(tools, "squeue", f"{QUEUE}; echo '42|PENDING|N/A|mine|None'; echo '44|PENDING|N/A|mine|None'")
    command(tools, "scancel", f'echo "$@" >> {tools}/cancelled')

    def interrupted() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.submitted_job(interrupted, "mine", ["40"])
    command(tools, "sbatch", LOST)
    assert client.submitted_job(lambda: client.run(["sbatch"]), "mine", ["40"]) == "42"
    assert (tools / "cancelled").read_text().split() == ["42", "44", "44"]


@pytest.mark.parametrize(
    ("ping", "others", "expected"),
    [
        ("echo 'Slurmctld(primary) at c1 is UP'", "exit 1", Controller.UP),
        ("echo 'Slurmctld(primary) at c1 is DOWN'; exit 1", "exit 1", Controller.SILENT),
        ("echo 'scontrol: not allowed for users' >&2; exit 1", "echo cpu", Controller.UP),
        ("echo 'scontrol: not allowed for users' >&2; exit 1", "echo 'not allowed' >&2; exit 1", Controller.SILENT),
        ("echo 'scontrol: not allowed for users' >&2; exit 1", LOST, Controller.SILENT),
        ("echo 'fatal: Could not establish a configuration source' >&2; exit 1", "exit 1", Controller.UNCONFIGURED),
    ],
)
def test_whether_there_is_a_controller(
    tools: Path, monkeypatch: pytest.MonkeyPatch, ping: str, others: str, expected: Controller
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    command(tools, "sbatch", "true")
    command(tools, "scontrol", ping)
    command(tools, "sinfo", others)
    command(tools, "squeue", others)
    assert client.find_controller()[0] is expected
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")  # then there should be one
    assert client.find_controller()[0] is (Controller.SILENT if expected is Controller.UNCONFIGURED else expected)


def test_a_machine_without_sbatch_has_no_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert client.find_controller()[0] is Controller.ABSENT


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
def test_whether_slurm_suspended_the_job(tools: Path, shown: str, since: str, expected: bool) -> None:
    command(tools, "scontrol", f"echo '{shown}'")
    assert SlurmJob("7", 0, 0).was_suspended(time.mktime(time.strptime(since, "%Y-%m-%dT%H:%M:%S"))) == expected


def test_the_components_of_a_heterogeneous_job(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "7+1|RUNNING|N/A|a|None\\n7+0|PENDING|N/A|a|Priority\\n9|RUNNING|N/A|b|None\\n"
    command(tools, "squeue", f"printf '{lines}'")
    assert [job.job_id for job in client.list_jobs([]) or ()] == ["7", "9"], "the first stands for the job"
    for number, (partition, nodes) in enumerate([("a", "2"), ("b", "1")]):
        monkeypatch.setenv(f"SLURM_JOB_PARTITION_HET_GROUP_{number}", partition)
        monkeypatch.setenv(f"SLURM_JOB_NUM_NODES_HET_GROUP_{number}", nodes)
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "b")
    command(tools, "sinfo", 'case "$*" in *=a) printf "n1|idle|none\\nn2|idle|none\\n";; *) echo "n3|idle|none";; esac')
    job = SlurmJob("7", 0, 0)
    assert job.nodes() == 3
    assert [job.may_start_without({name}, 3) for name in ("n4", "n3", "n1")] == [True, False, False]


def test_nodes_that_are_down_or_cannot_be_used(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SlurmJob("7", 0, 0)
    monkeypatch.setenv("SLURM_JOB_PARTITION", "cpu")
    command(tools, "sinfo", "echo 'n1|down*|Not responding'; echo 'n2|idle|none'; echo 'n3|drained|bad dimm'")
    assert job.unavailable_nodes(["n1", "n2", "n3"]) == {"n1": "down (Not responding)"}
    command(
        tools, "sinfo", "echo 'n1|down*|none'; echo 'n2|idle|none'; echo 'n3|drained|bad dimm'; echo 'n4|mixed|none'"
    )
    assert [job.may_start_without(set(), count) for count in (2, 3)] == [True, False]
    assert [job.may_start_without({name}, 2) for name in ("n1", "n2", "n3", "n4")] == [True, False, True, False]
    command(tools, "sinfo", "exit 1")
    assert job.unavailable_nodes(["n1"]) == {}
    assert job.may_start_without(set(), 1) is None
