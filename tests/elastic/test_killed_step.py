"""A step of a job whose agents were all killed is told by the next one, with the memory to request."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.elastic.requeue import find_killed_step, more_memory, refuse_third_kill
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Failure, advice_for
from hpc_train.run.files import write_json
from hpc_train.runs.diagnosis import find_cause

OVER = "slurmstepd: error: StepId=7.0 exceeded memory limit (2147483648 > 1073741824), being killed"
CGROUP = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose first attempt was made by step 0 of job 7."""
    run = RunDirectory(tmp_path / "run")
    run.create()
    run.update_record(run_id="abc", submissions=[{"job_id": "7", "output": str(run.logs / "7.out")}])
    (tmp_path / "7.out").write_text("srun: error: n1: task 0: Killed\n")
    attempt(run, "7.0.0")
    return run


def attempt(run: RunDirectory, launch: str) -> EventLog:
    number = run.claim_attempt()
    write_json(run.attempts / f"{number:03d}.json", {"launch_id": launch, "node": "n1"})
    return EventLog.open(run, "agent-n1", number)


def test_a_step_that_a_signal_has_killed_is_the_cause(run: RunDirectory) -> None:
    killed = find_killed_step(run, "7.1.0", 0)
    assert killed is not None
    attempt(run, "7.1.0").write("agents_killed", **killed.details(None))
    cause = find_cause(list(run.read_events()))
    assert cause is not None
    assert (cause.kind, cause.attempt, cause.node) == ("killed", 0, "n1")
    assert "all agents of step 7.0 (scancel --signal=KILL" in cause.message


@pytest.mark.parametrize("launch", ["7.0.0", "7.1.1", "8.1.0", "vm.17"])
def test_other_steps_and_starts_are_not_concerned(run: RunDirectory, launch: str) -> None:
    assert find_killed_step(run, launch, 0) is None
    assert find_killed_step(run, launch, -1) is None


def test_a_step_that_has_recorded_its_end_was_not_killed(run: RunDirectory) -> None:
    EventLog.open(run, "agent-n1", 0).write("stopped", exit_code=75)
    assert find_killed_step(run, "7.1.0", 0) is None


@pytest.mark.parametrize("line", [OVER, CGROUP, "slurmstepd: error: Exceeded job memory limit"])
def test_too_little_memory_is_told_with_more_and_not_tried_a_third_time(run: RunDirectory, line: str) -> None:
    output = run.logs / "7.out"
    output.write_text(f"{line}\nsrun: error: n1: task 0: Killed\n")
    killed = find_killed_step(run, "7.1.0", 0)
    assert killed is not None and killed.for_memory == line
    refuse_third_kill(run, killed, "64G")
    attempt(run, "7.1.0").write("agents_killed", **killed.details("64G"))
    cause = find_cause(list(run.read_events()))
    assert cause is not None and cause.kind == "out_of_memory"
    assert "set cluster.mem=96G instead of 64G" in cause.message
    assert advice_for(Failure.OUT_OF_MEMORY, cause.message) == "set the larger cluster.mem that the message names"
    output.write_text(f"{line}\n{line.replace('7.0', '7.1')}\n")
    again = find_killed_step(run, "7.2.0", 1)
    with pytest.raises(UserError, match="killed two steps of the job") as error:
        refuse_third_kill(run, again, "64G")
    assert error.value.fix.startswith("set cluster.mem=96G")


def test_the_lines_of_one_step_are_not_taken_for_those_of_another(run: RunDirectory) -> None:
    """The output is that of Slurm 22.05: the second step was killed by a signal, after the first for its memory."""
    over = "slurmstepd-n1: error: StepId=7.0 exceeded memory limit (582123520 > 419430400), being killed"
    extra = "slurmstepd-n1: error: Exceeded job memory limit"
    (run.logs / "7.out").write_text(f"{over}\n{extra}\nsrun: error: n1: task 0: Killed\n")
    first = find_killed_step(run, "7.1.0", 0)
    assert first is not None and first.for_memory == over
    attempt(run, "7.1.0")
    second = find_killed_step(run, "7.2.0", 1)
    assert second is not None and second.for_memory is None


def test_more_memory_than_an_unknown_amount() -> None:
    assert "DefMemPer" in more_memory(None)
    assert "more than 0" in more_memory("0")
