"""The settings of the site and of the user: their order at every door, their limits, and who may write them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from hpc_train import api
from hpc_train.config import settings as module
from hpc_train.config.compose import register
from hpc_train.config.run_path import default_root
from hpc_train.errors import UserError
from hpc_train.launch import launcher
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from tests.config.composing import forget_compositions
from tests.doors import command
from tests.other_user import OTHER, needs_root

Called = Callable[..., CompletedProcess[str]]
SITE_FILE = """
defaults:
  - optim: sgd
  - precision: bf16
cluster: {account: site, qos: site, time: "02:00:00", comment: site, price: {per_gpu_hour: 1.9}}
checkpoint: {keep: 7}
run: {root: "${oc.env:PLACE}/runs"}
limits:
  cluster.nodes: {max: 4}
  cluster.time: {max: "1-00:00:00"}
  cluster.account: {one_of: [site, mine]}
"""
USER_FILE = """
defaults:
  - precision: fp64
cluster: {qos: user, time: "03:00:00", comment: user}
"""
MINE = 'defaults: [local, _self_]\ntime: "04:00:00"\ncomment: project\n'


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a site, a user and a project; returns their directory."""
    texts = {"site.yaml": SITE_FILE, "xdg/hpc_train/user.yaml": USER_FILE, "conf/cluster/mine.yaml": MINE}
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    own = {"HPC_TRAIN_SITE": f"{tmp_path}/site.yaml", "XDG_CONFIG_HOME": f"{tmp_path}/xdg", "PLACE": str(tmp_path)}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HPC_TRAIN_ROOT", raising=False)
    environment = command.environment
    monkeypatch.setattr("tests.conftest.environment", lambda **extra: environment(**own, **extra))
    monkeypatch.setattr(module, "SYSTEM_FILE", tmp_path / "none.yaml")
    forget_compositions()
    return tmp_path


JOB = ("-cd", "conf", "cluster=mine", "cluster.comment=words", "+strategy=dp", "run.name=one", "run.snapshot=false")
EXPECTED = ("site", "user", "04:00:00", "words", 1.9, 7, "sgd", "fp64")


def values(config: Any) -> tuple[Any, ...]:
    cluster = config.cluster
    prices = cluster.price.per_gpu_hour
    names = (config.optim.name, config.precision.name)
    return (cluster.account, cluster.qos, cluster.time, cluster.comment, prices, config.checkpoint.keep, *names)


def test_a_sweep_and_a_frozen_run_have_the_settings_in_their_order(
    called: Called, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site, user, project, command line; Hydra's own loader composes the one, its compose API the other."""
    jobs: list[Any] = []
    monkeypatch.setattr(launcher, "freeze_all", lambda runs, code: jobs.extend(runs) or sys.exit(0))
    assert called(*JOB, "-m", "train.steps=3,4").returncode == 0
    frozen = called("freeze", *JOB)
    assert frozen.stdout == f"{files}/runs/one\n"
    run = RunDirectory(files / "runs/one")
    assert [values(config) for config in (jobs[0][0], jobs[1][0], load(run))] == [EXPECTED] * 3
    (files / "site.yaml").write_text("cluster: {account: other}\nlimits: {cluster.nodes: {max: 0}}\n")
    assert values(load(run)) == EXPECTED


@pytest.mark.long_form(10)  # two doors are above
def test_the_other_doors_compose_the_same(called: Called, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python, one job with -m, the foreground, a dry run, and a script."""
    configs: list[Any] = []
    monkeypatch.setattr(launcher, "freeze_all", lambda runs, code: configs.append(runs[0][0]) or sys.exit(0))
    monkeypatch.setattr("hpc_train.commands.train.task", lambda node, *_: configs.append(node) or 0)
    monkeypatch.chdir(files)
    with pytest.raises(SystemExit):
        api.submit(list(JOB[2:]), config_dir="conf")
    assert called(*JOB, "-m").returncode == 0
    assert called(*JOB).returncode == 0
    assert [values(config) for config in configs] == [EXPECTED] * 3
    dry = called(*JOB, "launch.dry_run=true", "-m")
    assert f"run directory: {files}/runs/one" in dry.stdout, dry.stderr
    script = called("script", *JOB, "cluster.kind=slurm", "cluster.gpus_per_node=1").stdout
    for option in ("--account=site", "--qos=user", "--time=04:00:00"):
        assert f"#SBATCH {option}\n" in script


def test_commands_look_for_runs_where_the_settings_put_them(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_root() == f"{files}/runs"
    monkeypatch.setenv("HPC_TRAIN_ROOT", "/elsewhere")
    assert default_root() == "/elsewhere"
    monkeypatch.delenv("HPC_TRAIN_ROOT")
    monkeypatch.delenv("PLACE")
    with pytest.raises(UserError, match=r"run.root is .*which has no value"):
        default_root()


def test_an_experiment_overrides_what_the_settings_choose(called: Called, files: Path) -> None:
    (files / "conf/experiment").mkdir()
    text = "# @package _global_\ndefaults: [{override /precision: bf16}]\ncluster: {qos: experiment}\n"
    (files / "conf/experiment/e.yaml").write_text(text)
    shown = called("--cfg", "job", "-cd", "conf", "experiment=e")
    assert "name: bf16" in shown.stdout and "qos: experiment" in shown.stdout, shown.stderr


def test_a_renamed_key_is_read_with_a_notice(called: Called, files: Path) -> None:
    (files / "site.yaml").write_text("cluster: {nice: 7}\n")
    (files / "xdg/hpc_train/user.yaml").write_text("cluster: {mail_type: END}\n")
    shown = called("--cfg", "job", "--origins", "-p", "cluster.extra", "cluster=slurm")
    assert shown.stdout == (
        "cluster.extra.nice: 7  # site.yaml:1\ncluster.extra.mail-type: END  # xdg/hpc_train/user.yaml:1\n"
    )
    assert f"note: {files}/site.yaml: cluster.nice was renamed to cluster.extra.nice; " in shown.stderr


def test_origins_name_the_file_of_each_key(called: Called) -> None:
    shown = called("--cfg", "job", "--origins", *JOB)
    lines = dict(line.split(": ", 1) for line in shown.stdout.splitlines())
    assert lines["cluster.account"] == "site  # site.yaml:5", shown.stderr
    assert lines["cluster.qos"] == "user  # xdg/hpc_train/user.yaml:4"
    assert lines["cluster.time"] == "'04:00:00'  # conf/cluster/mine.yaml:2"
    assert lines["cluster.comment"] == "words  # the command line"
    assert lines["cluster.nodes"] == "1  # default"
    assert lines["precision.name"].endswith("conf/precision/fp64.yaml:2")
    assert lines["run.root"].endswith("# site.yaml:7")
    assert "--cfg job --origins" in called("--origins").stderr
    part = called("--cfg", "job", "--origins", "-p", "precision", *JOB).stdout.splitlines()
    assert part == [line for line in shown.stdout.splitlines() if line.startswith("precision.")]
    assert "nope is not a config key" in called("--cfg", "job", "--origins", "-p", "nope", *JOB).stderr


def test_a_limit_of_the_site_cannot_be_overridden(called: Called, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one in the file of root lifted by another file of a site."""
    (files / "etc.yaml").write_text("limits: {checkpoint.keep: {max: 5}}\n")
    monkeypatch.setattr(module, "SYSTEM_FILE", files / "etc.yaml")
    over = ("cluster.nodes=2-5", "cluster.time=1-00:00:01", "cluster.account=other", "batch.global_size=64")
    refused = called("script", *JOB, *over, "cluster.kind=slurm", "cluster.gpus_per_node=1")
    assert refused.returncode == 2
    for message in (
        "cluster.nodes is 5, and the site allows at most 4",
        "cluster.time is 1-00:00:01, and the site allows at most 1-00:00:00",
        f"cluster.account=site; {files}/site.yaml sets this limit",
        f"checkpoint.keep=5; {files}/etc.yaml sets this limit",
    ):
        assert message in refused.stderr, refused.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: {acount: x}", "cluster.acount"),
        ("cluster: {nodes: [1]}", "cluster.nodes"),
        ("cluster: {kind: slurm}", "cluster.kind has no effect"),
        ("clusters: {nodes: 1}", "did you mean cluster?"),
        ("model: {dim: 1}", "depends on the job"),
        ("defaults: [slurm]", "`- cluster: slurm`"),
        ("defaults: [{strategy: dp}]", "chooses a file of strategy"),
        ("limits: {cluster.node: {max: 1}}", "cluster.node, which is not a config key"),
        ("limits: {cluster.time: {max: 24}}", "in quotes"),
        ("limits: {cluster.qos: {one_of: a}}", "must limit cluster.qos"),
        ('run: {root: "${hpc_train.root:/x}"}', "takes precedence"),
        ("cluster: [", "is not YAML"),
    ],
)
def test_a_mistake_in_a_file_names_it(text: str, message: str, files: Path) -> None:
    (files / "site.yaml").write_text(text + "\n")
    with pytest.raises(UserError) as mistake:
        register()
    assert message in str(mistake.value) and f"{files}/site.yaml" in str(mistake.value)


def test_a_wrong_value_names_the_line(called: Called, files: Path) -> None:
    (files / "site.yaml").write_text("checkpoint:\n  every: never\ncluster:\n  time: 24:00:00\n")
    assert "site.yaml:4" in called("freeze", "run.name=two").stderr
    (files / "site.yaml").write_text("checkpoint:\n  every: never\n")
    assert "checkpoint.every in site.yaml:2" in called("launch.dry_run=true", "run.name=two").stdout
    (files / "site.yaml").write_text("\ndefaults:\n  - cluster: nowhere\n")
    assert "cluster in site.yaml:3" in called("freeze", "run.name=two").stderr


def test_the_file_in_the_docs_is_valid(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (command.REPOSITORY / "docs/howto/site.md").read_text()
    (files / "site.yaml").write_text(next(text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)))
    register()
    assert module.site_limits()[0].limits["cluster.nodes"] == {"max": 16}
    monkeypatch.setenv("USER", "me")
    assert default_root() == "/scratch/project_123/me"


def test_which_files_are_used(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found.path.name for found in module.read_settings()] == ["site.yaml", "user.yaml"]
    (files / "site.yaml").chmod(0o664)
    with pytest.raises(UserError, match="can be written by other users"):
        module.read_settings()
    monkeypatch.setenv("HPC_TRAIN_SITE", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", "/nonexistent")
    assert module.read_settings() == ()
    monkeypatch.setenv("HPC_TRAIN_SITE", "/nonexistent")
    with pytest.raises(UserError, match="does not exist"):
        module.read_settings()


@needs_root
def test_a_site_file_of_another_user_is_refused(files: Path) -> None:
    os.chown(files / "site.yaml", OTHER, OTHER)
    with pytest.raises(UserError, match="belongs to another user"):
        module.read_settings()
