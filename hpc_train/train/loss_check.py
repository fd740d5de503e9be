"""Finds a loss that depends on how a batch is split, before the first step.

The sum and the count of a loss must be sums over samples: then they are the same whether one rank computes them for the
whole batch, or several ranks and micro-batches for parts of it. The module compares those of one micro-batch with those
of its two halves. They differ for a contrastive loss, for a forward pass that attends across the batch, and for a mean
with a count of 1.

The model is in evaluation mode, without dropout and with fixed batch statistics. A loss that is random nevertheless, or
changes with every call, differs between two passes over the same micro-batch and is not compared. Nothing changes for
the training: random state, buffers and plain attributes of the modules are restored, and there are no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from hpc_train.checkpoint.agreement import lowest
from hpc_train.data.dataset import Batch, Dataset, Nested, Ragged, StepBatch, map_leaves
from hpc_train.data.feed import example_micro_batch
from hpc_train.errors import UserError
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.engine import Engine, StepResult
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.exits import Failure, classify

Sums = tuple[float, float]  # of the losses and of the counts, over all ranks


def check_loss(engine: Engine, dataset: Dataset, mesh: Mesh, precision: str) -> str | None:
    """Returns a warning if the loss of a micro-batch of ``dataset`` is not the sum over its halves. Collective.

    Args:
        precision: the precision of the config, whose rounding errors are tolerated.

    Raises:
        UserError: the count is NaN or negative, or it is 0 while the sum is not 0.
    """
    size = max(2, mesh.layout.micro_size)
    batch = example_micro_batch(dataset, replace(mesh.layout, micro_size=size), mesh.device)
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _restored(engine.parts), torch.compiler.set_stance("force_eager"):
        whole, again = _sums(engine, batch), _sums(engine, batch)
        if math.isnan(whole[1]):
            raise UserError(
                "the loss of the model returned a count that is not a number (NaN)",
                where="the method loss of the model",
                fix="return as the count the number of samples or the sum of their weights",
            )
        tolerance = TOLERANCE.get(precision, ROUGH)
        if not _equal(whole, again, tolerance):
            return None
        halves, problem = _sums_of_halves(engine, dataset, batch, size, mesh)
    if problem is not None:
        return f"the loss was not checked for a dependence on the split of a batch: half a micro-batch fails: {problem}"
    return None if _equal(whole, halves, tolerance) else _warning(size, whole, halves, mesh.layout.dp)


TOLERANCE = {"fp64": 1e-3, "fp32": 1e-3}  # relative; GPUs may round the products of fp32 matrices to TF32
ROUGH = 0.02  # of losses in half precision
FLOOR = 1e-6  # differences of a loss per sample that do not count


def _equal(one: Sums, other: Sums, tolerance: float) -> bool:
    """Returns whether both are equal up to rounding; a loss that is not finite differs from no other."""
    if not all(map(math.isfinite, (*one, *other))):
        return True
    floor = FLOOR * max(1.0, one[1])
    return all(abs(a - b) <= tolerance * max(abs(a), abs(b)) + floor for a, b in zip(one, other, strict=True))


def _warning(samples: int, whole: Sums, halves: Sums, dp: int) -> str:
    """Returns the warning with the sums of one of the ``dp`` ranks, which have all computed the same samples."""
    one, both = (f"{total / dp:.6g} with the count {count / dp:.6g}" for total, count in (whole, halves))
    return (
        f"the results depend on the number of ranks and micro-batches: the loss of {samples} samples is {one}, but the "
        f"losses of their two halves add up to {both}. If the loss compares samples, declare it as loss(self, outputs, "
        "targets, gather), which compares those of all ranks; otherwise return a sum over samples and their number"
    )


def _sums(engine: Engine, batch: Batch) -> Sums:
    return _global(engine, engine.eval_step(StepBatch((batch,), 1)))


def _global(engine: Engine, result: StepResult) -> Sums:
    numbers = engine.reduce(result)
    return numbers.loss * (numbers.target_count or 1.0), numbers.target_count


def _sums_of_halves(engine: Engine, dataset: Dataset, batch: Batch, size: int, mesh: Mesh) -> tuple[Sums, str | None]:
    """Returns the sums of the two halves, or the error if the model does not accept half a micro-batch."""
    middle = size // 2 // 2 * 2 or 1  # even, because samples may belong together in pairs
    problem = result = None
    try:
        if isinstance(batch.inputs, Ragged):  # its halves are built from their items
            parts = [(0, middle), (middle, size - middle)]
            layouts = [(first, replace(mesh.layout, micro_size=count)) for first, count in parts]
            halves = [example_micro_batch(dataset, layout, mesh.device, first) for first, layout in layouts]
        else:
            halves = [_part(batch, 0, middle), _part(batch, middle, size)]
        result = engine.eval_step(StepBatch(tuple(halves), 1))
    except Exception as error:
        if classify(error) not in (Failure.USER_ERROR, Failure.REFUSED):
            raise  # such as an error of the GPU, which no batch size cures
        # training may still succeed, since its micro-batches have their full size
        problem = f"{type(error).__name__}: {error}"
    problem = lowest(problem, mesh.control)
    if problem is not None or result is None:
        return (math.nan, math.nan), problem
    return _global(engine, result), None


def _part(batch: Batch, first: int, last: int) -> Batch:
    def rows(part: Nested) -> Nested:
        return map_leaves(lambda value: value[first:last], part)

    context = {name: rows(value) for name, value in batch.context.items()}
    return Batch(rows(batch.inputs), rows(batch.targets), context, batch.samples[first:last])


@contextmanager
def _restored(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Restores the buffers of all modules, and their attributes that are tensors or plain values."""
    found = [*parts, *(part.bare for part in parts if isinstance(part, WrappedModel))]
    modules = [module for part in found for module in part.modules()]
    values = [(vars(module), name, value) for module in modules for name, value in vars(module).items()]
    plain = [entry for entry in values if isinstance(entry[2], bool | int | float | str | tuple | Tensor | None)]
    tensors = [value for _, _, value in values if isinstance(value, Tensor)]
    tensors += [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    copies = [tensor.detach().clone() for tensor in tensors]
    yield
    for attributes, name, value in plain:
        attributes[name] = value
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
