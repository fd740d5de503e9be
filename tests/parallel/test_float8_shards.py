"""Products in fp8 under tensor parallelism and zero-bubble schedules are those of one process.

A rounding to fp8 is a step, so the order of sums in bf16 decides some of them. Here operands and sums are in fp64, and
only the rounding to fp8 is left: every layout then gives the numbers of one process to 1e-10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.data.dataset import IGNORED
from hpc_train.errors import UserError
from hpc_train.layout.float8 import check_float8
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.parallelize import materialize
from hpc_train.parallel.precision import float8
from hpc_train.parallel.precision.float8 import use_float8
from tests.parallel.cells import Cell
from tests.parallel.oracle import error, global_batch, local_batch, mesh_of, whole
from tests.parallel.test_float8 import CPU, RECIPES, Gradients, config_of
from tests.ranks import run_on_world, run_ranks

SPLITS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tp and zero3": {"tp": 2, "dp": 2, "data_parallel": "zero3"},
    "tp and zbv": {"tp": 2, "pp": 2, "schedule": "zbv", "stages_per_rank": 2},
}
# exchanges of largest magnitudes of each matrix and micro-batch: one per product, but none where no part shares a scale
EXCHANGES = {"tensorwise": (2, 3), "rowwise": (1, 1), "mxfp8": (0, 0)}  # if the backward is whole, and if it is split
DIM = 64  # shards of half of it are blocks of mxfp8


def product(function: Any, operands: Any, _: Any) -> Tensor:
    first, second = (each._data.double() / each._scale.double() for each in operands)
    return first @ second


@contextmanager
def in_fp64() -> Iterator[None]:
    """Makes fp64 the dtype of the operands of products and of their sums. The rounding to fp8 stays."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    real = MXTensor.to_mx

    def to_mx(values: Tensor, *args: Any, **options: Any) -> Any:
        cast = real(values.float(), *args, **options)
        cast.orig_dtype = torch.float64
        return cast

    with ExitStack() as changes:
        changes.enter_context(mock.patch.object(float8, "OPERANDS", torch.float64))
        changes.enter_context(mock.patch.dict(FLOAT8_OPS_TABLE, {torch.ops.aten.mm.default: product}))
        changes.enter_context(mock.patch.object(MXTensor, "to_mx", to_mx))
        yield


def cell_of(model: str, split: dict[str, Any], **train: Any) -> Cell:
    """Returns a cell whose micro-batches have two samples, so that the scales cover the same values."""
    ranks = split["tp"] * split.get("dp", 1) * split.get("pp", 1)
    return Cell(ranks, model, "fp64", split, {"global_size": 2 * ranks, "micro_size": 2}, train)


def alone(cell: Cell, recipe: str) -> Gradients:
    """Returns the gradients of one process, in micro-batches of two samples."""
    config = config_of(cell, recipe, DIM)
    model: Any = build_model(config.model, config.train.seed)
    materialize(model, CPU, config.train.seed, torch.float64)
    use_float8(model, config.precision, CPU)
    inputs, targets = global_batch(cell, 0)
    count = int((targets != IGNORED).sum())
    for part, wanted in zip(inputs.split(2), targets.split(2), strict=True):
        (model(part, {}, wanted)[0] / count).backward()
    return {name: value.grad for name, value in model.named_parameters()}


class Counted(TorchDispatchMode):
    """Counts products of two matrices in fp8, and the exchanges of largest magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_fp8 = function is torch.ops.aten.mm.default and type(args[0]).__name__ in (
            "Float8TrainingTensor",
            "MXTensor",
        )
        largest = function is torch.ops._c10d_functional.all_reduce.default and args[1] == "max"
        self.calls["products"] += in_fp8
        self.calls["exchanges"] += largest
        return function(*args, **(kwargs or {}))


def first_step(rank: int, cell: Cell, recipe: str) -> tuple[Gradients, Counter[str]]:
    """Returns the gradients, and what was counted unless the layers are compiled, which a mode prevents."""
    config, mesh, counted = config_of(cell, recipe, DIM), mesh_of(cell, rank), Counted()
    engine = build_engine(config, mesh)
    with nullcontext() if config.train.compile else counted:
        engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
    return {name: whole(value.grad) for name, value in engine.named_parameters().items()}, counted.calls


def compared(rank: int, world_size: int, chosen: list[Cell], recipe: str) -> list[tuple[float, Counter[str]]]:
    """Returns the difference of the gradients from one process, and what was counted, for each cell."""
    found = []
    with in_fp64():
        expected = alone(chosen[0], recipe)
        for cell in chosen:
            gradients, calls = first_step(rank, cell, recipe)
            found.append((error(gradients, expected), calls))
    return found


@pytest.mark.parametrize(
    ("model", "recipe", "splits"),
    [
        pytest.param("gpt", "tensorwise", ("tp and zero3",), marks=pytest.mark.long_form(15)),
        pytest.param("gpt", "mxfp8", ("tp and zbv",), marks=pytest.mark.long_form(15)),
        pytest.param("gpt", "tensorwise", ("tp and zbv",), marks=pytest.mark.long_form(15)),
        pytest.param("gpt", "rowwise", ("tp and zbv",), marks=pytest.mark.long_form(15)),
        ("vit", "tensorwise", ("tp",)),
    ],
)
def test_gradients_are_those_of_one_process(model: str, recipe: str, splits: tuple[str, ...]) -> None:
    """Each of the 4 layers has 7 or 6 matrices, and each matrix 3 products per micro-batch: none is computed twice."""
    chosen = [cell_of(model, SPLITS[name]) for name in splits]
    for ranks in run_on_world(chosen[0].world_size, compared, chosen, recipe, timeout=280):
        for name, cell, (difference, calls) in zip(splits, chosen, ranks, strict=True):
            layout = cell.layout()
            matrices = 4 // layout.pp * (7 if model == "gpt" else 6) * layout.micro_batches
            assert difference < 1e-10, (name, difference)
            assert calls["products"] == 3 * matrices, name
            of_each = EXCHANGES[recipe][layout.splits_backward] if layout.tp > 1 else 0
            assert calls["exchanges"] == of_each * matrices, name


def compiled(rank: int, world_size: int, cell: Cell, recipe: str) -> tuple[float, int]:
    """Returns the difference from one process of layers that run as AOTAutograd has cut them, and their graphs."""
    import torch._inductor.compile_fx as inductor

    graphs = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    inductor.compile_fx = backend  # type: ignore[assignment]
    [(difference, _)] = compared(rank, world_size, [cell], recipe)
    return difference, len(graphs)


@pytest.mark.long_form(15)
def test_compiled_layers_exchange_the_largest_magnitudes() -> None:
    cell = cell_of("gpt", {"tp": 2}, compile=True)
    for difference, graphs in run_ranks(2, compiled, cell, "tensorwise", timeout=280):
        assert difference < 1e-10 and graphs


def refusal(rank: int, world_size: int, cell: Cell) -> str:
    """Returns the error of a rank whose shards are half a block; the config does not know which matrices are left."""
    config = config_of(cell, "mxfp8", fp8_skip=["attention"])
    check_float8(config, cell.layout())
    with pytest.raises(UserError) as refused:
        build_engine(config, mesh_of(cell, rank))
    return refused.value.what


def test_shards_of_half_a_block_are_refused() -> None:
    cell = cell_of("vit", {"tp": 4})
    found = run_on_world(4, refusal, replace(cell, precision="bf16"))
    wanted = "needs shards of a multiple of 32, but layers.0.ffn.w1.weight has a width of 64, which 4 ranks share"
    assert all(wanted in what for what in found)


def by_torchao(recipe: str, rows: Tensor, weight: Tensor) -> Tensor:
    """Returns the product of torchao's own function, whose gradients are computed together."""
    if recipe == "mxfp8":
        from torchao.prototype.moe_training.mxfp8_linear import mx_mm
        from torchao.prototype.mx_formats.config import MXFP8Dim0CastKernelChoice as Rows
        from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice as Columns
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        formats = (torch.float8_e4m3fn,) * 3
        choices = KernelPreference.EMULATED, Rows.TORCH, Columns.TORCH, ScaleCalculationMode.RCEIL, False
        result: Tensor = mx_mm.apply(rows, weight, *formats, 32, *choices)
        return result
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    products = LinearMMConfig(*(ScaledMMConfig(True, fast, False, False) for fast in (True, False, False)))
    config = Float8LinearConfig.from_recipe_name(recipe)
    result = matmul_with_hp_or_float8_args.apply(rows, weight.t(), products, config)
    return result


@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_have_the_bits_of_torchao(recipe: str, splits_backward: bool) -> None:
    torch.manual_seed(0)
    rows, weight, gradient = (torch.randn(size, dtype=torch.bfloat16) for size in ((64, 96), (32, 96), (64, 32)))
    found = []
    for function in (float8._multiply(recipe, True, splits_backward), partial(by_torchao, recipe)):
        operands = rows.clone().requires_grad_(), weight.clone().requires_grad_()
        result = function(*operands)
        result.backward(gradient)
        found.append([result, *(each.grad for each in operands)])
    assert all(torch.equal(own, wanted) for own, wanted in zip(*found, strict=True))
