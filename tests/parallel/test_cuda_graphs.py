"""Compiled code as CUDA graphs: refusals, and what the engine does for them; only a GPU can record one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from hpc_train.errors import UserError
from hpc_train.layout.techniques import check_compiler_device
from hpc_train.parallel.build import build_engine
from tests.parallel.cells import Cell
from tests.parallel.oracle import TOLERANCE, Outcome, compare_cells, local_batch, merge, mesh_of
from tests.ranks import run_ranks

GRAPHS = {"compile": True, "cuda_graphs": True}


def test_they_need_a_gpu() -> None:
    config = Cell(1, train=GRAPHS).config()
    with pytest.raises(UserError, match="needs GPUs"):
        check_compiler_device(config, gpus=0)
    check_compiler_device(config, gpus=1)
    check_compiler_device(Cell(1, train={"compile": True}).config(), gpus=0)
    Cell(2, strategy={"pp": 2}, train={"cuda_graphs": True}).layout()  # without compilation it has no effect


def captured(rank: int, world_size: int, cell: Cell) -> tuple[list[Any], list[Outcome]]:
    """The options of each graph, and the comparison with one process; the graphs run as they are."""
    import torch._inductor.compile_fx as inductor

    options: list[Any] = []

    def compile_fx(graph: Any, inputs: Any, config_patches: Any = None, **_: Any) -> Any:
        options.append(config_patches)
        return aot_eager(graph, inputs)

    inductor.compile_fx = compile_fx  # type: ignore[assignment]
    return options, compare_cells(rank, world_size, [cell])


@pytest.mark.long_form(15)
@pytest.mark.parametrize("kind", ["ddp", "allreduce"])
def test_gradients_of_several_micro_batches_are_those_of_one_process(kind: str) -> None:
    cell = Cell(2, "gpt", strategy={"dp": 2, "data_parallel": kind}, batch={"micro_batches": 3}, train=GRAPHS)
    ranks = run_ranks(2, captured, cell, timeout=200)
    assert merge([outcome for _, (outcome,) in ranks]).worst <= TOLERANCE["fp64"]
    for options, _ in ranks:
        assert options and all(each == {"triton.cudagraphs": True} for each in options)


def memory(rank: int, world_size: int) -> list[bool]:
    """Whether each step keeps the memory of the gradients, and each pass began with a mark; nothing is compiled."""
    from hpc_train.parallel import parallelize

    marks: list[int] = []
    parallelize.compile_model = lambda *_: None  # type: ignore[assignment]
    torch.compiler.cudagraph_mark_step_begin = lambda: marks.append(1)
    cell = Cell(1, "gpt", batch={"micro_batches": 2}, train=GRAPHS)
    mesh = mesh_of(cell, rank)
    engine = build_engine(cell.config(), mesh)
    places = []
    for step in range(2):
        engine.train_step(step, local_batch(cell, mesh.layout, 0, step))
        assert len(marks) == 2 * (step + 1)
        places.append([parameter.grad.data_ptr() for parameter in engine.named_parameters().values()])  # type: ignore[union-attr]
    engine.eval_step(local_batch(cell, mesh.layout, 0, 2))
    return [places[0] == places[1], len(marks) == 6]


def test_gradients_stay_where_they_are_and_each_pass_is_marked() -> None:
    assert run_ranks(1, memory) == [[True, True]]
