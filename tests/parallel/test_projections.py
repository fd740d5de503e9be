"""Projections that are computed together have the gradients of those that are not, wherever they are joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.models.linear_layers import JOINED, can_join
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.precision.dtypes import KeptCasts
from tests.parallel.cells import Cell
from tests.parallel.oracle import error, local_batch, mesh_of, whole
from tests.ranks import run_on_world

SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp": (2, {"dp": 2, "data_parallel": "allreduce"}),
    "ddp": (2, {"dp": 2, "data_parallel": "ddp"}),
    "1f1b": (2, {"pp": 2, "schedule": "1f1b"}),
    "zbv": (2, {"pp": 2, "schedule": "zbv", "stages_per_rank": 2}),
}
BATCH = {"global_size": 16, "micro_batches": 4}


def joined(engine: Any) -> int:
    return sum(JOINED in module.__dict__ for part in engine.parts for module in part.modules())


def differences(rank: int, _: int, chosen: list[Cell]) -> list[tuple[int, float]]:
    """Returns how many modules join their projections, and the difference of the gradients from others, in fp64."""
    found = []
    for cell in chosen:
        mesh, gradients, count = mesh_of(cell, rank), [], 0
        for joins in (False, True):
            engine: Any = build_engine(cell.config(), mesh)
            engine._casts = KeptCasts(engine.parts, torch.float64 if joins else None)
            with engine._casts.step():
                count = joined(engine)
            engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
            gradients.append({name: whole(value.grad) for name, value in engine.named_parameters().items()})
        found.append((count, error(*gradients)))
    return found


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("gpt-options", ["dp", "zbv"]),
        *(
            pytest.param(model, [*SPLITS], marks=pytest.mark.long_form(10))
            for model in ("gpt-options", "gpt", "gpt-windows", "vit")
        ),
    ],
)
def test_queries_keys_and_values_are_exact(model: str, names: list[str]) -> None:
    """With biases, norms of queries and keys, windows and a split backward."""
    for world_size in {SPLITS[name][0] for name in names}:
        splits = [SPLITS[name][1] for name in names if SPLITS[name][0] == world_size]
        chosen = [Cell(world_size, model, strategy=split, batch=BATCH) for split in splits]
        for ranks in run_on_world(world_size, differences, chosen):
            for cell, (count, difference) in zip(chosen, ranks, strict=True):
                assert count > 0, cell
                assert difference < 1e-13, cell


@pytest.mark.parametrize("mode", ["full", "ops"])
def test_a_recomputation_joins_them_too(mode: str) -> None:
    cell = Cell(1, "gpt", batch=BATCH, train={"activation_checkpointing": mode})
    [[(count, difference)]] = run_on_world(1, differences, [cell])
    assert count == 2 and difference < 1e-13


def test_tensor_parallel_ranks_and_shards_do_not_join() -> None:
    chosen = [Cell(2, "gpt", "bf16", split, BATCH) for split in ({"tp": 2}, {"dp": 2, "data_parallel": "zero2"})]
    assert run_on_world(2, counts, chosen) == [[0, 0], [0, 0]]
    assert run_on_world(1, counts, [Cell(1, "gpt", "bf16", {}, BATCH)]) == [[2]]


def counts(rank: int, _: int, chosen: list[Cell]) -> list[int]:
    """Returns how many modules join their projections in a step of each cell."""
    found = []
    for cell in chosen:
        engine: Any = build_engine(cell.config(), mesh_of(cell, rank))
        with engine._casts.step():
            found.append(joined(engine))
    return found


class Adapter(nn.Module):
    """Adds a low-rank product to a linear layer, as LoRA does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)
        self.weight = base.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.register_forward_hook(lambda _, inputs, output: 2 * output)
    return layer


def frozen(layer: nn.Linear) -> nn.Linear:
    return layer.requires_grad_(False)


@pytest.mark.parametrize("change", [Adapter, hooked, frozen, lambda layer: nn.Linear(8, 4, bias=False)])
def test_what_is_more_than_a_product_is_computed_on_its_own(change: Callable[[nn.Linear], nn.Module]) -> None:
    one, other = nn.Linear(8, 4), nn.Linear(8, 4)
    assert can_join([one, other])
    assert not can_join([one, change(other)])
