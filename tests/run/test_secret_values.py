"""Values of ``cluster.env`` and tokens of the environment are in no file of a run that others can read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.config.schema import ClusterConfig, Config, RunConfig
from hpc_train.config.secrets import file_mode, shown, without_secrets
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import keep_others_from_writing, write_for_group, write_text
from hpc_train.run.freeze import freeze
from tests.config.composing import config_of
from tests.launch.jobs import make_job
from tests.train.runs import TINY
from tests.warm_parents import with_server

IN_CONFIG = "canary-in-cluster-env"
IN_ENVIRONMENT = {
    "WANDB_API_KEY": "f" * 36 + "cafe",
    "HF_TOKEN": "canary-hf-token",
    "AWS_SECRET_ACCESS_KEY": "canary-aws-key",
}


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def holders(directory: Path, text: str) -> list[Path]:
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return [path for path in files if text.encode() in path.read_bytes()]


@pytest.mark.long_form(25, every_share=True)
def test_a_run_leaves_no_secret_in_files_that_others_read(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "hpc_train", *TINY, "+strategy=dp", "cluster=local", "cluster.cpu_workers=1"),
        *("cluster.gpus_per_node=0", "train.steps=2", "telemetry.wandb.mode=offline", "run.name=one"),
        "+cluster.env.OMP_NUM_THREADS='3'",
        *(f"+cluster.env.MY_SETTING={IN_CONFIG}", f'cluster.setup=["export MY_TOKEN={IN_CONFIG}"]'),
        f"run.root={tmp_path / 'runs'}",
    ]
    environment = with_server(os.environ) | IN_ENVIRONMENT | {"OMP_NUM_THREADS": "7"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, umask=0o000, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDirectory(tmp_path / "runs" / "one")
    threads = next(line for line in run.record()["environment"] if line["name"] == "OMP_NUM_THREADS")
    assert (threads["value"], threads["reason"]) == ("3", "set by the user"), "cluster.env holds without a batch script"
    assert list(run.wandb.glob("offline-run-*/run-*.wandb")), "W&B has recorded the run"
    assert holders(run.path, IN_CONFIG) == [run.config]
    assert stat.S_IMODE(run.config.stat().st_mode) == 0o600
    for value in IN_ENVIRONMENT.values():
        assert holders(tmp_path, value) == []
    writable = [
        path for path in (tmp_path / "runs").rglob("*") if path.lstat().st_mode & 0o022 and not path.is_symlink()
    ]
    assert writable == [], "a umask of 000 opens nothing"


def test_a_change_of_the_environment_is_told_without_its_values(tmp_path: Path, umask: None) -> None:
    run = RunDirectory(tmp_path / "runs" / "one")
    config = config_of(f"run.root={tmp_path / 'runs'}", "run.name=one")
    for value in ("first-canary", "second-canary"):
        freeze(replace(config, cluster=replace(config.cluster, env={"TOKEN": value})), run)
    (warning,) = run.read_events()
    assert "cluster.env.TOKEN: (hidden) -> (hidden)" in warning["message"]
    assert {path.name for path in holders(run.path, "-canary")} == {"config.yaml", "config-000.yaml"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in holders(run.path, "-canary"))


def test_a_batch_script_with_values_is_private(tmp_path: Path, umask: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpc_train.launch.executors.slurm import SlurmJobExecutor

    tools = tmp_path / "bin"
    tools.mkdir()
    commands = {"sbatch": "echo Submitted batch job 17"} | dict.fromkeys(("srun", "scontrol", "sinfo"), "exit 1")
    for name, text in commands.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    job = make_job(tmp_path / "sweep", cluster=ClusterConfig(kind="slurm", cpu_workers=2, env={"TOKEN": IN_CONFIG}))
    SlurmJobExecutor().submit([job], tmp_path / "sweep", 1)
    found = holders(tmp_path, IN_CONFIG)
    assert {path.name for path in found} == {"job.sbatch"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in found)


def test_only_assignments_to_secrets_are_hidden_in_lines_of_bash() -> None:
    lines = ["module load cuda", "export HF_TOKEN='a b' PATH=/bin:$PATH; API_KEY=xyz", "MONKEY=1"]
    hidden = ["module load cuda", "export HF_TOKEN=(hidden) PATH=/bin:$PATH; API_KEY=(hidden)", "MONKEY=1"]
    assert shown("cluster.setup", lines) == hidden
    secret = ["export HF_TOKEN=value-canary"]
    config = Config(cluster=ClusterConfig(env={"NAME": "value-canary"}, setup=secret))
    assert "value-canary" not in str(without_secrets(config))
    assert without_secrets(config)["cluster"]["env"] == {"NAME": "(hidden)"}
    assert file_mode(Config(cluster=ClusterConfig(setup=secret))) == 0o600
    assert file_mode(Config(cluster=ClusterConfig(setup=["module load cuda"]))) == 0o666
    assert file_mode(replace(config, run=RunConfig(group="lab"))) == 0o660


@pytest.mark.parametrize(
    ("before", "alone", "shared"),
    [(0o000, 0o022, 0o002), (0o002, 0o002, 0o002), (0o022, 0o022, 0o002), (0o077, 0o077, 0o007)],
)
def test_nobody_else_may_write_under_any_umask(
    before: int, alone: int, shared: int, umask: None, tmp_path: Path
) -> None:
    for change, wanted in ((keep_others_from_writing, alone), (write_for_group, shared)):
        os.umask(before)
        change()
        assert os.umask(0o022) == wanted


def test_a_temporary_file_that_was_left_open_does_not_open_the_next_one(tmp_path: Path, umask: None) -> None:
    path = tmp_path / "config.yaml"
    left = tmp_path / f".config.yaml.{os.uname().nodename}.{os.getpid()}"
    left.touch(mode=0o666)
    write_text(path, "secret", 0o600)
    assert path.stat().st_mode & 0o777 == 0o600 and not left.exists()
