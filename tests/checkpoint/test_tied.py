"""The ``.pt`` of a user's module with tied weights loads into that module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hpc_train.checkpoint.transfer import export
from hpc_train.config.compose import typed
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from tests.checkpoint.made import quiet_bar
from tests.checkpoint.training import make_manager
from tests.config.composing import compose
from tests.ranks import run_on_world
from tests.train.runs import TINY

TIED_MODEL = ("model=custom", f"model._target_={__name__}.Tied", "model.class_dim=last")


class Tied(nn.Module):
    """Predicts the next token; its output layer has the table of its embedding, and a norm is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.first = self.second = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 32, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(self.embed(inputs).transpose(1, 2))
        return self.out(self.second(hidden).transpose(1, 2))


def save(rank: int, world_size: int, path: str) -> None:
    make_manager(rank, world_size, path).save(7, {"tokens": 9, "loss_scale": None}, final=True)


@pytest.mark.long_form(5, cases=["dp"])
@pytest.mark.parametrize("strategy", ["dp", "zero3"])
def test_the_file_has_every_name_and_each_tensor_once(tmp_path: Path, strategy: str) -> None:
    run = RunDirectory(tmp_path / "run")
    others = [override for override in TINY if not override.startswith("model.")]
    freeze(typed(compose([*others, *TIED_MODEL, f"+strategy={strategy}"])), run)
    run_on_world(2, save, str(run.path))
    export(run, None, tmp_path / "model.pt", None, None, quiet_bar)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    module = Tied()
    module.load_state_dict(state)
    assert module.out.weight is module.embed.weight
    for alias, name in (("out.weight", "embed.weight"), ("second.running_mean", "first.running_mean")):
        assert state[alias].untyped_storage().data_ptr() == state[name].untyped_storage().data_ptr()
