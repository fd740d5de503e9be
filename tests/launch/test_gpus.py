"""The GPUs that a job requests from Slurm, and those that the steps of the surrounding job get."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.launch.executors import cost
from hpc_train.launch.gpus import EXPORT, JobGpus, asked_gpus, gpus_of_this_job
from hpc_train.schedulers.slurm.limits import check_limits
from hpc_train.schedulers.slurm.site import NodeKind, Partition, Site
from tests.launch.jobs import make_job

CPU = NodeKind(9, 64, 256000, {})
A100 = NodeKind(8, 64, 512000, {"a100": 4}, frozenset({"rack1", "a100"}))
V100 = NodeKind(3, 40, 256000, {"v100": 4}, frozenset({"v100"}))
BOTH = NodeKind(1, 40, 256000, {"a100": 2, "v100": 2})
H100 = NodeKind(2, 96, 512000, {"h100": 8}, frozenset({"rack2", "h100"}))
SITE = Site(
    "here",
    partitions={
        "cpu": Partition("cpu", default=True, nodes=9, kinds=(CPU,)),
        "gpu": Partition("gpu", nodes=8, kinds=(A100,)),
        "new": Partition("new", nodes=2, kinds=(H100,)),
        "mixed": Partition("mixed", nodes=10, kinds=(A100, H100)),
        "types": Partition("types", nodes=11, kinds=(A100, V100)),
        "all": Partition("all", nodes=19, kinds=(CPU, A100, H100)),
        "pairs": Partition("pairs", nodes=1, kinds=(BOTH,)),
        "slices": Partition("slices", nodes=2, kinds=(NodeKind(2, 64, 512000, {"a100_1g.5gb": 7}),)),
        "sliced": Partition("sliced", nodes=2, kinds=(NodeKind(2, 64, 512000, {"a100": 3, "a100_1g.5gb": 7}),)),
        "secret": Partition("secret", nodes=4),
    },
)


@pytest.fixture(autouse=True)
def a_login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def asked(**keys: Any) -> ClusterConfig:
    return ClusterConfig(kind="slurm", **keys)


@pytest.mark.parametrize(
    ("cluster", "count", "said"),
    [
        (asked(), 0, None),
        (asked(partition="gpu"), 4, None),
        (asked(partition="gpu", gpus_per_node=0), 0, None),
        (asked(partition="gpu", gpus_per_node=2), 2, None),
        (asked(partition="gpu", gres="nvme:10,gpu:a100:3"), 3, None),
        (asked(partition="gpu", gres="nvme:10"), 4, None),
        (asked(partition="slices"), 1, "cannot connect two slices of one GPU: 1 per node is requested"),
        (asked(partition="sliced"), 3, "3 per node are requested, and cluster.gpu_type=a100 ensures"),
        (asked(partition="sliced", gpu_type="a100"), 3, None),
        (asked(partition="sliced", gpu_type="a100_1g.5gb"), 1, "1 per node is requested"),
        (asked(partition="gpu,new"), 4, "have 4 or 8 GPUs: 4 per node are requested"),
        (asked(partition="mixed"), 4, "have 4 or 8 GPUs: 4 per node are requested; cluster.gpus_per_node=8 selects"),
        (asked(partition="mixed", gpu_type="h100"), 8, None),
        (asked(partition="mixed", constraint="h100"), 8, None),
        (asked(partition="mixed", constraint="rack2&h100"), 8, None),
        (asked(partition="mixed", constraint="v100|h100"), 8, None),
        (asked(partition="mixed", constraint="[rack1|rack2]"), 4, "have 4 or 8"),
        (asked(partition="mixed", constraint="nowhere"), 4, "have 4 or 8"),
        (asked(partition="mixed"), 4, "GPUs of type a100 or h100, and the job may get any; cluster.gpu_type=a100"),
        (asked(partition="types"), 4, "nodes of the partition types have GPUs of type a100 or v100, and the job may"),
        (asked(partition="types", gpu_type="v100"), 4, None),
        (asked(partition="types", constraint="a100"), 4, None),
        (asked(partition="pairs"), 4, None),
        (asked(partition="all"), 4, "10 of the 19 nodes of the partition all have GPUs"),
        (asked(partition="secret"), 0, "the GPUs of the nodes of the partition secret are unknown"),
        (asked(partition="gpu", clusters="other"), 0, "are unknown, so none is requested"),
    ],
)
def test_auto_is_what_the_nodes_have(cluster: ClusterConfig, count: int, said: str | None) -> None:
    found = asked_gpus(cluster, SITE)
    assert found.count == count
    assert (found.note is None) if said is None else (found.note is not None and said in found.note)


@pytest.mark.parametrize(
    ("cluster", "what", "fix"),
    [
        (asked(partition="mixed", gpu_type="v100"), "have no GPUs of type v100", "types here: a100, h100"),
        (asked(partition="gpu", extra={"gpus-per-task": 4}), "gpus-per-task in cluster.extra", "gpus_per_node=N"),
    ],
)
def test_auto_that_cannot_be(cluster: ClusterConfig, what: str, fix: str) -> None:
    with pytest.raises(UserError) as refused:
        asked_gpus(cluster, SITE)
    assert what in refused.value.what and fix in refused.value.fix


@pytest.mark.parametrize(
    ("partition", "gpus", "gpu_type", "fix"),
    [
        ("slices", 7, None, "cluster.gpus_per_node=1"),
        ("sliced", 4, None, "the whole GPUs of cluster.gpu_type=a100"),
        ("sliced", 2, "a100_1g.5gb", "cluster.gpus_per_node=1"),
        ("sliced", 3, None, None),
        ("sliced", 3, "a100", None),
        ("slices", 1, None, None),
    ],
)
def test_several_slices_of_a_gpu_are_refused_before_submission(
    tmp_path: Path, partition: str, gpus: int, gpu_type: str | None, fix: str | None
) -> None:
    cluster = asked(partition=partition, gpus_per_node=gpus, gpu_type=gpu_type, nodes=1)
    job = make_job(tmp_path, cluster=cluster, gpus=gpus)
    if fix is None:
        check_limits(job, SITE)
        return
    with pytest.raises(UserError, match="NCCL cannot connect two slices of one GPU") as caught:
        check_limits(job, SITE)
    assert fix in caught.value.fix


def test_sbatch_takes_the_partition_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    assert asked_gpus(asked(), SITE).count == 4
    assert asked_gpus(asked(partition="cpu"), SITE).count == 0
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert asked_gpus(asked(), SITE).count == 4, "it is the default of the user within a job too"


def test_the_choice_is_said_and_so_is_none(tmp_path: Path) -> None:
    mixed = make_job(tmp_path / "mixed", cluster=asked(partition="mixed"), gpus=4)
    assert "have 4 or 8 GPUs: 4 per node" in cost.cost_lines([mixed], SITE)[-1]
    none = make_job(tmp_path / "none", cluster=asked(partition="gpu", gpus_per_node=0))
    assert (
        cost.cost_lines([none], SITE)[-1]
        == "note: no GPU is requested; cluster.gpus_per_node=auto requests the 4 of a node"
    )


def test_more_nodes_than_have_the_gpus_are_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", cluster=asked(partition="all", nodes=3, gpus_per_node=8), gpus=8)
    with pytest.raises(UserError) as refused:
        check_limits(job, SITE)
    assert refused.value.what == "3 nodes with 8 GPUs are requested, but partition all has 2"
    assert "cluster.nodes=2 or fewer" in refused.value.fix
    check_limits(make_job(tmp_path / "other", cluster=asked(partition="all", nodes=10), gpus=4), SITE)


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


@pytest.mark.parametrize(
    ("environment", "expected", "exported"),
    [pytest.param(name, *case[2:], id=name) for name, case in CASES.items()],
    indirect=["environment"],
)
def test_a_step_gets_the_gpus_and_a_batch_script_names_those_that_its_steps_would_not_inherit(
    environment: dict[str, str], expected: JobGpus, exported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = 'echo "${SLURM_GPUS_PER_NODE:-}"; [ -z "${SLURM_GPU_BIND:-}" ]'
    script = "\n".join(["set -eu", EXPORT, shown])
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{exported}\n", "")
    monkeypatch.setenv("PATH", environment["PATH"])
    assert gpus_of_this_job(environment) == expected
    options = [f"--gpus-per-node={expected.per_node}"] if expected.per_node and not expected.inherited else []
    assert expected.srun_options(expected.per_node) == options


@pytest.mark.parametrize("environment", ["exclusive"], indirect=True)
def test_a_task_of_an_array_is_asked_for_by_both_of_its_numbers(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own alone, Slurm shows all tasks where it is that of the array as well."""
    task = environment | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    subprocess.run(["bash", "-c", EXPORT], env=task, check=True)
    assert (tmp_path / "asked").read_text() == "show job --details 7_3\n"
    (tmp_path / "asked").unlink()
    monkeypatch.setenv("PATH", environment["PATH"])
    assert gpus_of_this_job(task).per_node == 2
    assert (tmp_path / "asked").read_text() == "show job --details 7_3\n"
