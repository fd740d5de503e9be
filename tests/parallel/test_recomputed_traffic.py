"""How many collectives of tensor parallelism a layer repeats in its backward, as ``plan`` assumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.parallel.build import build_engine
from tests.parallel.cells import Cell
from tests.parallel.oracle import local_batch, mesh_of
from tests.ranks import run_on_world

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls[str(function).split(".")[1]] += 1
        return function(*args, **(kwargs or {}))


def collectives(rank: int, _: int, one: Cell, layers: int) -> dict[str, int]:
    """Returns the calls of collectives in a step of a model with so many layers."""
    config, mesh = one.config(), mesh_of(one, rank)
    model: Any = replace(config.model, n_layers=layers)  # type: ignore[call-arg]
    engine = build_engine(replace(config, model=model), mesh)
    batch = local_batch(one, mesh.layout, mesh.dp_rank, 0)
    with _Counted() as counted:
        engine.train_step(0, batch)
    return {name: counted.calls[name] // len(batch.micro_batches) for name in (GATHER, SCATTER)}


@pytest.mark.long_form(6)
def test_cheap_operations_repeat_the_collectives_of_a_layer_as_a_whole_layer_does() -> None:
    strategy = {"tp": 2, "data_parallel": "allreduce"}
    of_layer = {}
    for mode in ("none", "ops", "full"):
        one = Cell(2, "gpt", strategy=strategy, train={"activation_checkpointing": mode})
        few, many = (run_on_world(2, collectives, one, layers)[0] for layers in (2, 3))
        of_layer[mode] = {name: many[name] - few[name] for name in many}
    assert of_layer["none"] == {GATHER: 4, SCATTER: 4}
    assert of_layer["ops"] == of_layer["full"] == {GATHER: 6, SCATTER: 5}
