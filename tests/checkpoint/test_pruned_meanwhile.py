"""Commands that read the checkpoints of a live run, which removes them meanwhile; and files that nobody reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_train import cli
from hpc_train.checkpoint import listing, transfer
from hpc_train.checkpoint.reader import StoredTensors
from hpc_train.checkpoint.store import CheckpointStore, Retention
from hpc_train.config.evaluation import LOWEST_LOSS
from hpc_train.config.schema import CustomModelConfig
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.made import commit, is_complete, quiet_bar


def save(run: RunDirectory, step: int) -> None:
    commit(run, step, {"model.weight": torch.full((40, 10), float(step))})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(transfer, "_model", lambda run: (CustomModelConfig(), 8))
    run = RunDirectory(tmp_path / "mine")
    save(run, 1)
    return run


def goes_on(run: RunDirectory) -> None:
    """Saves the next checkpoint and keeps only that."""
    store = CheckpointStore(run.checkpoints)
    newest = store.newest()
    assert newest is not None
    save(run, newest.step + 1)
    store.prune(Retention(1), attempt=0)


@pytest.mark.parametrize("moment", ["verifying", "reading"])
@pytest.mark.parametrize("times", [1, 3])
def test_an_export_takes_the_next_checkpoint(
    run: RunDirectory, tmp_path: Path, moment: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [times]

    def disturbed(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            if left[0]:
                left[0] -= 1
                goes_on(run)
            return function(*arguments, **named)

        return call

    if moment == "verifying":
        monkeypatch.setattr(transfer, "verified_manifest", disturbed(transfer.verified_manifest))
    else:
        monkeypatch.setattr(StoredTensors, "read", disturbed(StoredTensors.read))
    to = tmp_path / "model.pt"
    assert transfer.export(run, None, to, "pt", None, quiet_bar)["step"] == 1 + times
    assert torch.load(to)["weight"].unique().tolist() == [float(1 + times)]
    left[0] = 1
    with pytest.raises(UserError, match="has no checkpoint of step"):
        transfer.export(run, 1 + times, tmp_path / "other.pt", "pt", None, quiet_bar)
    left[0] = 100
    with pytest.raises(UserError, match="faster than they can be exported"):
        transfer.export(run, None, tmp_path / "third.pt", "pt", None, quiet_bar)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "model.pt"]


def test_damage_is_still_damage(run: RunDirectory, tmp_path: Path) -> None:
    next((run.checkpoints / "step-00000001").glob("*.distcp")).write_bytes(b"x")
    with pytest.raises(UserError, match="is damaged"):
        transfer.export(run, None, tmp_path / "model.pt", "pt", None, quiet_bar)


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_removed_checkpoint_is_not_called_damaged(
    run: RunDirectory, action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, 2)
    read = listing.read_manifest

    def disturbed(path: Path) -> object:
        if path.name == "step-00000001" and next(calls, False):
            goes_on(run)
        return read(path)

    calls = iter([action == "list", action == "verify", False])
    monkeypatch.setattr(listing, "read_manifest", disturbed)
    assert cli.run(["checkpoint", action, str(run.path), "--json"]) == 0
    shown = capsys.readouterr()
    found = [(item["step"], item["problem"]) for item in json.loads(shown.out)]
    assert found == ([] if action == "list" else [(3, None)])
    assert ("removed its checkpoint of step 1 meanwhile" in shown.err) == (action == "verify")


def test_the_best_checkpoint_is_found_beside_those_that_cannot_be_read(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, loss in ((2, 0.5), (3, 0.1)):
        save(run, step)
        rewrite(run.checkpoints / f"step-{step:08d}", {"val_loss": loss})
    (run.checkpoints / "step-00000003" / "manifest.json").unlink()
    assert listing.choose_by_name(run, "best", LOWEST_LOSS).step == 2
    assert "the checkpoint of step 3 is skipped: manifest.json" in capsys.readouterr().err
    read = listing.read_manifest

    def disturbed(path: Path) -> object:
        if path.name == "step-00000001" and path.exists():
            shutil.rmtree(path)  # as a run that prunes
        return read(path)

    monkeypatch.setattr(listing, "read_manifest", disturbed)
    assert listing.choose_by_name(run, "best", LOWEST_LOSS).step == 2
    assert "step 1 is not" not in capsys.readouterr().err


def rewrite(checkpoint: Path, metrics: dict[str, float]) -> None:
    """Sets the results of an evaluation in a manifest."""
    manifest = replace(listing.read_manifest(checkpoint), metrics=metrics)
    (checkpoint / "manifest.json").write_bytes(manifest.encode())


def test_a_foreign_file_is_told_and_harmless(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    (run.checkpoints / "step-00000001" / "notes.txt").write_text("do not delete")
    assert cli.run(["checkpoint", "verify", str(run.path)]) == 0
    assert "intact (all bytes checked); files that do not belong to it: notes.txt" in " ".join(
        capsys.readouterr().out.split()
    )
    newest = CheckpointStore(run.checkpoints).newest()
    assert newest is not None and is_complete(newest)
