"""torch's pipeline schedules, over stages that know the shapes of their messages before the first micro-batch.

Without these shapes torch runs an extra forward and backward pass, which changes running statistics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from hpc_train.config.description_file import import_attribute, is_import_path
from hpc_train.data.dataset import Batch
from hpc_train.errors import UserError
from hpc_train.models.model import Model
from hpc_train.parallel.precision import autocast
from hpc_train.plan.layout import Layout

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
        """Calls ``model`` under autocast and without DDP, for a pass without a backward."""
        with autocast(self.precision, hidden.device):
            return self.leave(self.model(hidden, context=context, targets=targets))

    def leave(self, output: Any) -> Any:
        """Casts hidden states to the type that the next stage expects, and returns sums unchanged."""
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
    """Returns the shapes of the last stage's output: the sum of losses and the number of targets."""
    return torch.empty(1, device="meta", requires_grad=True), torch.empty(1, device="meta", dtype=torch.int64)


class Schedule:
    """One of torch's schedules for a fixed number of equally shaped micro-batches.

    Args:
        parts: the stages of this rank.
        example: a micro-batch of the shape of all.
        loss: from what the last stage returns for a micro-batch to the scalar whose gradient is taken.
    """

    def __init__(
        self,
        layout: Layout,
        parts: Sequence[Part],
        micro_batches: int,
        example: Batch,
        group: dist.ProcessGroup,
        loss: Loss,
    ) -> None:
        built = [_Stage(part, layout.stages, example, group) for part in parts]
        kind = schedule_class(layout)
        # The gradients are of the mean over the global batch already: nothing is left to be scaled by micro-batches.
        held = built[0] if issubclass(kind, PipelineScheduleSingle) else built
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


def schedule_class(layout: Layout) -> Any:
    """The class of torch's that the row of ``layout``'s schedule names.

    Raises:
        UserError: it cannot be imported, or is no schedule of torch's.
    """
    path, where = layout.pipeline.torch_class, f"strategy.schedule={layout.schedule}"
    found = import_attribute(path, where)
    if isinstance(found, type) and issubclass(found, PipelineScheduleSingle | PipelineScheduleMulti):
        return found
    raise UserError(
        f"{path} is no pipeline schedule of torch's",
        where=where,
        fix="a subclass of PipelineScheduleSingle or PipelineScheduleMulti in torch_class",
    )


Action = tuple[str, int]  # FORWARD, FULL_BACKWARD, BACKWARD_INPUT or BACKWARD_WEIGHT, and the stage


def recorded_actions(layout: Layout) -> list[list[Action]]:
    """Returns the actions of each rank in one step, in order, as torch's schedule of ``layout`` plans them."""
    kind, stages = schedule_class(layout), layout.stages
    planned = [_planned_stage(stage, layout) for stage in range(stages) if layout.placement[stage] == 0]
    single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(planned[0] if single else planned, layout.micro_batches, loss_fn=lambda *_: None)
    orders = schedule._get_pipeline_order() if single else schedule.pipeline_order
    return [
        [
            (part.computation_type.name, part.stage_index)
            for action in orders[rank]
            if action is not None
            for part in (action.sub_actions or (action,))
            if part.computation_type.name in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT")
        ]
        for rank in range(layout.pp)
    ]


def _planned_stage(stage: int, layout: Layout) -> Any:
    """Returns an object with the attributes that torch's schedules read from a stage to plan a step."""
    return SimpleNamespace(
        stage_index=stage,
        num_stages=layout.stages,
        group_rank=0,
        group_size=layout.pp,
        group=None,
        stage_index_to_group_rank={},
        submod=None,
        has_backward=True,
        is_first=stage == 0,
        is_last=stage == layout.stages - 1,
        device=torch.device("cpu"),
    )


def count_in_flight(actions: Sequence[Action], stages: Sequence[int]) -> set[tuple[int, ...]]:
    """Micro-batches that each of a rank's ``stages`` keeps activations of, at the moments when it keeps most in all.

    A forward keeps them until the gradients of the weights are taken.
    """
    kept, counts = dict.fromkeys(stages, 0), set()
    for action, stage in actions:
        kept[stage] += {"FORWARD": 1, "BACKWARD_INPUT": 0}.get(action, -1)
        counts.add(tuple(kept.values()))
    most = max(map(sum, counts))
    return {count for count in counts if sum(count) == most}


def check_extension(layout: Layout) -> None:
    """Compares the row of a schedule from a user's package with what torch's schedule does.

    Raises:
        UserError: torch does not accept the stages, or a fact of the row is wrong.
    """
    if not is_import_path(layout.schedule):
        return
    row, where = layout.pipeline, f"strategy.schedule={layout.schedule}"
    try:
        ranks = recorded_actions(layout)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"{row.torch_class} does not accept {layout.stages_per_rank} stages on each of {layout.pp} ranks with "
            f"{layout.micro_batches} micro-batches: {error}",
            where=where,
            fix="stages_per_rank, placement and micro_batches of the row as torch's schedule needs them",
        ) from error
    for rank, actions in enumerate(ranks):
        _check_rank(layout, rank, actions, where)


def _check_rank(layout: Layout, rank: int, actions: Sequence[Action], where: str) -> None:
    row = layout.pipeline
    stages = [stage for stage, owner in enumerate(layout.placement) if owner == rank]
    wrong: dict[str, object] = {"placement": {stage for _, stage in actions} != {*stages}}
    if not wrong["placement"]:
        stated = tuple(layout.in_flight(stage) for stage in stages)
        wrong["in_flight"] = stated not in count_in_flight(actions, stages)
    wrong["splits_backward"] = row.splits_backward != _splits(actions)
    for fact, differs in wrong.items():
        if differs:
            raise UserError(
                f"{fact} of row {row.name!r} is not what {row.torch_class} does on rank {rank} of {layout.pp}",
                where=where,
                fix=f"{fact} as hpc_train.parallel.schedules.recorded_actions shows it",
            )


def _splits(actions: Sequence[Action]) -> bool:
    return any(action == "BACKWARD_WEIGHT" for action, _ in actions)
