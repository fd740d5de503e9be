"""What a release has left on disk opens with the present code: its runs, its checkpoints, its site file."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_train.config.schema import Config
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.version import __version__
from tests.config.composing import config_of
from tests.doors.command import environment, hpc_train
from tests.releases.record import HERE, INTERRUPTED, OVERRIDES, STRATEGIES, losses_of

VERSIONS = sorted(path.name.removesuffix(".tar.gz") for path in HERE.glob("*.tar.gz"))
CONTINUED = [override for override in OVERRIDES if not override.startswith("train.steps=")]

Called = Callable[..., subprocess.CompletedProcess[str]]


def opened(version: str, folder: Path) -> None:
    """Extracts what ``version`` has left, with its run in ``outputs``, where commands look for runs."""
    with tarfile.open(HERE / f"{version}.tar.gz") as file:
        file.extractall(folder, filter="data")
    (folder / "outputs").mkdir()
    (folder / "run").rename(folder / "outputs" / "run")


def test_each_release_is_recorded() -> None:
    assert {"0.1.0", "0.9.0", __version__} <= set(VERSIONS)
    assert sum(path.stat().st_size for path in HERE.glob("*.tar.gz")) < 100_000 * len(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_run_of_a_release_is_shown(version: str, tmp_path: Path, called: Called) -> None:
    opened(version, tmp_path)
    for words, expected in (
        (["status", "run"], "4/4"),
        (["why", "run"], "nothing failed"),
        (["logs", "run"], "step 4/4"),
        (["compare", "run"], "done"),
        (["checkpoint", "list", "run"], "intact"),
        (["checkpoint", "verify", "run"], "intact"),
        (["report", "run", "--out", "page.html"], "page.html"),
        (["checkpoint", "export", "run", "--to", "model.pt"], "step 4"),
    ):
        done = called(*words)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout, words
    assert "validation" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_run_of_a_release_continues_with_the_same_settings(version: str, tmp_path: Path, called: Called) -> None:
    opened(version, tmp_path)
    done = called("freeze", *CONTINUED, "train.steps=5", "run.name=run")
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "outputs" / "run" / "events").glob("submitter-*")
    message = json.loads(written.read_text())["message"]
    assert message.startswith("continues with changed settings: train.steps: 4 -> 5; run.root: ")
    assert message.count(";") == 1


def frozen_with(run: RunDirectory, **values: dict[str, Any]) -> None:
    """Changes keys of a frozen run, as if they were the defaults of its version."""
    config = yaml.safe_load(run.config.read_text())
    for group, keys in values.items():
        config[group] |= keys
    text = yaml.safe_dump(config, sort_keys=False)
    run.config.write_text(text)
    run.update_record(config_hash=sha256(text.encode()).hexdigest())


def test_a_new_default_does_not_change_a_run_that_exists(tmp_path: Path, called: Called) -> None:
    opened("0.1.0", tmp_path)
    run = RunDirectory(tmp_path / "outputs" / "run")
    before = {"checkpoint": {"asynchronous": False, "wait_for_room_s": 7.0}, "optim": {"weight_decay": 0.0625}}
    frozen_with(run, **before, elastic={"max_requeues": 3})
    site = tmp_path / "site" / "cluster" / "mine.yaml"
    site.write_text("# @package _global_\ndefaults: [local@cluster, _self_]\nelastic:\n  max_requeues: 5\n")
    same = [*CONTINUED, "train.steps=5", "run.name=run"]
    planned = called(*same, "launch.dry_run=true", "-m")
    assert planned.returncode == 0, planned.stderr
    assert "note: the run keeps optim.weight_decay=0.0625; the default is now 0.1\n" in planned.stderr

    here = ["-cd", "site", *(word for word in same if word != "cluster=local" and "keep=" not in word)]
    done = called("freeze", *here, "cluster=mine", "checkpoint.wait_for_room_s=8")
    assert done.returncode == 0, done.stderr
    config = load(run)
    assert (config.optim.weight_decay, config.checkpoint.asynchronous) == (0.0625, False)  # set by nobody
    assert config.elastic.max_requeues == 5  # set by a file now
    assert config.checkpoint.wait_for_room_s == 8  # set by the command line now
    assert config.checkpoint.keep == Config().checkpoint.keep != 1  # set by the command line then
    # another file of the group was chosen
    assert config.cluster == config_of("cluster=local", "cluster.cpu_workers=1").cluster


@pytest.mark.long_form(50)  # above the run is frozen again, and its checkpoint read
@pytest.mark.parametrize("version", VERSIONS)
def test_the_run_of_a_release_trains_on(version: str, tmp_path: Path) -> None:
    opened(version, tmp_path)
    frozen_with(RunDirectory(tmp_path / "outputs" / "run"), optim={"weight_decay": 0.0625})
    done = hpc_train(*CONTINUED, "train.steps=5", "run.name=run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 5/5" in done.stdout and "keeps optim.weight_decay=0.0625" in done.stderr
    shown = hpc_train("evaluate", "run", "--json", cwd=tmp_path, env=environment())
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert json.loads(shown.stdout)["step"] == 5
    text = hpc_train("generate", "run", "1 2 3", "--tokenizer=ids", "--max-tokens=2", "--json", cwd=tmp_path)
    assert text.returncode == 0, text.stdout + text.stderr
    forked = hpc_train(*CONTINUED, "train.steps=6", "run.name=run", "run.fork=fork", "optim.lr=1e-4", cwd=tmp_path)
    assert forked.returncode == 0, forked.stdout + forked.stderr
    assert "step 6/6" in forked.stdout


@pytest.mark.long_form(25)  # above a checkpoint of the release is read
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("archive", sorted(HERE.glob("interrupted-*.tgz")), ids=lambda path: path.stem)
def test_a_killed_run_of_a_release_continues_with_the_losses_of_an_undisturbed_one(
    archive: Path, strategy: str, tmp_path: Path
) -> None:
    with tarfile.open(archive) as file:
        file.extractall(tmp_path / "outputs", filter="data")
    run = tmp_path / "outputs" / strategy
    expected = json.loads((tmp_path / "outputs" / "losses.json").read_text())[strategy]
    before = losses_of(run)
    done = hpc_train(*INTERRUPTED, f"+strategy={strategy}", f"run.name={strategy}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([*(run / "metrics").iterdir()]) == 2  # it was continued, and not begun again
    losses = losses_of(run)
    assert len(before) < len(losses) == len(expected) == 60
    for step, values in expected.items():
        assert losses[step] == pytest.approx(values, rel=1e-5), step  # the kernels of another processor


@pytest.mark.parametrize("version", VERSIONS)
def test_the_site_file_of_a_release_is_read(version: str, tmp_path: Path, called: Called) -> None:
    opened(version, tmp_path)
    done = called("-cd", "site", "cluster=here", "--cfg", "job", "-p", "cluster")
    assert done.returncode == 0, done.stderr
    assert "account: project_123" in done.stdout and "per_gpu_hour: 1.9" in done.stdout
