"""``train.reproducible=any_world_size``: the same bits on any number of ranks, and the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.config.schema import CustomModelConfig
from hpc_train.errors import UserError
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import seed_step
from hpc_train.parallel.replica_engine import cover, tree_sum
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.report import weights_sha256
from tests.parallel.cells import CLASSES, Cell
from tests.parallel.oracle import check_cells, local_batch, mesh_of
from tests.ranks import run_on_world

ON = {"reproducible": "any_world_size"}
STEPS = 8


def cell(ranks: int, model: str = "gpt", precision: str = "fp32", train: dict[str, Any] = ON, **fields: Any) -> Cell:
    """A global batch of 10 in 8 logical micro-batches: some hold one sample, some two."""
    batch = {"logical_micro_batches": 8}
    return Cell(ranks, model, precision, strategy={"dp": ranks}, batch=batch, train=train, **fields)


def hash_after_training(rank: int, world_size: int, cell: Cell, dropout: float) -> tuple[str, list[float]]:
    """The weights and the losses of ``STEPS`` steps of AdamW with clipping, as the trainer takes them."""
    mesh = mesh_of(cell, rank)
    config = cell.config()
    config.model.dropout = dropout
    engine = build_engine(config, mesh)
    optimizer = Optimizer(config.optim, engine.named_parameters())
    losses = []
    for step in range(STEPS):
        seed_step(config.train.seed, step, mesh)
        batch = local_batch(cell, mesh.layout, mesh.dp_rank, step)
        losses.append(engine.reduce(engine.train_step(step, batch)).loss)
        norm = engine.clip_grad_norm_(0.05)
        optimizer.step(1e-2, norm.isfinite())
    return weights_sha256(engine), losses


def trained(world_size: int, model: str = "gpt", train: dict[str, Any] = ON, dropout: float = 0.2) -> Any:
    """What all ranks agree on."""
    of_ranks = run_on_world(world_size, hash_after_training, cell(world_size, model, train=train), dropout)
    assert all(found == of_ranks[0] for found in of_ranks), "the ranks differ"
    return of_ranks[0]


@pytest.mark.parametrize(
    ("model", "others"),
    [
        ("gpt-tied", (3,)),
        *(
            pytest.param(*case, marks=pytest.mark.long_form(10))
            for case in (("gpt-tied", (2, 4, 8)), ("vit", (4,)), ("gpt-weighted", (2,)))
        ),
    ],
)
def test_any_number_of_ranks_trains_the_same_bits(model: str, others: tuple[int, ...]) -> None:
    """Also 3, which does not divide the micro-batches, with dropout, clipping, tied weights and a loss that counts."""
    one = trained(1, model)
    assert [trained(ranks, model) == one for ranks in others] == [True] * len(others)


def results_of_a_step(rank: int, world_size: int, cell: Cell) -> tuple[set[str], bool]:
    """Steps where tensors of no given device are on another device than the model, one parameter of which is
    transposed; returns the devices of the result, and whether gradients have the strides of their parameters.
    """
    mesh = mesh_of(cell, rank)
    engine = build_engine(cell.config(), mesh)
    parameters = engine.named_parameters()
    name = next(name for name, parameter in parameters.items() if parameter.ndim == 2)
    parameters[name].data = parameters[name].data.t().contiguous().t()
    batch = local_batch(cell, mesh.layout, mesh.dp_rank, 0)
    with torch.device("meta"):
        result = engine.train_step(0, batch)
    follow = all(each.grad is not None and each.grad.stride() == each.stride() for each in parameters.values())
    return {result.loss_sum.device.type, result.target_count.device.type}, follow


def test_what_a_step_returns_is_on_the_device_and_gradients_have_the_format_of_parameters() -> None:
    """Fused optimizers update memory, whatever the strides are."""
    assert run_on_world(2, results_of_a_step, cell(2)) == [({"cpu"}, True)] * 2


@pytest.mark.long_form(3)  # that the mode gives the same bits is tested above
def test_the_ordinary_sum_depends_on_the_number_of_ranks() -> None:
    """What the mode is for: this comparison can fail."""
    assert trained(1, train={}, dropout=0.0) != trained(4, train={}, dropout=0.0)


def test_the_gradients_are_those_of_one_process(record: Callable[..., None]) -> None:
    for ranks in (1, 3):
        chosen = [cell(ranks, model, "fp64") for model in ("gpt", "gpt-tied", "vit")]
        record(check_cells([*chosen, cell(ranks, "gpt", "fp64", loss_scale=1024.0)]), [])


@given(leaves=st.integers(1, 40), data=st.data())
def test_sub_trees_add_up_in_one_order(leaves: int, data: st.DataObject) -> None:
    """However the leaves are divided, each rank's sub-trees and then theirs give the expression of the whole tree."""
    ranks = data.draw(st.integers(1, leaves))
    root = range(leaves)
    held = [range(rank * leaves // ranks, (rank + 1) * leaves // ranks) for rank in range(ranks)]
    nodes = [node for part in held for node in cover(root, part)]
    assert [leaf for node in nodes for leaf in node] == list(root)
    generator = torch.Generator().manual_seed(leaves)
    values = torch.randn(leaves, generator=generator)

    def leaf(node: range) -> torch.Tensor | None:
        return values[node.start].clone() if len(node) == 1 else None

    sums = {node: tree_sum(node, leaf) for node in nodes}
    assert tree_sum(root, sums.get).item() == tree_sum(root, leaf).item()


@pytest.mark.parametrize(
    ("ranks", "strategy", "fields", "reason"),
    [
        (9, {"dp": 9}, {}, "8 logical micro-batches are too few for 9 ranks"),
        (2, {"dp": 2}, {"batch": {"logical_micro_batches": 11}}, "is 10, less than 11 logical"),
    ],
)
def test_refused_with_the_reason(ranks: int, strategy: dict[str, Any], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Cell(ranks, strategy=strategy, **{"train": ON} | fields).layout()


def buffers_are_refused(rank: int, world_size: int) -> None:
    normed = Cell(1, train=ON, batch={"global_size": 8})
    config = normed.config()
    config.model = CustomModelConfig(_target_="hpc_train.models.resnet.resnet18", args={"n_classes": 4})
    with pytest.raises(UserError, match="batch statistics depend on the number of ranks, so the bits of the weights"):
        build_engine(config, mesh_of(normed, rank))
    counting = cell(1, "custom")
    config = counting.config()
    config.model = CustomModelConfig(_target_="tests.parallel.module.CountingTiny", args={"classes": CLASSES})
    mesh = mesh_of(counting, rank)
    engine = build_engine(config, mesh)
    with pytest.raises(UserError, match="the forward pass changes the buffer passes, whose values then depend on the"):
        engine.train_step(0, local_batch(counting, mesh.layout, mesh.dp_rank, 0))


def test_batch_statistics_and_forward_passes_that_change_buffers_are_refused() -> None:
    run_on_world(1, buffers_are_refused)
