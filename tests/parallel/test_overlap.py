"""Our own reduction sends gradients during the backward, and they are the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hpc_train.config.schema import CustomModelConfig
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.reduction import GradientReduction, _plan
from tests.parallel.cells import VOCABULARY, Cell, Form, in_two_forms
from tests.parallel.oracle import check_cells, local_batch, mesh_of
from tests.ranks import run_on_world

SMALL = {"data_parallel": "allreduce", "bucket_cap_mb": 0.002}


def pipeline(schedule: str, stages_per_rank: int = 1, model: str = "gpt") -> Cell:
    strategy = {"dp": 2, "pp": 2, "schedule": schedule, "stages_per_rank": stages_per_rank} | SMALL
    return Cell(4, model, strategy=strategy, batch={"micro_batches": 4})


def tensor_parallel(model: str = "gpt") -> Cell:
    return Cell(4, model, strategy={"dp": 2, "tp": 2} | SMALL, batch={"micro_batches": 3})


def backwards_to_come(rank: int, world_size: int, cells: list[Cell]) -> list[list[list[list[int]]]]:
    """For each cell, two steps and each stage, the first to send first: the backwards to come at each bucket."""
    found: dict[GradientReduction, list[int]] = {}
    send = GradientReduction._send_next

    def noted(self: GradientReduction) -> None:
        found.setdefault(self, []).append(sum(stage._backwards for stage in self._send_order or ()))
        send(self)

    of_cells = []
    for cell in cells:
        mesh = mesh_of(cell, rank)
        engine = build_engine(cell.config(), mesh)
        steps = []
        for step in range(2):
            found.clear()
            with mock.patch.object(GradientReduction, "_send_next", noted):
                engine.train_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
            steps.append([*found.values()])
        of_cells.append(steps)
    return of_cells


WHOLE = [Cell(2, strategy={"dp": 2} | SMALL, batch={"micro_batches": 3}), tensor_parallel(), pipeline("1f1b"),
         pipeline("gpipe"), pipeline("interleaved_1f1b", 2)]  # fmt: skip
SPLIT = [pipeline("interleaved_zero_bubble", 2), pipeline("zbv", 2)]


@in_two_forms(20)
@pytest.mark.parametrize("world_size", [2, 4])  # the short form of four ranks has one pipeline
def test_buckets_are_sent_as_soon_as_they_are_final(world_size: int, form: Form) -> None:
    """During the last backward of a stage, or after it while the rank's other stages go on."""
    cells = form([cell for cell in (*SPLIT, *WHOLE) if cell.world_size == world_size], "dp")
    for of_cells in run_on_world(world_size, backwards_to_come, cells):
        for cell, steps in zip(cells, of_cells, strict=True):
            assert len(steps) == 2
            for stages in steps:
                assert len(stages) == cell.layout().stages_per_rank, cell
                assert all(len(buckets) > 1 for buckets in stages), cell
                early = stages if cell in WHOLE else stages[:-1]
                assert all(to_come > 0 for buckets in early for to_come in buckets), (cell, stages)


@pytest.mark.long_form(40)  # test_layouts and test_pipeline have the gradients, and small buckets
def test_the_gradients_are_those_of_one_process(record: Callable[..., None]) -> None:
    schedules = (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2), ("zbv", 2))
    models = ("gpt-tied", "vit")
    chosen = [pipeline(*schedule, model) for schedule in schedules for model in models]
    chosen += [tensor_parallel("vit"), tensor_parallel("gpt-tied")]
    record(check_cells(chosen), [])


def uses_less(rank: int, world_size: int) -> list[Any]:
    """Each rank leaves out another parameter; each parameter is a bucket. A step with one backward, one with two."""
    parameters = [nn.Parameter(torch.tensor([float(number)])) for number in range(1, 5)]
    world: Any = dist.group.WORLD
    reduction = GradientReduction(dict.fromkeys(parameters, world), 1e-9, send_order=[])
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
    late = "a gradient changed after all backward passes of the step"
    assert run_on_world(2, uses_less) == [[once, twice, late]] * 2


def gathered_ahead(rank: int, world_size: int, cell: Cell) -> list[bool]:
    """Whether the parameters of the following layer were asked for when a layer began its forward pass."""
    mesh = mesh_of(cell, rank)
    engine = build_engine(cell.config(), mesh)
    layers = [*engine.parts[0].layers.values()]
    found = []
    for layer, following in pairwise(layers):
        group = following._get_fsdp_state()._fsdp_param_group
        layer.register_forward_pre_hook(lambda *_, group=group: found.append(group._all_gather_result is not None))
    engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
    return found


def sizes_of_buckets(rank: int, world_size: int) -> list[list[int]]:
    """The numbers of parameters in the buckets of a rank that has 8 or 7 of 15 words, for many sizes of buckets."""
    cell = Cell(world_size, strategy={"tp": world_size})
    config = cell.config()
    config.model.vocab_size = config.data.vocab_size = 15  # type: ignore[attr-defined]
    mesh = mesh_of(cell, rank)
    groups = dict.fromkeys(build_engine(config, mesh).named_parameters().values(), mesh.group("dp_cp"))
    return [[len(bucket) for bucket in _plan(groups, capacity)] for capacity in range(64, 4096, 64)]


def test_tensor_parallel_ranks_cut_buckets_at_the_same_parameters() -> None:
    """Else their collectives would have another order: the sums of partial gradients are part of a bucket."""
    first, second = run_on_world(2, sizes_of_buckets)
    assert first == second


def test_zero3_gathers_the_next_layer_while_one_computes() -> None:
    cell = Cell(2, strategy={"dp": 2, "data_parallel": "zero3"}, batch={"micro_batches": 2})
    for found in run_on_world(cell.world_size, gathered_ahead, cell):
        assert found and all(found)


class SkipsBlocks(nn.Module):
    """Runs its second block only in every other forward pass, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.output = nn.Linear(8, VOCABULARY)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden, self.calls = self.embed(inputs), self.calls + 1
        for number, block in enumerate(self.blocks):
            hidden = block(hidden) if number != 1 or self.calls % 2 else hidden
        return self.output(hidden)


def losses_with_skipped_blocks(rank: int, world_size: int, kinds: Sequence[str]) -> list[list[float]]:
    model = CustomModelConfig(_target_="tests.parallel.test_overlap.SkipsBlocks", wrap=["Sequential"])
    of_kinds = []
    for kind in kinds:
        torch.manual_seed(0)
        cell = Cell(2, strategy={"dp": 2, "data_parallel": kind}, batch={"micro_batches": 2})
        mesh = mesh_of(cell, rank)
        engine = build_engine(replace(cell.config(), model=model), mesh)
        optimizer = torch.optim.SGD(list(engine.named_parameters().values()), lr=0.5)
        losses = []
        for step in range(6):
            result = engine.train_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
            losses.append(engine.reduce(result).loss)
            optimizer.step()
        of_kinds.append(losses)
    return of_kinds


def test_a_block_that_is_skipped_has_the_newest_weights_when_it_runs_again() -> None:
    for expected, *sharded in run_on_world(2, losses_with_skipped_blocks, ("allreduce", "zero1", "zero3")):
        assert len({*expected}) == 6
        for found in sharded:
            assert found == pytest.approx(expected, rel=1e-9)
