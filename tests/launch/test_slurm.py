"""Slurm jobs against commands that only write down how they were called."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import ClusterConfig
from hpc_train.launch.slurm import SlurmSubmitter
from hpc_train.launch.submitter import choose
from tests.launch.jobs import make_job

SITE = ClusterConfig(kind="slurm", nodes=2, gpus_per_node=4, partition="gpu", account="lab", time="02:00:00")


def command(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    command(folder, "srun", "true")
    command(
        folder, "sbatch", f'echo "$1" >> {tmp_path}/scripts; cp "$1" {tmp_path}/script; echo Submitted batch job 41'
    )
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_the_script_asks_for_what_the_config_says(slurm: Path, tmp_path: Path) -> None:
    submitter = choose(SITE)
    assert isinstance(submitter, SlurmSubmitter)
    assert submitter.shape(SITE) == (2, 4, 4)
    job = make_job(tmp_path / "sweep", cluster=SITE, gpus=4)
    assert submitter.submit([job], tmp_path / "sweep", 1) == ["41"]
    script = (tmp_path / "script").read_text()
    for line in ("nodes=2", "ntasks-per-node=1", "gpus-per-node=4", "partition=gpu", "account=lab", "time=02:00:00"):
        assert f"#SBATCH --{line}\n" in script
    assert "--kill-on-bad-exit=1" in script


def test_jobs_of_one_shape_are_one_array_and_keep_their_order(slurm: Path, tmp_path: Path) -> None:
    clusters = [SITE, ClusterConfig(kind="slurm", nodes=1, gpus_per_node=4), SITE]
    jobs = [make_job(tmp_path / "sweep", n, cluster=cluster, gpus=4, cap=1) for n, cluster in enumerate(clusters)]
    ids = SlurmSubmitter().submit(jobs, tmp_path / "sweep", 3)
    assert ids == ["41_0", "41", "41_1"]
    assert len((tmp_path / "scripts").read_text().splitlines()) == 2


def test_a_refusal_of_sbatch_is_one_message(slurm: Path, tmp_path: Path) -> None:
    command(slurm, "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    with pytest.raises(ConfigError, match="invalid partition"):
        SlurmSubmitter().submit([make_job(tmp_path / "sweep", cluster=SITE, gpus=4)], tmp_path / "sweep", 1)


@pytest.mark.parametrize(
    ("squeue", "expected"),
    [
        ("echo 41_0; echo 42", {"41_0", "42"}),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", set()),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", {"41_0", "41_1", "42"}),
    ],
)
def test_which_jobs_are_present(slurm: Path, squeue: str, expected: set[str]) -> None:
    command(slurm, "squeue", squeue)
    assert SlurmSubmitter().present(["41_0", "41_1", "42"]) == expected


def test_without_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose(ClusterConfig()).name == "this machine"
    with pytest.raises(ConfigError, match="sbatch is not on the PATH"):
        choose(SITE)
    with pytest.raises(ConfigError, match="this machine is one"):
        choose(ClusterConfig()).shape(ClusterConfig(nodes=2))
