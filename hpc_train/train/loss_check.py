"""Finds a loss that depends on how a batch is split or padded, before the first step.

The sum and the count of a loss must be sums over samples: then they are the same whether one rank computes them for the
whole batch, or several ranks and micro-batches for parts of it. Those of one micro-batch are compared with those of its
two halves. They differ for a contrastive loss, for a forward pass that attends across the batch, and for a mean with a
count of 1.

Padding fills up a batch whose samples do not divide over the ranks and micro-batches: copies of a sample whose targets
are all ``IGNORED``. Micro-batches are compared that differ only in the inputs of such a row, or in having it.

The model is in evaluation mode. A loss that is random nevertheless draws from a generator, or differs between two
passes over the same micro-batch; it is not compared with its halves. Nothing changes for the training: random state,
buffers and plain attributes of the modules are restored, and there are no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hpc_train.checkpoint.agreement import lowest
from hpc_train.data.dataset import IGNORED, Batch, Dataset, Nested, Ragged, StepBatch, leaves, map_leaves
from hpc_train.data.feed import example_micro_batch
from hpc_train.errors import UserError
from hpc_train.parallel.engine import Engine, StepResult, seed_micro_batch
from hpc_train.parallel.mesh import Mesh
from hpc_train.run.exits import Failure, classify
from hpc_train.train.kept_state import drawn, kept_random_state, kept_state

Sums = tuple[float, float]  # of the losses and of the counts, over all ranks


@dataclass(frozen=True)
class LossCheck:
    """Holds what was found.

    Attributes:
        warning: the loss depends on the split of a batch, or was not compared; None if neither.
        padding: how padding enters the loss; None if it does not.
    """

    warning: str | None = None
    padding: str | None = None


def check_loss(
    engine: Engine, dataset: Dataset, mesh: Mesh, precision: str, *, halves: bool = True, padding: bool = True
) -> LossCheck:
    """Compares the loss of a micro-batch of ``dataset`` with that of its parts and with padding. Collective.

    Args:
        precision: the precision of the config, whose rounding errors are tolerated.
        halves: whether to compare the two halves.
        padding: whether to look for padding in the loss.

    Raises:
        UserError: the count is NaN or negative, or it is 0 while the sum is not 0.
    """
    with kept_random_state(mesh.device), kept_state(engine.parts), torch.compiler.set_stance("force_eager"):
        check = _Check(engine, dataset, mesh, TOLERANCE.get(precision, ROUGH))
        return LossCheck(check.split() if halves else None, check.padding() if padding else None)


TOLERANCE = {"fp64": 1e-3, "fp32": 1e-3}  # relative; GPUs may round the products of fp32 matrices to TF32
ROUGH = 0.02  # of losses in half precision
REPEATED = 1e-5  # of two passes over rows that are equal where they count; only sums in another order differ
FLOOR = 1e-6  # differences of a loss per sample that do not count


class _Check:
    """Computes the loss of a micro-batch and its variants."""

    def __init__(self, engine: Engine, dataset: Dataset, mesh: Mesh, tolerance: float) -> None:
        self._engine = engine
        self._dataset = dataset
        self._mesh = mesh
        self._tolerance = tolerance
        self._size = max(2, mesh.layout.micro_size)
        self._batch = self._read(0, self._size)
        seed_micro_batch(0, 0, 0, mesh.device)
        before = drawn(mesh.device)
        self._whole = self._global(engine.eval_step(StepBatch((self._batch,), 1)))
        self._draws = drawn(mesh.device) != before
        if math.isnan(self._whole[1]):
            raise UserError(
                "the loss of the model returned a count that is not a number (NaN)",
                where="the method loss of the model",
                fix="return as the count the number of samples or the sum of their weights",
            )

    def split(self) -> str | None:
        """Returns a warning if the loss is not the sum over the halves."""
        if self._any_rank_draws():
            return None
        middle = self._size // 2 // 2 * 2 or 1  # even, because samples may belong together in pairs
        halves, problem = self._tried(self._part(0, middle), self._part(middle, self._size))
        if halves is None:
            return f"the loss was not checked for a dependence on the split of a batch: half a micro-batch {problem}"
        if _equal(self._whole, halves, self._tolerance) or not self._is_repeatable():
            return None
        # those of one of the ranks, which have all computed the same samples
        dp = self._mesh.layout.dp
        whole, both = (f"{total / dp:.6g} with the count {count / dp:.6g}" for total, count in (self._whole, halves))
        return (
            f"the results depend on the number of ranks and micro-batches: the loss of {self._size} samples is "
            f"{whole}, but the losses of their two halves add up to {both}. If the loss compares samples, declare it "
            "as loss(self, outputs, targets, gather), which compares those of all ranks; otherwise return a sum over "
            "samples and their number"
        )

    def padding(self) -> str | None:
        """Returns how a row without targets enters the loss; None if it does not, or the loss cannot be computed."""
        if isinstance(self._batch.inputs, Ragged):  # which is not padded
            return None
        dp = self._mesh.layout.dp
        # the feed pads with copies of the first sample of a micro-batch
        last = self._size - 1
        padded, _ = self._tried(_without_targets(self._batch, last, copied=True))
        other, _ = self._tried(_without_targets(self._batch, last, copied=False))
        if padded is None or other is None:
            return None
        counted = any(bool((value[last] != IGNORED).any()) for value in leaves(self._batch.targets))
        if counted and padded[1] == self._whole[1] > self._mesh.layout.dp_cp:  # a count of 1 is that of a mean
            return f"its count is {padded[1] / dp:g} with and without the targets of a row"
        if not _equal(padded, other, REPEATED) and self._is_repeatable():
            sums = f"{padded[0] / dp:.6g} or {other[0] / dp:.6g}"
            return f"its sum is {sums}, depending on the inputs of a row without targets"
        # a loss that is rounded to bf16 may hide this difference, and other shapes may draw other random numbers
        if self._any_rank_draws():
            return None
        shorter, _ = self._tried(self._part(0, last))
        if shorter is None or _equal(padded, shorter, self._tolerance) or not self._is_repeatable():
            return None
        return f"its sum is {padded[0] / dp:.6g} with a row without targets and {shorter[0] / dp:.6g} without this row"

    def _read(self, first: int, last: int) -> Batch:
        layout = replace(self._mesh.layout, micro_size=last - first)
        return example_micro_batch(self._dataset, layout, self._mesh.device, first)

    def _part(self, first: int, last: int) -> Batch:
        """Returns some of the samples of the micro-batch."""
        if isinstance(self._batch.inputs, Ragged):  # which is built from its items
            return self._read(first, last)
        batch = self._batch
        return _mapped(batch, lambda rows: rows[first:last], lambda rows: rows[first:last], batch.samples[first:last])

    def _is_repeatable(self) -> bool:
        """Returns whether a second pass over the micro-batch has the same loss."""
        return _equal(self._whole, self._global(self._pass(self._batch)), REPEATED)

    def _any_rank_draws(self) -> bool:
        return lowest(self._draws or None, self._mesh.control) is not None

    def _tried(self, *micro_batches: Batch) -> tuple[Sums | None, str]:
        """Returns the sums, or what happens if the model does not accept these micro-batches."""
        problem = result = None
        try:
            result = self._pass(*micro_batches)
        except Exception as error:
            if classify(error) not in (Failure.USER_ERROR, Failure.REFUSED):
                raise  # such as an error of the GPU, which no batch size cures
            # training may still succeed, since its micro-batches have their full size
            problem = f"fails: {type(error).__name__}: {error}"
        problem = lowest(problem, self._mesh.control)
        if problem is not None or result is None:
            return None, str(problem)
        return self._global(result), ""

    def _pass(self, *micro_batches: Batch) -> StepResult:
        seed_micro_batch(0, 0, 0, self._mesh.device)  # what is drawn is the same in each pass
        return self._engine.eval_step(StepBatch(micro_batches, 1))

    def _global(self, result: StepResult) -> Sums:
        numbers = self._engine.reduce(result)
        return numbers.loss * (numbers.target_count or 1.0), numbers.target_count


def _equal(first: Sums, second: Sums, tolerance: float) -> bool:
    """Returns whether both are equal up to rounding; a loss that is not finite differs from no other."""
    if not all(map(math.isfinite, (*first, *second))):
        return True
    floor = FLOOR * max(1.0, first[1])
    return all(abs(a - b) <= tolerance * max(abs(a), abs(b)) + floor for a, b in zip(first, second, strict=True))


def _without_targets(batch: Batch, row: int, copied: bool) -> Batch:
    """Returns ``batch`` without the targets of ``row``, whose inputs may be ``copied`` from the first row."""

    def inputs(value: torch.Tensor) -> torch.Tensor:
        if not copied:
            return value
        changed = value.clone()
        changed[row] = value[0]
        return changed

    def targets(value: torch.Tensor) -> torch.Tensor:
        changed = value.clone()
        changed[row] = IGNORED
        return changed

    return _mapped(batch, inputs, targets, batch.samples)


Change = Callable[[torch.Tensor], torch.Tensor]


def _mapped(batch: Batch, inputs: Change, targets: Change, samples: tuple[int, ...]) -> Batch:
    context: dict[str, Nested] = {name: map_leaves(inputs, value) for name, value in batch.context.items()}
    return Batch(map_leaves(inputs, batch.inputs), map_leaves(targets, batch.targets), context, samples)
