"""The scripts in slurm/ on a real cluster, as they stand there: options before them, overrides after them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from hpc_train.launch.script import EXIT, REQUEUE_AFTER, REQUEUE_BEFORE, REQUEUE_END
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json
from tests.doors.command import REPOSITORY, TINY
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import ONE_NODE, SLOW, detail, events, every_step, job_id, losses, wait_for_step

SCRIPTS = REPOSITORY / "slurm"


def submit(cluster: Cluster, script: str, *arguments: str, options: tuple[str, ...] = (), cwd: Path) -> str:
    done = cluster.call("sbatch", "--parsable", *options, str(SCRIPTS / script), *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def finish(cluster: Cluster, job_id: str, cwd: Path) -> None:
    logs = lambda: "\n".join(path.read_text() for path in sorted(cwd.glob("*.log")))  # noqa: E731
    state = cluster.wait_for_state(job_id, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", seconds=240)
    assert state == "COMPLETED", logs()


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_a_script_is_short_names_no_site_and_ends_as_submitted_jobs_do(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < 40
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert not [line for line in options for site in ("partition", "account", "qos", "constraint") if site in line]
    assert lines[-1].startswith('source "$RUN/job.sh" ')


@pytest.mark.long_form(30)  # test_jobs.py trains on two nodes, and tests/parallel compares the losses of layouts
def test_two_nodes_give_the_losses_of_a_local_run(python: Cluster, tmp_path: Path, local_losses: list[float]) -> None:
    arguments = ["+strategy=hybrid", *TINY, "cluster.cpu_workers=2", "run.name=slurm"]
    job = submit(python, "multi_node.sbatch", *arguments, cwd=tmp_path)
    finish(python, job, tmp_path)
    assert len(local_losses) == 6
    assert losses(tmp_path / "outputs" / "slurm") == pytest.approx(local_losses, rel=1e-6)
    meeting = read_json(tmp_path / "outputs" / "slurm" / "attempts" / "000.json")
    assert (meeting["nodes"], meeting["layout"]["pp"], meeting["layout"]["dp"]) == (2, 2, 2)
    (log,) = tmp_path.glob("*.log")
    assert "ranks 0-1: pp 0, dp 0-1, tp 0" in log.read_text()
    assert "ranks 2-3: pp 1, dp 0-1, tp 0" in log.read_text()


@pytest.mark.long_form(25)  # tests/machine/test_allocation.py
def test_nodes_of_one_switch_are_neighbors_in_rank(python: Cluster, tmp_path: Path) -> None:
    """Three nodes of which Slurm numbers one of another switch in between; the variable says so here."""
    frozen = python.hpc_train("freeze", "+strategy=dp", *TINY, "cluster.nodes=3", "cluster.cpu_workers=1",
                             "batch.global_size=6", "run.name=run", cwd=tmp_path)  # fmt: skip
    assert frozen.returncode == 0, frozen.stderr
    agent = f"{sys.executable} -m hpc_train agent {tmp_path / 'outputs' / 'run'}"
    place = "spine.rack$((SLURM_NODEID % 2)).$SLURMD_NODENAME"
    step = f"srun --ntasks-per-node=1 bash -c 'SLURM_TOPOLOGY_ADDR={place} exec {agent}'"
    done = python.call("sbatch", "--parsable", "-N3", "--exclusive", "-o", "job.log", f"--wrap={step}", cwd=tmp_path)
    finish(python, done.stdout.strip(), tmp_path)
    lines = (tmp_path / "job.log").read_text().splitlines()
    order = [line.split(":")[0].split(".")[1] for line in lines if ": ranks " in line]
    assert order == ["rack0", "rack0", "rack1"]
    assert len(losses(tmp_path / "outputs" / "run")) == 6


APPTAINER = """\
#!/bin/bash
# Apptainer's command line, without a container: writes down what is asked for and runs it.
printf '%s\\n' "$*" >> "$APPTAINER_CALLS"
[ "$1" = exec ] || exit 255
shift
while [[ "$1" == --* ]]; do [ "$1" = --bind ] && shift; shift; done
[ -e "$1" ] || { echo "no image $1" >&2; exit 255; }
shift
exec "$@"
"""


@pytest.fixture
def with_apptainer(python: Cluster, tmp_path: Path) -> Cluster:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apptainer").write_text(APPTAINER)
    (folder / "apptainer").chmod(0o755)
    (tmp_path / "image.sif").touch()
    path = f"{folder}{os.pathsep}{python.environment['PATH']}"
    calls = str(tmp_path / "calls")
    return dataclasses.replace(python, environment={**python.environment, "PATH": path, "APPTAINER_CALLS": calls})


@pytest.mark.long_form(25)  # tests/launch/test_script.py has the text of such scripts
def test_a_container_by_script_freezes_and_trains_inside(with_apptainer: Cluster, tmp_path: Path) -> None:
    image = str(tmp_path / "image.sif")
    here = dataclasses.replace(with_apptainer, environment={**with_apptainer.environment, "IMAGE": image})
    arguments = ["+strategy=dp", *TINY, "cluster.cpu_workers=2", "run.name=run"]
    finish(here, submit(here, "container.sbatch", *arguments, cwd=tmp_path), tmp_path)
    run = tmp_path / "outputs" / "run"
    assert len(losses(run)) == 6
    inside = f"exec --nv --bind {tmp_path} {image} python -m hpc_train"
    freezing, training = (tmp_path / "calls").read_text().splitlines()
    assert freezing.startswith(f"{inside} freeze +strategy=dp ")
    assert training == f"{inside} agent {run}"


@pytest.mark.long_form(30)  # tests/launch/test_script.py
def test_a_submitted_job_in_a_container_is_requeued_from_outside(with_apptainer: Cluster, tmp_path: Path) -> None:
    run, image = tmp_path / "outputs" / "run", tmp_path / "image.sif"
    arguments = [*SLOW, *ONE_NODE, "train.steps=25", "run.name=run"]
    process = with_apptainer.start(*arguments, f"cluster.container.image={image}", "-m", cwd=tmp_path)
    wait_for_step(run, 3)
    with_apptainer.call("scancel", "--signal=USR2", job_id(run))
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    assert every_step(run) == list(range(1, 26))
    assert len(events(run, "requeued")) == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    for call in calls:
        assert call.startswith(f"exec --bind {tmp_path}/outputs:{tmp_path}/outputs")
        assert call.endswith(f" {image} python -m hpc_train agent {run}")


@pytest.mark.long_form(15)  # tests/launch/test_request.py freezes for the shape of a job
def test_freeze_checks_against_the_nodes_of_the_job(python: Cluster, tmp_path: Path) -> None:
    job = submit(python, "multi_node.sbatch", "+strategy=dp", "strategy.dp=64", *TINY, "run.name=wide", cwd=tmp_path)
    assert python.wait_for_state(job, "COMPLETED", "FAILED") == "FAILED"
    (log,) = tmp_path.glob("*.log")
    assert "needs 64 workers, but only 8 are available" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not (tmp_path / "outputs" / "wide").exists()


@pytest.mark.long_form(60)  # test_jobs.py runs one of the scripts
def test_one_node_and_an_array(python: Cluster, tmp_path: Path) -> None:
    few = "cluster.cpu_workers=2"
    single = submit(python, "single_node.sbatch", "+strategy=zero2", *TINY, few, cwd=tmp_path)
    sweep = ["+strategy=dp,pp", *TINY, few, "run.name=sweep"]
    array = submit(python, "sweep_array.sbatch", *sweep, options=("--array=1-2%2",), cwd=tmp_path)
    finish(python, single, tmp_path)
    assert len(losses(tmp_path / "outputs" / f"slurm-{single}")) == 6
    finish(python, f"{array}_1", tmp_path)
    assert len(losses(tmp_path / "outputs" / "sweep" / "1")) == 6
    (submission,) = RunDirectory(tmp_path / "outputs" / "sweep" / "1").record()["submissions"]
    assert submission["job_id"] == f"{array}_1", "as status and cancel look it up"
    assert python.wait_for_state(f"{array}_2", "COMPLETED", "FAILED") == "FAILED"
    assert "--array=0-1" in (tmp_path / f"hpc_train-{array}_2.log").read_text()


@pytest.mark.long_form(25)  # tests/elastic/test_requeue.py has the decision
def test_a_scancel_in_the_moment_before_the_requeue_counts(python: Cluster, tmp_path: Path) -> None:
    """The end of a script that has looked whether its job runs, and whose job is cancelled just then."""
    before = [
        "#!/bin/bash",
        "RUN=.",
        REQUEUE_BEFORE,
        "trap '' TERM",
        "status=75",
        'mkdir attempts; touch "attempts/end-$SLURM_JOB_ID.0.requeue"; echo 75 > "attempts/end-$SLURM_JOB_ID.0.node-0"',
        'squeue() { command squeue "$@"; scancel "$SLURM_JOB_ID"; }',
    ]
    (tmp_path / "job.sbatch").write_text("\n".join([*before, REQUEUE_END, REQUEUE_AFTER, EXIT]))
    job = python.call("sbatch", "--parsable", "--requeue", "job.sbatch", cwd=tmp_path).stdout.strip()
    assert python.wait_for_state(job, "CANCELLED", "COMPLETED", "FAILED") == "CANCELLED"
    assert detail(python, job, "Restarts") == "0"


@pytest.mark.long_form(40)  # test_jobs.py runs a script of slurm/
def test_interactive(python: Cluster, tmp_path: Path) -> None:
    options = {"SALLOC": "--nodes=2 --partition=debug --time=00:05:00"}
    shell = dataclasses.replace(python, environment=python.environment | options)
    arguments = ["+strategy=hybrid", *TINY, "cluster.cpu_workers=2", "run.name=run"]
    done = shell.call(str(SCRIPTS / "interactive.sh"), *arguments, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "outputs" / "run")) == 6
    assert read_json(tmp_path / "outputs" / "run" / "attempts" / "000.json")["nodes"] == 2
    assert "step 6/6" in done.stdout
    assert done.stdout.count("done: 6 steps") == 1, "the agent of the first node alone prints the training"


EXEC = """#!/bin/bash
{line} exec --nproc-per-node 1 -- python program.py 'a=b' '' '$HOME' "it's ü"
"""
PROGRAM = """
import json, os, pathlib, sys, time
rank, count = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
pathlib.Path(f"seen-{count}-{rank}.json").write_text(json.dumps(sys.argv[1:]))
time.sleep(600 if count == 0 else 0)
sys.exit(7 if count else 0)
"""


@pytest.mark.long_form(60)  # tests/doors/test_exec.py runs it on this machine, and test_script.py ends a batch script
@pytest.mark.parametrize("line", ["{python} -m hpc_train", "srun {python} -m hpc_train"])
def test_exec_in_a_batch_script_is_requeued_and_passes_on_words_and_exit_code(
    line: str, python: Cluster, tmp_path: Path
) -> None:
    """With srun before it, nothing requeues the job: it ends with 75 at the announcement of its limit."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "job.sh").write_text(EXEC.format(line=line.format(python=sys.executable)))
    options = ["--nodes=2", "--ntasks-per-node=1", "--time=15", "--requeue"]
    done = python.call("sbatch", "--parsable", *options, str(tmp_path / "job.sh"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    wait_for("both ranks", lambda: len(list(tmp_path.glob("seen-0-*.json"))) == 2, 120)
    python.call("scancel", "--signal=USR2", job)
    assert python.wait_for_state(job, "FAILED", "COMPLETED", "CANCELLED") == "FAILED"
    (run,) = (tmp_path / "outputs").iterdir()
    assert run.name.startswith(f"{job}-")
    count = 0 if line.startswith("srun") else 1
    for path in sorted(tmp_path.glob(f"seen-{count}-*.json")):
        assert json.loads(path.read_text()) == ["a=b", "", "$HOME", "it's ü"]
    code = detail(python, job, "ExitCode")
    assert code == ("75:0" if count == 0 else "7:0")
