"""Weights are cast once per step: the gradients have the same bits, and their reduction begins no later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.precision.dtypes import CASTS, KeptCasts
from tests.parallel.cells import Cell
from tests.parallel.oracle import local_batch, mesh_of, whole
from tests.ranks import run_on_world

SPLITS: dict[str, dict[str, Any]] = {
    "allreduce": {"dp": 2, "data_parallel": "allreduce"},
    "ddp": {"dp": 2, "data_parallel": "ddp"},
    "tp": {"tp": 2},
    "1f1b": {"pp": 2, "schedule": "1f1b"},
    "zbv": {"pp": 2, "schedule": "zbv", "stages_per_rank": 2},
}
RECOMPUTING: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": "full"},
    "ops": {"activation_checkpointing": "ops"},
    "chunks": {"loss_chunks": 2},
}
ACCUMULATED = {"global_size": 16, "micro_batches": 4}


class Casts(TorchDispatchMode):
    """Counts how often each of ``parameters`` is cast to another dtype."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {value.data_ptr(): name for name, value in parameters.items()}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._names:
            self.counts[self._names[args[0].data_ptr()]] += 1
        return function(*args, **(kwargs or {}))


def engine_of(cell: Cell, rank: int, keeps: bool = True) -> tuple[Any, Any]:
    mesh = mesh_of(cell, rank)
    engine: Any = build_engine(cell.config(), mesh)
    engine._casts._owners.clear()  # projections that are computed together are rounded otherwise
    if not keeps:
        engine._casts = KeptCasts((), None)
    return engine, partial(local_batch, cell, mesh.layout, mesh.dp_rank)


def held_casts(engine: Engine) -> int:
    modules = [module for part in engine.parts for module in part.modules()]
    return sum(bool({CASTS, "forward"} & {*module.__dict__}) for module in modules)


def part_of(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".", maxsplit=1)[0]


def gradients(cell: Cell, rank: int, keeps: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the gradients of a step, and the layers of the parameters in the order in which gradients were added."""
    engine, batch = engine_of(cell, rank, keeps)
    finals: list[str] = []
    for name, parameter in engine.named_parameters().items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: finals.append(part_of(name)))
    engine.train_step(0, batch(0))
    assert held_casts(engine) == 0
    engine.eval_step(batch(1))
    found = {name: whole(parameter.grad) for name, parameter in engine.named_parameters().items()}
    return found, finals


def compare(rank: int, _: int, chosen: list[Cell]) -> list[tuple[bool, bool]]:
    """Returns whether keeping the casts changes any bit, and whether it changes the order of the gradients."""
    found = []
    for cell in chosen:
        (ours, order), (theirs, their_order) = (gradients(cell, rank, keeps) for keeps in (True, False))
        same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
        found.append((same and [*ours] == [*theirs], order == their_order))
    return found


CASES = [(model, precision, tuple(SPLITS)) for model in ("gpt", "vit") for precision in ("bf16", "fp16")]
CASES += [("gpt-options", precision, tuple({*SPLITS} - {"tp"})) for precision in ("bf16", "fp16")]


@pytest.mark.parametrize(
    ("model", "precision", "names"),
    [("gpt", "bf16", ("allreduce", "zbv")), *(pytest.param(*case, marks=pytest.mark.long_form(10)) for case in CASES)],
)
def test_gradients_have_the_same_bits_in_the_same_order(model: str, precision: str, names: tuple[str, ...]) -> None:
    chosen = [Cell(2, model, precision, SPLITS[name], ACCUMULATED) for name in names]
    for ranks in run_on_world(2, compare, chosen):
        assert dict(zip(map(str, chosen), ranks, strict=True)) == {str(cell): (True, True) for cell in chosen}


def test_a_recomputation_uses_the_same_casts() -> None:
    chosen = [Cell(1, "gpt", "bf16", {}, ACCUMULATED, train) for train in RECOMPUTING.values()]
    [found] = run_on_world(1, compare, chosen)
    assert found == [(True, True)] * len(chosen)


def test_the_bits_are_those_of_any_world_size() -> None:
    logical = {"global_size": 16, "logical_micro_batches": 4}
    chosen = [Cell(2, "gpt", "bf16", {"dp": 2}, logical, {"reproducible": "any_world_size"})]
    assert run_on_world(2, compare, chosen) == [[(True, True)]] * 2


def count_casts(rank: int, _: int, cell: Cell, keeps: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the casts of each parameter in a step and in an evaluation."""
    engine, batch = engine_of(cell, rank, keeps)
    counts = []
    for call in (partial(engine.train_step, 0), engine.eval_step):
        with Casts(dict(engine.named_parameters())) as casts:
            call(batch(0))
        counts.append(dict(casts.counts))
    return counts[0], counts[1]


@pytest.mark.parametrize("train", [{}, RECOMPUTING["full"]], ids=["kept", "recomputed"])
def test_a_step_casts_each_weight_once(train: dict[str, Any]) -> None:
    cell = Cell(1, "gpt", "bf16", {}, ACCUMULATED, train)
    [(in_step, in_evaluation)] = run_on_world(1, count_casts, cell, True)
    [(before, _)] = run_on_world(1, count_casts, cell, False)
    matrices = {name for name in before if "norm" not in name}
    assert len(matrices) == 15, "all but the table of the embedding"
    assert {in_step[name] for name in matrices} == {1}
    assert {in_evaluation[name] for name in matrices} == {4}, "once per micro-batch"
    assert {before[name] for name in matrices} <= {4, 8}


class Router(nn.Module):
    """Leaves autocast for its linear layer, as mixtures of experts do, and reads the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)
        self.inner.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inner(inputs)
        with torch.autocast("cpu", enabled=False):
            return self.outer(hidden.to(self.outer.weight.dtype))


def test_a_module_that_leaves_autocast_computes_in_fp32() -> None:
    model = Router()
    inputs = torch.randn(3, 4)
    casts = KeptCasts([model], torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(inputs)
        with casts.step(), Casts(dict(model.named_parameters())) as counted:
            found = model(inputs)
    assert torch.equal(found, expected) and found.dtype == torch.float32
    assert not counted.counts, "a frozen weight is cast once, too"


def test_casts_are_dropped_after_a_failure() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ZeroDivisionError), KeptCasts([layer], torch.bfloat16).step():
        assert {CASTS, "forward"} <= {*layer.__dict__}
        _ = 1 // 0
    assert not {CASTS, "forward"} & {*layer.__dict__}


def test_parametrised_weights_shared_weights_and_other_dtypes() -> None:
    shared, other, wide = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4).double()
    other.weight = shared.weight
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with KeptCasts([nn.ModuleList([shared, other, wide, parametrised])], torch.bfloat16).step():
        assert CASTS not in wide.__dict__ and CASTS not in parametrised.__dict__
        (one, bias), (two, none) = shared.__dict__[CASTS], other.__dict__[CASTS]
        assert one is two and bias.dtype == torch.bfloat16 and none is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outer(self.inner(inputs).relu())


def compiled(rank: int, _: int) -> list[list[str]]:
    """Returns the dtypes of the inputs of each graph that two steps of two micro-batches compile."""
    graphs: list[list[str]] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append([str(value.dtype) for value in inputs if isinstance(value, Tensor)])
        return graph.forward

    block = Block()
    block.compile(backend=backend)
    casts = KeptCasts([block], torch.bfloat16)
    for _step in range(2):
        with casts.step():
            for _micro in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    output = block(torch.randn(3, 4))
                output.float().sum().backward()
    return graphs


def test_a_compiled_layer_is_one_graph_that_takes_the_casts() -> None:
    [[dtypes]] = run_on_world(1, compiled)
    assert sorted(dtypes) == [*["torch.bfloat16"] * 4, "torch.float32"]
