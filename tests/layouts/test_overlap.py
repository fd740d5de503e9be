"""Our own reduction sends gradients during the backward, and they are the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import join_mesh
from hpc_train.parallel.reduction import GradientReduction
from tests.layouts.cells import Cell
from tests.layouts.oracle import check_cells, local_batch
from tests.ranks import run_ranks

SMALL = {"data_parallel": "reduce", "bucket_cap_mb": 0.002}


def pipeline(schedule: str, stages_per_rank: int = 1, model: str = "gpt") -> Cell:
    strategy = {"dp": 2, "pp": 2, "schedule": schedule, "stages_per_rank": stages_per_rank} | SMALL
    return Cell(4, model, strategy=strategy, batch={"micro_batches": 4})


def sent_before_the_end(rank: int, world_size: int, cell: Cell) -> list[tuple[int, int]]:
    """Buckets of this rank that were sent when the backward was through, and all of them, for two steps."""
    found, reduce = [], GradientReduction.reduce

    def counted(self: GradientReduction) -> None:
        found.append((self.sent, len(self._buckets)))
        reduce(self)

    GradientReduction.reduce = counted  # type: ignore[method-assign]
    mesh = join_mesh(cell.layout(), rank, torch.device("cpu"))
    engine = build_engine(cell.config(), mesh)
    for step in range(2):
        engine.train_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
    return found


@pytest.mark.parametrize(
    "cell",
    [Cell(2, strategy={"dp": 2} | SMALL, batch={"micro_batches": 3}), pipeline("1f1b"), pipeline("gpipe")],
    ids=["replicas", "1f1b", "gpipe"],
)
def test_buckets_are_sent_during_the_last_backward(cell: Cell) -> None:
    for counts in run_ranks(cell.world_size, sent_before_the_end, cell):
        assert len(counts) == 2
        assert all(early == buckets > 1 for early, buckets in counts), counts


def test_stages_that_share_a_rank_wait_for_each_other() -> None:
    """The ranks could not agree on an order of all their buckets."""
    for counts in run_ranks(4, sent_before_the_end, pipeline("interleaved_1f1b", 2)):
        assert [early for early, _ in counts] == [0] * 4


def test_the_gradients_are_those_of_one_process(record: Callable[..., None]) -> None:
    schedules = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zbv", 2))
    record(check_cells([pipeline(*schedule, model) for schedule in schedules for model in ("gpt-tied", "vit")]), [])


def uses_less(rank: int, world_size: int) -> list[Any]:
    """Each rank leaves out another parameter; each parameter is a bucket. A step with one backward, one with two."""
    parameters = [nn.Parameter(torch.tensor([float(number)])) for number in range(1, 5)]
    reduction = GradientReduction(parameters, dist.group.WORLD, 1e-9, overlap=True)  # type: ignore[arg-type]
    sums = []
    for backwards in (1, 2):
        for parameter in parameters:
            parameter.grad = None
        reduction.begin(backwards)
        for _ in range(backwards):
            sum(value**2 for number, value in enumerate(parameters) if number != rank + 1).backward()  # type: ignore[union-attr]
        reduction.reduce()
        sums.append([value.grad.item() for value in parameters if value.grad is not None])
    try:
        parameters[0].square().backward()
    except RuntimeError as error:
        sums.append(str(error))  # type: ignore[arg-type]
    return sums


def test_ranks_that_use_other_parameters_send_in_one_order() -> None:
    once = [4.0, 4.0, 6.0, 16.0]  # 2 x value, of both ranks or of one
    twice = [2 * value for value in once]
    late = "a gradient was added to after all backwards of the step"
    assert run_ranks(2, uses_less) == [[once, twice, late]] * 2
