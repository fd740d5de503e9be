"""Notices and refusals of settings that would waste a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpc_train.config.compose import typed
from hpc_train.config.evaluation import check_evaluation
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.user_code import check_targets
from hpc_train.parallel.build import build_engine
from tests.config.composing import compose
from tests.data.layouts import replicas


class Regression(nn.Linear):
    def __init__(self, trains: bool = True) -> None:
        super().__init__(4, 4)
        self.requires_grad_(trains)


class OwnLoss(nn.Linear):
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (outputs - targets).square().sum(), len(outputs)


CUSTOM = ["model=custom", f"model._target_={__name__}.Regression"]


def config(*overrides: str) -> Config:
    return typed(compose([*overrides]))


def notes(*overrides: str) -> tuple[str, ...]:
    return resolve_layout(config(*overrides), 1, 1).notes


def test_a_warmup_that_is_longer_than_the_run_is_told() -> None:
    (note,) = notes("train.steps=10", "optim.warmup_steps=2000")
    assert note == "the learning rate never reaches optim.lr: optim.warmup_steps=2000, but the run has 10 steps"
    assert notes("train.steps=10", "optim.warmup_steps=10") == notes("train.epochs=1") == ()


def test_a_model_of_the_user_without_data_is_told(tmp_path: Path) -> None:
    (note,) = notes(*CUSTOM)
    assert "source of Python's standard library" in note
    assert notes(*CUSTOM, "data=synthetic") == notes(*CUSTOM, f"data.path={tmp_path}") == notes() == ()


@pytest.mark.parametrize(("name", "loss"), [("Regression", "mse"), ("OwnLoss", "cross_entropy")])
def test_a_metric_that_the_loss_lacks_is_refused(name: str, loss: str) -> None:
    model = ["model=custom", f"model._target_={__name__}.{name}", f"model.loss={loss}", "train.eval_every=5"]
    with pytest.raises(UserError, match="val_accuracy, which no evaluation computes"):
        check_evaluation(config(*model, "checkpoint.keep_best=val_accuracy"))
    stopping = config(*model, "+hooks=early_stopping", "hooks.early_stopping.args.monitor=val_accuracy")
    with pytest.raises(UserError, match="val_accuracy, which no evaluation computes"):
        check_targets(stopping, replicas(1, 4))
    check_evaluation(config(*model, "checkpoint.keep_best=val_loss"))
    check_evaluation(config(*CUSTOM, "model.loss=cross_entropy", "checkpoint.keep_best=val_accuracy"))


def test_a_model_without_trained_parameters_is_refused() -> None:
    layout = replicas(1, 4)
    mesh: Any = SimpleNamespace(layout=layout, replica=SimpleNamespace(dp_cp_rank=0, layout=layout))
    with pytest.raises(UserError, match="no parameters that are trained: all have requires_grad=False"):
        build_engine(config(*CUSTOM, "+model.args.trains=false"), mesh)
    with pytest.raises(UserError, match="it has no parameters"):
        build_engine(config("model=custom", "model._target_=torch.nn.Identity"), mesh)
