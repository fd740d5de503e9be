"""Defines the interfaces between trainer, engines and replicas, and the random seeds of a step.

The random generators (for dropout) are seeded before each step, so a resumed run draws the same numbers and saves no
generator state.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.data.dataset import IGNORED, Batch, StepBatch, leaves
from hpc_train.errors import UserError
from hpc_train.models.model import Model
from hpc_train.models.moe import Routers
from hpc_train.models.own_loss import check_global_count
from hpc_train.parallel.compression import Compression
from hpc_train.parallel.gradient_norm import UpdatesInBackward
from hpc_train.parallel.local_replicas import sum_over_replicas
from hpc_train.parallel.mesh import Mesh


@dataclass(frozen=True)
class StepResult:
    """Holds sums over this rank's micro-batches as tensors on the device, which the host has not read.

    A rank without the head holds zeros.

    Attributes:
        target_count: the number of targets, or the count that a user's own loss returned with its sum.
        correct: the number of correct top-1 predictions; None if the model does not count them.
        choices: layer -> the number of choices of each expert in this layer, and last, of those that were dropped.
    """

    loss_sum: Tensor
    target_count: Tensor
    correct: Tensor | None = None
    choices: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepNumbers:
    """Holds a step's result as numbers, which are the same on every rank."""

    loss: float  # the sum over the global batch, divided by the count
    target_count: float  # the count of the loss, which may be a sum of weights
    accuracy: float | None = None


class Engine(Protocol):
    """Interface through which the trainer runs steps; it hides how the model is distributed.

    Attributes:
        check_loss: whether the loss is custom and does not declare that it compares samples, so that it should
            be checked before the first step. It is the same on every rank.
        updates: updates parameters inside the backward pass (``optim.in_backward``); None if it is not used.
        aliases: further names of tied parameters and buffers -> their canonical names; rank 0 knows all.
    """

    check_loss: bool
    updates: UpdatesInBackward | None
    aliases: Mapping[str, str]

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Returns the model parts (pipeline stages) that this rank holds."""

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Returns canonical global name -> parameter of this rank; a tied copy has its canonical name."""

    def named_buffers(self) -> Mapping[str, Tensor]:
        """Returns canonical global name -> persistent buffer of this rank."""

    def compressions(self) -> tuple[Compression, ...]:
        """Returns the gradient compression of each part of this rank."""

    def read_anew(self, written: Collection[str]) -> None:
        """Stops keeping copies of the parameters ``written`` over a step, since the forward pass itself writes to
        them."""

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        """Runs forward and backward pass over all micro-batches, from cleared gradients.

        Afterwards every parameter's ``.grad`` is the gradient of the mean loss over the *global* batch, or with
        ``strategy.local_steps`` over the part of this rank's replica, times ``loss_scale`` if given. The mean is the
        sum of losses divided by the sum of the counts that the loss returned, which is ``batch.target_count`` for a
        built-in loss. If ``updates`` has begun a step, it has used the gradients
        instead, and every ``.grad`` is None.
        """

    def commit(self, finite: Tensor) -> None:
        """Keeps the state of compression and running statistics of a training step, if all gradients were ``finite``.

        Args:
            finite: a scalar bool on the device.
        """

    def eval_step(self, batch: StepBatch) -> StepResult:
        """Runs the forward pass in evaluation mode without gradients; works with every strategy."""

    def outputs(self, inputs: Tensor, context: Mapping[str, Tensor] | None = None) -> Tensor:
        """Returns the outputs of the whole model for ``inputs`` in evaluation mode. Collective.

        Raises:
            UserError: the model is split into pipeline stages.
        """

    def reduce(self, result: StepResult) -> StepNumbers:
        """Returns the same numbers on every rank of a replica. Collective; the host waits here."""

    def clip_grad_norm_(self, max_norm: float, loss_scale: Tensor | None = None) -> Tensor:
        """Divides the gradients by ``loss_scale`` and clips them to ``max_norm`` (0 disables it).

        Returns:
            The global norm of the unscaled gradients before clipping, with each parameter counted once. It is a scalar
            on the device, the same on every rank, and not finite if any gradient is not finite.
        """


class Replicas(Protocol):
    """The interface through which an engine synchronizes gradients.

    Attributes:
        module: the module whose forward pass is called in training.
        loss_factor: the factor of the loss with which the gradients become sums over the ``dp_cp`` ranks.
        compression: the compression of the gradients; None without compression.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def loss_factor(self) -> int: ...

    @property
    def compression(self) -> Compression | None: ...

    def begin(self, step: int, backwards: int) -> None:
        """Prepares a step with ``backwards`` backward passes."""

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Returns the context for the forward and backward pass of one micro-batch."""

    def backward_done(self) -> None:
        """Reports that a backward pass of a pipeline stage has added all its gradients."""

    def finish(self) -> None:
        """Ends the step after its last backward pass; on return the gradients cover the global batch."""

    def evaluated(self) -> None:
        """Reports that forward passes without a backward pass are over."""


class WrappedEngine:
    """Forwards every call to ``engine``; subclasses override the calls that they observe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.check_loss = engine.check_loss
        self.updates = engine.updates
        self.aliases = engine.aliases

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return self._engine.parts

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        return self._engine.named_parameters()

    def named_buffers(self) -> Mapping[str, Tensor]:
        return self._engine.named_buffers()

    def compressions(self) -> tuple[Compression, ...]:
        return self._engine.compressions()

    def read_anew(self, written: Collection[str]) -> None:
        self._engine.read_anew(written)

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        return self._engine.train_step(step, batch, loss_scale)

    def commit(self, finite: Tensor) -> None:
        self._engine.commit(finite)

    def eval_step(self, batch: StepBatch) -> StepResult:
        return self._engine.eval_step(batch)

    def outputs(self, inputs: Tensor, context: Mapping[str, Tensor] | None = None) -> Tensor:
        return self._engine.outputs(inputs, context)

    def reduce(self, result: StepResult) -> StepNumbers:
        return self._engine.reduce(result)

    def clip_grad_norm_(self, max_norm: float, loss_scale: Tensor | None = None) -> Tensor:
        return self._engine.clip_grad_norm_(max_norm, loss_scale)


def with_routers(result: StepResult, routers: Routers) -> StepResult:
    """Returns ``result`` with the auxiliary losses and the choices of this rank's routers. Collective if they have
    biases."""
    collected = routers.finish()
    if collected is None:
        return result
    loss, choices = collected
    return replace(result, loss_sum=result.loss_sum + loss, choices=choices)


def over_replicas(result: StepResult, mesh: Mesh) -> StepResult:
    """Returns the sums of ``result`` over the ranks at the same position in all replicas. Collective.

    Raises:
        ReplicaLost: see ``across_replicas``.
    """
    loss_sum = result.loss_sum.clone()
    target_count = result.target_count.clone()
    correct = None if result.correct is None else result.correct.clone()
    sum_over_replicas([loss_sum, target_count] + ([] if correct is None else [correct]), mesh)
    return replace(result, loss_sum=loss_sum, target_count=target_count, correct=correct)


def reduce_result(result: StepResult, mesh: Mesh) -> StepNumbers:
    """Adds up ``result`` over all ranks of ``mesh`` and waits for the numbers. Collective."""
    return step_numbers(*add_up(result, mesh).tolist())


def add_up(result: StepResult, mesh: Mesh) -> Tensor:
    """Adds up ``result`` over all ranks. A GPU's host waits for it only if there are several replicas. Collective.

    Ranks without the head hold zeros. Tensor-parallel ranks hold equal sums, so only those of the first are added.

    Returns:
        The arguments of ``step_numbers``, ``[4]`` fp64 on the device.
    """
    counts = mesh.tp_rank == 0
    correct = result.correct
    values = [result.loss_sum, result.target_count]
    values += [torch.zeros_like(result.loss_sum)] * 2 if correct is None else [correct, torch.ones_like(correct)]
    sums = torch.stack([value.to(mesh.device, torch.float64) for value in values]) * counts
    sum_over_ranks(sums, mesh)
    return sums


def sum_over_ranks(values: Tensor, mesh: Mesh) -> None:
    """Sums ``values``, on the device, over all ranks in place. Collective.

    Raises:
        ReplicaLost: see ``across_replicas``.
    """
    if mesh.layout.replica.world_size > 1:
        dist.all_reduce(values, group=mesh.group("replica"))
    sum_over_replicas([values], mesh)


def add_up_choices(result: StepResult, layers: int, experts: int, mesh: Mesh) -> Tensor:
    """Adds up the choices of ``result`` over all ranks: int64 ``[layers, experts + 1]`` on the device, 0 for layers
    without experts. Collective."""
    choices = torch.zeros(layers, experts + 1, dtype=torch.int64, device=mesh.device)
    for layer, counts in result.choices.items():
        choices[layer] = counts
    sum_over_ranks(choices, mesh)
    return choices


def step_numbers(loss_sum: float, target_count: float, correct_sum: float, reports: float) -> StepNumbers:
    """Returns the means; ``reports`` is the number of ranks that have counted correct predictions.

    Raises:
        UserError: a loss of the user's returned counts by which its sum cannot be divided.
    """
    check_global_count(loss_sum, target_count)
    targets = target_count or 1.0
    return StepNumbers(loss_sum / targets, target_count, correct_sum / targets if reports else None)


def changed_training(name: str, trains: bool) -> UserError:
    """Returns the error for a parameter whose ``requires_grad`` has changed after the engine was built."""
    return UserError(
        f"requires_grad of {name} became {trains} during training, but the optimizer, the reduction of gradients and "
        "the checkpoints have the parameters that trained at the start",
        where=f"model, {name}",
        fix="keep requires_grad=True from the start, and run parts that do not train yet under torch.no_grad(): a "
        "parameter without a gradient stays as it is (with several ranks: strategy.data_parallel=allreduce or zero)",
    )


def stream_seed(*key: object) -> int:
    """Returns a 63-bit hash of ``key`` as a seed, the same in every process and version of Python."""
    digest = hashlib.blake2b(":".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_step(seed: int, step: int, mesh: Mesh, sequence_shards: bool = False) -> None:
    """Seeds the default generators of Python, numpy, torch and this rank's device for ``step``.

    Ranks that hold different tokens drop different elements: the context-parallel ranks and, with
    ``sequence_shards``, the tensor-parallel ranks. Other tensor-parallel ranks share one seed, so that they drop the
    same elements of replicated tensors.
    """
    parts = [mesh.dp_rank, mesh.pp_rank, *_ranks_of_tokens(mesh, sequence_shards)]
    _seed_all(stream_seed("step", seed, step, *parts), mesh.device)


def _ranks_of_tokens(mesh: Mesh, sequence_shards: bool) -> list[object]:
    parts: list[object] = []
    if mesh.layout.cp > 1:
        parts += [mesh.cp_rank]
    if sequence_shards:
        parts += [f"tp{mesh.tp_rank}"]
    return parts


def has_sequence_shards(engine: Engine) -> bool:
    """Returns whether the tensor-parallel ranks hold different tokens between the layers of the model."""
    return any(isinstance(part, Model) and part.sequence_shards > 1 for part in engine.parts)


def seed_micro_batch(seed: int, step: int, logical: int, device: torch.device) -> None:
    """Seeds the default generators for a logical micro-batch, independently of the rank that computes it."""
    _seed_all(stream_seed("micro-batch", seed, step, logical), device)


class MicroBatchSeeds:
    """Seeds the default generators before each micro-batch under ``batch.balance``, independently of the replica that
    computes it.

    Args:
        sequence_shards: see ``seed_step``.
    """

    def __init__(self, seed: int, mesh: Mesh, sequence_shards: bool) -> None:
        self._seed = seed
        self._parts = _ranks_of_tokens(mesh, sequence_shards)
        self._device = mesh.device
        self._step = 0
        self._numbers: tuple[int, ...] = ()

    def begin(self, step: int, batch: StepBatch) -> None:
        self._step = step
        self._numbers = batch.numbers

    def __call__(self, index: int, *stage: int) -> None:
        """Seeds for the micro-batch at ``index`` of the step; does nothing if the batch has no ``numbers``."""
        if self._numbers:
            parts = (self._numbers[index], *stage, *self._parts)
            _seed_all(stream_seed("balanced", self._seed, self._step, *parts), self._device)


def _seed_all(value: int, device: torch.device) -> None:
    """Seeds torch, and Python and numpy, which a model may also draw from."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)


@contextmanager
def refusing_wrong_targets(model: nn.Module, micro_batches: Sequence[Batch]) -> Iterator[None]:
    """Encloses a pass of ``model`` over ``micro_batches``, and names the sample or the dtypes that make it fail.

    On CPUs torch's losses name the target in an IndexError, and compiled code raises a RuntimeError that does not name
    it. On a GPU such a target is an assertion of a kernel (``Failure.KERNEL``), after which no tensor can be read.

    Raises:
        UserError: a target in them, or their dtypes, are the cause of the error in the block.
    """
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if micro_batches:
            _refuse_dtypes(error, micro_batches[0])
        is_wrong = _condition(error, model)
        if is_wrong is not None:
            for micro in micro_batches:
                _refuse(error, micro, is_wrong)
        raise


IsWrong = Callable[[Tensor], Tensor]


def _condition(error: BaseException | None, model: nn.Module) -> IsWrong | None:
    """Returns the targets that ``error`` is about; None if it is another error."""
    while error is not None:  # torch's pipeline schedules raise an error of their own from that of a stage
        if isinstance(error, IndexError) and (named := re.fullmatch(r"Target (-?\d+) is out of bounds\.", str(error))):
            target = int(named[1])
            return lambda targets: targets == target
        if isinstance(error, RuntimeError) and re.search(r"\bindex\b.*out of bounds", str(error)):
            parts = model.head.modules() if isinstance(model, Model) and model.head is not None else ()
            widths = [part.out_features for part in parts if isinstance(part, nn.Linear)]
            if not widths:
                return None
            # the last matrix of the head has one output for each class
            return lambda targets: (targets != IGNORED) & ((targets < 0) | (targets >= widths[-1]))
        error = error.__cause__
    return None


_NO_LABELS = re.compile(r"expected (target dtype to be|scalar type) Long\b")
_NO_INDICES = re.compile(r"for argument #1 'indices' to have one of the following scalar types: Long")
_NO_FLOATS = re.compile(r"(same dtype|should be the same|expected scalar type|mixed dtype)", re.IGNORECASE)
_INTEGERS = re.compile(r"\b(torch\.)?(Long|Int|Short|Char|Byte|Bool|long|int|short|char|unsigned char|bool)(Tensor)?\b")


def _refuse_dtypes(error: BaseException, micro: Batch) -> None:
    """Raises UserError if torch's ``error`` is about the dtype of the inputs or of the targets of ``micro``."""
    message = str(error).partition("\n")[0]
    inputs = {value.dtype for value in leaves(micro.inputs)}
    targets = {value.dtype for value in leaves(micro.targets)}
    has_float_inputs = any(dtype.is_floating_point for dtype in inputs)
    part = "inputs"
    if _NO_LABELS.search(message) and any(dtype.is_floating_point for dtype in targets):
        part = "targets"
        fix = "return integers as class labels, or use model.loss=mse for other targets"
    elif _NO_INDICES.search(message) and has_float_inputs:
        fix = "return integers as token ids"
    elif inputs and not has_float_inputs and _NO_FLOATS.search(message) and _INTEGERS.search(message):
        fix = "return floating-point inputs, such as pixels divided by 255"
    else:
        return
    dtypes = targets if part == "targets" else inputs
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    raise UserError(
        f"the model or its loss does not accept the {part} of the data, which are {names}: {message}",
        where="data, model",
        fix=fix,
    ) from error


def _refuse(error: BaseException, micro: Batch, is_wrong: IsWrong) -> None:
    """Raises UserError if ``micro`` has such a target; the loss may have made its own."""
    for targets in leaves(micro.targets):
        if targets.is_floating_point() or not is_wrong(targets).any():
            continue
        place = is_wrong(targets).nonzero()[0].tolist()
        fix = f"number the classes from 0, set a target that does not count to {IGNORED}, or add outputs to the model"
        if micro.samples:
            sample = f"sample {micro.samples[place[0]]}"
        else:
            sample = f"row {place[0]} of a micro-batch"
        raise UserError(
            f"the target of {sample} is {int(targets[tuple(place)])}, which is not one of the model's classes",
            where="data, model",
            fix=fix,
        ) from error
