"""When a job asks to run again, what the batch script makes of it, and steps whose agents were all killed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpc_train.config.schema import ClusterConfig, Config, ElasticConfig, RunConfig
from hpc_train.elastic.agent_loop import write_pause
from hpc_train.elastic.attempts import Attempts
from hpc_train.elastic.decision import Budget, RestartDecision, over_budget
from hpc_train.elastic.fabric import Fabric
from hpc_train.elastic.nodes import TOO_OFTEN, NodeFailures
from hpc_train.elastic.rendezvous.client import Pause, _ask
from hpc_train.elastic.rendezvous.messages import Leave
from hpc_train.elastic.rendezvous.store import Stores
from hpc_train.elastic.requeue import (
    JobEnd,
    find_killed_step,
    is_announcement,
    more_memory,
    refuse_third_kill,
    request,
    request_without_marker,
)
from hpc_train.errors import UserError
from hpc_train.launch.script import EXIT, REQUEUE_AFTER, REQUEUE_BEFORE, REQUEUE_END, by_hand
from hpc_train.machine.allocation import Allocation
from hpc_train.run import lease
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Action, Exit, Failure, advice_for
from hpc_train.run.file_lock import LockOwner
from hpc_train.run.files import write_json
from hpc_train.run.requests import record_stop_request
from hpc_train.runs.diagnosis import find_cause
from tests.elastic.conftest import Freeze, stand_in


def start(run: RunDirectory, restart: int, step: int | None, **elastic: Any) -> Exit:
    """One start of job 7 that was stopped when ``step`` was the newest checkpoint."""
    if step is not None:
        (run.checkpoints / f"step-{step:08d}").mkdir(exist_ok=True)
    end = JobEnd(run, "7", restart, 0)
    return request(end, Config(elastic=ElasticConfig(**elastic)), EventLog.open(run, "agent-n0", restart), "")


def test_a_requeue_needs_progress_since_the_one_before(run: RunDirectory) -> None:
    assert start(run, 0, None) == Exit.STOPPED
    assert start(run, 1, 5) == Exit.STOPPED
    assert start(run, 2, None) == Exit.GAVE_UP
    assert [event["event"] for event in run.read_events()] == ["requeued", "requeued", "stopped_retrying"]


def test_a_run_in_the_foreground_of_a_job_of_one_node_is_requeued(frozen: Freeze) -> None:
    """Nothing has recorded a submission of it."""
    run = frozen()
    assert run.record()["submissions"] == []
    assert start(run, 0, None) == Exit.STOPPED


def test_requeues_have_a_ceiling(run: RunDirectory) -> None:
    assert start(run, 0, 1, max_requeues=1) == Exit.STOPPED
    assert start(run, 1, 2, max_requeues=1) == Exit.GAVE_UP
    other = Config(elastic=ElasticConfig(max_requeues=1))
    assert request(JobEnd(run, "8", 0, 0), other, EventLog.open(run, "agent-n0", 2), "") == 75, (
        "another job begins anew"
    )


def test_a_job_of_a_chain_needs_progress_since_the_job_before(run: RunDirectory) -> None:
    lease.add_submission(run, "-m", job_id="7", chain=["7", "8", "9"])
    ask = lambda job: request(JobEnd(run, job, 0, 0), Config(), EventLog.open(run, "agent-n0", 0), "")  # noqa: E731
    assert ask("7") == Exit.STOPPED
    assert ask("8") == Exit.GAVE_UP


def attempts_of(run: RunDirectory, end: JobEnd, nodes: int = 2, **elastic: Any) -> Attempts:
    """Returns the attempts of job 7 on the agent of its first node."""
    here = Allocation(nodes, 0, "n1", "7", "7.0.0", "n1", ("n1", "n2")[:nodes])
    config, events = Config(elastic=ElasticConfig(**elastic)), EventLog.open(run, "agent-n1", 0)
    return Attempts(run, config, here, end, Stores("tests.elastic.entries:serve"), Fabric(run, config, []), events)


@pytest.mark.parametrize(
    ("state", "srun", "ends", "marker", "code", "asked"),
    [
        ("RUNNING 100", 75, {0: 75, 1: 75}, True, 75, ["requeue incomplete 7"]),
        ("RUNNING 100", 75, {0: 75, 1: 75}, False, 75, []),
        ("COMPLETING 100", 75, {0: 75}, True, 75, []),  # being cancelled, or requeued by Slurm itself
        ("RUNNING 0", 75, {0: 75}, True, 75, []),  # held
        ("RUNNING 100", 137, {0: 1, 1: 75}, True, 1, []),  # one node failed, srun killed the other
        ("RUNNING 100", 137, {}, False, 1, []),
        ("RUNNING 100", 93, {0: 93, 1: 75}, False, 93, []),
        ("RUNNING 100", 0, {0: 0, 1: 0}, False, 0, []),
    ],
)
def test_the_end_of_the_batch_script(
    run: RunDirectory,
    tmp_path: Path,
    state: str,
    srun: int,
    ends: dict[int, int],
    marker: bool,
    code: int,
    asked: list[str],
) -> None:
    for node, ended in ends.items():
        JobEnd(run, "7", 0, node).record(ended)
    if marker:
        JobEnd(run, "7", 0, 0).ask_for_requeue(3)
    calls = tmp_path / "calls"
    stand_in(tmp_path, squeue=f"echo '{state}'", scontrol=f'echo "$*" >> {calls}')
    script = "\n".join([f"RUN={run.path} status={srun}", REQUEUE_BEFORE, REQUEUE_END, REQUEUE_AFTER, EXIT])
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=environment, check=False)
    assert done.returncode == code
    assert (calls.read_text().splitlines() if calls.exists() else []) == asked


# As squeue responds in the last task of an array, whose id is that of the array: it also lists a task that waits.
OF_ARRAY = (
    'case "$*" in *%Q*) priority=" 100";; esac\n'
    'case "$*" in *5_3*) ;; *) echo "PENDING$priority";; esac\n'
    'echo "RUNNING$priority"'
)
LAST_TASK = {"SLURM_JOB_ID": "5", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}


def test_the_last_task_of_an_array_is_not_taken_for_the_whole_array(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another task of it waits since its own requeue."""
    calls = tmp_path / "calls"
    scontrol = f'[ "$1" = show ] || echo "$*" >> {calls}'
    stand_in(tmp_path, squeue=OF_ARRAY, scontrol=scontrol, sleep="true")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **LAST_TASK}
    end = JobEnd(run, "5", 0, 0)
    end.record(Exit.STOPPED)
    end.ask_for_requeue(3)
    script = "\n".join([f"RUN={run.path} status=1", REQUEUE_BEFORE, REQUEUE_END, REQUEUE_AFTER, EXIT])
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=environment, check=False)
    assert done.returncode == 75
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert request_without_marker(end, Config()) is None
    assert end.job is not None
    _ask(end.job, end.job.requeue_command(chained=False))
    assert calls.read_text().splitlines() == ["requeue incomplete 5_3"] * 3
    owner = replace(LockOwner.of_this_process(), host="n1", machine="n1")
    assert owner.job_id == "5_3"
    assert owner.may_be_alive(replace(owner, machine="n2", job_id="9"), lambda: 1.0)


@pytest.mark.parametrize(
    ("reported", "killed", "code", "asked"),
    [
        (75, True, 75, ["scancel --signal=KILL 5_3.1", "scontrol requeue incomplete 5_3"]),
        (75, False, 75, ["scancel --signal=KILL 5_3.1", "scontrol requeue incomplete 5_3"]),  # a process in D state
        (0, True, 0, ["scancel --signal=KILL 5_3.1"]),
        (None, False, 0, []),
    ],
)
def test_a_step_that_does_not_end_does_not_hold_the_job(
    run: RunDirectory, tmp_path: Path, reported: int | None, killed: bool, code: int, asked: list[str]
) -> None:
    """As where a node is frozen. The stand-in for srun ends by itself only where no agent has reported an end."""
    calls, pid = tmp_path / "calls", tmp_path / "pid"
    end = JobEnd(run, "7", 0, 0, "1")
    end.record(1)  # by an earlier run in the same allocation
    if reported == Exit.STOPPED:
        end.ask_for_requeue(3)
    tell = f"printf '{reported}\\nstep 1\\n' > {run.attempts}/end-7.0.node-0; " if reported is not None else ""
    stand_in(
        tmp_path,
        srun=f"echo $$ > {pid}; {tell}exec /bin/sleep {1 if reported is None else 1000}",
        sleep="/bin/sleep 0.02",
        scancel=f'echo "scancel $*" >> {calls}; ' + (f"kill -KILL $(cat {pid})" if killed else "true"),
        squeue="echo RUNNING 100",
        scontrol=f'[ "$1" = show ] || echo "scontrol $*" >> {calls}',  # it is asked for the job's GPUs too
    )
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "5",
        "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "4", "RUN": str(run.path),
    }  # fmt: skip
    script = by_hand(survives=False)
    call = ["bash", "-euo", "pipefail", "-c", script, "job", "agent"]
    done = subprocess.run(call, env=environment, check=False, timeout=60)
    assert done.returncode == code
    assert (calls.read_text().splitlines() if calls.exists() else []) == asked
    assert not psutil.pid_exists(int(pid.read_text())), "nothing is left of the step"
    assert [path.name for path in run.attempts.glob("*.frozen")] == ([] if reported is None else ["end-7.0.frozen"])


def test_a_batch_script_passes_the_signal_of_slurm_on(run: RunDirectory, tmp_path: Path) -> None:
    """``--signal=B:USR1@60``: the script gets it alone, and again the agents, which were still starting."""
    got = tmp_path / "got"
    stand_in(
        tmp_path,
        srun=f"trap 'echo again >> {got}' USR2; kill -USR1 $PPID\n"
        f"until grep -qs again {got}; do /bin/sleep 0.02; done\n"
        f"printf '75\\n' > {run.attempts}/end-7.0.node-0; exit 75",
        sleep="/bin/sleep 0.02",
        squeue="echo RUNNING 100",
        scontrol='[ "$1" = show ]',
    )
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_CPUS_PER_NODE": "4", "RUN": str(run.path),
    }  # fmt: skip
    script = by_hand(survives=False)
    call = ["bash", "-euo", "pipefail", "-c", script, "job", "agent"]
    done = subprocess.run(call, env=environment, check=False, timeout=60)
    assert done.returncode == 75
    assert got.read_text() == "again\n"


SHOWN = "JobState=RUNNING RunTime={run} TimeLimit={limit} TimeMin=N/A PreemptTime={preempted}"


@pytest.mark.parametrize(
    ("stop", "shown", "recorded", "expected"),
    [
        ("SIGUSR1", SHOWN.format(run="23:50:00", limit="1-00:00:00", preempted="None"), False, True),
        ("SIGTERM", SHOWN.format(run="00:01:10", limit="00:03:00", preempted="None"), False, True),  # a minute early
        ("SIGUSR1", SHOWN.format(run="23:50:00", limit="1-00:00:00", preempted="None"), True, False),  # cancel --save
        ("SIGUSR1", SHOWN.format(run="12:00:00", limit="1-00:00:00", preempted="None"), False, False),  # by hand
        ("SIGUSR1", SHOWN.format(run="12:00:00", limit="UNLIMITED", preempted="None"), False, False),
        ("SIGTERM", SHOWN.format(run="12:00:00", limit="UNLIMITED", preempted="2026-01-31T12:00:00"), False, True),
        ("SIGINT", SHOWN.format(run="23:50:00", limit="1-00:00:00", preempted="None"), False, False),  # Ctrl-C
        ("run.max_gpu_hours", SHOWN.format(run="23:50:00", limit="1-00:00:00", preempted="None"), False, False),
        ("SIGUSR1", "", False, False),  # Slurm does not respond
    ],
)
def test_a_stop_signal_near_the_limit_that_no_command_has_sent_is_slurms(
    run: RunDirectory, in_job: Callable[..., None], stop: str, shown: str, recorded: bool, expected: bool
) -> None:
    in_job(scontrol=f"echo '{shown}'" if shown else "exit 1")
    if recorded:
        record_stop_request(run)
    assert is_announcement(stop, run) == expected
    end = JobEnd(run, "7", 0, 0)
    assert attempts_of(run, end, nodes=1).leave(Leave(RestartDecision(Action.STOP), stop=stop)) == Exit.STOPPED
    assert end.requeues() == [] and (run.attempts / "end-7.0.requeue").exists() == expected


def test_a_hub_that_wakes_up_when_another_agent_acts_for_the_job_says_nothing(run: RunDirectory) -> None:
    """Slurm wakes it to end it: it sees its nodes gone, and the job is to run again."""
    end = JobEnd(run, "7", 0, 0)
    attempts = attempts_of(run, end)
    assert attempts.superseded() is None
    assert JobEnd(run, "7", 0, 1).claim_succession()
    assert attempts.superseded() is not None
    assert attempts.leave(Leave(RestartDecision(Action.FAIL, "node n2 is lost"))) == Exit.STOPPED
    assert not end.is_recorded()
    assert list(run.read_events()) == []
    end.begin()
    assert attempts.superseded() is None, "another step of the same job"


@pytest.mark.parametrize(
    ("shown", "replaced"),
    [
        ("JobState=RUNNING Restarts=0", False),
        ("JobState=SUSPENDED Restarts=0", False),
        ("JobState=PENDING Restarts=0", True),
        ("JobState=RUNNING Restarts=1", True),
        ("", False),  # Slurm does not respond
    ],
)
def test_a_hub_that_wakes_up_after_slurm_has_requeued_the_job_says_nothing(
    run: RunDirectory, in_job: Callable[..., None], shown: str, replaced: bool
) -> None:
    in_job(scontrol=f"echo {shown}")
    end = JobEnd(run, "7", 0, 0)
    attempts = attempts_of(run, end)
    why = attempts.replaced_by_slurm()
    assert (why is not None) == replaced
    if why is not None:
        assert attempts.leave(Leave(RestartDecision(Action.STOP, why))) == Exit.STOPPED
        assert not end.is_recorded()
        assert list(run.read_events()) == []


@pytest.mark.parametrize(("in_slurm", "event"), [(True, "suspended"), (False, "paused")])
def test_a_pause_is_a_suspension_if_slurm_has_just_resumed_the_job(
    run: RunDirectory, in_job: Callable[..., None], in_slurm: bool, event: str
) -> None:
    now = time.time()
    in_job(scontrol=f"date --date=@{now:.0f} +SuspendTime=%Y-%m-%dT%H:%M:%S")
    write_pause(Pause(25.0, now), EventLog.open(run, "agent-n1", 0), in_slurm)
    (written,) = run.read_events()
    assert (written["event"], written["seconds"], written["until"]) == (event, 25.0, now)
    assert written["reason"].endswith("for 25 s")


def test_a_node_that_failed_twice_is_excluded_at_the_requeue_and_only_for_a_time(run: RunDirectory) -> None:
    failures = NodeFailures(run, expiry_s=3600)
    for node in ("n2", "n3", "n3"):
        failures.note(node, "killed")
    assert start(run, 0, 1) == Exit.STOPPED
    assert JobEnd(run, "7", 0, 0).exclude_file.read_text() == "n3"
    assert start(run, 1, 2, exclude_hours=0) == Exit.STOPPED
    assert JobEnd(run, "7", 1, 0).exclude_file.read_text() == "", "the list is lifted"


@pytest.mark.parametrize(
    ("states", "cluster", "excluded"),
    [
        ("n1 mixed\nn2 allocated\nn3 idle", {"nodes": 2}, "n2"),
        ("n1 mixed\nn2 allocated\nn3 drained*", {"nodes": 2}, ""),  # Slurm would hold the job: BadConstraints
        ("n1 mixed\nn2 allocated\nn3 idle", {"nodes": 2, "exclude": "n[3-4]"}, "n[3-4]"),
        ("n1 mixed\nn2 allocated\nn3 idle", {"nodes": 2, "nodelist": "n[1-2]"}, ""),
        ("n1 mixed\nn2 allocated", {"nodes": "1-2"}, "n2"),
        ("", {"nodes": 2}, "n2"),  # Slurm does not respond
    ],
)
def test_a_node_without_which_the_job_could_not_start_is_not_excluded(
    run: RunDirectory,
    in_job: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    states: str,
    cluster: dict[str, Any],
    excluded: str,
) -> None:
    printed = "\n".join(f"{line.replace(' ', '|')}|none" for line in states.splitlines())
    in_job(sinfo=f"echo '{printed}'" if states else "exit 1")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "cpu")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    NodeFailures(run, expiry_s=3600).note("n2", "node_lost", TOO_OFTEN)
    config, end = Config(cluster=ClusterConfig(**cluster)), JobEnd(run, "7", 0, 0)
    assert request(end, config, EventLog.open(run, "agent-n0", 0), "") == Exit.STOPPED
    assert (end.exclude_file.read_text() if end.exclude_file.exists() else "") == excluded


def test_a_run_has_a_ceiling_of_gpu_hours_over_all_of_its_jobs(run: RunDirectory) -> None:
    events = EventLog.open(run, "agent-n0", 0)
    began = time.time() - 7200
    events.write("started", world_size=4, gpus=4, launch="7.0.0", job_id="7", began=began, layout="")
    assert not Budget(run, 9, gpus=4).is_used_up
    assert Budget(run, 7, gpus=4).is_used_up
    assert over_budget(run, Config(run=RunConfig(max_gpu_hours=9)), time.time()) is None
    assert "8.0 GPU-hours" in str(over_budget(run, Config(run=RunConfig(max_gpu_hours=7)), time.time()))


OVER = "slurmstepd: error: StepId=7.0 exceeded memory limit (2147483648 > 1073741824), being killed"
CGROUP = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."


@pytest.fixture
def killed_run(run: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A run whose first attempt was made by step 0 of job 7."""
    run.update_record(run_id="abc", submissions=[{"job_id": "7", "output": str(run.logs / "7.out")}])
    (tmp_path / "7.out").write_text("srun: error: n1: task 0: Killed\n")
    attempt(run, "7.0.0")
    return run


def attempt(run: RunDirectory, launch: str) -> EventLog:
    number = run.claim_attempt()
    write_json(run.attempts / f"{number:03d}.json", {"launch_id": launch, "node": "n1"})
    return EventLog.open(run, "agent-n1", number)


def test_a_step_that_a_signal_has_killed_is_the_cause(killed_run: RunDirectory) -> None:
    killed = find_killed_step(killed_run, "7.1.0", 0)
    assert killed is not None
    attempt(killed_run, "7.1.0").write("agents_killed", **killed.details(None))
    cause = find_cause(list(killed_run.read_events()))
    assert cause is not None
    assert (cause.kind, cause.attempt, cause.node) == ("killed", 0, "n1")
    assert "all agents of step 7.0 (scancel --signal=KILL" in cause.message


@pytest.mark.parametrize("launch", ["7.0.0", "7.1.1", "8.1.0", "vm.17"])
def test_other_steps_and_starts_are_not_concerned(killed_run: RunDirectory, launch: str) -> None:
    assert find_killed_step(killed_run, launch, 0) is None
    assert find_killed_step(killed_run, launch, -1) is None


def test_a_step_that_has_recorded_its_end_was_not_killed(killed_run: RunDirectory) -> None:
    EventLog.open(killed_run, "agent-n1", 0).write("stopped", exit_code=75)
    assert find_killed_step(killed_run, "7.1.0", 0) is None


@pytest.mark.parametrize("line", [OVER, CGROUP, "slurmstepd: error: Exceeded job memory limit"])
def test_too_little_memory_is_told_with_more_and_not_tried_a_third_time(killed_run: RunDirectory, line: str) -> None:
    output = killed_run.logs / "7.out"
    output.write_text(f"{line}\nsrun: error: n1: task 0: Killed\n")
    killed = find_killed_step(killed_run, "7.1.0", 0)
    assert killed is not None and killed.for_memory == line
    refuse_third_kill(killed_run, killed, "64G")
    attempt(killed_run, "7.1.0").write("agents_killed", **killed.details("64G"))
    cause = find_cause(list(killed_run.read_events()))
    assert cause is not None and cause.kind == "out_of_memory"
    assert "set cluster.mem=96G instead of 64G" in cause.message
    assert advice_for(Failure.OUT_OF_MEMORY, cause.message) == "set the larger cluster.mem that the message names"
    output.write_text(f"{line}\n{line.replace('7.0', '7.1')}\n")
    again = find_killed_step(killed_run, "7.2.0", 1)
    with pytest.raises(UserError, match="killed two steps of the job") as error:
        refuse_third_kill(killed_run, again, "64G")
    assert error.value.fix.startswith("set cluster.mem=96G")


def test_the_lines_of_one_step_are_not_taken_for_those_of_another(killed_run: RunDirectory) -> None:
    """The output is that of Slurm 22.05: the second step was killed by a signal, after the first for its memory."""
    over = "slurmstepd-n1: error: StepId=7.0 exceeded memory limit (582123520 > 419430400), being killed"
    extra = "slurmstepd-n1: error: Exceeded job memory limit"
    (killed_run.logs / "7.out").write_text(f"{over}\n{extra}\nsrun: error: n1: task 0: Killed\n")
    first = find_killed_step(killed_run, "7.1.0", 0)
    assert first is not None and first.for_memory == over
    attempt(killed_run, "7.1.0")
    second = find_killed_step(killed_run, "7.2.0", 1)
    assert second is not None and second.for_memory is None


def test_more_memory_than_an_unknown_amount() -> None:
    assert "DefMemPer" in more_memory(None)
    assert "more than 0" in more_memory("0")
