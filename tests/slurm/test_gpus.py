"""The GPUs that reach the agents. Those of the cluster are only declared: a probe stands in for the agent."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.launch.script import by_hand
from hpc_train.run.directory import RunDirectory
from tests.doors.command import REPOSITORY, TINY
from tests.slurm.cluster import Cluster

SCRIPTS = REPOSITORY / "slurm"
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
TELL = 'echo "agent on $SLURMD_NODENAME: GPUs ${CUDA_VISIBLE_DEVICES:-none}"'
PYTHON = f"""\
#!/bin/bash
# python, but for agents
case " $* " in *" hpc_train agent "*) {TELL}; exit;; esac
exec {sys.executable} "$@"
"""
APPTAINER = '#!/bin/bash\nwhile [[ $1 != *.sif ]]; do shift; done; shift; exec "$@"\n'  # without a container
ALL = "0,1,2,3"
CASES = {
    "--exclusive": ({"n5": ALL, "n6": ALL}, "--partition=gpu", "--nodes=2", "--exclusive"),
    "--exclusive, one node": ({"n6": ALL}, "--nodelist=n6", "--partition=gpu", "--exclusive"),
    "--exclusive, unlike nodes": ({"n6": "0,1", "n7": "0,1"}, "--partition=mixed", "--nodes=2", "--exclusive"),
    "--exclusive, no GPUs": ({"n1": "none"}, "--partition=cpu", "--nodelist=n1", "--exclusive"),
    "--exclusive, some": ({"n6": "0", "n7": "0"}, "--partition=mixed", "--nodes=2", "--exclusive", "--gres=gpu:1"),
    "--gpus-per-node": ({"n5": ALL, "n6": ALL}, "--partition=gpu", "--nodes=2", "--gpus-per-node=4"),
    "--gpus-per-node, some": ({"n7": "0"}, "--partition=mixed", "--nodelist=n7", "--gpus-per-node=a100:1"),
    "--gres": ({"n5": "0,1"}, "--partition=gpu", "--nodelist=n5", "--gres=gpu:2"),
    "--gres, of a type": ({"n6": ALL}, "--partition=gpu", "--gres=gpu:a100:4"),
    "--gpus": ({"n6": ALL, "n7": "0"}, "--partition=mixed", "--nodes=2", "--gpus=5"),
    "--gpus-per-task": ({"n6": "0,1"}, "--partition=gpu", "--nodelist=n6", "--gpus-per-task=2"),
}


@pytest.fixture
def shell(cluster: Cluster, tmp_path: Path) -> Cluster:
    """The cluster, with commands in whose place the tests' own are called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("python", PYTHON), ("apptainer", APPTAINER)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (tmp_path / "image.sif").touch()
    path = f"{folder}{os.pathsep}{cluster.environment['PATH']}"
    return replace(cluster, environment={**cluster.environment, "PATH": path, "IMAGE": str(tmp_path / "image.sif")})


def told(text: str) -> dict[str, str]:
    """The GPUs of each agent, by node."""
    return dict(re.findall(r"agent on (\w+): GPUs (\S+)", text))


def output(shell: Cluster, job: str, folder: Path, pattern: str) -> str:
    shell.wait_for_state(job, *ENDED)
    return "\n".join(path.read_text() for path in sorted(folder.glob(pattern)))


@pytest.mark.parametrize("name", CASES)
def test_the_step_of_a_job_has_its_gpus(name: str, cluster: Cluster, tmp_path: Path) -> None:
    expected, *options = CASES[name]
    (tmp_path / "job.sh").write_text(by_hand(survives=False))
    wrapped = f"set -u; RUN=.; source ./job.sh bash -c '{TELL}'"
    call = ["--parsable", "--ntasks-per-node=1", "--output=log", *options, '--wrap=bash -c "$SCRIPT"']
    here = replace(cluster, environment={**cluster.environment, "SCRIPT": wrapped})
    done = here.call("sbatch", *call, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = output(cluster, done.stdout.strip(), tmp_path, "log")
    assert told(text) == expected, text


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.glob("*.sbatch")))
def test_the_agents_of_the_shipped_scripts_have_all_gpus_of_their_nodes(
    script: str, shell: Cluster, tmp_path: Path
) -> None:
    done = shell.call("sbatch", "--parsable", "--partition=gpu", str(SCRIPTS / script), "+strategy=dp", *TINY,
                      "batch.global_size=8", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = output(shell, done.stdout.strip().partition("_")[0], tmp_path, "*.log")
    nodes = told(text)
    assert len(nodes) == 2 or script != "multi_node.sbatch", text
    assert set(nodes.values()) == {ALL}, text


@pytest.mark.parametrize(("asked", "gpus"), [("--nodes=2", ALL), ("--nodes=2 --gpus-per-node=2", "0,1")])
def test_so_have_those_of_an_interactive_run(asked: str, gpus: str, shell: Cluster, tmp_path: Path) -> None:
    here = replace(shell, environment={**shell.environment, "SALLOC": f"--partition=gpu {asked}"})
    done = here.call(str(SCRIPTS / "interactive.sh"), "+strategy=dp", *TINY, "batch.global_size=8", cwd=tmp_path)
    assert told(done.stdout) == {"n5": gpus, "n6": gpus}, done.stdout + done.stderr


def test_a_script_freezes_for_the_gpus_of_its_job(shell: Cluster, tmp_path: Path) -> None:
    """Though the shell of an allocation may run where there are none."""
    here = replace(shell, environment={**shell.environment, "SALLOC": "--partition=gpu --nodes=2 --gpus-per-node=1"})
    done = here.call(str(SCRIPTS / "interactive.sh"), "+strategy=dp", "strategy.dp=64", *TINY, cwd=tmp_path)
    assert "needs 64 workers, but only 2 are available" in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("salloc", "gpus"), [(["--exclusive"], ALL), (["--gres=gpu:2"], "0,1"), (["--exclusive", "--gpus-per-node=1"], "0")]
)
def test_inside_an_allocation_auto_means_its_gpus(salloc: list[str], gpus: str, shell: Cluster, tmp_path: Path) -> None:
    run = ["+strategy=dp", *TINY, "cluster.nodes=2", "batch.global_size=8", "cluster.python=python", "run.name=inside"]
    train = [sys.executable, "-m", "hpc_train", *run, "-m"]
    done = shell.call("salloc", "--partition=gpu", "--nodes=2", *salloc, *train, cwd=tmp_path)
    count = len(gpus.split(","))
    assert f"dp {2 * count}" in done.stdout and f"{count} GPUs per node" in done.stdout, done.stdout + done.stderr
    logs = "\n".join(path.read_text() for path in (tmp_path / "outputs" / "inside").rglob("allocation.out"))
    assert told(logs) == {"n5": gpus, "n6": gpus}, logs


def test_what_is_submitted_asks_for_the_gpus_of_the_partition(shell: Cluster, tmp_path: Path) -> None:
    """The README's first command on Slurm, on a partition whose nodes have four GPUs each."""
    asked = ["+strategy=hybrid", *TINY, "cluster.nodes=2", "batch.global_size=8", "cluster.partition=gpu"]
    shown = shell.hpc_train(*asked, "launch.dry_run=true", "-m", cwd=tmp_path)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for part in ("--gpus-per-node=4", "8 workers on 2 nodes (4 GPUs per node)", "dp 4 x pp 2", "2 nodes with 4 GPUs"):
        assert part in shown.stdout, shown.stdout
    script = shell.hpc_train("script", *asked, "cluster.python=python", "run.name=alone", cwd=tmp_path)
    assert "#SBATCH --gpus-per-node=4\n" in script.stdout and "dp 4 x pp 2" in script.stdout
    doctor = shell.hpc_train("doctor", *asked, cwd=tmp_path)
    assert "4 GPUs per node" in doctor.stdout, doctor.stdout
    detached = ["cluster.python=python", "launch.detach=true", "launch.yes=true", "run.name=far", "-m"]
    submitted = shell.hpc_train(*asked, *detached, cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    run = RunDirectory(tmp_path / "outputs" / "far")
    text = output(shell, run.record()["submissions"][-1]["job_id"], run.logs / "slurm", "*.out")
    assert told(text) == {"n5": ALL, "n6": ALL}, text
    (tmp_path / "job.sbatch").write_text(script.stdout)
    alone = shell.call("sbatch", "--parsable", "--output=log", "job.sbatch", cwd=tmp_path)
    text = output(shell, alone.stdout.strip(), tmp_path, "log")
    assert told(text) == {"n5": ALL, "n6": ALL}, text


def test_a_job_that_asks_for_no_gpu_gets_none(shell: Cluster, tmp_path: Path) -> None:
    asked = ["+strategy=dp", *TINY, "cluster.partition=gpu", "cluster.gpus_per_node=0", "launch.dry_run=true", "-m"]
    done = shell.hpc_train(*asked, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--gpus-per-node" not in done.stdout and "4 workers on 1 node (CPU)" in done.stdout
    assert "note: no GPU is requested; cluster.gpus_per_node=auto requests the 4 of a node" in done.stdout


def test_of_unlike_nodes_all_can_run_the_job(shell: Cluster, tmp_path: Path) -> None:
    asked = ["+strategy=dp", *TINY, "cluster.partition=mixed", "batch.global_size=8", "launch.dry_run=true", "-m"]
    both = shell.hpc_train(*asked, "cluster.nodes=2", cwd=tmp_path).stdout
    assert "--gpus-per-node=2 " in both and "nodes of the partition mixed have 2 or 4 GPUs: 2 per node" in both
    larger = shell.hpc_train(*asked, "cluster.constraint=gpu4", cwd=tmp_path).stdout
    assert "--gpus-per-node=4 " in larger and "have 2 or 4" not in larger
    too_many = shell.hpc_train(*asked, "cluster.nodes=2", "cluster.gpus_per_node=4", cwd=tmp_path)
    assert "2 nodes with 4 GPUs are requested, but partition mixed has 1" in too_many.stdout, too_many.stdout
