"""CUDA graphs and asynchronous tensor parallelism: refusals, the calls that enable them, and what is compiled.

Their kernels need GPUs; on CPUs the compiler leaves the graphs as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.techniques import check_compiler_device
from hpc_train.layout.validate import validate
from hpc_train.parallel import parallelize
from hpc_train.parallel.build import build_engine
from tests.parallel.cells import Cell
from tests.parallel.oracle import TOLERANCE, Outcome, compare_cells, local_batch, merge, mesh_of
from tests.ranks import run_on_world, run_ranks

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
    cell = Cell(1, "gpt", batch={"micro_batches": 2}, train=GRAPHS)
    mesh = mesh_of(cell, rank)
    with mock.patch.object(parallelize, "compile_model"):
        engine = build_engine(cell.config(), mesh)
    places = []
    with mock.patch.object(torch.compiler, "cudagraph_mark_step_begin") as mark:
        for step in range(2):
            engine.train_step(step, local_batch(cell, mesh.layout, 0, step))
            assert mark.call_count == 2 * (step + 1)
            places.append([parameter.grad.data_ptr() for parameter in engine.named_parameters().values()])  # type: ignore[union-attr]
        engine.eval_step(local_batch(cell, mesh.layout, 0, 2))
    return [places[0] == places[1], mark.call_count == 6]


def test_gradients_stay_where_they_are_and_each_pass_is_marked() -> None:
    assert run_on_world(1, memory) == [[True, True]]


def asynchronous(model: str = "gpt", tp: int = 2, compiles: bool = True, **cluster: Any) -> Config:
    strategy = {"tp": tp, "async_tp": True}
    config = Cell(2, model, "fp32", strategy=strategy, train={"compile": compiles}).config()
    return replace(config, cluster=replace(config.cluster, **{"visible_gpus": "all"} | cluster))


def test_it_needs_a_gpu() -> None:
    assert validate(asynchronous(), 1, 2).tp == 2
    check_compiler_device(asynchronous(), gpus=2)
    with pytest.raises(UserError, match="async_tp needs GPUs"):
        check_compiler_device(asynchronous(), gpus=0)


def joined(rank: int, world_size: int, config: Config) -> tuple[list[Any], list[str], list[tuple[int, int]]]:
    """The options of the graphs, the groups with shared memory, and in each pass of a layer the gathers and scatters
    that the compiler finds; the graphs run as they are."""
    import torch._inductor.compile_fx as inductor
    from torch._inductor.fx_passes import micro_pipeline_tp as passes
    from torch.distributed import _symmetric_memory as symmetric

    options, groups, found = [], list[str](), list[tuple[int, int]]()

    def search(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        nodes = graph.graph
        found.append((len(passes.find_all_gather_patterns(nodes)), len(passes.find_reduce_scatter_patterns(nodes))))
        return graph.forward

    def compile_fx(graph: Any, inputs: Any, config_patches: Any = None, **_: Any) -> Any:
        options.append(config_patches)
        return aot_autograd(fw_compiler=search)(graph, inputs)

    inductor.compile_fx = compile_fx  # type: ignore[assignment]
    symmetric.enable_symm_mem_for_group = groups.append  # type: ignore[assignment]
    cell = Cell(2, "gpt", "fp32", strategy={"tp": 2})
    mesh = mesh_of(cell, rank)
    engine = build_engine(config, mesh)
    engine.train_step(0, local_batch(cell, mesh.layout, 0, 0))
    assert groups == [mesh.group("tp").group_name]
    return options, groups, found


@pytest.mark.long_form(15)
def test_the_compiler_finds_the_collectives_of_a_layer() -> None:
    """The forward and the backward of a layer each gather and scatter the input and the output of both branches."""
    for options, groups, found in run_ranks(2, joined, asynchronous(), timeout=200):
        assert len(groups) == 1
        assert options and all(each == {"_micro_pipeline_tp": True} for each in options)
        assert found.count((2, 2)) == 2
