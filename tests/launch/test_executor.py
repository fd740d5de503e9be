"""Where ``cluster=auto`` runs a job: never on a login node by mistake, and never in a job that has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train import opening
from hpc_train.commands.train import _check_foreground
from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.launch.executors.executor import select_executor
from hpc_train.schedulers.slurm.client import in_allocation
from tests.launch.jobs import make_job
from tests.schedulers.test_variables import command

AUTO, LOCAL, SLURM = (ClusterConfig(kind=kind) for kind in ("auto", "local", "slurm"))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no Slurm of this machine
    return tmp_path


def cluster_that(tools: Path, ping: str, job: str = "") -> None:
    for name in ("sbatch", "srun", "sinfo"):
        command(tools, name, "exit 1")
    command(tools, "scontrol", ping)
    command(tools, "squeue", job)


UP, DOWN = "echo 'Slurmctld(primary) at c is UP'", "echo 'Slurmctld(primary) at c is DOWN'; exit 1"


def test_a_machine_without_slurm(tools: Path) -> None:
    assert select_executor(AUTO).name == "this machine"
    with pytest.raises(UserError, match="sbatch is not on the PATH"):
        select_executor(SLURM)
    with pytest.raises(UserError, match="on this machine only"):
        select_executor(AUTO).shape(make_job(tools / "sweep", cluster=ClusterConfig(nodes=2)).config)


def test_a_controller_that_responds(tools: Path) -> None:
    cluster_that(tools, UP)
    assert select_executor(AUTO).name == "Slurm"
    assert select_executor(LOCAL).name == "this machine"


def test_a_silent_controller_is_no_reason_to_train_on_this_machine(tools: Path) -> None:
    cluster_that(tools, DOWN)
    for use in (lambda: select_executor(AUTO), lambda: _check_foreground(make_job(tools, cluster=AUTO).config)):
        with pytest.raises(UserError, match=r"controller does not respond: scontrol: Slurmctld.* is DOWN") as caught:
            use()
        assert "try again" in caught.value.fix and "cluster=local" in caught.value.fix
    assert select_executor(LOCAL).name == "this machine"
    _check_foreground(make_job(tools, cluster=LOCAL).config)


def test_commands_of_slurm_without_a_cluster_are_noted(tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opening.tell_once.cache_clear()
    cluster_that(tools, "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1")
    assert select_executor(AUTO).name == "this machine"
    assert "find no cluster: training on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("squeue", "ended"),
    [
        ("echo RUNNING", False),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", False),  # srun says it
        ("echo COMPLETED", True),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),
        ("true", True),
    ],
)
def test_the_job_of_a_shell_is_asked_about(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], squeue: str, ended: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "999")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    cluster_that(tools, UP, squeue)
    assert in_allocation() is not ended
    if not ended:
        assert select_executor(AUTO).name == "this allocation"
        return
    for use in (lambda: select_executor(AUTO), lambda: _check_foreground(make_job(tools, cluster=AUTO).config)):
        with pytest.raises(UserError, match="this shell belongs to Slurm job 999, which has ended") as caught:
            use()
        assert "unset SLURM_JOB_ID" in caught.value.fix and "cluster=slurm" in caught.value.fix
    assert select_executor(SLURM).name == "Slurm"
    assert "the variables of Slurm job 999, which has ended, are not used" in capsys.readouterr().err
    assert select_executor(AUTO).name == "Slurm", "nothing of the job is left in this process"
