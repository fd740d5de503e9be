"""Checkpoints are promoted after verification, and imported again with their lineage."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_train.checkpoint.manifest import Manifest
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.checkpoint.writer import write_tensors
from hpc_train.commands import checkpoint
from hpc_train.errors import UserError
from hpc_train.report.registry import import_reference
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.run.imported import published
from hpc_train.telemetry.sinks import wandb as sink
from tests.doors.schema import check_output
from tests.telemetry import mlflow_service
from tests.telemetry.test_mlflow import real_server
from tests.train.runs import frozen


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with checkpoints of step 1, the best, and 2, the newest."""
    monkeypatch.setenv("HPC_TRAIN_ROOT", str(tmp_path / "outputs"))
    made = frozen(tmp_path / "outputs" / "mine", "+strategy=single", "+cluster.env.TOKEN=hidden")
    made.update_record(published={"config.json": {"eos_token_id": 2}})
    for step, loss in ((1, 0.5), (2, 0.7)):
        save(made, step, loss)
    return made


def save(run: RunDirectory, step: int, val_loss: float) -> None:
    store = CheckpointStore(run.checkpoints)
    writing = store.begin(step, attempt=0)
    files = write_tensors({"w": torch.full((4,), float(step))}, writing, None, lambda size, count: None)
    store.commit(writing, Manifest(step, files, metrics={"val_loss": val_loss}, time=1e9))


def test_mlflow_keeps_verified_checkpoints_with_aliases_and_lineage(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with mlflow_service.service() as server:
        promote_and_import(run, server.url, monkeypatch, capsys)
        tags = {tag["key"]: tag["value"] for tag in server.versions[0]["tags"]}
        assert tags["hpc_train.run_id"] == run.record()["run_id"] and '"kind": "synthetic"' in tags["hpc_train.data"]
        assert server.aliases == {"best": "1", "production": "1", "last": "2"}
        assert len(server.versions) == 2, "the same checkpoint is stored once"
        assert not any(b"hidden" in data for data in server.files.values()), "the values of cluster.env are secret"


def promote_and_import(
    run: RunDirectory, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    said = [done(capsys, ["promote", str(run.path), "--to", "mlflow", *more]) for more in (BEST, [], [])]
    assert "step 1 is version 1 of mine as production, best" in said[0]
    assert "step 2 is version 2 of mine as last" in said[1] and said[2] == said[1]
    found = json.loads(done(capsys, ["import", "mlflow:mine@production", "--to", "again", "--json"]))
    imported = RunDirectory(Path(found["path"]))
    assert found["step"] == 1 and found["lineage"]["run"] == str(run.path)
    assert imported.record()["imported_from"] == "mlflow:mine@production"
    assert published(imported) == published(run) == {"config.json": {"eos_token_id": 2}}
    assert load(imported).data == load(run).data and load(imported).cluster.env == {}
    kept = [path.read_bytes() for path in sorted((imported.checkpoints / "step-00000001").iterdir())]
    assert kept == [path.read_bytes() for path in sorted((run.checkpoints / "step-00000001").iterdir())]
    assert checkpoint.main(["verify", "again"]) == 0
    with pytest.raises(UserError, match="already exists"):
        checkpoint.main(["import", "mlflow:mine/2", "--to", "again"])
    with pytest.raises(UserError, match="cannot import"):
        checkpoint.main(["import", "mlflow:mine@nothing", "--to", "other"])
    assert not (run.path.parent / "other").exists()


BEST = ["--checkpoint", "best", "--as", "production"]


def done(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    capsys.readouterr()
    assert checkpoint.main(arguments) == 0
    printed = capsys.readouterr().out
    if "--json" in arguments:
        check_output(["checkpoint", *arguments], printed)
    return printed


@pytest.mark.long_form(60)  # the stand-in server above
def test_a_real_mlflow_server(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with real_server(tmp_path) as url:
        promote_and_import(run, url, monkeypatch, capsys)


class Artifact:
    """A stand-in for that of wandb, which copies files when they are added."""

    stored: dict[str, Artifact]

    def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
        self.name, self.metadata, self.version = f"{name}:v0", metadata, "v0"
        self.entity, self.project = "team", "hpc_train"
        self.files: dict[str, bytes] = {}

    def add_dir(self, folder: str, name: str = "") -> None:
        for path in Path(folder).iterdir():
            self.files[f"{name}/{path.name}".lstrip("/")] = path.read_bytes()

    def wait(self) -> Artifact:
        return self

    def download(self, root: str) -> None:
        for name, data in self.files.items():
            (Path(root) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(root) / name).write_bytes(data)


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Artifact]:
    """A stand-in for wandb; returns its artifacts by reference."""
    stored: dict[str, Artifact] = {}

    def log_artifact(artifact: Artifact, aliases: list[str]) -> Artifact:
        stored.update({f"team/hpc_train/mine:{alias}": artifact for alias in aliases})
        return artifact

    wandb_run = SimpleNamespace(url="https://example.org", resumed=False, log_artifact=log_artifact)
    wandb_run.finish = lambda: None
    wandb_run.define_metric = lambda name, **more: None
    module = SimpleNamespace(Artifact=Artifact, init=lambda **settings: wandb_run, Settings=dict)
    module.Api = lambda: SimpleNamespace(artifact=lambda reference, type: stored[reference])
    module.teardown = lambda: None
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(sink, "why_offline", lambda: None)
    return stored


def test_wandb_keeps_them_as_artifacts_of_the_run(
    run: RunDirectory, artifacts: dict[str, Artifact], capsys: pytest.CaptureFixture[str]
) -> None:
    done(capsys, ["promote", str(run.path), *BEST])
    assert sorted(artifacts) == ["team/hpc_train/mine:best", "team/hpc_train/mine:production"]
    assert artifacts["team/hpc_train/mine:best"].metadata["metrics"] == {"val_loss": 0.5}
    found = json.loads(done(capsys, ["import", "wandb:team/hpc_train/mine:best", "--to", "again", "--json"]))
    assert found["step"] == 1 and load(RunDirectory(Path(found["path"]))).model == load(run).model


def test_files_that_somebody_changed_are_refused(
    run: RunDirectory, artifacts: dict[str, Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done(capsys, ["promote", str(run.path)])
    stored = artifacts["team/hpc_train/mine:last"]
    for name, word in [("config.yaml", "differs from its lineage"), ("checkpoint/.metadata", "damaged")]:
        before = stored.files[name]
        stored.files[name] = b"x" + before[1:]
        with pytest.raises(UserError, match=word):
            import_reference("wandb:team/hpc_train/mine:last", "again", tmp_path, load(run))
        assert not (tmp_path / "again").exists()
        stored.files[name] = before
    with pytest.raises(UserError, match="write wandb:ENTITY/PROJECT/NAME:ALIAS"):
        import_reference("wandb:mine", "again", tmp_path, load(run))


def test_a_damaged_checkpoint_is_not_promoted(run: RunDirectory, artifacts: dict[str, Artifact]) -> None:
    metadata = run.checkpoints / "step-00000002" / ".metadata"
    metadata.write_bytes(b"x" + metadata.read_bytes()[1:])
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.main(["promote", str(run.path)])
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    with pytest.raises(UserError, match="has no checkpoint"):
        checkpoint.main(["promote", str(run.path)])
    assert artifacts == {}
