"""Half precision gives the same numbers under every strategy, whether it casts the parameters or autocast does.

Where a rank keeps casts of whole weights, it computes queries, keys and values together, and rounds the gradient of
their input once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hpc_train.config.schema import Config, PrecisionConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.parallelize import apply_loss_form, materialize
from hpc_train.parallel.precision.dtypes import KeptCasts, autocast, choose_tf32, compute_dtype, set_hidden_dtype
from tests.parallel.cells import Cell
from tests.parallel.oracle import error, global_batch, local_batch, mesh_of, whole
from tests.ranks import run_on_world

Gradients = dict[str, Tensor]
SPLITS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "ddp": {"dp": 2, "data_parallel": "ddp"},
    "zero1": {"dp": 2, "data_parallel": "zero1"},
    "zero2": {"dp": 2, "data_parallel": "zero2"},
    "zero3": {"dp": 2, "data_parallel": "zero3"},
    "pp": {"pp": 2, "schedule": "1f1b"},
}
SUMMED_BY_ROW = ("embedding", "class_token")  # gradients that ZeRO sums over tokens or samples in the compute dtype


def config_of(cell: Cell, residual: str) -> Config:
    config = cell.config()
    precision = PrecisionConfig(name=cell.precision, residual=residual)
    return replace(config, precision=precision, model=replace(config.model, n_layers=2))


def cell_of(model: str, split: dict[str, Any], precision: str = "bf16", **train: Any) -> Cell:
    """Returns a cell whose micro-batches have two samples, so that all products have the same shapes."""
    return Cell(2, model, precision, split, {"global_size": 8, "micro_size": 2}, train)


def first_step(rank: int, cell: Cell, residual: str) -> tuple[float, Gradients]:
    mesh = mesh_of(cell, rank)
    engine = build_engine(config_of(cell, residual), mesh)
    result = engine.reduce(engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0)))
    return result.loss, {name: whole(value.grad) for name, value in engine.named_parameters().items()}


def alone(cell: Cell, residual: str, keeps: bool) -> tuple[float, Gradients]:
    """Returns the loss and gradients of one process, in micro-batches of two samples.

    Args:
        keeps: whether it keeps the casts of the weights.
    """
    config = config_of(cell, residual)
    model: Any = build_model(config.model, config.train.seed)
    materialize(model, torch.device("cpu"), config.train.seed, torch.float32)
    set_hidden_dtype(model, config.precision)
    apply_loss_form(model, loss_form(config, cell.layout()))
    inputs, targets = global_batch(cell, 0)
    count, total = int((targets != IGNORED).sum()), 0.0
    with KeptCasts([model], compute_dtype(cell.precision) if keeps else None).step():
        for part, wanted in zip(inputs.split(2), targets.split(2), strict=True):
            with autocast(cell.precision, inputs.device):
                loss, _ = model(part, {}, wanted)
            (loss / count).backward()
            total += loss.item()
    return total / count, {name: value.grad for name, value in model.named_parameters()}


def differences(rank: int, _: int, chosen: list[Cell], residual: str) -> list[tuple[float, float, float]]:
    """Returns the relative differences of loss, gradients and gradients ``SUMMED_BY_ROW`` from one process."""
    references = {keeps: alone(chosen[0], residual, keeps) for keeps in (False, True)}
    found = []
    for cell in chosen:
        wanted, expected = references[not cell.layout().shards_state]
        loss, gradients = first_step(rank, cell, residual)
        rows = {name for name in gradients if any(part in name for part in SUMMED_BY_ROW)}
        of_rows = error({name: gradients[name] for name in rows}, expected) if rows else 0.0
        of_others = error({name: value for name, value in gradients.items() if name not in rows}, expected)
        found.append((abs(loss - wanted) / wanted, of_others, of_rows))
    return found


@pytest.mark.long_form(10, cases=["gpt-compute", "vit-fp32"])
@pytest.mark.parametrize("residual", ["compute", "fp32"])
@pytest.mark.parametrize("model", ["gpt", "vit"])
def test_bf16_is_the_same_under_every_strategy(model: str, residual: str) -> None:
    _compare([cell_of(model, split) for split in SPLITS.values()], residual)


@pytest.mark.long_form(10)
def test_bf16_is_the_same_under_every_strategy_if_the_loss_computes_its_gradients() -> None:
    _compare([cell_of("gpt", split, loss_chunks=3) for split in SPLITS.values()], "compute")


def _compare(chosen: list[Cell], residual: str) -> None:
    for ranks in run_on_world(2, differences, chosen, residual):
        for name, (of_loss, of_gradients, by_row) in zip(SPLITS, ranks, strict=True):
            assert max(of_loss, of_gradients) < 1e-6, name
            assert by_row < 0.01, name


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_set_for_products_and_convolutions_on_gpus_only(tf32: bool) -> None:
    with mock.patch.object(torch, "set_float32_matmul_precision") as chosen, torch.backends.cudnn.flags():
        torch.backends.cudnn.allow_tf32 = not tf32
        choose_tf32(PrecisionConfig(tf32=tf32), torch.device("cpu"))
        assert not chosen.called and torch.backends.cudnn.allow_tf32 is not tf32
        choose_tf32(PrecisionConfig(tf32=tf32), torch.device("cuda", 0))
        chosen.assert_called_once_with("high" if tf32 else "highest")
        assert torch.backends.cudnn.allow_tf32 is tf32
