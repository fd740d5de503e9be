"""Which variables of the shell reach Slurm's commands, batch scripts, steps and W&B."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.launch.executors.slurm import SlurmJobExecutor, refusal
from hpc_train.launch.sbatch import options
from hpc_train.launch.script import ENVIRONMENT
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.limits import check_limits
from hpc_train.schedulers.slurm.site import Partition, Site
from hpc_train.schedulers.slurm.variables import RULES, Receiver, reaches, rule_of
from tests.launch.jobs import make_job

QUERY, SBATCH, SCRIPT, INNER, WANDB = Receiver
SITE = ClusterConfig(kind="slurm", nodes=1, gpus_per_node=0)


@pytest.mark.parametrize(
    ("name", "receivers"),
    [
        ("HOME", {*Receiver}),
        ("SLURM_CONF", {*Receiver}),
        ("SLURM_JWT", {*Receiver}),
        ("SLURM_CLUSTERS", set()),
        ("SBATCH_PARTITION", {SBATCH, SCRIPT}),
        ("SBATCH_ACCOUNT", {SBATCH, SCRIPT}),
        ("SBATCH_QOS", {SBATCH, SCRIPT}),
        ("SBATCH_MEM_PER_NODE", {SBATCH, SCRIPT}),
        ("SBATCH_ARRAY_INX", set()),
        ("SBATCH_WAIT", set()),
        ("SBATCH_GPUS_PER_TASK", set()),
        ("SQUEUE_PARTITION", set()),
        ("SINFO_FORMAT", set()),
        ("SACCT_FORMAT", set()),
        ("SCANCEL_INTERACTIVE", set()),
        ("SALLOC_PARTITION", {*Receiver}),
        ("SLURM_TRES_PER_TASK", set()),
        ("SLURM_CPU_BIND", set()),
        ("SLURM_CPU_BIND_TYPE", set()),
        ("SLURM_GRES", set()),
        ("SLURM_HINT", {SCRIPT}),  # sbatch sets it for --hint
        ("SLURM_CPUS_PER_TASK", {SCRIPT}),
        ("SLURM_MEM_PER_NODE", {SCRIPT}),
        ("SLURM_JOB_ID", {SCRIPT, INNER}),
        ("SRUN_CPUS_PER_TASK", {SCRIPT}),
        ("SRUN_CONTAINER", set()),
        ("WANDB_SWEEP_ID", {QUERY, SBATCH, SCRIPT, INNER}),
        ("WANDB_PROJECT", {*Receiver}),
    ],
)
def test_what_a_variable_reaches(name: str, receivers: set[Receiver]) -> None:
    assert {receiver for receiver in Receiver if reaches(name, receiver)} == receivers


def test_every_rule_has_a_reason_and_every_name_is_decided_by_its_rule() -> None:
    assert all(rule.reason for rule in RULES)
    hidden = [name for rule in RULES for name in rule.names if rule_of(name.replace("*", "X")) is not rule]
    assert hidden == []


def command(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/bin/sh\n{script}\n")
    (tools / name).chmod(0o755)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shell full of left-over variables, with commands that write down those that they get."""
    for name in ("squeue", "scontrol", "sinfo", "scancel", "srun", "sacctmgr"):
        command(tmp_path, name, f"env > {tmp_path}/{name}.env; echo '7|RUNNING|N/A|c|None'")
    command(tmp_path, "sbatch", f"env > {tmp_path}/sbatch.env; echo 41")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name in (
        "SQUEUE_PARTITION", "SINFO_NODES", "SACCT_FORMAT", "SCANCEL_STATE", "SBATCH_WAIT", "SBATCH_ARRAY_INX",
        "SBATCH_ACCOUNT", "SLURM_MEM_PER_CPU", "SLURM_CPU_BIND", "SLURM_HINT", "SLURM_TIME_FORMAT", "SRUN_DEBUG",
        "SLURM_TRES_PER_TASK", "SLURM_CONF", "SLURM_CPUS_PER_TASK",
    ):  # fmt: skip
        monkeypatch.setenv(name, "cpu=1")
    return tmp_path


def handed(folder: Path, name: str) -> set[str]:
    """Returns the variables of Slurm that a command got."""
    lines = (folder / f"{name}.env").read_text().splitlines()
    prefixes = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_")
    return {line.partition("=")[0] for line in lines if line.startswith(prefixes)}


def test_queries_and_cancellations_get_no_filter(shell: Path) -> None:
    assert client.list_jobs(["--jobs=7"]) is not None
    client.node_states(["--nodes=n1"])
    client.show_job("7")
    client.cancel(["7"])
    assert [handed(shell, name) for name in ("squeue", "sinfo", "scontrol", "scancel")] == [{"SLURM_CONF"}] * 4


def test_a_submission_gets_the_defaults_of_the_user_only_and_the_rest_is_noted(shell: Path) -> None:
    job = make_job(shell / "sweep", cluster=SITE)
    assert SlurmJobExecutor().submit([job], shell / "sweep", 1) == ["41"]
    assert handed(shell, "sbatch") == {"SLURM_CONF", "SBATCH_ACCOUNT"}
    notes = [line for line in SlurmJobExecutor().check([job]) if line.startswith("note: SBATCH_")]
    assert [note.split()[1] for note in notes] == ["SBATCH_ARRAY_INX", "SBATCH_WAIT"]


def test_a_batch_script_hands_on_what_describes_its_job(shell: Path) -> None:
    """A stand-in for srun with the rule of Slurm 23.11 (src/common/slurm_opt.c)."""
    command(shell, "srun", f'[ -z "$SLURM_TRES_PER_TASK" ] || exit 9; env > {shell}/srun.env')
    script = f"set -euo pipefail\n{ENVIRONMENT}\nsqueue > /dev/null\nsrun"
    variables = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "8"}
    subprocess.run(["bash", "-c", script], env=variables, check=True)
    own = {"SLURM_CONF", "SLURM_CPUS_PER_TASK", "SLURM_HINT", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_ID"}
    own |= {"SLURM_MEM_PER_CPU", "SLURM_EXPORT_ENV", "SRUN_CPUS_PER_TASK"}
    assert {name for name in handed(shell, "srun") if not name.startswith("SBATCH_")} == own
    assert "SQUEUE_PARTITION" not in handed(shell, "squeue")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SBATCH_PARTITION", "nope", "sbatch: error: invalid partition specified: nope"),
        ("SBATCH_HINT", "x", 'sbatch: error: unrecognized --hint argument "x", see --hint=help'),
        ("SBATCH_TIMELIMIT", "soon", "sbatch: error: Invalid --time specification"),
        ("SLURM_CLUSTERS", "other", "sbatch: error: No cluster 'other' known by database."),
    ],
)
def test_the_variable_that_causes_a_refusal_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("SBATCH_NETWORK", "hfi")
    error = refusal(said)
    assert error.where == f"{name} of this shell" and error.fix.startswith(f"unset {name}")
    other = refusal("sbatch: error: Invalid feature specification")
    assert (
        other.where == "cluster.constraint"
        and f"sbatch also reads {', '.join(sorted([name, 'SBATCH_NETWORK']))}" in (other.fix)
    )


def test_our_own_checks_name_the_variable_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "nope")
    site = Site("c", partitions={"cpu": Partition("cpu", default=True)})
    with pytest.raises(UserError, match="partition 'nope' does not exist") as caught:
        check_limits(make_job(tmp_path, cluster=SITE), site)
    assert caught.value.where == "SBATCH_PARTITION of this shell"


def test_the_clusters_of_the_shell_are_the_default_of_the_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    job = make_job(tmp_path, cluster=SITE)
    assert options(job, Site("mine"))["clusters"] == "other"
    assert "clusters" not in options(job, Site("other")), "that of this machine"
    job.config.cluster.clusters = "third"
    assert options(job, Site("mine"))["clusters"] == "third"
