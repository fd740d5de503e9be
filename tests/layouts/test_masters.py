"""Weights in bf16 with fp32 masters: the same numbers under every strategy, checkpoints in fp32, and refusals.

Each layout adds two gradients, which round to the same sum in bf16 wherever they are added, so it can be compared with
one process more closely than bf16 rounds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.config.schema import Config, OptimConfig, PrecisionConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.masters import local_part, master_of, saved_value
from hpc_train.parallel.parallelise import apply_loss_form, materialise
from hpc_train.parallel.precision import autocast, set_hidden_dtype
from hpc_train.plan.loss_chunks import loss_form
from hpc_train.train.optimizer import Optimizer
from tests.layouts.cells import Cell
from tests.layouts.oracle import error, global_batch, local_batch, mesh_of, whole
from tests.ranks import run_on_world

CPU = torch.device("cpu")
STEPS, RATE, MAX_NORM = 2, 1e-2, 0.05
SPLITS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "allreduce": {"dp": 2, "data_parallel": "allreduce"},
    "zero1": {"dp": 2, "data_parallel": "zero1"},
    "zero2": {"dp": 2, "data_parallel": "zero2"},
    "zero3": {"dp": 2, "data_parallel": "zero3"},
    "offload": {"dp": 2, "offload": "optimizer"},
    "offload-zero2": {"dp": 2, "data_parallel": "zero2", "offload": "optimizer"},
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "gpipe": {"pp": 2, "schedule": "gpipe"},
}
BY_ROW = ("embedding", "class_token")  # whose gradients ZeRO sums over tokens or samples in another order
Values = dict[str, Tensor]


def config_of(cell: Cell) -> Config:
    config = cell.config()
    return replace(
        config,
        precision=PrecisionConfig(name=cell.precision, weights="bf16"),
        optim=OptimConfig(lr=RATE, eps=1e-3),  # a larger epsilon, or noise in tiny gradients would become full steps
        model=replace(config.model, n_layers=4),
    )


def cell_of(model: str, split: dict[str, Any]) -> Cell:
    return Cell(2, model, "bf16", split, {"global_size": 4, "micro_size": 2})


def alone(cell: Cell) -> tuple[Values, Values]:
    """Returns the first gradients and the last masters of a plain loop with torch's clipping and AdamW."""
    config = config_of(cell)
    model: Any = build_model(config.model, config.train.seed)
    materialise(model, CPU, config.train.seed, torch.float32)
    set_hidden_dtype(model, config.precision)
    apply_loss_form(model, loss_form(config, cell.layout()))
    masters = {name: nn.Parameter(value.detach().clone()) for name, value in model.named_parameters()}
    decays = {decays: [each for each in masters.values() if (each.ndim >= 2) is decays] for decays in (True, False)}
    groups = [{"params": some, "weight_decay": 0.1 if key else 0.0} for key, some in decays.items()]
    adamw, first = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-3), dict[str, Tensor]()
    model.to(torch.bfloat16)
    for step in range(STEPS):
        model.zero_grad()
        inputs, targets = global_batch(cell, step)
        count = int((targets != IGNORED).sum())
        for part, wanted in zip(inputs.split(2), targets.split(2), strict=True):
            with autocast("bf16", CPU):
                loss, _ = model(part, {}, wanted)
            (loss / count).backward()
        gradients = {name: value.grad for name, value in model.named_parameters()}
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        norm = torch.stack([gradient.float().norm() for gradient in gradients.values()]).norm()
        factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1).bfloat16()
        for name, gradient in gradients.items():
            masters[name].grad = (gradient * factor).float()
        adamw.step()
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(masters[name])
    return first, {name: value.detach() for name, value in masters.items()}


def trained(rank: int, cell: Cell) -> tuple[Values, Values]:
    config, mesh = config_of(cell), mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    offload = config.strategy.offload == "optimizer"
    optimizer, first = Optimizer(config.optim, engine.named_parameters(), offload), dict[str, Tensor]()
    for step in range(STEPS):
        engine.train_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
        grads = {name: value.grad for name, value in engine.named_parameters().items()}
        assert {gradient.dtype for gradient in grads.values() if gradient is not None} == {torch.bfloat16}
        first = first or {name: whole(gradient).clone() for name, gradient in grads.items()}
        optimizer.step(RATE, engine.clip_grad_norm_(MAX_NORM).isfinite())
    for value in engine.named_parameters().values():
        master = master_of(value)
        assert master is not None and master.dtype == torch.float32
        assert torch.equal(local_part(value), local_part(master).bfloat16())
    saved = {name: saved_value(value) for name, value in engine.named_parameters().items()}
    return first, {name: whole(value) for name, value in saved.items()}


def differences(rank: int, _: int, chosen: list[Cell]) -> list[tuple[float, float, float]]:
    """Returns the relative differences of the first gradients, of the last masters, and of the gradients ``BY_ROW``."""
    found = []
    for cell in chosen:
        wanted, last = alone(cell)
        gradients, masters = trained(rank, cell)
        rows = {name for name in gradients if any(part in name for part in BY_ROW)}
        others = {name: value for name, value in gradients.items() if name not in rows}
        by_row = error({name: gradients[name] for name in rows}, wanted) if rows else 0.0
        found.append((error(others, wanted), error(masters, last), by_row))
    return found


@pytest.mark.parametrize("model", ["gpt", "gpt-tied", "vit"])
def test_bf16_weights_are_the_same_under_every_strategy(model: str) -> None:
    chosen = [cell_of(model, split) for split in SPLITS.values()]
    for ranks in run_on_world(2, differences, chosen):
        for name, (of_gradients, of_masters, by_row) in zip(SPLITS, ranks, strict=True):
            assert of_gradients < 1e-6, name
            assert by_row < 0.01, name
            assert of_masters < (1e-6 if by_row < 1e-6 else 0.005), name
