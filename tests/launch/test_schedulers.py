"""Schedulers other than Slurm: one that a user writes from the page, and the templates, with stand-ins for commands.

The stand-ins start what they are given as the manuals of PBS, LSF and Flux say, in a new environment with the variables
of the scheduler.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hpc_train.elastic.agent_session import time_to_stop
from hpc_train.elastic.requeue import JobEnd
from hpc_train.errors import UserError
from hpc_train.machine.allocation import current_allocation
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.schedulers.current import current_job
from tests.doors.command import REPOSITORY, TINY, environment, hpc_train
from tests.launch.jobs import make_job

NODES = "127.0.0.2\n127.0.0.3\n"
OVERRIDES = [*TINY, "+strategy=dp", "cluster.cpu_workers=1", "cluster.gpus_per_node=0", "run.name=first"]

# The server of PBS: it runs a job in the background, after the job that it depends on.
QSUB = r"""
echo "qsub $*" >> {folder}/calls
number=$(ls {folder} | grep -c '^job[0-9]*$')
script={folder}/job$number
if [ -f "${{@: -1}}" ]; then cp "${{@: -1}}" $script; else cat > $script; fi
echo "$2" > $script.name
[[ $* != *" -v "* ]] || export "$(sed 's/.* -v \([^ ]*\).*/\1/' <<< "$*")"
before=$(sed -n 's/.*afterany:\([0-9]*\).*/\1/p' <<< "$*")
export PBS_JOBID=$number.pbs01 PBS_NODEFILE={folder}/nodefile PBS_O_WORKDIR=$PWD
setsid bash -c 'while kill -0 $0 2> /dev/null; do sleep 0.2; done; exec bash $1' \
  "$([ -z "$before" ] || cat {folder}/job$before.pid)" $script > {folder}/out$number 2>&1 < /dev/null &
echo $! > $script.pid
if [ -e {folder}/silent ]; then rm {folder}/silent; echo "qsub: cannot connect to server" >&2; exit 1; fi
echo $number.pbs01
"""
# In an instance on two nodes without a time limit: `flux run` starts a task per node with its rank, and passes on the
# signals of attach_fwd_signals (flux-core, src/cmd/job/attach.c).
FLUX = r"""
case "$*" in
  "getattr jobid") echo f2Nh7 ;;
  "hostlist --expand --delimiter=, local") paste -sd, {folder}/nodefile ;;
  "job timeleft") echo 4294967295 ;;
  "run -N 2 --tasks-per-node=1 --exclusive -o exit-timeout=none "*)
    for rank in 0 1; do FLUX_TASK_RANK=$rank FLUX_JOB_ID=7 "${{@:8}}" & done
    for signal in TERM HUP ALRM USR1 USR2; do trap "kill -$signal \$(jobs -pr)" $signal; done
    trap "echo one more ctrl-C within 2s to cancel" INT
    while [ -n "$(jobs -pr)" ]; do wait; done ;;
  "--parent batch -N 2 --exclusive -t 4h --env=HPC_TRAIN_JOB_ID="*)
    echo "flux $*" >> {folder}/calls
    env "${{8#--env=}}" setsid bash "$9" > {folder}/out1 2>&1 < /dev/null &
    echo $! > {folder}/job1.pid ;;
  *) echo "flux $*" >> {folder}/calls; exit 1 ;;
esac
"""
TOOLS = {
    # PATH is that of $PBS_HOME/pbs_environment
    "pbs_tmrsh": "[[ $2 == /* && -e $PBS_NODEFILE ]] || exit 255; shift;"
    ' exec env -i HOME="$HOME" PATH=/usr/bin:/bin PBS_JOBID=$PBS_JOBID {fixed} "$@"',
    "blaunch": 'shift; exec env -i HOME="$HOME" PATH=/usr/bin:/bin LSB_JOBID=$LSB_JOBID {fixed} "$@"',
    "ssh": 'shift 3; exec env -i HOME="$HOME" PATH=/usr/bin:/bin {fixed} bash -c "$*"',
    "qsub": QSUB,
    "flux": FLUX,
    "qselect": "for name in {folder}/job*.name; do"
    ' [ "$(cat $name 2> /dev/null)" != "$2" ] || echo "$(basename ${{name%.name}} | tr -d job).pbs01"; done',
    "qstat": "for id in $(shift; echo $*); do kill -0 $(cat {folder}/job${{id%%.*}}.pid) 2> /dev/null"
    " && printf 'Job Id: %s\\n    Job_Name = n\\n    job_state = R\\n    queue = q\\n\\n' $id; done",
    "qdel": "kill -- -$(cat {folder}/job${{1%%.*}}.pid)",
    "qsig": "pkill -USR1 -s $(cat {folder}/job${{3%%.*}}.pid)",  # all processes of the session, as PBS does
}


@pytest.fixture
def tools(tmp_path: Path) -> Iterator[Callable[..., dict[str, str]]]:
    """Yields a function that makes commands of a scheduler, and returns an environment that has them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nodefile").write_text(NODES)

    def make(**variables: str) -> dict[str, str]:
        fixed = f"PYTHONPATH={REPOSITORY} CUDA_VISIBLE_DEVICES= HPC_TRAIN_STRICT_EVENTS=1"
        for name, text in TOOLS.items():
            tool = folder / name
            tool.write_text(f"#!/bin/bash\n{text.format(folder=folder, fixed=fixed)}\n")
            tool.chmod(0o755)
        path = f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
        return environment(PATH=path, PYTHONPATH=f"{REPOSITORY}:{tmp_path}", **variables)

    yield make
    for file in folder.glob("*.pid"):  # jobs of a test that has failed
        with suppress(ProcessLookupError):
            os.killpg(int(file.read_text()), signal.SIGKILL)


def page_file(tmp_path: Path) -> None:
    """Writes the scheduler of docs/schedulers.md."""
    page = (REPOSITORY / "docs/schedulers.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_site").mkdir()
    (tmp_path / "my_site/pbs.py").write_text(code)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long_form(40))])
def test_a_scheduler_that_is_written_from_the_page_trains(
    tmp_path: Path, tools: Callable[..., dict[str, str]], nodes: int
) -> None:
    """The answer to the submission is lost, and the job is submitted once nevertheless."""
    page_file(tmp_path)
    env = tools()
    (tmp_path / "bin/silent").touch()
    (tmp_path / "bin/nodefile").write_text("".join(NODES.splitlines(keepends=True)[:nodes]))
    options = [*OVERRIDES, "cluster.kind=my_site.pbs:SCHEDULER", f"cluster.nodes={nodes}"]
    done = hpc_train("-m", *options, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "bin/out0").read_text()
    assert (tmp_path / "bin/calls").read_text().count("qsub") == 1
    run = RunDirectory(tmp_path / "outputs/first")
    (submission,) = run.record()["submissions"]
    assert (submission["job_id"], submission["scheduler"]) == ("0.pbs01", "my_site.pbs:SCHEDULER")
    assert run.attempt_record(0)["nodes"] == nodes
    status = hpc_train("status", "first", "--json", cwd=tmp_path, env=env)
    assert json.loads(status.stdout)["state"] == "done"
    dry = hpc_train("-m", *options, "run.name=second", "launch.dry_run=true", cwd=tmp_path, env=env)
    script = hpc_train("script", *options, "run.name=second", cwd=tmp_path, env=env).stdout
    assert "pbs_tmrsh" in script and script in dry.stdout and not (tmp_path / "outputs/second").exists()


@pytest.mark.long_form(60)  # the short form cancels jobs of Slurm, and submits with this scheduler
def test_jobs_of_this_scheduler_are_stopped_resumed_and_cancelled(
    tmp_path: Path, tools: Callable[..., dict[str, str]]
) -> None:
    page_file(tmp_path)
    env = tools()
    options = [*SLOW, "train.steps=500", "cluster.cpu_workers=1", "run.name=first", "launch.detach=true"]
    done = hpc_train("-m", *options, "cluster.kind=my_site.pbs:SCHEDULER", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    run = RunDirectory(tmp_path / "outputs/first")
    for number, stop in enumerate(("cancel first --save", "cancel first")):
        before = len(steps_of(run))
        until(lambda before=before: len(steps_of(run)) > before + 2)
        again = hpc_train("resume", "first", cwd=tmp_path, env=env)
        assert again.returncode == 2 and "PBS job" in again.stderr, again.stderr
        stopped = hpc_train(*stop.split(), "--json", cwd=tmp_path, env=env)
        assert json.loads(stopped.stdout) == {"cancelled": 1, "ended_before": 0}, stopped.stderr
        pid = int((tmp_path / f"bin/job{number}.pid").read_text())
        until(lambda pid=pid: not psutil.pid_exists(pid))
        status = hpc_train("status", "first", "--json", cwd=tmp_path, env=env)
        assert json.loads(status.stdout)["state"] == "stopped"
        if number == 0:
            assert hpc_train("resume", "first", "--detach", cwd=tmp_path, env=env).returncode == 0
    assert [item["job_id"] for item in run.record()["submissions"]] == ["0.pbs01", "1.pbs01"]
    assert not list(run.attempts.glob("*.requeue"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("SCHEDULER = PBS()", ""), "defines no SCHEDULER"),
        # the short form imports other objects that a user has written
        pytest.param(("def cancel", "def end"), "cancel", marks=pytest.mark.long_form(3)),
        pytest.param(("import shlex", "import torch"), "torch", marks=pytest.mark.long_form(3)),
        pytest.param(("SCHEDULER = PBS()", "SCHEDULER = PBS"), "must be a Scheduler", marks=pytest.mark.long_form(3)),
    ],
)
def test_a_wrong_scheduler_is_refused_before_anything_is_submitted(
    tmp_path: Path, tools: Callable[..., dict[str, str]], change: tuple[str, str], message: str
) -> None:
    page_file(tmp_path)
    file = tmp_path / "my_site/pbs.py"
    file.write_text(file.read_text().replace(*change))
    done = hpc_train("-m", *OVERRIDES, "cluster.kind=my_site.pbs:SCHEDULER", cwd=tmp_path, env=tools())
    assert done.returncode == 2
    assert message in done.stderr and "fix:" in done.stderr
    assert not (tmp_path / "outputs").exists()


SLOW = [
    "+strategy=dp",
    "model=custom",
    "model._target_=tests.doors.faulty.Slow",
    "train.reproducible=any_world_size",
    "batch.logical_micro_batches=2",
    "data=synthetic",
    "data.sequence_length=16",
    "data.validation_samples=8",
    "batch.global_size=8",
    "telemetry.log_every=1",
    "telemetry.wandb.mode=disabled",
    "cluster.preflight_action.slow_device=warn",
    "cluster.gpus_per_node=0",
    "train.steps=16",
]


@pytest.fixture
def template(tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that copies a template, with the overrides of a run on two nodes, as a user edits it."""

    def copy(name: str) -> Path:
        folder = tmp_path / "deploy/schedulers"
        shutil.copytree(REPOSITORY / "deploy/schedulers", folder, dirs_exist_ok=True)
        text = (folder / name).read_text()
        overrides = " ".join([*SLOW, "cluster.cpu_workers=1", "run.name=first"])
        (folder / name).write_text(text.replace("OVERRIDES=(+strategy=hybrid)", f"OVERRIDES=({overrides})"))
        return folder / name

    return copy


def until(condition: Callable[[], object], limit_s: float = 200) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def agent_of(run: RunDirectory, node: int) -> psutil.Process:
    """Returns the agent of a node."""
    for process in psutil.process_iter():
        try:
            if process.cmdline()[1:] == ["-m", "hpc_train", "agent", str(run.path)] and (
                process.environ().get("HPC_TRAIN_NODE_RANK") == str(node)
            ):
                return process
        except psutil.Error:
            continue
    raise AssertionError("there is no such agent")


def steps_of(run: RunDirectory) -> list[int]:
    return [line["step"] for line in run.read_metrics()]


def check_weights(run: RunDirectory, tmp_path: Path) -> None:
    """Compares losses and weights with those of one process that nothing has disturbed; they are equal bit by bit."""
    fast = [word.replace("faulty.Slow", "faulty.Faulty") for word in SLOW]
    done = hpc_train(
        *fast, "+model.args.how=never", "cluster=local", "cluster.cpu_workers=1", "run.name=one", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    one = RunDirectory(tmp_path / "outputs/one")
    expected = {line["step"]: line["loss"] for line in one.read_metrics()}
    assert {line["step"]: line["loss"] for line in run.read_metrics()} == pytest.approx(expected)
    assert run.record()["result"]["weights_sha256"] == one.record()["result"]["weights_sha256"]


@pytest.mark.parametrize(
    ("name", "command", "submission"),
    [
        ("pbs.sh", ["qsub"], "-v HPC_TRAIN_JOB_ID=pbs-0-pbs01"),
        ("flux.sh", ["setsid", "--fork", "bash"], "--env=HPC_TRAIN_JOB_ID=flux-f2Nh7"),
    ],
)
@pytest.mark.long_form(60)  # the short form trains a job of PBS, and requeues jobs of Slurm
def test_a_job_that_nears_its_limit_is_continued_by_one_other_job(
    tmp_path: Path,
    tools: Callable[..., dict[str, str]],
    template: Callable[[str], Path],
    name: str,
    command: list[str],
    submission: str,
) -> None:
    script = template(name)
    env = tools()
    subprocess.run([*command, script.relative_to(tmp_path)], cwd=tmp_path, env=env, check=True)
    run = RunDirectory(tmp_path / "outputs/first")
    until(lambda: run.config.exists() and len(steps_of(run)) > 2)
    agent_of(run, 0).send_signal(signal.SIGUSR2)
    pids = tmp_path / "bin/job1.pid"
    until(pids.exists)
    until(lambda: not psutil.pid_exists(int(pids.read_text())))
    assert (tmp_path / "bin/calls").read_text().count(submission) == 1, (tmp_path / "bin/out1").read_text()
    assert [event.name for event in run.read_events()].count("requeued") == 1
    assert steps_of(run) == [*range(1, 17)]
    check_weights(run, tmp_path)
    status = hpc_train("status", "first", "--json", cwd=tmp_path, env=env)
    assert json.loads(status.stdout)["state"] == "done"


@pytest.mark.parametrize(("node", "second"), [(0, NODES), (1, "127.0.0.2\n")])
@pytest.mark.long_form(60)  # the short form requeues jobs of Slurm
def test_a_job_of_lsf_that_loses_a_node_is_requeued_by_its_exit_code(
    tmp_path: Path, tools: Callable[..., dict[str, str]], template: Callable[[str], Path], node: int, second: str
) -> None:
    """Without node 0, the agent of the other node requests the requeue. The ``second`` start may have fewer nodes."""
    script = template("lsf.sh")
    nodefile = tmp_path / "bin/nodefile"
    env = tools(LSB_JOBID="7", LSB_JOBINDEX="0", LSB_DJOB_HOSTFILE=str(nodefile))
    run = RunDirectory(tmp_path / "outputs/first")
    with script.open() as text:
        job = subprocess.Popen(["bash"], stdin=text, cwd=tmp_path, env=env, start_new_session=True)
    until(lambda: run.config.exists() and len(steps_of(run)) > 2)
    agent = agent_of(run, node)
    for process in [*agent.children(recursive=True), agent]:
        process.kill()
    assert job.wait(200) == 85
    nodefile.write_text(second)
    with script.open() as text:
        again = subprocess.run(["bash"], stdin=text, cwd=tmp_path, env=env, check=False, timeout=200)
    assert again.returncode == Exit.DONE
    assert [event.name for event in run.read_events()].count("requeued") == 1
    assert "node_lost" in {event.name for event in run.read_events()}
    assert run.attempt_record(run.newest_attempt())["nodes"] == len(second.split())
    check_weights(run, tmp_path)


@pytest.mark.long_form(30)  # tests/elastic kills workers, too
def test_a_worker_of_a_flux_job_that_is_killed_is_restarted(
    tmp_path: Path, tools: Callable[..., dict[str, str]], template: Callable[[str], Path]
) -> None:
    job = subprocess.Popen(["bash", template("flux.sh")], cwd=tmp_path, env=tools(), start_new_session=True)
    run = RunDirectory(tmp_path / "outputs/first")
    until(lambda: run.config.exists() and len(steps_of(run)) > 2)
    parents = [child for child in agent_of(run, 1).children() if "early_forkserver.py" in " ".join(child.cmdline())]
    for worker in parents[0].children():
        worker.kill()
    assert job.wait(200) == Exit.DONE
    assert run.newest_attempt() == 1
    check_weights(run, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
@pytest.mark.long_form(40)
def test_a_run_on_hosts_is_stopped_by_a_signal_and_resumed_by_the_same_command(
    tmp_path: Path, tools: Callable[..., dict[str, str]], template: Callable[[str], Path], number: signal.Signals
) -> None:
    """Ctrl-C reaches all processes of the terminal, those in the background ignore it."""
    command = ["bash", template("hosts.sh"), "127.0.0.2,127.0.0.3", *SLOW, "cluster.cpu_workers=1", "run.name=first"]
    env = tools()
    job = subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True)
    run = RunDirectory(tmp_path / "outputs/first")
    until(lambda: run.config.exists() and len(steps_of(run)) > 2)
    os.killpg(job.pid, number)
    assert job.wait(200) == Exit.STOPPED
    assert subprocess.run(command, cwd=tmp_path, env=env, check=False, timeout=200).returncode == Exit.DONE
    assert "requeued" not in {event.name for event in run.read_events()}
    check_weights(run, tmp_path)


@pytest.mark.parametrize(("left_s", "lead_s"), [(3600, 120), (60, 20)])
def test_an_agent_stops_before_the_end_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: int, lead_s: int
) -> None:
    """As early as a save needs, by default 120 s, and at most a third of the time that is left."""
    job = make_job(tmp_path / "sweep")
    end_time = int(time.time()) + left_s
    for name, value in (JOB | {"HPC_TRAIN_END_TIME": str(end_time)}).items():
        monkeypatch.setenv(name, value)
    expected = pytest.approx(end_time - lead_s, abs=1)
    assert time_to_stop(job.run, job.config, JobEnd.of_this_process(job.run)) == expected


JOB = {"HPC_TRAIN_JOB_ID": "7", "HPC_TRAIN_NODES": "n1,n2,n3", "HPC_TRAIN_NODE_RANK": "1", "SLURM_JOB_ID": "9"}


def test_the_allocation_of_the_variables() -> None:
    second = current_allocation(JOB)
    assert (second.nodes, second.node_rank, second.node_name, second.address) == (3, 1, "n2", "n2")
    assert (second.job_id, second.launch_id) == ("7", "7.0.0")
    first = current_allocation(JOB | {"HPC_TRAIN_NODE_RANK": "0", "HPC_TRAIN_ADDRESS": "10.0.0.1"})
    assert (first.address, first.node_names) == ("10.0.0.1", ("n1", "n2", "n3"))
    one = current_allocation({"HPC_TRAIN_JOB_ID": "7", "HPC_TRAIN_NODES": "n1\n"})
    assert (one.nodes, one.address) == (1, "127.0.0.1")


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        ({"HPC_TRAIN_NODES": "n1,n2,n1"}, "HPC_TRAIN_NODES", "has n1 more than once"),
        ({"HPC_TRAIN_NODES": "n1,../n2"}, "HPC_TRAIN_NODES", "cannot be a host name"),
        ({"HPC_TRAIN_NODE_RANK": "3"}, "HPC_TRAIN_NODE_RANK", "is 3, but HPC_TRAIN_NODES has 3 nodes"),
        ({"HPC_TRAIN_NODE_RANK": ""}, "HPC_TRAIN_NODE_RANK", "is not set"),
        ({"HPC_TRAIN_NODE_RANK": "-1"}, "HPC_TRAIN_NODE_RANK", "not a whole number"),
        ({"HPC_TRAIN_JOB_ID": ""}, "HPC_TRAIN_JOB_ID", "must consist of letters"),
        ({"HPC_TRAIN_JOB_ID": "12.pbs[3]"}, "HPC_TRAIN_JOB_ID", "must consist of letters"),
        ({"HPC_TRAIN_END_TIME": "04:00:00"}, "HPC_TRAIN_END_TIME", "not a whole number"),
    ],
)
def test_wrong_variables_are_refused(change: dict[str, str], where: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        current_allocation(JOB | change)
    assert caught.value.where == where and caught.value.fix


def test_a_job_without_a_command_that_requeues_it_says_how_to_resume() -> None:
    assert "HPC_TRAIN_REQUEUE" in str(current_job(JOB).why_no_requeue())
    assert current_job(JOB | {"HPC_TRAIN_REQUEUE": "true"}).why_no_requeue() is None
