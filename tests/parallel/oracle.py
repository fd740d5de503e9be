"""Compares an engine on several ranks with the oracle: a plain loop in one process with torch's clipping and AdamW.

The loop uses no micro-batches, padding, meshes or names: the whole global batch passes through the whole model at once.
Every rank runs the loop itself (the models are tiny) and compares its shards of each tensor with the result, so that
nothing is gathered.

To check one layout in a test, call ``check_layout(4, "gpt", strategy={"dp": 2, "pp": 2})``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from hpc_train.data.dataset import IGNORED, Batch, StepBatch
from hpc_train.data.sampler import Order
from hpc_train.layout.layout import Layout
from hpc_train.models.build import build_model
from hpc_train.models.model import named_buffers
from hpc_train.models.moe import Router
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import Engine, StepNumbers
from hpc_train.parallel.mesh import Mesh, join_mesh
from hpc_train.parallel.parallelize import materialize
from hpc_train.parallel.precision.dtypes import parameter_dtype
from tests.checkpoint.progress import LONG
from tests.parallel.cells import CLASSES, IMAGE, MIXTURES, VOCABULARY, Cell
from tests.ranks import kept, run_on_world, run_ranks

STEPS = 5 if LONG else 2
AT_ONCE = 16  # cells of one call of the ranks
MAX_NORM = 0.05  # lower than every gradient norm of these models, so that clipping is always active
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
# AdamW's epsilon: in fp32, 1e-8 would turn the noise in tiny gradients into steps of full size.
EPS = {"fp64": 1e-8, "fp32": 1e-3}
FLOOR = 1e-3
SEPARATES = hasattr(FSDPModule, "set_separate_reduce_scatter_group")  # torch 2.13


@dataclass(frozen=True)
class Record:
    """Records a training of ``STEPS`` steps and an evaluation after it.

    Attributes:
        gradients: the gradients by canonical name, after the first backward and before clipping.
        parameters: the parameters by canonical name, after the last step.
    """

    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    losses: tuple[float, ...]
    counts: tuple[float, ...]
    norms: tuple[float, ...]
    evaluation: StepNumbers
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # persistent, after the last step


@dataclass(frozen=True)
class Outcome:
    """Holds the largest relative errors of a cell against one process, over all tensors (see ``error``) and numbers."""

    cell: Cell
    layout: str
    names: tuple[str, ...]
    gradients: float
    parameters: float
    losses: float
    norms: float

    @property
    def worst(self) -> float:
        return max(self.gradients, self.parameters, self.losses, self.norms)


def check_layout(world_size: int, model: str = "gpt", **fields: Any) -> Outcome:
    """Compares one ``Cell(world_size, model, **fields)`` with one process."""
    return check_cells([Cell(world_size, model, **fields)])[0]


def check_cells(cells: Sequence[Cell], timeout: float = 280) -> list[Outcome]:
    """Compares ``cells``, all of one world size, with one process; each ``AT_ONCE`` of them take at most ``timeout`` s.

    They run on ranks that other tests have used, but compiled cells run on new ranks.

    Raises:
        AssertionError: a cell differs from one process, fails, or does not hold every parameter.
    """
    run = run_ranks if any(cell.config().train.compile for cell in cells) else run_on_world
    outcomes = []
    for first in range(0, len(cells), AT_ONCE):
        some = cells[first : first + AT_ONCE]
        ranks = run(cells[0].world_size, compare_cells, some, timeout=timeout)
        outcomes += [merge(list(of_ranks)) for of_ranks in zip(*ranks, strict=True)]
    wrong = [outcome for outcome in outcomes if not outcome.worst <= TOLERANCE[outcome.cell.precision]]
    assert not wrong, "these cells differ from one process:\n" + "\n".join(map(line, wrong))
    return outcomes


def merge(outcomes: list[Outcome]) -> Outcome:
    """Merges the outcomes of all ranks: the largest errors, and every name that some rank holds."""
    first = outcomes[0]
    held = {name for outcome in outcomes for name in outcome.names}
    assert held == expected_names(first.cell), f"{first.cell}: {held ^ expected_names(first.cell)}"
    errors = {
        key: max((getattr(outcome, key) for outcome in outcomes), key=lambda error: (math.isnan(error), error))
        for key in ("gradients", "parameters", "losses", "norms")
    }
    return Outcome(first.cell, first.layout, tuple(sorted(held)), **errors)


def line(outcome: Outcome) -> str:
    cell = outcome.cell
    errors = " ".join(f"{getattr(outcome, key):8.1e}" for key in ("gradients", "parameters", "norms", "losses"))
    return f"{cell.world_size} ranks  {errors}  {len(outcome.names):3d} tensors  {cell}: {outcome.layout}"


def expected_names(cell: Cell) -> set[str]:
    return {name for name, _ in build_model(cell.config().model, 0).named_parameters()}


def compare_cells(rank: int, world_size: int, cells: list[Cell]) -> list[Outcome]:
    """Compares ``cells`` with one process; every rank calls it."""
    pipelines = any(cell.strategy.get("pp", 1) > 1 for cell in cells)
    with checking_each_model_once() if pipelines else nullcontext():
        return [_compare_one(cell, mesh_of(cell, rank)) for cell in cells]


_CHECKED: set[tuple[str, torch.Size]] = set()


@contextmanager
def checking_each_model_once() -> Iterator[None]:
    """Makes pipelines check the shape of hidden states once per model, which takes a sixth of the time of a cell."""
    from hpc_train.parallel.pipeline import engine

    check = engine.check_hidden_shape

    def once(model: Any, inputs: Tensor, context: Mapping[str, Tensor]) -> None:
        key = repr(model), inputs.shape
        if key not in _CHECKED:
            check(model, inputs, context)
            _CHECKED.add(key)

    with mock.patch.object(engine, "check_hidden_shape", once):
        yield


def mesh_of(cell: Cell, rank: int) -> Mesh:
    """Returns the mesh of ``cell``; see ``kept_mesh``."""
    return kept_mesh(cell.layout(), rank)


def kept_mesh(layout: Layout, rank: int) -> Mesh:
    """Returns the mesh of ``layout``; those of one shape share their process groups, which have threads. Collective."""
    shape = (layout.dp, layout.pp, layout.cp, layout.tp, layout.shard, layout.ep, layout.ring, layout.replicas)
    mesh: Mesh = kept(shape, lambda: join_mesh(layout, rank, torch.device("cpu")))
    return replace(mesh, layout=layout)


def _compare_one(cell: Cell, mesh: Mesh) -> Outcome:
    try:
        expected = _expected(cell)
        engine = build_engine(cell.config(), mesh)
        found = train_engine(cell, mesh, engine, copy=shard_of)
    except Exception as problem:
        raise AssertionError(f"{cell}: {mesh.layout}") from problem
    parameters = engine.named_parameters()
    assert min(expected.norms) > MAX_NORM, f"{cell}: clipping is not active: {expected.norms}"
    assert found.counts == expected.counts, cell
    for name, buffer in found.buffers.items():
        assert torch.equal(buffer, expected.buffers[name]), f"{cell}: {name}"
    assert found.evaluation.target_count == expected.evaluation.target_count, cell
    assert found.evaluation.accuracy == expected.evaluation.accuracy, cell
    return Outcome(
        cell,
        str(mesh.layout),
        tuple(found.gradients),
        error_of_shards(found.gradients, expected.gradients, parameters),
        error_of_shards(found.parameters, expected.parameters, parameters),
        relative((*found.losses, found.evaluation.loss), (*expected.losses, expected.evaluation.loss)),
        relative(found.norms, expected.norms),
    )


_KNOWN: dict[tuple[str, str, int, float], Record] = {}


def _expected(cell: Cell) -> Record:
    """Returns the record of one process, computed once per rank because it is the same for all layouts."""
    config = cell.config()
    key = (repr(config.model), cell.precision, config.batch.global_size, config.train.z_loss)
    if key not in _KNOWN:
        _KNOWN[key] = train_plainly(cell)
    return _KNOWN[key]


def error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the largest difference of any element, relative to the largest element of its tensor.

    Some gradients are zero except for rounding errors: softmax cancels the effect of the key biases. Therefore the
    difference is relative to at least ``FLOOR`` times the largest element of all tensors.
    """
    floor = FLOOR * max(value.abs().max().item() for value in expected.values())
    return max(_error_of_one(found[name], expected[name], expected[name], floor) for name in found)


def error_of_shards(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> float:
    """Returns the ``error`` of the shards that this rank holds of ``expected``, placed as ``parameters`` are."""
    floor = FLOOR * max(value.abs().max().item() for value in expected.values())
    return max(
        _error_of_one(found[name], _placed_as(parameters[name], expected[name]), expected[name], floor)
        for name in found
    )


def _error_of_one(found: Tensor, expected: Tensor, whole: Tensor, floor: float) -> float:
    if not found.numel():  # a rank without a part of a tensor that is smaller than the number of ranks
        return 0.0
    return (found - expected).abs().max().item() / max(whole.abs().max().item(), floor)


def _placed_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Returns the part of ``value`` that this rank holds of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


def relative(found: tuple[float, ...], expected: tuple[float, ...]) -> float:
    return max(abs(a - b) / abs(b) if not math.isnan(a) else math.nan for a, b in zip(found, expected, strict=True))


def global_batch(cell: Cell, step: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs and targets of one step; some of the targets are ignored."""
    generator = torch.Generator().manual_seed(100 + step)
    size = cell.config().batch.global_size
    if cell.model.startswith("gpt"):
        inputs = torch.randint(VOCABULARY, (size, cell.sequence), generator=generator)
        targets = torch.randint(VOCABULARY, (size, cell.sequence), generator=generator)
    else:
        inputs = torch.randn(size, 3, IMAGE, IMAGE, generator=generator, dtype=parameter_dtype(cell.precision))
        classes = torch.randint(CLASSES, (size,), generator=generator)
        targets = inputs.clone() if cell.model == "custom-vae" else classes
    targets.view(-1)[torch.randint(targets.numel(), (2,), generator=generator)] = IGNORED
    if cell.model in MIXTURES:
        targets[0, 3:] = IGNORED  # padding
    return inputs, targets


def local_batch(cell: Cell, layout: Layout, dp_rank: int, step: int) -> StepBatch:
    """Returns the share of ``dp_rank``, with the padding that the feed would add. Only training moves micro-batches."""
    inputs, targets = global_batch(cell, step)
    size, target_count = inputs.shape[0], int((targets != IGNORED).sum())
    inputs = torch.cat((inputs, inputs.new_zeros(1, *inputs.shape[1:])))  # PADDING, -1, selects the last row
    targets = torch.cat((targets, targets.new_full((1, *targets.shape[1:]), IGNORED)))
    order = Order(size, size, drop_last=True, seed=None)
    counts = cell.counts[step % len(cell.counts)] if cell.counts and step < STEPS else ()
    held = layout.micro_batches_of(dp_rank, counts)
    slots = [torch.from_numpy(order.rank_batch(0, layout, rank)[number]) for rank, number in held]
    numbers = tuple(rank * layout.micro_batches + number for rank, number in held) if counts else ()
    return StepBatch(tuple(Batch(inputs[row], targets[row]) for row in slots), target_count, numbers)


def train_plainly(cell: Cell) -> Record:
    """Trains with a plain loop in one process."""
    config, dtype = cell.config(), parameter_dtype(cell.precision)
    model: Any = build_model(config.model, config.train.seed)
    if cell.model.startswith("custom"):
        model.to(dtype)
    else:
        materialize(model, torch.device("cpu"), config.train.seed, dtype)
    optimizer = adamw(list(model.parameters()), cell)
    gradients: dict[str, Tensor] = {}
    losses, counts, norms = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = global_batch(cell, step)
        with recorded_routing(model) as routings:
            loss_sum, count = model(inputs, {}, targets)
        for routing in routings:
            loss_sum = loss_sum + plain_auxiliary_loss(routing, targets)
        if config.train.z_loss:
            normalizer = model(inputs, {}).logsumexp(-1)[targets != IGNORED]
            loss_sum = loss_sum + config.train.z_loss * normalizer.square().sum()
        (loss_sum / count).backward()
        losses.append((loss_sum / count).item())
        counts.append(float(count))
        if step == 0:
            gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        for routing in routings:
            update_bias_plainly(routing, targets)
    model.eval()
    with torch.no_grad():
        loss_sum, count, correct = model(*_with_context(global_batch(cell, STEPS)))
    accuracy = None if correct is None else int(correct) / float(count)
    evaluation = StepNumbers((loss_sum / count).item(), float(count), accuracy)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = named_buffers([model])
    return Record(gradients, parameters, tuple(losses), tuple(counts), tuple(norms), evaluation, buffers)


@dataclass(frozen=True)
class Routing:
    """Holds what a router has received and chosen for a batch: hidden states ``[samples, tokens, dim]``, experts
    ``[samples, tokens, top_k]``."""

    router: Router
    hidden: Tensor
    experts: Tensor


@contextmanager
def recorded_routing(model: nn.Module) -> Iterator[list[Routing]]:
    """Yields a list to which each pass of a router of ``model`` is appended."""
    routings: list[Routing] = []

    def record(router: Any, inputs: Any, outputs: Any) -> None:
        routings.append(Routing(router, inputs[0], outputs[1]))

    routers = (module for module in model.modules() if isinstance(module, Router))
    hooks = [router.register_forward_hook(record) for router in routers]
    yield routings
    for hook in hooks:
        hook.remove()


def plain_auxiliary_loss(routing: Routing, targets: Tensor) -> Tensor:
    """Computes the losses of a router sequence by sequence, times the targets of each."""
    router = routing.router
    moe = router.config
    total = routing.hidden.new_zeros(())
    for hidden, experts, row in zip(routing.hidden, routing.experts, targets, strict=True):
        counted = int((row != IGNORED).sum())
        length = _length(row)
        logits = hidden[:length] @ router.weight.T
        scores = logits.softmax(-1) if moe.router == "softmax" else logits.sigmoid()
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        load = torch.stack([(experts[:length] == expert).sum() for expert in range(len(router.weight))])
        balance = len(router.weight) * (load / load.sum() * mean).sum()
        total = total + counted * (moe.balance_loss * balance + moe.z_loss * (logits.logsumexp(-1) ** 2).mean())
    return total


def update_bias_plainly(routing: Routing, targets: Tensor) -> None:
    bias = routing.router.expert_bias
    if bias is None:
        return
    chosen = [
        int(expert)
        for experts, row in zip(routing.experts, targets, strict=True)
        for expert in experts[: _length(row)].flatten()
    ]
    mean = len(chosen) / len(bias)
    for expert in range(len(bias)):
        count = chosen.count(expert)
        bias[expert] += routing.router.config.bias_rate * ((count < mean) - (count > mean))


def _length(row: Tensor) -> int:
    """Returns the number of tokens up to the last target that counts."""
    return max(index for index, target in enumerate(row) if target != IGNORED) + 1


def train_engine(
    cell: Cell, mesh: Mesh, engine: Engine, copy: Callable[[Tensor | None], Tensor] | None = None
) -> Record:
    """Trains with an engine, as the trainer does.

    Args:
        copy: what the record holds of gradients and parameters: ``whole`` tensors unless given.
    """
    copy = copy or whole
    parameters = engine.named_parameters()
    shards = {name: nn.Parameter(_local(value)) for name, value in parameters.items()}
    optimizer = adamw(list(shards.values()), cell)
    scale = None if cell.loss_scale is None else torch.tensor(cell.loss_scale)
    gradients: dict[str, Tensor] = {}
    losses, counts, norms = [], [], []
    for step in range(STEPS):
        batch = local_batch(cell, mesh.layout, mesh.dp_rank, step)
        numbers = engine.reduce(engine.train_step(step, batch, scale))
        losses.append(numbers.loss)
        counts.append(numbers.target_count)
        if step == 0:
            gradients = {name: copy(value.grad) / (cell.loss_scale or 1) for name, value in parameters.items()}
        norm = engine.clip_grad_norm_(MAX_NORM, scale)
        engine.commit(norm.isfinite())
        norms.append(norm.item())
        for name, value in parameters.items():
            shards[name].data, shards[name].grad = _local(value), _local(value.grad)
        optimizer.step()
    evaluation = engine.reduce(engine.eval_step(local_batch(cell, mesh.layout, mesh.dp_rank, STEPS)))
    final = {name: copy(value) for name, value in parameters.items()}
    buffers = engine.named_buffers()
    return Record(gradients, final, tuple(losses), tuple(counts), tuple(norms), evaluation, buffers)


def adamw(parameters: list[nn.Parameter], cell: Cell) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=EPS[cell.precision])


def whole(value: Tensor | None) -> Tensor:
    """Returns a copy of the full tensor. Collective for DTensors."""
    assert value is not None
    value = value.detach()
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def shard_of(value: Tensor | None) -> Tensor:
    """Returns a copy of what this rank holds of a tensor."""
    return _local(value).clone()


def _local(value: Tensor | None) -> Tensor:
    """Returns what this rank holds of a tensor, in the same memory."""
    assert value is not None
    if not isinstance(value, DTensor):
        return value.detach()
    assert not any(placement.is_partial() for placement in value.placements), value.placements
    return value._local_tensor.detach()


def _with_context(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    return pair[0], {}, pair[1]
