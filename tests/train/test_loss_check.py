"""Before the first step: a loss that depends on the split of a batch is reported, and no other; nothing changes.

The rehearsal finds nothing in these models, whose gradients are those of one process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.config.schema import Config, CustomModelConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.data.feed import example_micro_batch
from hpc_train.errors import UserError
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.train.guard import CheckedWrites, check_loss
from hpc_train.train.rehearsal import rehearse
from tests.parallel.cells import CLASSES, IMAGE, Cell
from tests.parallel.module import Tiny
from tests.parallel.oracle import Record, mesh_of, train_engine
from tests.ranks import run_on_world
from tests.train.test_guard import dataset_of


class Undeclared(Tiny):
    """A contrastive loss of the samples of a micro-batch."""

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        kept = outputs[targets != IGNORED]
        return (kept @ kept.T).logsumexp(1).sum(), len(kept)


class Mean(Tiny):
    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(outputs, targets, ignore_index=IGNORED), 1


class Attending(Tiny):
    """Attends to the other samples of the batch, with a built-in loss."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return (5 * outputs @ outputs.T).softmax(1) @ outputs


class Random(Tiny):
    """Draws noise in evaluation mode as well, drops features in training, and tracks batch statistics."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, batch_norm=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.dropout(super().forward(inputs))
        return outputs + torch.randn_like(outputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        kept = targets != IGNORED
        return F.cross_entropy(outputs[kept], targets[kept], reduction="sum"), int(kept.sum())


class Dropping(Random):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.dropout(Tiny.forward(self, inputs))


class Stateful(Dropping):
    """Changes a number, a tensor and a buffer with every call."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.calls, self.scale = 0, torch.ones(())
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        self.scale = self.scale + 1
        self.seen += 1
        total, count = super().loss(outputs, targets)
        return total * (self.calls + float(self.scale) + float(self.seen)), count


class FixedSize(Tiny):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        return outputs.view(5, CLASSES)


class BrokenDevice(Tiny):
    """Fails as on a GPU with an uncorrectable memory error, at the first half of a micro-batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        if len(outputs) < 5:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        return outputs


class NaNCount(Tiny):
    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.sum(), outputs.sum().detach() * float("nan")


class NegativeCount(Tiny):
    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs.sum(), outputs.new_tensor(-3.0)


EXAMPLE = "examples.own_loss.ClassifyingAutoencoder"


def config_of(cell: Cell, name: str | None) -> Config:
    config = cell.config()
    if name is not None:
        config.model = CustomModelConfig(_target_=f"{__name__}.{name}", args={"classes": CLASSES})
    if name == EXAMPLE:
        config.model = CustomModelConfig(_target_=EXAMPLE, args={"image_size": IMAGE, "n_classes": CLASSES})
    return config


def trained(cell: Cell, mesh: Mesh, name: str | None, check: bool) -> tuple[Record, str | None]:
    torch.manual_seed(1)
    engine = build_engine(config_of(cell, name), mesh)
    before, warning = torch.get_rng_state(), None
    if check:
        if engine.check_loss:
            warning = check_loss(engine, dataset_of(cell), mesh, cell.precision).warning
        found = rehearse(config_of(cell, name), mesh, engine, example_micro_batch(dataset_of(cell), mesh.layout, CPU))
        assert found.not_compared in (None, "no rank computes all of the model", GATHERS), found
        assert (found.attributes == ["calls", "scale"]) == (name == "Stateful"), found
        engine = CheckedWrites(engine, mesh)
    assert torch.equal(before, torch.get_rng_state())
    return train_engine(cell, mesh, engine), warning


CPU = torch.device("cpu")
GATHERS = "the loss compares the samples of all ranks"


def warnings_of(rank: int, world_size: int, cases: list[tuple[Cell, str | None]]) -> list[str | None]:
    """The warning of each case, whose training must have the same bits as without the check."""
    found = []
    for cell, name in cases:
        mesh = mesh_of(cell, rank)
        plain, _ = trained(cell, mesh, name, check=False)
        record, warning = trained(cell, mesh, name, check=True)
        assert (record.losses, record.norms, record.evaluation) == (plain.losses, plain.norms, plain.evaluation), name
        assert all(torch.equal(record.parameters[key], value) for key, value in plain.parameters.items()), name
        found.append(warning)
    return found


def dp(kind: str = "ddp", **fields: Any) -> Cell:
    return Cell(2, "custom", strategy={"dp": 2, "data_parallel": kind}, **fields)


def pp(model: str, schedule: str, stages: int) -> Cell:
    return Cell(2, model, strategy={"pp": 2, "schedule": schedule, "stages_per_rank": stages})


@pytest.mark.long_form(25, every_share=True)
def test_a_loss_that_depends_on_the_split_is_reported_and_no_other() -> None:
    cases: dict[str, tuple[Cell, str | None]] = {
        "contrastive": (dp(), "Undeclared"),
        "contrastive in fp32": (dp("zero3", precision="fp32"), "Undeclared"),
        "mean": (dp("zero2"), "Mean"),
        "attending": (dp("allreduce"), "Attending"),
        "fixed size": (dp("zero3"), "FixedSize"),
        "random": (dp(batch={"global_size": 8}), "Random"),
        "dropout": (dp(batch={"global_size": 8}), "Dropping"),
        "stateful": (dp(batch={"global_size": 8}), "Stateful"),
        "single samples": (dp(batch={"global_size": 2}), None),
        "built-in": (dp("zero1"), None),
        "weights": (replace(dp("zero3"), model="custom-weighted"), None),
        "heads": (replace(dp(), model="custom-heads"), None),
        "autoencoder": (replace(dp("zero2"), model="custom-vae"), None),
        "example": (dp("zero3", batch={"micro_batches": 2}), EXAMPLE),
        "declared": (replace(dp(), model="custom-contrastive"), None),
        "pipeline": (pp("gpt-heads", "1f1b", 1), None),
        "pipeline in a V": (pp("gpt-weighted", "zbv", 2), None),
        "built-in parts": (pp("gpt", "gpipe", 1), None),
    }
    first, second = run_on_world(2, warnings_of, list(cases.values()), timeout=300)
    assert first == second
    found = dict(zip(cases, first, strict=True))
    for name in ("contrastive", "contrastive in fp32", "mean", "attending"):
        assert "declare it as loss(self, outputs, targets, gather)" in (found.pop(name) or ""), name
    assert "half a micro-batch fails: RuntimeError" in (found.pop("fixed size") or "")
    assert {name for name, warning in found.items() if warning} == set(), found


def raised(rank: int, world_size: int, cases: dict[str, type[Exception]]) -> list[str]:
    found = []
    for name, kind in cases.items():
        cell = Cell(1, "custom")
        mesh = mesh_of(cell, rank)
        with pytest.raises(kind) as problem:
            check_loss(build_engine(config_of(cell, name), mesh), dataset_of(cell), mesh, "fp64")
        found.append(str(problem.value))
    return found


def test_a_count_that_cannot_divide_is_refused_and_an_error_of_the_device_is_no_warning() -> None:
    cases = {"NaNCount": UserError, "NegativeCount": UserError, "BrokenDevice": RuntimeError}
    ((nan, negative, broken),) = run_on_world(1, raised, cases)
    assert "not a number" in nan and "-3" in negative and "uncorrectable ECC" in broken
    assert all("set in: the method loss of the model" in message for message in (nan, negative))
