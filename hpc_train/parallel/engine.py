"""The interface between the trainer and the engines that compute gradients, the numbers of a step, and their seeds.

Random numbers (dropout) are seeded before each step, so a resumed run draws the same ones and saves no generator state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.data.dataset import StepBatch
from hpc_train.parallel.compression.build import Compression
from hpc_train.parallel.mesh import Mesh


@dataclass(frozen=True)
class StepResult:
    """Sums over this rank's micro-batches, on the device; nothing here has been read by the host.

    ``target_count`` is what the loss counts: targets, or what a loss of the user's own returned with its sum. A rank
    without the head holds zeros. ``correct`` counts right top-1 predictions where the model reports them.
    """

    loss_sum: Tensor
    target_count: Tensor
    correct: Tensor | None = None


@dataclass(frozen=True)
class StepNumbers:
    """A step's result as numbers, the same on every rank."""

    loss: float  # the sum over the global batch, divided by the count
    target_count: float  # as the loss counts: weights may add up to a fraction
    accuracy: float | None = None


class Engine(Protocol):
    """Computes the gradients of a step; the trainer does not know which engine it drives."""

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The model parts (pipeline stages) that this rank holds."""

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Canonical global name -> parameter, of this rank. A tied copy stands under its canonical name."""

    def named_buffers(self) -> Mapping[str, Tensor]:
        """Canonical global name -> persistent buffer, of this rank."""

    def compressions(self) -> tuple[Compression, ...]:
        """The compression of the gradients of each part of this rank."""

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        """Forward and backward over all micro-batches.

        Afterwards every parameter's ``.grad`` is the gradient of the mean loss over the *global* batch, times
        ``loss_scale`` where given: of the sum of losses over the sum of the counts that the loss returned, which is
        ``batch.target_count`` for a built-in loss. Starts from cleared gradients.
        """

    def commit(self, finite: Tensor) -> None:
        """Updates the state of compression after a training step, if the gradients of all ranks were ``finite``.

        Args:
            finite: a scalar bool on the device.
        """

    def eval_step(self, batch: StepBatch) -> StepResult:
        """Forward only, in evaluation mode, without gradients; works under every strategy."""

    def reduce(self, result: StepResult) -> StepNumbers:
        """Returns the same numbers on every rank. Collective; call it at log steps only, since the host waits here."""

    def clip_grad_norm_(self, max_norm: float, loss_scale: Tensor | None = None) -> Tensor:
        """Divides the gradients by ``loss_scale`` and clips them to ``max_norm`` (0: no clipping).

        Returns the global norm before clipping (after unscaling), over all parameters of all ranks, each counted
        once: a scalar on the device, the same on every rank, not finite where any gradient was not.
        """


class WrappedEngine:
    """Forwards every call to ``engine``; subclasses override the calls that they observe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return self._engine.parts

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        return self._engine.named_parameters()

    def named_buffers(self) -> Mapping[str, Tensor]:
        return self._engine.named_buffers()

    def compressions(self) -> tuple[Compression, ...]:
        return self._engine.compressions()

    def train_step(self, step: int, batch: StepBatch, loss_scale: Tensor | None = None) -> StepResult:
        return self._engine.train_step(step, batch, loss_scale)

    def commit(self, finite: Tensor) -> None:
        self._engine.commit(finite)

    def eval_step(self, batch: StepBatch) -> StepResult:
        return self._engine.eval_step(batch)

    def reduce(self, result: StepResult) -> StepNumbers:
        return self._engine.reduce(result)

    def clip_grad_norm_(self, max_norm: float, loss_scale: Tensor | None = None) -> Tensor:
        return self._engine.clip_grad_norm_(max_norm, loss_scale)


def reduce_result(result: StepResult, mesh: Mesh) -> StepNumbers:
    """Adds up ``result`` over all ranks on the training backend. Collective.

    Ranks without the head hold zeros; tensor-parallel ranks computed the same sums, and only the first one's count.
    """
    counts = mesh.tp_rank == 0
    correct = result.correct
    values = [result.loss_sum, result.target_count]
    values += [torch.zeros_like(result.loss_sum)] * 2 if correct is None else [correct, torch.ones_like(correct)]
    sums = torch.stack([value.to(mesh.device, torch.float64) for value in values]) * counts
    if mesh.layout.world_size > 1:
        dist.all_reduce(sums)
    loss_sum, target_count, correct_sum, reports = sums.tolist()
    targets = target_count or 1.0
    return StepNumbers(loss_sum / targets, target_count, correct_sum / targets if reports else None)


def stream_seed(*place: object) -> int:
    """A 63-bit seed of a place in a run, the same in every process and version of Python."""
    digest = hashlib.blake2b(":".join(map(str, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_step(seed: int, step: int, mesh: Mesh) -> None:
    """Seeds the default generators of the CPU and of this rank's device for ``step``.

    Tensor-parallel ranks share one stream: what is whole on each of them must be dropped alike.
    """
    _seed_all(stream_seed("step", seed, step, mesh.dp_rank, mesh.pp_rank), mesh.device)


def seed_micro_batch(seed: int, step: int, logical: int, device: torch.device) -> None:
    """The same for a logical micro-batch, whichever rank computes it."""
    _seed_all(stream_seed("micro-batch", seed, step, logical), device)


def _seed_all(value: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
