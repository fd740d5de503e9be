"""Targets of a user's dataset that are no class of the model: refused with the sample that has them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpc_train.config.schema.data import OwnKeys
from hpc_train.data.custom import CustomDataset
from hpc_train.data.dataset import IGNORED, Batch
from hpc_train.data.feed import example_micro_batch
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.engine import refusing_wrong_targets
from hpc_train.parallel.parallelize import materialize
from hpc_train.parallel.replica_engine import ReplicaEngine
from tests.data.layouts import replicas
from tests.parallel.cells import SEQUENCE, VOCABULARY, Cell


def forward(labels: list[Any], module: nn.Module | None = None) -> Any:
    dataset = CustomDataset([(torch.ones(4), label) for label in labels], OwnKeys(kind="samples"), 0)
    micro = example_micro_batch(dataset, replicas(1, len(labels)), torch.device("cpu"))
    engine: Any = object.__new__(ReplicaEngine)
    engine._model = WrappedModel(module or nn.Linear(4, 3), "cross_entropy")
    engine._precision, engine._mesh, engine._graphed = "fp32", SimpleNamespace(device=torch.device("cpu")), False
    return engine._forward(engine._model, micro)


@pytest.mark.parametrize("label", [7, 3, -1])
def test_a_target_that_is_no_class_is_refused_with_its_sample(label: int) -> None:
    with pytest.raises(UserError, match=f"the target of sample 2 is {label}, which is not one of the model's classes"):
        forward([0, 2, label, IGNORED])
    assert forward([0, 2, 1, IGNORED])[1] == 3


@pytest.mark.long_form(8)
@pytest.mark.parametrize("word", [VOCABULARY, -5])
def test_the_same_is_told_of_a_compiled_loss(word: int) -> None:
    """Which raises an error that does not name the target."""
    model: Any = build_model(Cell(1).config().model, 0)
    materialize(model, torch.device("cpu"), 0, torch.float32)
    model.head.fused = True
    model.head.compile_with(partial(torch.compile, backend="aot_eager"))
    targets = torch.ones(3, SEQUENCE, dtype=torch.int64)
    engine: Any = object.__new__(ReplicaEngine)
    engine._model, engine._precision, engine._graphed = model, "fp32", False
    engine._mesh = SimpleNamespace(device=torch.device("cpu"), layout=replicas(1, 3))
    assert engine._forward(model, Batch(torch.ones_like(targets), targets, {}))[1] == targets.numel()
    targets[0, 3], targets[2, 5] = IGNORED, word
    with pytest.raises(UserError, match=f"the target of sample 9 is {word}, which is not one of the model's classes"):
        engine._forward(model, Batch(torch.ones_like(targets), targets, {}, (7, 8, 9)))


def test_the_same_is_told_of_a_stage() -> None:
    """In a pipeline torch raises its own error from that of a stage."""
    micro = Batch(torch.ones(2, 4), torch.tensor([0, 9]), {}, (5, 6))
    with (
        pytest.raises(UserError, match="the target of sample 6 is 9"),
        refusing_wrong_targets(nn.Linear(1, 1), [micro]),
    ):
        raise RuntimeError("[Stage 1] failed to run forward") from IndexError("Target 9 is out of bounds.")


@pytest.mark.parametrize(
    ("label", "told"), [(None, "sample 1 .*targets is a NoneType"), ((1, "a"), "targets is a tuple")]
)
def test_a_target_that_is_no_number_is_refused_with_its_sample(label: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        forward([0, label])


def test_an_index_error_of_the_users_own_model_is_left_as_it_is() -> None:
    class Wrong(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise IndexError("index 9 is out of range")

    with pytest.raises(IndexError, match="index 9"):
        forward([0, 1], Wrong(4, 3))


@pytest.mark.parametrize(
    ("inputs", "targets", "module", "message"),
    [
        (torch.ones(2, 4), torch.ones(2), nn.Linear(4, 3), "the targets of the data, which are float32: .*Long"),
        (
            torch.ones(2, 4, dtype=torch.int64),
            torch.ones(2),
            nn.Linear(4, 3),
            "the inputs of the data, which are int64",
        ),
        (
            torch.ones(2, 4, dtype=torch.uint8),
            torch.ones(2),
            nn.Linear(4, 3),
            "the inputs of the data, which are uint8",
        ),
        (torch.ones(2, 1, 4, 4, dtype=torch.uint8), torch.ones(2), nn.Conv2d(1, 1, 3), "inputs .* which are uint8"),
        (torch.ones(2, 4), torch.ones(2), nn.Embedding(4, 3), "the inputs of the data, which are float32"),
    ],
)
def test_dtypes_that_the_model_does_not_accept_are_named(
    inputs: torch.Tensor, targets: torch.Tensor, module: nn.Module, message: str
) -> None:
    with pytest.raises(UserError, match=message) as error, refusing_wrong_targets(module, [Batch(inputs, targets)]):
        nn.functional.cross_entropy(module(inputs).flatten(1), targets)
    assert error.value.fix.startswith("return ")


def test_a_mistake_of_the_users_own_model_in_dtypes_is_left_as_it_is() -> None:
    micro = Batch(torch.ones(2, 4), torch.ones(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="same dtype"), refusing_wrong_targets(nn.Linear(4, 3), [micro]):
        nn.Linear(4, 3)(micro.inputs.double())
