"""Pipeline schedules by name, over stages whose shapes are known before the first micro-batch.

torch learns shapes that it is not told by one real forward and backward pass, which layers with running statistics
count as a step. Here a stage is told what it receives and sends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from hpc_train.data.dataset import Batch
from hpc_train.models.model import Model
from hpc_train.parallel.precision import autocast

_CLASSES: dict[str, Any] = {
    "sequential": ScheduleGPipe,  # with one micro-batch: a stage computes while the others wait
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
_ONE_STAGE = (ScheduleGPipe, Schedule1F1B)

Loss = Callable[[tuple[Tensor, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """One pipeline stage as this rank holds it.

    Attributes:
        model: the cut model, perhaps sharded by FSDP.
        module: what the schedule calls: ``model``, or DDP around it.
        precision: of the config.
        dtype: of the hidden states that travel between stages.
        backward_done: called when a micro-batch has added to the gradients of all weights.
    """

    stage: int
    model: Model
    module: nn.Module
    precision: str
    dtype: torch.dtype
    backward_done: Callable[[], None]

    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        """Shape of the hidden states that travel between stages for a micro-batch of ``inputs``."""
        micro, tokens, *rest = self.model.hidden_shape(inputs)
        return (micro, tokens // self.model.sequence_shards, *rest)

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor], targets: Tensor | None = None) -> Any:
        """``model`` under autocast, past DDP: for a pass without a backward."""
        with autocast(self.precision, hidden.device):
            return self.leave(self.model(hidden, context=context, targets=targets))

    def leave(self, output: Any) -> Any:
        """Hidden states as they travel, in exactly the type that the next stage expects; sums as they are."""
        return output.to(self.dtype).contiguous() if isinstance(output, Tensor) else output


class _Stage(PipelineStage):
    """A stage that computes under autocast and sends what it announced."""

    def __init__(self, part: Part, stages: int, example: Batch, group: dist.ProcessGroup) -> None:
        inputs = torch.empty_like(example.inputs, device="meta")
        shape = part.hidden_shape(inputs)
        hidden = torch.empty(shape, dtype=part.dtype, device="meta", requires_grad=True)
        super().__init__(
            part.module,
            part.stage,
            stages,
            example.inputs.device,
            input_args=(inputs if part.stage == 0 else hidden,),
            output_args=_sums_on_meta() if part.stage == stages - 1 else (hidden,),
            group=group,
        )
        self._part = part

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(self._part.precision, self.device):
            output = super().forward_maybe_with_nosync(*args, **kwargs)
        if self.is_last:  # of one element each, so that torch can concatenate them over micro-batches
            return tuple(value.reshape(1) for value in output)
        return self._part.leave(output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:  # else the gradients of weights are taken by themselves
            self._part.backward_done()

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        super().backward_weight_one_chunk(*args, **kwargs)
        self._part.backward_done()


def _sums_on_meta() -> tuple[Tensor, Tensor]:
    """What the last stage returns: the sum of losses and the number of targets."""
    return torch.empty(1, device="meta", requires_grad=True), torch.empty(1, device="meta", dtype=torch.int64)


class Schedule:
    """One of torch's schedules for a fixed number of equally shaped micro-batches.

    Args:
        parts: the stages of this rank.
        stages: the number of stages over all ranks.
        example: a micro-batch of the shape of all.
        loss: from what the last stage returns for a micro-batch to the scalar whose gradient is taken.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Part],
        stages: int,
        micro_batches: int,
        example: Batch,
        group: dist.ProcessGroup,
        loss: Loss,
    ) -> None:
        built = [_Stage(part, stages, example, group) for part in parts]
        kind = _CLASSES[name]
        # The gradients are of the mean over the global batch already: nothing is left to be scaled by micro-batches.
        held = built[0] if kind in _ONE_STAGE else built
        self._schedule = kind(held, micro_batches, loss_fn=loss, scale_grads=False)
        self._is_first = parts[0].stage == 0
        # Without it torch keeps and concatenates what the last stage returned; not every release since 2.9 has it.
        known = inspect.signature(self._schedule.step).parameters
        self._quiet = {"return_outputs": False} if "return_outputs" in known else {}

    def step(self, micro_batches: Sequence[Batch]) -> None:
        """Forward and backward over all micro-batches; gradients add up in ``.grad``."""
        inputs = (_join([batch.inputs for batch in micro_batches]),) if self._is_first else ()
        context = _join_context([batch.context for batch in micro_batches])
        targets = _join([batch.targets for batch in micro_batches])
        # Every stage gets the targets, and only the head looks at them: torch cannot split keywords without a tensor.
        self._schedule.step(*inputs, target=targets, context=context, targets=targets, **self._quiet)


def _join(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(values)


def _join_context(contexts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: _join([context[name] for context in contexts]) for name in contexts[0]}
