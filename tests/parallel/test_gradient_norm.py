"""The norm of gradients is exact where that of torch is not; updates in the backward leave the ordinary bits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.gradient_norm import norms
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import materialize
from hpc_train.parallel.precision.masters import local_part
from hpc_train.train.optimizers.learning_rate import learning_rates
from hpc_train.train.optimizers.optimizer import Optimizer
from hpc_train.train.step import TrainStep
from tests.parallel.cells import Cell, Form, in_two_forms
from tests.parallel.graphs import run_graphs_as_cut
from tests.parallel.oracle import error, global_batch, local_batch, mesh_of, relative
from tests.ranks import run_on_world, run_ranks


@pytest.mark.parametrize(("dtype", "found"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_the_norm_of_a_large_gradient_on_the_host(dtype: torch.dtype, found: torch.dtype) -> None:
    """torch's is 13 % too small here."""
    value = torch.tensor(1e-4, dtype=dtype)
    small, large = value.expand(7), value.expand(1 << 14, 1 << 13).clone()
    (first, second) = norms([small, large])
    assert (first.dtype, second.dtype) == (found, found)
    assert first.item() == pytest.approx(value.item() * math.sqrt(7), rel=1e-6)
    assert second.item() == pytest.approx(value.item() * math.sqrt(large.numel()), rel=1e-4)


def test_a_gradient_that_is_not_finite_has_no_finite_norm() -> None:
    large = torch.zeros((1 << 16) + 1)
    large[-1] = math.inf
    assert not norms([large])[0].isfinite()


def test_small_gradients_have_the_bits_of_torch() -> None:
    gradients = [torch.randn(9, 3), torch.randn(5)]
    assert norms(gradients) == list(torch._foreach_norm(gradients))


STEPS = 3
IN_BACKWARD: dict[str, Any] = {"in_backward": True, "clip_norm": 0.0, "warmup_steps": 2}
SMALL: dict[str, Any] = {"bucket_cap_mb": 0.001}  # several buckets, also of several parameters


def cell_of(world_size: int, model: str = "gpt-tied", optim: dict[str, Any] | None = None, **fields: Any) -> Cell:
    return Cell(world_size, model, optim=IN_BACKWARD | (optim or {}), **fields)


Trained = tuple[dict[str, Tensor], list[float], list[float]]  # parameters and state, losses, norms


def train_plainly(cell: Cell) -> Trained:
    """One process, torch's AdamW and no hooks."""
    config = cell.config()
    model: Any = build_model(config.model, config.train.seed)
    materialize(model, torch.device("cpu"), config.train.seed, torch.float64)
    rate = learning_rates(config.optim, config.batch.global_size, STEPS)
    whole: list[nn.Parameter] = list(model.parameters())
    groups = [
        {"params": [p for p in whole if (p.ndim >= 2) is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = global_batch(cell, step)
        total, count = model(inputs, {}, targets)
        (total / count).backward()
        losses.append((total / count).item())
        norms.append(torch.cat([p.grad.flatten() for p in whole if p.grad is not None]).norm().item())
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{key}": optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}
    return found, losses, norms


def train(cell: Cell, config: Config, mesh: Mesh) -> Trained:
    """The engine and the step of the trainer; gradients are gone after each step if they are used in the backward."""
    engine = build_engine(config, mesh)
    parameters = engine.named_parameters()
    optimizer = Optimizer(config.optim, parameters)
    take_step = TrainStep(config, mesh, engine, optimizer, STEPS)
    losses, norms = [], []
    for step in range(STEPS):
        outcome = take_step(step, local_batch(cell, mesh.layout, mesh.dp_rank, step))
        losses.append(engine.reduce(outcome.result).loss)
        norms.append(outcome.grad_norm.item())
        assert all((value.grad is None) is config.optim.in_backward for value in parameters.values()), cell
    found = {name: value.detach().clone() for name, value in parameters.items()}
    for name, state in optimizer.named_state().items():
        found |= {f"{name}.{key}": local_part(value).clone() for key, value in state.items()}
    return found, losses, norms


def against_one_process(rank: int, world_size: int, cells: list[Cell]) -> list[float]:
    """The largest relative error of each cell."""
    worst = []
    for cell in cells:
        wanted, losses, norms = train_plainly(cell)
        found, own_losses, own_norms = train(cell, cell.config(), mesh_of(cell, rank))
        found = {name: value for name, value in found.items() if name in wanted}
        assert found.keys() == wanted.keys()
        numbers = relative((*own_losses, *own_norms), (*losses, *norms))
        worst.append(max(error(found, wanted), numbers))
    return worst


def check(world_size: int, cells: list[Cell]) -> None:
    errors = [max(of_ranks) for of_ranks in zip(*run_on_world(world_size, against_one_process, cells), strict=True)]
    assert not {str(cell): error for cell, error in zip(cells, errors, strict=True) if not error < 1e-10}


@in_two_forms(10)
def test_one_rank_trains_like_a_plain_loop(form: Form) -> None:
    trains: list[dict[str, Any]] = [
        {},
        {"loss_chunks": 3},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "ops", "loss_chunks": 2},
    ]
    models = ("gpt", "gpt-tied", "vit", "gpt-options")
    cells = [cell_of(1, model) for model in models]
    cells += [cell_of(1, model, train=train) for model in ("gpt-tied", "gpt-options") for train in trains[1:]]
    check(1, form(cells, "model", "activation_checkpointing"))


@in_two_forms(15)
def test_replicas_train_like_a_plain_loop(form: Form) -> None:
    splits: list[dict[str, Any]] = [
        {"dp": 2, "data_parallel": "ddp"},
        {"dp": 2, "data_parallel": "ddp"} | SMALL,
        {"dp": 2, "data_parallel": "allreduce"} | SMALL,
        {"cp": 2} | SMALL,
    ]
    cells = [cell_of(2, model, strategy=split) for split in splits for model in ("gpt-tied", "gpt-options")]
    cells += [cell_of(2, "vit", strategy=splits[1])]
    cells += [cell_of(2, strategy=splits[2], train={"activation_checkpointing": "full", "loss_chunks": 2})]
    check(2, form(cells, "data_parallel", "cp", "activation_checkpointing"))


@pytest.mark.long_form(10)
def test_replicas_and_context_parallel_ranks_together() -> None:
    check(4, [cell_of(4, strategy={"dp": 2, "cp": 2} | SMALL), cell_of(4, "gpt", strategy={"dp": 4} | SMALL)])


def against_the_ordinary_step(rank: int, world_size: int, cells: list[Cell]) -> None:
    for cell in cells:
        config = cell.config()
        ordinary = replace(config, optim=replace(config.optim, in_backward=False))
        mesh = mesh_of(cell, rank)
        (found, *numbers), (wanted, *their_numbers) = (train(cell, each, mesh) for each in (config, ordinary))
        assert numbers == their_numbers, cell
        assert found.keys() == wanted.keys(), cell
        assert not [name for name, value in found.items() if not torch.equal(value, wanted[name])], cell


OPTIMIZERS: list[dict[str, Any]] = [
    {},
    {"name": "sgd", "lr": 0.1},
    {"name": "sgd", "lr": 0.1, "momentum": 0.0},
    {"moments": "bf16"},
    {"_target_": "torch.optim.RMSprop"},
    {
        "_target_": "torch.optim.Muon",
        "groups": {"others": {"match": "stem|head|norm", "_target_": "torch.optim.AdamW"}},
    },
    {"_target_": "examples.own_optimizer.Lion", "elementwise": True, "lr": 1e-3},
    {"groups": {"slow": {"match": "wq|norm", "lr_factor": 0.1, "weight_decay": 0.3}}},
]


@pytest.mark.parametrize(
    "optimizers", [OPTIMIZERS[::4], pytest.param(OPTIMIZERS, marks=pytest.mark.long_form(12))], ids=["short", "every"]
)
def test_every_optimizer_leaves_the_bits_of_the_ordinary_step(optimizers: list[dict[str, Any]]) -> None:
    """Parameters, state, losses and norms."""
    cells = [cell_of(1, "gpt-tied", each, precision="fp32") for each in optimizers]
    cells += [cell_of(1, precision="bf16"), cell_of(1, "gpt", precision="bf16", train={"loss_chunks": 2})]
    run_on_world(1, against_the_ordinary_step, cells)


@in_two_forms(10)
def test_replicas_leave_the_bits_of_the_ordinary_step(form: Form) -> None:
    split = {"dp": 2, "data_parallel": "allreduce"} | SMALL
    cells = [cell_of(2, "gpt-tied", each, precision="fp32", strategy=split) for each in OPTIMIZERS[::2]]
    cells += [cell_of(2, precision="fp32", strategy=split | {"compression": kind}) for kind in ("bf16", "fp16")]
    cells += [cell_of(2, precision="bf16", strategy=split | {"compression": "bf16"})]
    run_on_world(2, against_the_ordinary_step, form(cells, "compression"))


def compiled(rank: int, world_size: int, generates_code: bool) -> None:
    if not generates_code:
        run_graphs_as_cut()
    against_the_ordinary_step(rank, world_size, [cell_of(1, "gpt", precision="fp32", train={"compile": True})])


@pytest.mark.parametrize(
    "generates_code", [pytest.param(code, marks=pytest.mark.long_form(80 if code else 10)) for code in (False, True)]
)
def test_a_compiled_layer_leaves_the_bits_of_the_ordinary_step(generates_code: bool) -> None:
    run_ranks(1, compiled, generates_code, timeout=300)


def overflow_in_the_first_layer(rank: int, world_size: int, cell: Cell) -> tuple[list[str], list[str], list[float]]:
    """Returns the parameters that a step has changed, those that the following step has changed, and the norms."""
    mesh = mesh_of(cell, rank)
    engine = build_engine(cell.config(), mesh)
    parameters, model = engine.named_parameters(), engine.parts[0]
    take_step = TrainStep(cell.config(), mesh, engine, Optimizer(cell.config().optim, parameters), STEPS)
    layer: Any = model.get_submodule("layers.0")
    hook = layer.register_full_backward_hook(lambda module, given, of_output: (given[0] * float("inf"), *given[1:]))
    changed, norms = [], []
    for step in (0, 1):
        before = {name: value.detach().clone() for name, value in parameters.items()}
        norms.append(take_step(step + 1, local_batch(cell, mesh.layout, mesh.dp_rank, step)).grad_norm.item())
        changed.append([name for name, value in parameters.items() if not torch.equal(before[name], value)])
        assert int(take_step.take_skipped()[1]) == 1 - step
        hook.remove()
    return changed[0], changed[1], norms


@pytest.mark.parametrize("strategy", [{}, {"dp": 2} | SMALL], ids=["single", "dp"])
def test_updates_end_where_a_gradient_is_not_finite(strategy: dict[str, Any]) -> None:
    """The step counts as skipped. Only the stem is behind the overflow in this backward pass."""
    world_size = 2 if strategy else 1
    cell = cell_of(world_size, "gpt", strategy=strategy)
    found = run_on_world(world_size, overflow_in_the_first_layer, cell)
    for in_first, in_second, step_norms in found:
        assert {name.partition(".")[0] for name in in_first} == {"layers", "head"}
        assert len(in_first) == len(in_second) - 1, "all but the table of the stem"
        assert step_norms[1] < float("inf") and not step_norms[0] < float("inf")
    assert all(each[:2] == found[0][:2] for each in found)


def own_count(rank: int, world_size: int) -> None:
    cell = cell_of(1, "gpt-weighted")
    with pytest.raises(UserError, match="the loss returns its own count, by which the gradients are divided"):
        build_engine(cell.config(), mesh_of(cell, rank))


def test_a_loss_with_its_own_count_is_refused() -> None:
    run_on_world(1, own_count)
