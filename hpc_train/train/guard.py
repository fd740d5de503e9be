"""Tests custom code before the first step, and rejects code that would silently give wrong results.

The results must be the same as in one process, however the work is split. The checks need a few passes over one
micro-batch, so they run once for each combination of code, config, layout and version of torch; ``run.json`` records
them. Differences between ranks that only appear with different samples are found in the first step by
``CheckedWrites``.

The sum and the count of a loss must be sums over samples: then they are the same whether one rank computes them for the
full batch, or several ranks and micro-batches compute them for parts. The values of a micro-batch are compared with the
values of its two halves. They differ for a contrastive loss, for a forward pass that attends across the batch, and for
a mean with a count of 1.

If the samples of a batch cannot be divided evenly among ranks and micro-batches, padding fills it up: copies of a
sample whose targets are all ``IGNORED``. Two comparisons find an effect of padding: micro-batches that differ only in
the inputs of such a row, and micro-batches with and without such a row.

The model is in evaluation mode for these comparisons. If the loss is random nevertheless, i.e. it draws from a
generator or differs between two passes over the same micro-batch, it is not compared with its halves. The checks do not
affect the training: random state, buffers and plain attributes of the modules are restored, and there are no gradients.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.checkpoint.agreement import lowest
from hpc_train.config.evaluation import MAIN
from hpc_train.config.extensions import is_import_path
from hpc_train.config.schema import Config, CustomModelConfig, StreamDataConfig
from hpc_train.data.dataset import IGNORED, Batch, Dataset, Nested, Ragged, StepBatch, leaves, map_leaves
from hpc_train.data.feed import EvalFeed, example_micro_batch
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.models.model import Model, canonical_name
from hpc_train.models.own_loss import place
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.collectives import broadcast_plain
from hpc_train.parallel.engine import Engine, StepResult, WrappedEngine, over_replicas, seed_micro_batch
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.writes import REFUSE, checksum, written_in_lookups
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Failure, classify
from hpc_train.train.debug import join_names
from hpc_train.train.evaluation import Evaluation
from hpc_train.train.kept_state import drawn, kept_random_state, kept_state
from hpc_train.train.rehearsal import Rehearsal, rehearse
from hpc_train.train.report import Report

CHECKED = "checked"  # the key in run.json that records the checks


def check_user_code(
    config: Config,
    run: RunDirectory,
    mesh: Mesh,
    engine: Engine,
    training: Dataset,
    evaluation: Evaluation,
    report: Report,
) -> None:
    """Checks the model of ``config``, unless that was done before. Collective.

    Raises:
        UserError: the training or the evaluation of the model would differ from one process.
    """
    while isinstance(engine, WrappedEngine):  # wrappers that observe the model would count the passes of the checks
        engine = engine._engine
    if mesh.layout.dp_cp > 1:
        _check_replicated_state(config, mesh, engine)
    if config.train.check == "off" or not is_user_code(config, engine):
        return
    key = _key(config, run, mesh, engine)
    checked = broadcast_plain(run.record().get(CHECKED) if mesh.rank == 0 else None, mesh.control)
    if checked is not None and checked["key"] == broadcast_plain(key, mesh.control):
        engine.read_anew(checked["written"])
        return

    warnings = []
    loss_warning = _check_loss(config, mesh, engine, training, evaluation)
    if loss_warning is not None:
        warnings.append(loss_warning)
    warnings += _warnings_of_targets(training, mesh)
    rehearsal = Rehearsal()
    if config.train.debug:  # the debug mode checks each step and names values that are not finite
        rehearsal.not_compared = "train.debug=true"
    elif not mesh.layout.logical_micro_batches and not engine.compressions():
        rehearsal = rehearse(config, mesh.replica, engine, example_micro_batch(training, mesh.layout, mesh.device))
    if rehearsal.attributes:
        warnings.append(
            f"the forward pass changes attributes that are neither parameters nor buffers: "
            f"{join_names(rehearsal.attributes)}. Checkpoints do not contain them, so a resumed run starts with their "
            "initial values; register_buffer saves a tensor"
        )
    if rehearsal.not_compared is not None and mesh.rank == 0:
        print(f"gradients are not compared with the gradients of one process: {rehearsal.not_compared}")
    for warning in warnings:
        report.warning(0, warning)
    if report.metrics is not None:
        record: dict[str, Any] = {CHECKED: {"key": key, "written": rehearsal.written}}
        if warnings:
            record["loss_warning"] = "; ".join(warnings)
        report.events.record(run, **record)


def _check_replicated_state(config: Config, mesh: Mesh, engine: Engine) -> None:
    """Raises UserError if a rank would scale rows of an embedding that other ranks do not look up."""
    names = written_in_lookups(engine.parts)
    if names:
        raise UserError(
            f"{join_names(names)} has max_norm, so a forward pass scales the rows that it looks up: each rank would "
            "scale the rows of its samples, and the replicas would diverge",
            where=f"strategy.data_parallel={mesh.layout.data_parallel}, model",
            fix="strategy=single, or nn.Embedding without max_norm",
        )
    if config.train.buffers != REFUSE and mesh.rank == 0:
        print(_BUFFERS[config.train.buffers])


_BUFFERS = {
    "rank0": "train.buffers=rank0: after each step, the buffers of all ranks get the values of rank 0. If the forward "
    "pass changes them, the results differ from one process",
    "mean": "train.buffers=mean: after each step, the buffers are averaged over the ranks. If the forward pass changes "
    "them, the results differ from one process",
}


def is_user_code(config: Config, engine: Engine) -> bool:
    """Returns whether the model or its loss is not part of hpc_train."""
    if isinstance(config.model, CustomModelConfig) or is_import_path(config.model.kind) or engine.check_loss:
        return True
    return any(isinstance(part, WrappedModel) for part in engine.parts)


def _key(config: Config, run: RunDirectory, mesh: Mesh, engine: Engine) -> str:
    """Returns a hash of all inputs of the checks on the first rank; an empty string on other ranks."""
    if mesh.rank != 0:
        return ""
    code = frozen_code(run)
    part = engine.parts[0]
    if isinstance(part, WrappedModel):
        part = part.bare
    try:
        source = inspect.getsource(type(part))  # the source may be outside of the frozen code
    except (OSError, TypeError):  # the class was created at run time
        source = ""
    digest = hashlib.sha256(run.config.read_bytes())
    for fact in (torch.__version__, str(mesh.layout), code.snapshot if code is not None else "", source):
        digest.update(fact.encode())
    return digest.hexdigest()


def _check_loss(config: Config, mesh: Mesh, engine: Engine, training: Dataset, evaluation: Evaluation) -> str | None:
    """Returns the warning about a loss that depends on the split of a batch.

    Raises:
        UserError: batches will be padded, and padding enters the loss.
    """
    padded = padding_of_training(config, mesh.layout, training)
    padded = padded or padding_of_evaluation(config, mesh.layout, evaluation.feeds.values())
    if not engine.check_loss and padded is None:
        return None
    check = check_loss(
        engine, training, mesh, config.precision.name, halves=engine.check_loss, padding=padded is not None
    )
    if padded is not None and check.padding is not None:
        raise _padded(padded, check.padding, engine)
    return check.warning


def check_evaluation_padding(config: Config, mesh: Mesh, engine: Engine, evaluation: Evaluation) -> None:
    """Checks an evaluation that is not part of a training. Collective.

    Raises:
        UserError: batches will be padded, and padding enters the loss.
    """
    padded = padding_of_evaluation(config, mesh.layout, evaluation.feeds.values())
    if padded is None or config.train.check == "off" or not is_user_code(config, engine):
        return
    check = check_loss(engine, evaluation.feeds[MAIN].dataset, mesh, config.precision.name, halves=False)
    if check.padding is not None:
        raise _padded(padded, check.padding, engine)


def _padded(padded: str, problem: str, engine: Engine) -> UserError:
    where = "model"
    for part in engine.parts:
        owner: Any = part.head if isinstance(part, Model) else part
        if isinstance(part, Model | WrappedModel) and callable(getattr(owner, "loss", None)):
            where = f"model, {place(owner.loss)}"
            break
    return UserError(
        f"{padded}, but the loss of the model does not exclude padded rows: {problem}",
        where=where,
        fix="exclude rows whose targets are all -100 from the sum and from the count, as in kept = targets != -100; "
        "a forward pass must not mix the rows of a batch. train.check=off trains and evaluates with padding",
    )


def padding_of_training(config: Config, layout: Layout, training: Dataset) -> str | None:
    """Returns a description of the training batches with padded rows; None if there are none."""
    size = config.batch.global_size
    places = layout.dp * layout.micro_batches * layout.micro_size
    if size != places:
        return f"the {size} samples of a step are padded to {places} rows"
    if isinstance(config.data, StreamDataConfig):
        is_short = not config.data.repeat
    else:
        is_short = not config.batch.drop_last and len(training) % size > 0
    return "the last batch is filled up with padding" if is_short else None


def padding_of_evaluation(config: Config, layout: Layout, feeds: Iterable[EvalFeed]) -> str | None:
    """Returns a description of the evaluation with padded rows; None if there is none."""
    size = config.batch.global_size
    places = layout.dp * layout.micro_batches * layout.micro_size
    for feed in feeds:
        if size != places or feed.samples % size:
            return f"an evaluation of {feed.samples} samples in batches of {size} has padding"
    return None


SCANNED = 64  # the number of samples whose targets are checked


def _warnings_of_targets(training: Dataset, mesh: Mesh) -> Iterable[str]:
    """Yields a warning if measured values may be mistaken for missing targets."""
    size = min(len(training), SCANNED) if training.loads_cheaply else 2
    batch = example_micro_batch(training, replace(mesh.layout, micro_size=size), torch.device("cpu"))
    if isinstance(batch.inputs, Ragged):  # every target of a ragged batch counts
        return
    targets = [value for value in leaves(batch.targets) if value.is_floating_point()]
    missing = sum(int((value == IGNORED).sum()) for value in targets)
    if missing:
        total = sum(value.numel() for value in targets)
        yield (
            f"{missing} of {total} targets of the first samples are -100, the mark of a target that does not count. If "
            "-100 is a measured value, shift or scale the targets"
        )


SAME = 1e-5  # values are equal up to this difference, relative to the largest element of a tensor


class CheckedWrites(WrappedEngine):
    """Wraps ``engine`` and compares the state of its replicas after the first training step of the attempt.

    A buffer or parameter that the forward pass changes may depend on the samples of its rank (a codebook, a queue, rows
    of an embedding with ``max_norm``) or not (a counter, a momentum teacher). The ranks agree only in the latter case.
    ``train_step`` raises UserError on all ranks if the replicas differ in such a tensor.
    """

    def __init__(self, engine: Engine, mesh: Mesh) -> None:
        super().__init__(engine)
        self._group = mesh.group("dp_cp")
        self._device = mesh.device
        self._kind = mesh.layout.data_parallel
        self._pending = mesh.layout.dp_cp > 1

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        if not self._pending:
            return self._engine.train_step(step, batch, loss_scale)
        self._pending = False
        before = {name: tensor.detach().clone() for name, tensor in self._buffers()}
        sums = {name: checksum(tensor) for name, tensor in self._replicated_parameters()}
        result = self._engine.train_step(step, batch, loss_scale)
        ranks = dist.get_world_size(self._group)

        buffers = dict(self._buffers())
        changed = [name not in buffers or not _same(before[name], buffers[name]) for name in before]
        differing = self._differing([buffers.get(name) for name in before], changed)
        if any(differing):
            names = join_names([name for name, differs in zip(before, differing, strict=True) if differs])
            raise UserError(
                f"the forward pass changes the buffers {names}, and each of the {ranks} ranks computes other values, "
                "from its own samples: only the values of one rank would be saved, and the results depend on the "
                "number of ranks",
                where="train.buffers=refuse, model",
                fix="train.buffers=rank0 gives all ranks the values of rank 0 after each step, as DDP does; "
                "train.buffers=mean averages them. strategy=single computes with all samples",
            )

        parameters = dict(self._replicated_parameters())
        changed = [checksum(parameters[name]) != value for name, value in sums.items()]
        differing = self._differing([*parameters.values()], changed)
        if any(differing):
            names = join_names([name for name, differs in zip(sums, differing, strict=True) if differs])
            raise UserError(
                f"the forward pass writes to the parameters {names}, and each of the {ranks} ranks writes other "
                "values, from its own samples, so the replicas diverge",
                where=f"strategy.data_parallel={self._kind}, model",
                fix="strategy=single, or write values that do not depend on the samples, such as a function of other "
                "parameters",
            )
        return result

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            for name, buffer in part.named_buffers():
                yield canonical_name(name), buffer

    def _replicated_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters that every replica holds in full and that only the forward pass may change in a
        step."""
        if self.updates is None:
            for name, parameter in self.named_parameters().items():
                if not isinstance(parameter, DTensor):
                    yield name, parameter.detach()

    @torch.no_grad()
    def _differing(self, tensors: list[Tensor | None], changed: list[bool]) -> list[bool]:
        """Returns for each of ``tensors`` whether replicas differ in it. ``changed`` states which tensors have changed
        on this rank. Collective."""
        sizes = [0 if tensor is None else tensor.numel() for tensor in tensors]
        facts = torch.tensor([changed, sizes, [-size for size in sizes]], dtype=torch.int64, device=self._device)
        dist.all_reduce(facts, dist.ReduceOp.MAX, group=self._group)
        differing = []
        for tensor, has_changed, most, least in zip(tensors, *facts.tolist(), strict=True):
            differs = most != -least
            if has_changed and not differs and tensor is not None and most > 0:
                values = tensor.detach().to(self._device, torch.float64).reshape(-1)
                bounds = torch.stack((values, -values))
                dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._group)
                largest, smallest = bounds[0], -bounds[1]
                scale = torch.maximum(largest.abs(), smallest.abs()).max()
                differs = bool((largest - smallest).max() > SAME * scale)
            differing.append(bool(has_changed and differs))
        return differing


def _same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


Sums = tuple[float, float]  # the sums of the losses and of the counts over all ranks


@dataclass(frozen=True)
class LossCheck:
    """Holds the result of the checks of a loss.

    Attributes:
        warning: a text if the loss depends on the split of a batch or was not compared; otherwise None.
        padding: a description of how padding affects the loss; None if it does not.
    """

    warning: str | None = None
    padding: str | None = None


def check_loss(
    engine: Engine, dataset: Dataset, mesh: Mesh, precision: str, *, halves: bool = True, padding: bool = True
) -> LossCheck:
    """Compares the loss of a micro-batch of ``dataset`` with the loss of its halves and with padding. Collective.

    Args:
        precision: the precision of the config, whose rounding errors are tolerated.
        halves: whether to compare the two halves.
        padding: whether to check that padding does not affect the loss.

    Raises:
        UserError: the count is NaN or negative, or it is 0 while the sum is not 0.
    """
    with kept_random_state(mesh.device), kept_state(engine.parts), torch.compiler.set_stance("force_eager"):
        check = _Check(engine, dataset, mesh, TOLERANCE.get(precision, ROUGH))
        return LossCheck(check.split() if halves else None, check.padding() if padding else None)


TOLERANCE = {"fp64": 1e-3, "fp32": 1e-3}  # relative; GPUs may round the products of fp32 matrices to TF32
ROUGH = 0.02  # the relative tolerance of losses in half precision
REPEATED = 1e-5  # the relative tolerance if only the order of sums may differ
FLOOR = 1e-6  # the absolute tolerance of a loss per sample


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
                fix="return the number of samples, or the sum of their weights, as the count",
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
        # the values of one rank; all ranks have computed the same samples
        dp = self._mesh.layout.dp
        whole, both = (f"{total / dp:.6g} with the count {count / dp:.6g}" for total, count in (self._whole, halves))
        return (
            f"the results depend on the number of ranks and micro-batches: the loss of {self._size} samples is "
            f"{whole}, but the losses of their two halves add up to {both}. If the loss compares samples, declare it "
            "as loss(self, outputs, targets, gather), which compares the samples of all ranks; otherwise return a sum "
            "over samples and their number"
        )

    def padding(self) -> str | None:
        """Describes how a row without targets affects the loss; None if it does not, or if the loss cannot be
        computed."""
        if isinstance(self._batch.inputs, Ragged):  # ragged batches have no padding
            return None
        dp = self._mesh.layout.dp
        # the feed pads with copies of the first sample of a micro-batch
        last = self._size - 1
        padded, _ = self._tried(_without_targets(self._batch, last, copied=True))
        other, _ = self._tried(_without_targets(self._batch, last, copied=False))
        if padded is None or other is None:
            return None
        counted = any(bool((value[last] != IGNORED).any()) for value in leaves(self._batch.targets))
        if counted and padded[1] == self._whole[1] > self._mesh.layout.dp_cp:  # a mean may have a count of 1
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
        if isinstance(self._batch.inputs, Ragged):  # a ragged batch is built from its items
            return self._read(first, last)
        batch = self._batch
        return _mapped(batch, lambda rows: rows[first:last], lambda rows: rows[first:last], batch.samples[first:last])

    def _is_repeatable(self) -> bool:
        """Returns whether a second pass over the micro-batch has the same loss."""
        return _equal(self._whole, self._global(self._pass(self._batch)), REPEATED)

    def _any_rank_draws(self) -> bool:
        return lowest(self._draws or None, self._mesh.control) is not None

    def _tried(self, *micro_batches: Batch) -> tuple[Sums | None, str]:
        """Returns the sums, or None and the problem if the model does not accept these micro-batches."""
        problem = result = None
        try:
            result = self._pass(*micro_batches)
        except Exception as error:
            if classify(error) not in (Failure.USER_ERROR, Failure.REFUSED):
                raise  # for example a GPU error, which does not depend on the batch size
            # training may still succeed, since its micro-batches have their full size
            problem = f"fails: {type(error).__name__}: {error}"
        problem = lowest(problem, self._mesh.control)
        if problem is not None or result is None:
            return None, str(problem)
        return self._global(result), ""

    def _pass(self, *micro_batches: Batch) -> StepResult:
        seed_micro_batch(0, 0, 0, self._mesh.device)  # each pass draws the same numbers
        return self._engine.eval_step(StepBatch(micro_batches, 1))

    def _global(self, result: StepResult) -> Sums:
        numbers = self._engine.reduce(over_replicas(result, self._mesh))
        return numbers.loss * (numbers.target_count or 1.0), numbers.target_count


def _equal(first: Sums, second: Sums, tolerance: float) -> bool:
    """Returns whether both are equal up to rounding. A loss that is not finite counts as equal to any other."""
    if not all(map(math.isfinite, (*first, *second))):
        return True
    floor = FLOOR * max(1.0, first[1])
    return all(abs(a - b) <= tolerance * max(abs(a), abs(b)) + floor for a, b in zip(first, second, strict=True))


def _without_targets(batch: Batch, row: int, copied: bool) -> Batch:
    """Returns ``batch`` without the targets of ``row``. With ``copied``, its inputs are copied from the first row."""

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
