"""Parts that a constructor or a hook has put into evaluation mode stay there, under every engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.config.schema import CustomModelConfig
from hpc_train.models.wrapped import WrappedModel, begin_training, parts_in_evaluation
from hpc_train.parallel.build import build_engine
from tests.parallel.cells import CLASSES, IMAGE, Cell
from tests.parallel.module import NormedNet, Tiny
from tests.parallel.oracle import error, local_batch, mesh_of, relative, train_engine, train_plainly
from tests.ranks import run_on_world


class FrozenNorm(Tiny):
    """Normalizes by fixed statistics, and does not drop in a part that evaluates."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, batch_norm=True)
        assert isinstance(self.norm, nn.BatchNorm2d)
        self.norm.running_mean.fill_(0.25)  # type: ignore[union-attr]
        self.norm.running_var.fill_(2)  # type: ignore[union-attr]
        self.frozen = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.5))
        for part in (self.norm, self.frozen):
            part.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs + self.frozen(inputs))
        return outputs


class FrozenLayer(NormedNet):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.layers["1"].norm.eval()


@dataclass(frozen=True)
class FrozenCell(Cell):
    def _model(self) -> CustomModelConfig:
        if self.model == "custom":
            return CustomModelConfig(_target_=f"{__name__}.FrozenNorm", args={"classes": CLASSES})
        sizes = {"width": 16, "image_size": IMAGE, "n_classes": CLASSES}
        return CustomModelConfig(_target_=f"{__name__}.FrozenLayer", args=sizes)


def differences(rank: int, world_size: int, cells: list[Cell]) -> list[float]:
    """The largest error of each cell against a plain loop that leaves the modes alone."""
    found = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        engine.eval_step(local_batch(cell, mesh.layout, mesh.dp_rank, 0))
        assert parts_in_evaluation(engine.parts[0]) == ["norm", "frozen"]
        expected = train_plainly(replace(cell, world_size=1, strategy={}))
        record = train_engine(cell, mesh, engine)
        found.append(max(error(record.parameters, expected.parameters), relative(record.losses, expected.losses)))
        assert torch.equal(engine.named_buffers()["norm.running_mean"], torch.full((6,), 0.25, dtype=torch.float64))
    return found


def cell(**strategy: Any) -> FrozenCell:
    return FrozenCell(strategy.get("dp", 1), "custom", strategy=strategy, batch={"global_size": 8})


def test_parts_stay_in_evaluation_mode_and_train_as_in_a_plain_loop() -> None:
    (single,) = run_on_world(1, differences, [cell()])
    several, _ = run_on_world(2, differences, [cell(dp=2, data_parallel=kind) for kind in ("ddp", "zero3")])
    assert max(*single, *several) < 1e-10


def modes_of_stages(rank: int, world_size: int) -> list[str]:
    cell = FrozenCell(2, "own", strategy={"pp": 2, "schedule": "1f1b", "stages_per_rank": 1}, batch={"global_size": 8})
    mesh = mesh_of(cell, rank)
    engine = build_engine(cell.config(), mesh)
    engine.eval_step(local_batch(cell, mesh.layout, mesh.dp_rank, 0))
    return [name for part in engine.parts for name in parts_in_evaluation(part)]


def test_stages_of_a_pipeline_keep_the_modes() -> None:
    first, second = run_on_world(2, modes_of_stages)
    assert first + second == ["layers.1.norm"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_model_that_evaluates_as_a_whole_trains_as_a_whole(wrapped: bool) -> None:
    bare = FrozenNorm(CLASSES).eval()
    model = WrappedModel(bare, "cross_entropy") if wrapped else bare
    begin_training(model)
    assert all(module.training for module in bare.modules())
