"""The GPUs that reach the agents through every way of starting them. A probe stands in for the agent.

The GPUs of the devcluster are device files without a driver. Where this machine allows it, a job may open only those
that Slurm has given it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hpc_train.launch.gpus import EXPORT
from hpc_train.launch.script import by_hand
from hpc_train.run.directory import RunDirectory
from tests.doors.command import REPOSITORY, TINY
from tests.slurm.cluster import Cluster
from tests.slurm.gpu_probe import list_gpus

SCRIPTS = REPOSITORY / "slurm"
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
PYTHON = f"""\
#!/bin/bash
# python, but the probe for agents; if FROZEN names a run directory, freeze prints it
case " $* " in
  *" hpc_train agent "*) exec {sys.executable} -m tests.slurm.gpu_probe ;;
  *" hpc_train freeze "*) [ -z "${{FROZEN:-}}" ] || {{ echo "$FROZEN"; exit; }} ;;
esac
exec {sys.executable} "$@"
"""
APPTAINER = '#!/bin/bash\nwhile [[ $1 != *.sif ]]; do shift; done; shift; exec "$@"\n'  # without a container
AGENT = 'python -m hpc_train agent "$RUN"'
STEP = f'source "$RUN/job.sh" {AGENT}'
ALL, TWO, ONE = "4 GPUs", "2 GPUs", "1 GPUs"
CASES = {
    # n7 has two threads per core, so fewer cores than n6 to give to its task
    "--exclusive, unlike nodes": (
        {"n6": TWO, "n7": TWO},
        ["--partition=mixed", "--nodes=2", "--exclusive", "--hint=nomultithread"],
    ),
    "--exclusive, no GPUs": ({"n1": "0 GPUs"}, ["--partition=cpu", "--nodelist=n1", "--exclusive"]),
    "--exclusive, some": (
        {"n6": ONE, "n7": ONE},
        ["--partition=mixed", "--nodes=2", "--exclusive", "--gres=gpu:1"],
    ),
    "--gpus-per-node": ({"n7": ONE}, ["--partition=mixed", "--nodelist=n7", "--gpus-per-node=a100:1"]),
    "--gres": ({"n5": TWO}, ["--partition=gpu", "--nodelist=n5", "--gres=gpu:2"]),
    "--gpus": ({"n6": ALL, "n7": ONE}, ["--partition=mixed", "--nodes=2", "--gpus=5"]),
    "--gpus-per-task": ({"n6": TWO}, ["--partition=gpu", "--nodelist=n6", "--gpus-per-task=2"]),
    # scripts for one task per GPU; the one task of the agent gets the GPUs of all of them
    "--gpus-per-task=1": (
        {"n5": ALL, "n6": ALL},
        ["--partition=gpu", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-task=1", "--cpus-per-task=1"],
    ),
    "--ntasks-per-gpu": ({"n6": ALL}, ["--partition=gpu", "--nodelist=n6", "--gpus=4", "--ntasks-per-gpu=1"]),
    "--gpu-bind": (
        {"n6": TWO},
        ["--partition=gpu", "--nodelist=n6", "--ntasks-per-node=2", "--gpus-per-node=2", "--gpu-bind=single:1"],
    ),
}
IN_SHORT_FORM = ["--exclusive, unlike nodes"]
REFUSED = {
    "no GPUs requested": (
        "the node has 4, and the process sees none: the job did not request GPUs from Slurm",
        STEP,
        ["--partition=gpu", "--nodelist=n5"],
    ),
    "srun without GPUs": (
        "4 are allocated to the job, and the process sees none: srun started the step without GPUs",
        f"srun {AGENT}",
        ["--partition=gpu", "--nodelist=n5", "--exclusive"],
    ),
}
BATCH_SCRIPTS = sorted(path.name for path in SCRIPTS.glob("*.sbatch"))
TRAINING = ["+strategy=dp", *TINY, "batch.global_size=8"]


@dataclass(frozen=True)
class Submitted:
    """A job, and the directory in which its logs are."""

    job: str
    directory: Path

    def log(self, shell: Cluster) -> str:
        shell.wait_for_state(self.job, *ENDED)
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.log")))


@pytest.fixture(scope="module")
def shell(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The cluster, with commands in whose place the tests' own are called."""
    folder = tmp_path_factory.mktemp("shell")
    for name, text in (("python", PYTHON), ("apptainer", APPTAINER)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "image.sif").touch()
    list_gpus(folder / "driver")
    environment = {name: value for name, value in cluster.environment.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    folders = {"IMAGE": str(folder / "image.sif"), "GPU_PROBE": str(folder / "driver")}
    return replace(cluster, environment=environment | folders)


@pytest.fixture(scope="module")
def frozen(shell: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The shell, in which ``freeze`` only prints a directory with the scripts that it would write."""
    run = RunDirectory(tmp_path_factory.mktemp("frozen"))
    run.attempts.mkdir()
    run.job_script.write_text(by_hand(survives=False))
    run.gpus_script.write_text(f"{EXPORT}\n")
    return replace(shell, environment=shell.environment | {"FROZEN": str(run.path), "RUN": str(run.path)})


def _one_task(options: list[str]) -> list[str]:
    return [] if any("--ntasks" in option for option in options) else ["--ntasks-per-node=1"]


def submit(shell: Cluster, call: list[str], directory: Path) -> Submitted:
    done = shell.call("sbatch", "--parsable", *call, cwd=directory)
    assert done.returncode == 0, done.stderr
    return Submitted(done.stdout.strip().partition("_")[0], directory)


def gpus_by_node(text: str) -> dict[str, str]:
    """Returns what each agent says of its GPUs."""
    return dict(re.findall(r"agent on (\w+): (.*)", text))


def submit_steps(shell: Cluster, steps: dict[str, tuple[str, list[str]]], directory: Path) -> dict[str, Submitted]:
    """Submits a job for each of the ``steps``, which have a command and the options of sbatch."""
    jobs = {}
    for number, (name, (step, options)) in enumerate(steps.items()):
        call = [*_one_task(options), "--output=%j.log", *options, f"--wrap=exec bash -uc '{step}'"]
        folder = directory / str(number)
        folder.mkdir()
        jobs[name] = submit(shell, call, folder)
    return jobs


@pytest.mark.parametrize(
    "names", [IN_SHORT_FORM, [name for name in CASES if name not in IN_SHORT_FORM]], ids=["some", "others"]
)
@pytest.mark.long_form(30, cases=["others"])  # tests/launch/test_gpus.py has the variables and records of such jobs
def test_the_step_of_a_job_has_its_gpus(names: list[str], frozen: Cluster, tmp_path: Path) -> None:
    jobs = submit_steps(frozen, {name: (STEP, CASES[name][1]) for name in names}, tmp_path)
    for name, job in jobs.items():
        text = job.log(frozen)
        assert gpus_by_node(text) == CASES[name][0], f"{name}\n{text}"


@pytest.mark.long_form(8)  # tests/machine/test_gpus.py
def test_a_step_that_may_open_no_gpu_does_not_train(frozen: Cluster, tmp_path: Path) -> None:
    if not Path(frozen.environment["SLURM_CONF"]).parent.with_name("etc-gpu").exists():
        pytest.skip("the control groups of this machine cannot restrict the devices of a job")
    jobs = submit_steps(frozen, {name: (step, options) for name, (_, step, options) in REFUSED.items()}, tmp_path)
    for name, job in jobs.items():
        text = job.log(frozen)
        assert gpus_by_node(text) == {"n5": f"cannot use the GPUs of this node: {REFUSED[name][0]}"}, text


@pytest.mark.long_form(25)  # test_jobs.py runs one of the scripts, whose steps have the GPUs as those above
def test_the_agents_of_a_batch_script_have_all_gpus_of_their_nodes(
    shell: Cluster, frozen: Cluster, tmp_path: Path
) -> None:
    """Only one of the scripts freezes its run itself."""
    jobs = {}
    for name in BATCH_SCRIPTS:
        folder = tmp_path / name
        folder.mkdir()
        here = shell if name == "multi_node.sbatch" else frozen
        jobs[name] = submit(here, ["--partition=gpu", str(SCRIPTS / name), *TRAINING], folder)
    for name, job in jobs.items():
        text = job.log(shell)
        nodes = gpus_by_node(text)
        assert len(nodes) == 2 or name != "multi_node.sbatch", text
        assert set(nodes.values()) == {ALL}, text


@pytest.mark.parametrize("script", BATCH_SCRIPTS)
def test_a_batch_script_names_the_options_that_some_sites_require(script: str) -> None:
    text = (SCRIPTS / script).read_text()
    assert re.search(r"^##SBATCH --gpus-per-node=4 .*--gres=gpu:4", text, flags=re.MULTILINE)


@pytest.mark.long_form(15)  # tests/launch/test_gpus.py
def test_interactive_runs_have_the_gpus_of_their_allocation(frozen: Cluster, shell: Cluster, tmp_path: Path) -> None:
    """The shell of an allocation may run where there are no GPUs."""
    interactive = [str(SCRIPTS / "interactive.sh"), *TRAINING]
    gpus = {"SALLOC": "--partition=gpu --nodes=2 --gpus-per-node=2"}
    done = replace(frozen, environment=frozen.environment | gpus).call(*interactive, cwd=tmp_path)
    assert gpus_by_node(done.stdout) == {"n5": TWO, "n6": TWO}, done.stdout + done.stderr
    wide = replace(shell, environment=shell.environment | gpus).call(*interactive, "strategy.dp=64", cwd=tmp_path)
    assert "needs 64 workers, but only 4 are available" in wide.stderr, wide.stdout + wide.stderr


@pytest.mark.long_form(40)  # the interactive script and jobs that are submitted
def test_inside_an_allocation_auto_means_its_gpus(shell: Cluster, tmp_path: Path) -> None:
    """In the foreground a run would use this machine, so it is refused."""
    train = f"python -m hpc_train {' '.join(TRAINING)} cluster.python=python"
    script = f"{train} run.name=here || echo refused: $?; {train} cluster.nodes=2 run.name=inside -m"
    done = shell.call("salloc", "--partition=gpu", "--nodes=2", "--exclusive", "bash", "-c", script, cwd=tmp_path)
    assert "the nodes of this job have 4 GPUs each, but this shell does not run on them" in done.stderr
    assert "refused: 2" in done.stdout and not (tmp_path / "outputs" / "here").exists()
    assert "dp 8" in done.stdout and "4 GPUs per node" in done.stdout, done.stdout + done.stderr
    logs = "\n".join(path.read_text() for path in (tmp_path / "outputs" / "inside").rglob("allocation.out"))
    assert gpus_by_node(logs) == {"n5": ALL, "n6": ALL}, logs


def test_auto_requests_the_gpus_of_the_partition(call: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The README's first command on Slurm, on partitions with GPUs. A job that requests no GPU gets none."""
    job = ["+strategy=hybrid", *TINY, "cluster.nodes=2", "batch.global_size=8"]
    sweep = ["cluster.partition=gpu,mixed", "cluster.gpus_per_node=auto,0", "launch.dry_run=true", "-m"]
    shown = call(*job, *sweep).stdout
    jobs = dict(re.findall(r"^job (\d) (.*?)(?=^job |^\n)", shown, flags=re.MULTILINE | re.DOTALL))
    assert "8 workers on 2 nodes (4 GPUs per node)" in jobs["0"] and "dp 4 x pp 2" in jobs["0"], shown
    assert "8 workers on 2 nodes (CPU)" in jobs["1"], shown
    assert "4 workers on 2 nodes (2 GPUs per node)" in jobs["2"], shown
    for part in (
        "--gpus-per-node=4",
        "--gpus-per-node=2",
        "2 nodes with 4 GPUs",
        "note: no GPU is requested; cluster.gpus_per_node=auto requests the 4 of a node",
        "nodes of the partition mixed have 2 or 4 GPUs: 2 per node",
    ):
        assert part in shown, f"{part}\n{shown}"


@pytest.mark.long_form(20)  # tests/launch/test_slurm.py and test_gpus.py
def test_jobs_that_are_submitted_have_the_gpus_that_they_request(
    shell: Cluster, frozen: Cluster, tmp_path: Path
) -> None:
    """An array by ``-m``, and the script of one run."""
    asked = [*TRAINING, "cluster.partition=gpu", "cluster.python=python"]
    sweep = ["train.seed=1,2", "launch.detach=true", "launch.yes=true", "run.name=far", "-m"]
    done = shell.hpc_train(*asked, *sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    script = shell.hpc_train("script", *asked, "run.name=alone", cwd=tmp_path)
    assert "#SBATCH --gpus-per-node=4\n" in script.stdout and "dp 4" in script.stdout, script.stdout + script.stderr
    (tmp_path / "alone.sbatch").write_text(script.stdout)
    alone = submit(frozen, ["--output=alone.log", "alone.sbatch"], tmp_path)
    for number in ("0", "1"):
        run = RunDirectory(tmp_path / "outputs" / "far" / number)
        shell.wait_for_state(run.record()["submissions"][-1]["job_id"], *ENDED)
    text = "\n".join(path.read_text() for path in (tmp_path / "outputs" / "far").rglob("*.out"))
    assert re.findall(r"agent on n[56]: (.*)", text) == [ALL, ALL], text
    assert set(gpus_by_node(alone.log(shell)).values()) == {ALL}
