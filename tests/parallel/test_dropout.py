"""Dropout under tensor parallelism: independent for different tokens, and equal where the ranks hold the same ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import seed_micro_batch
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.step import TrainStep
from tests.parallel.cells import Cell
from tests.parallel.oracle import local_batch, mesh_of
from tests.ranks import run_on_world


def dropped(rank: int, _: int, cell: Cell) -> list[list[bool]]:
    """Which elements each dropout of one training step set to 0 on this rank."""
    config, mesh = cell.config(), mesh_of(cell, rank)
    config.model.dropout = 0.5
    engine = build_engine(config, mesh)
    found: list[list[bool]] = []

    def record(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        before, after = (value.to_local() if isinstance(value, DTensor) else value for value in (inputs[0], output))
        found.append(((after == 0) & (before != 0)).flatten().tolist())

    for part in engine.parts:
        for module in part.modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(record)
    step = TrainStep(config, mesh, engine, Optimizer(config.optim, engine.named_parameters()), 5)
    step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
    return found


@pytest.mark.parametrize(("model", "same"), [("gpt", False), ("vit", True)])
def test_tensor_parallel_ranks_drop_the_same_elements_only_of_the_same_tokens(model: str, same: bool) -> None:
    strategy: dict[str, Any] = {"tp": 2}
    first, second = run_on_world(2, dropped, Cell(2, model, "fp32", strategy))
    assert len(first) >= 5 and all(any(mask) for mask in first)
    assert [one == other for one, other in zip(first, second, strict=True)] == [same] * len(first)


def test_a_model_may_draw_from_the_generators_of_python_and_numpy() -> None:
    def drawn(step: int) -> tuple[float, ...]:
        seed_micro_batch(2**63 - 1, step, 1, torch.device("cpu"))
        return random.random(), np.random.random(), torch.rand(()).item()

    first, again, other = drawn(3), drawn(3), drawn(4)
    assert first == again
    assert not {*first} & {*other}
