"""Jobs that Slurm stops ahead of their time limit or for other jobs: they save, wait and continue, unless they must
not be requeued. ``test_jobs.py`` has the short form."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.doors.command import REPOSITORY
from tests.report.test_page import check
from tests.schedulers.test_variables import command
from tests.slurm.cluster import Cluster, reconfigured, wait_for
from tests.slurm.runs import (
    FAULTY,
    ONE_NODE,
    ONE_WORKER,
    SLOW,
    TWO_BY_TWO,
    detail,
    events,
    every_step,
    job_id,
    status,
    steps,
    wait_for_step,
    wait_for_submission,
    wandb_ids,
    why,
    with_python,
)

ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
TAKE_ALL = ["sbatch", "--parsable", "--nodes=4", "--exclusive", "--wrap=sleep 2"]


@pytest.mark.long_form(45)  # tests/elastic/test_requeue.py
def test_preemption_loses_no_step_and_keeps_the_wandb_run(plain: Cluster, tmp_path: Path) -> None:
    case = [*SLOW, *TWO_BY_TWO, "train.steps=40", "telemetry.wandb.mode=offline", "cluster.partition=preempt"]
    process = plain.start(*case, "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 3)
    urgent = plain.call(*TAKE_ALL, cwd=tmp_path)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert plain.state(urgent.stdout.strip()) == "COMPLETED"
    assert every_step(run) == list(range(1, 41)), "each step was taken once"
    assert len(set(wandb_ids(run))) == 1
    assert detail(plain, job_id(run), "Restarts") == "1"
    page = " ".join(check((run / "report.html").read_text()).words.split())
    assert "nothing failed" in page and "requeues 1 " in page and "over 2 jobs" in page


@pytest.mark.long_form(40)  # tests/elastic/test_requeue.py has the end of the script and the signal that it passes on
def test_a_batch_script_is_preempted_and_continues(plain: Cluster, tmp_path: Path) -> None:
    cluster = with_python(plain)
    run = tmp_path / "outputs" / "run"
    options = ["--parsable", "--partition=preempt", "--nodes=1-2", str(REPOSITORY / "slurm" / "preemptible.sbatch")]
    arguments = [*SLOW, "train.steps=30", "cluster.cpu_workers=2", "run.name=run"]
    job = cluster.call("sbatch", *options, *arguments, cwd=tmp_path).stdout.strip()
    wait_for_step(run, 3)
    urgent = cluster.call(*TAKE_ALL, cwd=tmp_path)
    assert cluster.wait_for_state(job, *ENDED) == "COMPLETED", "".join(
        path.read_text() for path in tmp_path.glob("*.log")
    )
    assert cluster.state(urgent.stdout.strip()) == "COMPLETED"
    assert every_step(run) == list(range(1, 31)), "each step was taken once"
    assert {event["attempt"] for event in events(run, "started")} == {0, 1}
    assert detail(cluster, job, "Restarts") == "1"


@pytest.mark.long_form(30)  # tests/runs/test_diagnosis.py
def test_a_node_that_an_administrator_sets_down_is_named_with_the_reason(plain: Cluster, tmp_path: Path) -> None:
    node = ""
    # it stays down, as on most sites
    with reconfigured(plain, lambda conf: conf.replace("ReturnToService=2", "ReturnToService=1")):
        try:
            case = [*SLOW, *ONE_NODE, "train.steps=600", "launch.detach=true"]
            assert plain.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path).returncode == 0
            run = tmp_path / "outputs" / "run"
            wait_for_step(run, 2)
            (node,) = events(run, "started")[0]["nodes"]
            plain.call("scontrol", "update", f"nodename={node}", "state=down", "reason=bad dimm")
            wait_for("the second start", lambda: bool(events(run, "requeued_by_slurm")), 120)
            cause = why(plain, tmp_path)["cause"]
        finally:
            plain.call("scontrol", "update", f"nodename={node}", "state=resume")
    assert (cause["kind"], cause["node"]) == ("node_lost", node)
    assert cause["message"] == f"Slurm requeued the job: node {node} is down (bad dimm)"


@pytest.mark.timeout(900)
@pytest.mark.long_form(210)  # tests/elastic/test_requeue.py, and the signal in test_jobs.py
def test_the_time_limit_loses_no_step_and_keeps_the_wandb_run(plain: Cluster, tmp_path: Path) -> None:
    steps = 400  # of 0.4 s: more than fit into three minutes less start and save; few are left for the second job
    slow = [*SLOW, "+model.args.seconds=0.4", f"train.steps={steps}", "telemetry.wandb.mode=offline"]
    case = [*slow, *ONE_NODE, "cluster.time=00:03:00", "elastic.stop_grace_s=40"]
    directory = tmp_path / "50%x runs"  # of which Slurm would replace a part in the path of the output
    directory.mkdir()
    done = plain.hpc_train(*case, "run.name=run", "-m", cwd=directory, timeout=800)
    run = directory / "outputs" / "run"
    assert done.returncode == 0, done.stdout + done.stderr
    assert every_step(run) == list(range(1, steps + 1)), "each step was taken once"
    requeued = events(run, "requeued")
    assert len(requeued) >= 1
    assert len(set(wandb_ids(run))) == 1
    assert detail(plain, job_id(run), "Restarts") == str(len(requeued))


@pytest.mark.long_form(120)  # tests/elastic/test_requeue.py
def test_the_time_limit_of_jobs_that_are_not_requeued(plain: Cluster, tmp_path: Path) -> None:
    """One may not be requeued, a step of the next takes longer than the grace, and the third gets no signal."""
    shell = with_python(plain)
    short = [*ONE_NODE, "cluster.time=1", "elastic.stop_grace_s=10", "launch.detach=true", "train.steps=9000", "-m"]
    long_step = ["+model.args.seconds=100", "elastic.hang_timeout_s=0"]
    for more in (["run.name=once", "elastic.max_requeues=0"], ["run.name=late", "elastic.max_requeues=0", *long_step]):
        done = shell.hpc_train(*SLOW, *short, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    script = [str(REPOSITORY / "slurm" / "single_node.sbatch"), *SLOW, "cluster.cpu_workers=1", "train.steps=9000"]
    options = ["--parsable", "--time=1", "--signal=URG@10", "--output=job.log"]
    untold = shell.call("sbatch", *options, *script, "run.name=untold", cwd=tmp_path).stdout.strip()
    assert shell.wait_for_state(untold, *ENDED) == "TIMEOUT"
    for name in ("once", "late"):
        shell.wait_for_state(job_id(tmp_path / "outputs" / name), *ENDED)
    reports = {name: why(shell, tmp_path, name) for name in ("once", "late", "untold")}
    announced = "Slurm announced the time limit or a preemption (USR2); not requeued: elastic.max_requeues=0"
    assert reports["once"]["cause"]["message"].startswith(announced)
    assert (reports["once"]["exit_code"], reports["once"]["checkpoint"]["lost_steps"]) == (93, 0)
    assert reports["late"]["cause"]["message"] == "did not stop within 10 s of the request (elastic.stop_grace_s)"
    assert "increase elastic.stop_grace_s" in reports["late"]["advice"][0]
    assert reports["untold"]["slurm"]["state"] == "TIMEOUT"
    assert "it did not stop before its time limit: increase cluster.time" in reports["untold"]["advice"][0]


@pytest.mark.long_form(30)  # tests/doors has a restart that finds them gone
def test_a_requeued_job_that_finds_its_checkpoints_gone_is_refused(plain: Cluster, tmp_path: Path) -> None:
    process = plain.start(*SLOW, *ONE_NODE, "train.steps=600", "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 2)
    plain.call("scancel", "--signal=USR2", job_id(run))
    wait_for("the requeue", lambda: bool(events(run, "requeued")), 120)
    before = every_step(run)
    shutil.rmtree(run / "checkpoints")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2, output
    assert f"this run had saved a checkpoint of step {before[-1]}, but none of its checkpoints is left" in output
    assert every_step(run) == before, "nothing was trained again"
    plain.wait_for_state(job_id(run), "FAILED")
    assert detail(plain, job_id(run), "ExitCode") == "2:0"


@pytest.mark.long_form(30)  # tests/elastic/test_requeue.py
def test_a_job_that_somebody_holds_is_not_requeued(plain: Cluster, tmp_path: Path) -> None:
    """``status`` has Slurm's states: held, suspended, pending again. A job that is held while running stays so."""
    case = [*SLOW, *ONE_NODE, "train.steps=600", "launch.detach=true", "+cluster.extra.hold=true"]
    left = plain.hpc_train(*case, "run.name=run", "-m", cwd=tmp_path)
    assert left.returncode == 0, left.stdout + left.stderr
    run = tmp_path / "outputs" / "run"
    assert status(plain, tmp_path, "run")[0]["state"] == "held (JobHeldUser)"
    plain.call("scontrol", "release", job_id(run))
    wait_for_step(run, 2)
    plain.call("scontrol", "suspend", job_id(run))
    assert status(plain, tmp_path, "run")[0]["state"] == "suspended"
    plain.call("scontrol", "resume", job_id(run))
    plain.call("scontrol", "requeue", job_id(run))
    plain.wait_for_state(job_id(run), "PENDING")
    plain.call("scontrol", "update", f"JobId={job_id(run)}", "StartTime=now+1hour")
    assert status(plain, tmp_path, "run")[0]["state"].startswith("pending")
    plain.call("scontrol", "update", f"JobId={job_id(run)}", "StartTime=now")
    second = run / "metrics" / "attempt-001.jsonl"
    wait_for("a step of the second start", lambda: second.exists() and bool(second.read_text()), 120)
    plain.call("scontrol", "hold", job_id(run))
    plain.call("scancel", "--signal=USR2", job_id(run))
    assert plain.wait_for_state(job_id(run), "FAILED", "PENDING") == "FAILED"
    assert detail(plain, job_id(run), "ExitCode") == "75:0"
    assert detail(plain, job_id(run), "Restarts") == "1"
    assert plain.hpc_train("wait", "run", cwd=tmp_path).returncode == 75


@pytest.mark.long_form(45)  # tests/launch/test_slurm.py has the options and the refusal
def test_a_job_with_expedited_requeue_that_fails_is_not_left_in_the_queue(plain: Cluster, tmp_path: Path) -> None:
    """Slurm 25.11 holds such a job when its script exits with another code than 0. Stand-ins of sbatch and scontrol in
    front of this older Slurm show what reaches them."""
    tools = tmp_path / "bin"
    tools.mkdir()
    real = {name: shutil.which(name, path=plain.environment["PATH"]) for name in ("sbatch", "scontrol")}
    note = f'printf "%s\\n" "$*" >> {tmp_path}/calls'
    command(tools, "scontrol", f'[ "$1" != version ] || exec echo slurm 25.11.0; exec {real["scontrol"]} "$@"')
    expedited = 'for word; do shift; [ "$word" != --requeue=expedite ] || word=--requeue; set -- "$@" "$word"; done'
    command(tools, "sbatch", f'{note}; {expedited}; exec {real["sbatch"]} "$@"')
    shell = replace(plain, environment={**plain.environment, "PATH": f"{tools}:{plain.environment['PATH']}"})
    asked = [*ONE_NODE, "cluster.requeue=expedite", "launch.detach=true", "-m"]
    cases = {"done": [*SLOW, "train.steps=6"], "failed": FAULTY, "requeued": [*SLOW, "train.steps=600"]}
    for name, case in cases.items():
        done = shell.hpc_train(*case, *asked, f"run.name={name}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 6 and all("--requeue=expedite" in call for call in calls), "each --test-only and submission"
    jobs = {name: job_id(tmp_path / "outputs" / name) for name in cases}
    wait_for_step(tmp_path / "outputs" / "requeued", 2)
    plain.call("scancel", "--signal=USR2", jobs["requeued"])
    assert plain.wait_for_state(jobs["requeued"], "PENDING") == "PENDING", "a job that asks for a requeue gets it"
    plain.call("scancel", jobs["requeued"])
    assert plain.wait_for_state(jobs["done"], *ENDED) == "COMPLETED"
    assert plain.wait_for_state(jobs["failed"], *ENDED) == "CANCELLED"
    assert status(plain, tmp_path, "failed")[0]["state"] == "failed"


def chain(run: Path) -> list[str]:
    """Returns the ids of the jobs of a chain or of cluster.first."""
    wait_for_submission(run)
    return list(RunDirectory(run).record()["submissions"][-1]["chain"])


@pytest.mark.long_form(30)  # tests/launch/test_slurm.py, tests/elastic/test_requeue.py
def test_a_run_that_needs_two_jobs_of_a_chain_cancels_the_third(cluster: Cluster, tmp_path: Path) -> None:
    process = cluster.start(*SLOW, *ONE_NODE, "train.steps=50", "launch.chain=3", "run.name=run", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    wait_for_step(run, 3)
    ids = chain(run)
    assert detail(cluster, ids[0], "Requeue") == "0"
    cluster.call("scancel", "--signal=USR2", ids[0])  # what Slurm sends ahead of the time limit
    shown = cluster.hpc_train("status", "run", "--json", cwd=tmp_path)
    assert json.loads(shown.stdout)["part"].endswith(" of 3"), shown.stdout
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert every_step(run) == list(range(1, 51)), "each step was taken once"
    assert [cluster.wait_for_state(job, *ENDED) for job in ids] == ["FAILED", "COMPLETED", "CANCELLED"]
    assert [event["job_id"] for event in events(run, "started")] == ids[:2]


@pytest.mark.parametrize(("how", "states"), [("failure", ["FAILED", "CANCELLED"]), ("scancel", ["CANCELLED"] * 3)])
@pytest.mark.long_form(25)  # tests/launch/test_slurm.py
def test_a_failure_or_scancel_of_one_job_ends_the_chain(
    cluster: Cluster, tmp_path: Path, how: str, states: list[str]
) -> None:
    case = [*FAULTY] if how == "failure" else [*SLOW, "train.steps=600"]
    options = [f"launch.chain={len(states)}", "launch.detach=true", "run.name=run", "-m"]
    left = cluster.hpc_train(*case, *ONE_NODE, *options, cwd=tmp_path)
    assert left.returncode == 0, left.stdout + left.stderr
    run = tmp_path / "outputs" / "run"
    ids = chain(run)
    if how == "scancel":
        wait_for_step(run, 2)
        cluster.call("scancel", ids[0])
    assert [cluster.wait_for_state(job, *ENDED) for job in ids] == states
    assert {event["job_id"] for event in events(run, "started")} == {ids[0]}


FIRST = "cluster.first=[{account: research}, {partition: debug, nodes: 2, time: '10'}]"


@pytest.mark.long_form(45)  # tests/launch has the races of the scripts, and the submission
def test_the_first_of_three_jobs_to_start_trains_the_run(cluster: Cluster, tmp_path: Path) -> None:
    """The nodes of the partition cpu are taken, so that the job in debug starts first; it is requeued and goes on. Then
    all three may start at the same time."""
    run = tmp_path / "outputs" / "run"
    taken = cluster.call("sbatch", "--parsable", "--nodes=2", "--exclusive", "--wrap=sleep 600", cwd=tmp_path).stdout
    case = [*SLOW, *ONE_NODE, "train.steps=3000", FIRST, "run.name=run", "launch.detach=true", "-m"]
    case += ["cluster.exclusive=true", "cluster.nodes=3", "elastic.min_nodes=2"]
    left = cluster.hpc_train(*case, cwd=tmp_path)
    assert left.returncode == 0, left.stdout + left.stderr
    ids = chain(run)
    wait_for_step(run, 3)
    assert [cluster.wait_for_state(job, "CANCELLED", "RUNNING") for job in ids] == ["CANCELLED", "CANCELLED", "RUNNING"]
    assert events(run, "started")[0]["world_size"] == 4, "two nodes of two workers, as this job requests"
    (row,) = status(cluster, tmp_path, "run")
    assert (row["job_id"], row["state"], row["nodes"]) == (ids[2], "running", 2)
    shown = cluster.hpc_train("why", "run", cwd=tmp_path)
    assert f"it started before {ids[0]}, {ids[1]}, which were withdrawn" in shown.stdout
    cluster.call("scancel", "--signal=USR2", ids[2])
    wait_for("the second start", lambda: len(events(run, "started")) == 2, 240)
    assert cluster.hpc_train("cancel", "run", cwd=tmp_path).returncode == 0
    assert cluster.wait_for_state(ids[2], *ENDED) == "CANCELLED"
    assert every_step(run) == list(range(1, len(every_step(run)) + 1)), "each step was taken once"
    assert {event["job_id"] for event in events(run, "started")} == {ids[2]}
    cluster.call("scancel", taken.strip())


@pytest.mark.long_form(30)  # tests/launch has twenty races of the scripts
@pytest.mark.parametrize("seed", range(4))
def test_a_race_of_three_jobs_on_a_real_cluster(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    """Idle nodes: two jobs or all three start within a second, before or after the others are submitted."""
    draw = random.Random(seed)
    run = tmp_path / "outputs" / "run"
    first = f"cluster.first=[{{account: research}}, {{time: '{draw.randint(5, 50)}'}}]"
    hold = ["+cluster.extra.begin=now+8"] if seed % 2 else []  # all become eligible in the same second
    case = [*SLOW, *ONE_WORKER, "train.steps=4", first, *hold, "run.name=run", "-m"]
    done = cluster.hpc_train(*case, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ids = chain(run)
    states = [cluster.wait_for_state(job, *ENDED) for job in ids]
    (trained,) = {event["job_id"] for event in events(run, "started")}
    assert states[ids.index(trained)] == "COMPLETED" and set(states) <= {"COMPLETED", "CANCELLED"}
    assert every_step(run) == [1, 2, 3, 4]
    assert [row["state"] for row in status(cluster, tmp_path, "run")] == ["done"]


@pytest.mark.long_form(280)  # tests/elastic/test_priority.py
def test_a_run_gives_nodes_back_to_a_more_urgent_one(cluster: Cluster, tmp_path: Path) -> None:
    alone = ["cluster.nodes=3", "cluster.cpu_workers=1", "cluster.exclusive=true", "launch.detach=true", "-m"]
    first = ["run.name=first", "elastic.min_nodes=1", "elastic.grow=always", "elastic.max_nodes=3", "train.steps=9000"]
    assert cluster.hpc_train(*SLOW, *alone, *first, cwd=tmp_path).returncode == 0
    run = tmp_path / "outputs" / "first"
    wait_for_step(run, 3)
    urgent = ["run.name=urgent", "elastic.priority=1", "train.steps=5"]
    assert cluster.hpc_train(*SLOW, *alone, *urgent, cwd=tmp_path).returncode == 0
    assert cluster.hpc_train("wait", "urgent", cwd=tmp_path).returncode == 0
    asked = events(run, "resize_requested")[0]
    job = job_id(tmp_path / "outputs" / "urgent")
    assert asked["nodes"] == 1 and f"job {job} waits for 3 nodes, and its priority 1 is above 0" in asked["reason"]
    assert events(run, "resized")[0]["nodes"] == 1
    wait_for("three nodes again", lambda: events(run, "resized")[-1]["nodes"] == 3, 240)
    before = max(steps(run))
    wait_for_step(run, before + 3)
    assert cluster.hpc_train("cancel", "first", cwd=tmp_path).returncode == 0
