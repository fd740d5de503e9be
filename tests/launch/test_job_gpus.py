"""The GPUs of a job and how its steps get them, from the environment and from what ``scontrol`` has printed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpc_train.launch.gpus import JobGpus, gpu_export_lines, gpus_of_this_job

EXCLUSIVE = """\
   NumNodes=2 NumCPUs=8 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   JOB_GRES=gpu:6
     Nodes=n3 CPU_IDs=0-3 Mem=400 GRES=gpu:4(IDX:0,2-4)
     Nodes=n[4,7] CPU_IDs=0-3 Mem=400 GRES=gpu:2(IDX:0-1)
   Partition=gpu Comment=TresPer-is-not-asked gpu
"""
ALIKE = """\
   JOB_GRES=gpu:a100:8,nvme:2
     Nodes=n[5-6] CPU_IDs=0-3 Mem=400 GRES=gpu:a100:3(IDX:0-2),gpu:v100:1(IDX:3),nvme:1
"""
WITHOUT = """\
   JOB_GRES=(null)
     Nodes=n[1-2] CPU_IDs=0-3 Mem=400 GRES=
   CpusPerTres=gres:gpu:16
"""
JOB = {"SLURM_JOB_ID": "7"}
CASES = {
    "exclusive": (EXCLUSIVE, {"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,2,3,4"}, JobGpus(2, False), "2"),
    "exclusive, two types on a node": (ALIKE, {"SLURM_GPUS_ON_NODE": "4"}, JobGpus(4, False), "4"),
    "exclusive, in the shell of salloc": (ALIKE, {}, JobGpus(4, False), "4"),
    "no GPUs": (WITHOUT, {}, JobGpus(0, False), ""),
    "--gpus-per-node": ("", {"SLURM_GPUS_PER_NODE": "a100:2", "SLURM_GPUS_ON_NODE": "4"}, JobGpus(2, True), "a100:2"),
    "--gpus-per-node=0": ("", {"SLURM_GPUS_PER_NODE": "0", "SLURM_GPUS_ON_NODE": "4"}, JobGpus(0, True), "0"),
    "--gpus-per-task": ("", {"SLURM_GPUS_PER_TASK": "3", "SLURM_GPUS_ON_NODE": "3"}, JobGpus(3, True), ""),
    "--gpus-per-task=1, four tasks per node": (
        f"{ALIKE}   TresPerTask=gres:gpu:1\n",
        {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "4"},
        JobGpus(4, False),
        "4",
    ),
    "--gpus-per-task=1, six tasks on two nodes": (
        f"{EXCLUSIVE}   TresPerTask=gres:gpu:1\n",
        {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "6", "SLURM_JOB_NUM_NODES": "3", "SLURM_GPU_BIND": "single:1"},
        JobGpus(2, False),
        "2",
    ),
    "--gpus": (EXCLUSIVE, {"SLURM_GPUS": "6", "SLURM_GPUS_ON_NODE": "4"}, JobGpus(2, True), ""),
    "--gres": (f"{EXCLUSIVE}   TresPerNode=gres:gpu:1\n", {"SLURM_GPUS_ON_NODE": "4"}, JobGpus(1, True), ""),
    "--gres, Slurm 23": (f"{ALIKE}   TresPerNode=gres/nvme:1,gres/gpu:a100:3\n", {}, JobGpus(3, True), ""),
    "--gres without a number": (f"{ALIKE}   TresPerNode=gres/gpu\n", {}, JobGpus(1, True), ""),
    "--gres=none": (f"{ALIKE}   TresPerNode=gres/nvme:1\n", {}, JobGpus(4, False), "4"),
    "scontrol does not answer": ("", {"SLURM_GPUS_ON_NODE": "4"}, JobGpus(4, False), "4"),
    "no SLURM_GPUS_ON_NODE": ("", {"SLURM_JOB_GPUS": "0,1,2"}, JobGpus(3, False), "3"),
    "SLURM_GPUS_ON_NODE=0": ("", {"SLURM_GPUS_ON_NODE": "0"}, JobGpus(0, False), ""),
    "nothing is known": ("", {}, JobGpus(0, False), ""),
}


@pytest.fixture
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Of a job, with a ``scontrol`` that has the recording and writes down how it is called."""
    shown, variables, *_ = CASES[request.param]
    (tmp_path / "shown").write_text(shown)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/shown\ntest -s {tmp_path}/shown\n')
    scontrol.chmod(0o755)
    return JOB | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def by_name(column: int) -> list[object]:
    return [pytest.param(name, case[column], id=name) for name, case in CASES.items()]


@pytest.mark.parametrize(("environment", "expected"), by_name(2), indirect=["environment"])
def test_the_gpus_that_a_step_gets(
    environment: dict[str, str], expected: JobGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", environment["PATH"])
    assert gpus_of_this_job(environment) == expected
    options = [f"--gpus-per-node={expected.per_node}"] if expected.per_node and not expected.inherited else []
    assert expected.srun_options(expected.per_node) == options


@pytest.mark.parametrize(("environment", "expected"), by_name(3), indirect=["environment"])
def test_a_batch_script_names_the_gpus_that_its_steps_would_not_inherit(
    environment: dict[str, str], expected: str
) -> None:
    shown = 'echo "${SLURM_GPUS_PER_NODE:-}"; [ -z "${SLURM_GPU_BIND:-}" ]'
    script = "\n".join(["set -eu", *gpu_export_lines(), shown])
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


@pytest.mark.parametrize("environment", ["exclusive"], indirect=True)
def test_a_task_of_an_array_is_asked_for_by_both_of_its_numbers(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own alone, Slurm shows all tasks where it is that of the array as well."""
    task = environment | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    subprocess.run(["bash", "-c", "\n".join(gpu_export_lines())], env=task, check=True)
    assert (tmp_path / "asked").read_text() == "show job --details 7_3\n"
    (tmp_path / "asked").unlink()
    monkeypatch.setenv("PATH", environment["PATH"])
    assert gpus_of_this_job(task).per_node == 2
    assert (tmp_path / "asked").read_text() == "show job --details 7_3\n"
