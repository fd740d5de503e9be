"""What a run or a fork takes over from a checkpoint, bit for bit, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.tensors import assert_same_bits, read_tensors
from tests.checkpoint.training import make_manager
from tests.ranks import run_on_world
from tests.train.runs import frozen

TIED = "model.tied_embeddings=true"


def save_made_up(rank: int, world_size: int, path: str) -> None:
    """Saves initial parameters and an optimizer state that differs from parameter to parameter and row to row."""
    manager = make_manager(rank, world_size, path)
    for name, tensors in manager.optimizer.named_state().items():
        for key, tensor in tensors.items():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.add_(len(name) + len(key))
    manager.save(7, {"tokens": 9, "loss_scale": None})


def restore_and_save(rank: int, world_size: int, path: str) -> dict[str, Any]:
    manager = make_manager(rank, world_size, path)
    restored = manager.restore()
    assert restored is not None
    manager.save(8, restored.extra)
    return {"step": restored.step, "extra": restored.extra, "with_optimizer": restored.with_optimizer}


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=pp", TIED)
    run_on_world(2, save_made_up, str(run.path))
    names = read_tensors(run.checkpoints / "step-00000007")
    assert "model.stem.embedding.weight" in names
    assert not [name for name in names if "head.output" in name]


def fork(path: Path, source: RunDirectory, *overrides: str) -> RunDirectory:
    run = frozen(path, *overrides)
    run.update_record(forked_from=str(source.path))
    return run


def test_a_fork_begins_with_the_state_of_its_source(tmp_path: Path) -> None:
    source = frozen(tmp_path / "source", "+strategy=single")
    run_on_world(1, save_made_up, str(source.path))
    run = fork(tmp_path / "fork", source, "+strategy=dp")
    everything = {"step": 7, "extra": {"tokens": 9, "loss_scale": None}, "with_optimizer": True}
    assert run_on_world(2, restore_and_save, str(run.path)) == [everything] * 2
    assert_same_bits(source.checkpoints / "step-00000007", run.checkpoints / "step-00000008")
    assert [path.name for path in source.checkpoints.iterdir()] == ["step-00000007"]


@pytest.mark.long_form(8)
@pytest.mark.parametrize("optimizer", ["optim=sgd", "optim._target_=torch.optim.RMSprop"])
def test_a_fork_with_another_optimizer_takes_the_model_only(tmp_path: Path, optimizer: str) -> None:
    source = frozen(tmp_path / "source", "+strategy=single")
    run_on_world(1, save_made_up, str(source.path))
    run = fork(tmp_path / "fork", source, "+strategy=dp", optimizer)
    assert run_on_world(2, restore_and_save, str(run.path))[0]["with_optimizer"] is False
    before = read_tensors(source.checkpoints / "step-00000007")
    after = read_tensors(run.checkpoints / "step-00000008")
    assert all(torch.equal(before[name], after[name]) for name in after if name.startswith("model."))
    assert all(not after[name].any() for name in after if name.startswith("optim."))


def restore_error(rank: int, world_size: int, path: str) -> str:
    manager = make_manager(rank, world_size, path)
    with pytest.raises(UserError) as caught:
        manager.restore()
    return str(caught.value)


def test_another_model_is_refused_with_all_differences_in_one_message(tmp_path: Path) -> None:
    source = frozen(tmp_path / "source", "+strategy=single")
    run_on_world(1, save_made_up, str(source.path))
    changes = ("model.n_layers=3", "model.vocab_size=64", TIED)
    run = fork(tmp_path / "fork", source, "+strategy=dp", *changes)
    first, second = run_on_world(2, restore_error, str(run.path))
    assert first == second
    assert "only in the checkpoint" in first
    assert "layers.3." in first
    assert "model.stem.embedding.weight: [32, 16] float32 in the checkpoint, [64, 16] float32 in the run" in first
