"""Predicts the time of a step and the memory of a rank for one layout on one machine. Imports no torch.

The step is simulated from the time of each pass (``passes.py``) in the order of the pipeline's schedule; the traffic of
data-parallel ranks adds the time that concurrent passes do not cover, and the time by which it slows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

from hpc_train.config.schema import Config
from hpc_train.config.values import LayerMode, Recomputation
from hpc_train.layout.counted import counted
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import Memory, estimate, needed_bytes, reserved_bytes
from hpc_train.layout.optimizers import values_per_parameter
from hpc_train.layout.orders import BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Action, PipelineShape
from hpc_train.layout.partition import layer_counts
from hpc_train.layout.recomputation import moved_bytes, recomputation_of
from hpc_train.planner.machine import Machine, Rates
from hpc_train.planner.passes import (
    Group,
    Passes,
    all_reduce,
    gather,
    group_of,
    load,
    message,
    pipeline_seconds,
    scatter,
    uncovered,
)
from hpc_train.planner.work import Block, Work, count_work

Collective = Callable[[float, Group, Rates], float]
PARTS = {"compute_s": "compute", "bubble_s": "bubble", "communication_s": "communication", "optimizer_s": "optimizer"}
ROOM = 0.93  # of the memory of a device, which a layout should not exceed
SENT_SHARE = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}  # share of the bytes of fp32 gradients


@dataclass(frozen=True, eq=False)
class Demand:
    """Computes the memory that a layout needs, on request only: most layouts of a plan are too slow to matter."""

    config: Config
    layout: Layout
    rates: Rates

    @cached_property
    def memory(self) -> Memory | None:
        """Returns the memory of the rank that needs the most; None if the size of the model is unknown."""
        return estimate(self.config, self.layout)

    @property
    def reserved_bytes(self) -> float:
        """Returns what the context, libraries and, on GPUs, the communicators of a rank take."""
        if self.rates.cores:
            return self.rates.reserved_bytes
        return reserved_bytes(self.layout, self.rates.reserved_bytes)

    @property
    def needed_bytes(self) -> float:
        """Returns ``memory`` with the reserved memory and what the allocator adds."""
        held = self.memory.total if self.memory else 0.0
        return needed_bytes(held, self.reserved_bytes, self.rates.allocator_share)

    def fits(self, factor: float, share: float = 1.0) -> bool:
        """Returns whether ``share`` of a device has ``factor`` times the memory and the reserved memory."""
        return not self.exceeds(share * self.rates.memory_bytes, factor)

    def exceeds(self, device_bytes: float, factor: float) -> bool:
        """Returns whether a device of ``device_bytes`` lacks ``factor`` times the memory plus the reserved memory."""
        held = self.memory.total if self.memory else 0.0
        return needed_bytes(factor * held, self.reserved_bytes, self.rates.allocator_share) > device_bytes


@dataclass(frozen=True)
class Prediction:
    """Holds the prediction for one layout. Times are in seconds per step, and their sum is the step.

    Attributes:
        compute_s: forward, backward and recomputation of the busiest rank, with its tensor-parallel traffic.
        bubble_s: waiting for other pipeline stages.
        communication_s: traffic of data-parallel ranks that no computation covers.
        optimizer_s: the update of the parameters.
        demand: the memory that it needs.
        mfu: the share of the peak that the operations of the model take.
        memory_factor: the factor that corrects ``demand``, without the reserved memory.
    """

    layout: Layout
    compute_s: float
    bubble_s: float
    communication_s: float
    optimizer_s: float
    demand: Demand = field(compare=False)
    samples_per_s: float
    tokens_per_s: float
    mfu: float
    memory_factor: float = 1.0

    @property
    def memory(self) -> Memory | None:
        return self.demand.memory

    @property
    def needed_bytes(self) -> float:
        fixed = self.demand.reserved_bytes
        return fixed + (self.demand.needed_bytes - fixed) * self.memory_factor

    @property
    def device_bytes(self) -> float:
        return self.demand.rates.memory_bytes

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())

    @property
    def parts_s(self) -> dict[str, float]:
        return {text: float(getattr(self, name)) for name, text in PARTS.items()}

    def longest_beside(self, other: Prediction) -> tuple[str, float]:
        """Returns the part of the step that exceeds the same part of ``other`` by the most seconds, and the
        difference."""
        longer = {text: seconds - other.parts_s[text] for text, seconds in self.parts_s.items()}
        return max(longer.items(), key=lambda part: part[1])

    @property
    def fits(self) -> bool:
        return self.demand.fits(self.memory_factor)

    @property
    def has_room(self) -> bool:
        """Returns whether it fits with memory to spare, since the estimate of what libraries take is rough."""
        return self.demand.fits(self.memory_factor, ROOM)

    def needs_more_than(self, other: Prediction) -> bool:
        """Returns whether it needs more memory than ``other``, in less time than ``needed_bytes`` takes."""
        return self.demand.exceeds(other.needed_bytes, self.memory_factor)


def predict_step(
    config: Config, layout: Layout, machine: Machine, simulated: bool = True, work: Work | None = None
) -> Prediction:
    """Returns the prediction for ``layout``.

    With ``simulated``, the order of the pipeline's schedule is simulated; otherwise the row of the schedule states the
    bubble, for equal stages and messages that take no time. ``work`` is the work of the model, if it has been counted.
    Raises UserError if the size of the model is unknown, or the devices do not compute in its precision.
    """
    return _Step(config, layout, machine, work or count_work(config)).predict(simulated)


class _Run(NamedTuple):
    """Groups consecutive blocks of a stage that are alike, and states what is recomputed in each."""

    block: Block
    recomputed: LayerMode
    number: int


class Holders(NamedTuple):
    """Describes the ranks that hold the same parameters.

    Attributes:
        number: how many there are.
        shard: how many of them share a copy of the ZeRO state.
        stride: the difference of their global numbers.
    """

    number: int
    shard: int
    stride: int


class _Step:
    """Predicts one step of a layout on a machine."""

    def __init__(self, config: Config, layout: Layout, machine: Machine, work: Work) -> None:
        machine = machine.shared_by(min(layout.world_size, machine.devices_per_node))
        self.config = config
        self.layout = layout
        self.machine = machine
        self.rates: Rates = machine.rates
        self.work = work
        self.passes = Passes(config, layout, machine, work)
        self.width = self.passes.width
        self.narrow = self.passes.narrow
        self.recomputation: Recomputation = recomputation_of(config, layout)
        stem, *layers, head = self.work.blocks
        blocks = [(layer, self.recomputation.mode(number)) for number, layer in enumerate(layers)]
        stages: list[list[_Run]] = []
        first = 0
        for count in self._counts():
            alike = groupby(blocks[first : first + count])
            stages.append([_Run(*block, len([*several])) for block, several in alike])
            first += count
        stages[0].insert(0, _Run(stem, "none", 1))
        stages[-1].append(_Run(head, "none", 1))
        self.stages = stages

    def predict(self, simulated: bool) -> Prediction:
        layout = self.layout
        busy, waiting = self._passes(simulated)
        communication = self._exposed(busy) + self._outer_steps()
        optimizer = self._optimizer()
        samples = self.config.batch.global_size / (busy + waiting + communication + optimizer)
        peak = self.machine.peak(self.config.precision.name) * layout.world_size
        return Prediction(
            layout=layout,
            compute_s=busy,
            bubble_s=waiting,
            communication_s=communication,
            optimizer_s=optimizer,
            demand=Demand(self.config, layout, self.rates),
            samples_per_s=samples,
            tokens_per_s=samples * self.work.tokens,
            mfu=samples * self.work.sample_flops / peak,
        )

    def _passes(self, simulated: bool) -> tuple[float, float]:
        """Returns for how long the busiest rank computes in a step, and for how long it waits for other stages."""
        layout = self.layout
        moving = self._moving()
        forward, backward = self.passes.forward, self.passes.backward
        forwards = [sum(run.number * forward(run.block) for run in stage) for stage in self.stages]
        forwards = [*map(max, forwards, moving)]
        backwards = [sum(run.number * backward(run.block, run.recomputed) for run in stage) for stage in self.stages]
        backwards = [*map(max, backwards, moving)]
        of_rank = [0.0] * layout.pp
        for stage, rank in enumerate(layout.placement):
            of_rank[rank] += layout.micro_batches * (forwards[stage] + backwards[stage])
        busy = max(of_rank)
        if layout.pp == 1:
            return busy, 0.0
        if not simulated or layout.pipeline.order is None:
            return busy, busy * layout.bubble_share / (1 - layout.bubble_share)
        size = self.work.hidden * layout.micro_size * self.narrow / (layout.cp * layout.tp)
        sent = message(size, layout.replica.stage_ranks >= self.machine.devices_per_node, self.rates)
        messages = [0.0 if a == b else sent for a, b in pairwise(layout.placement)]
        simulated_s = step_seconds(layout, forwards, backwards, messages)
        ranks = min(layout.world_size, self.machine.devices_per_node)
        return busy, pipeline_seconds(simulated_s, busy, ranks, self.rates) - busy

    def _moving(self) -> list[float]:
        """Returns the seconds in which activations leave a stage in one pass; in the backward they come back."""
        if self.config.train.activation_offload == "none":
            return [0.0] * self.layout.stages
        config = counted(self.config)
        first = 0
        estimates = []
        for count in self._counts():
            numbers = range(first, first + count)
            moved = sum(moved_bytes(config, self.layout, number) for number in numbers)
            estimates.append(moved / self.rates.host_bytes_per_s)
            first += count
        return estimates

    def _counts(self) -> list[int]:
        split = self.config.strategy.pp_split if self.layout.pp > 1 else "even"
        return layer_counts(len(self.work.blocks) - 2, self.layout.stages, split)

    def _parameters(self) -> tuple[float, float]:
        """Returns the parameters of the rank that has most: first those that ``tp`` divides, then the experts, which
        only ``ep`` divides."""
        layout = self.layout
        held = [(0.0, 0.0)] * layout.pp
        for stage, rank in enumerate(layout.placement):
            blocks = [(run.number, run.block) for run in self.stages[stage]]
            experts = sum(number * block.experts for number, block in blocks) * (layout.ep > 1 or layout.tp > 1)
            whole = sum(number * block.parameters for number, block in blocks) - experts
            held[rank] = (held[rank][0] + whole / layout.tp, held[rank][1] + experts / layout.ep)
        return max(held, key=sum)

    def _exposed(self, busy: float) -> float:
        """Returns the time of the data-parallel traffic that forward and backward do not cover.

        Experts that expert-parallel ranks share have groups of fewer ranks; their traffic is covered by as large a part
        of the passes as they are of the parameters.
        """
        layout = self.layout.replica
        strides = layout.tp, layout.ep
        parts = zip(self._parameters(), self._shards(), strides, strict=True)
        total = sum(self._parameters())
        exposed = 0.0
        for parameters, shard, stride in parts:
            ranks = Holders(layout.stage_ranks // stride, shard, stride)
            if parameters and ranks.number > 1:
                exposed += self._exposed_of(parameters, ranks, busy * parameters / total)
        return exposed

    def _outer_steps(self) -> float:
        """Returns the time in which replicas exchange their weights, per step (``strategy.local_steps``)."""
        replicas = self.layout.replicas
        local_steps = self.config.strategy.local_steps
        if replicas == 1 or local_steps is None:
            return 0.0
        held = sum(parameters / shard for parameters, shard in zip(self._parameters(), self._shards(), strict=True))
        group = group_of(replicas, self.layout.replica.world_size, self.machine.devices_per_node)
        return all_reduce(held * self.width, group, self.rates) / local_steps

    def _shards(self) -> tuple[int, int]:
        """Returns how many ranks share the ZeRO state of a parameter, and of an expert; 1 without ZeRO."""
        layout = self.layout.replica
        if not layout.shards_state:
            return 1, 1
        return layout.shard, layout.expert_sizes[1]

    def _exposed_of(self, parameters: float, ranks: Holders, busy: float) -> float:
        layout = self.layout.replica
        blocks = max(1, len(self.work.blocks) // layout.pp)
        # of the passes of one micro-batch, a third is the forward
        micro_batch_s = busy / layout.micro_batches
        if not layout.shards_state:
            everyone = group_of(ranks.number, ranks.stride, self.machine.devices_per_node)
            sent = parameters * self.passes.gradient * self._sent_share()
            collectives = 1 if self.rates.cores else blocks  # a bucket of 25 MB holds several small blocks
            return uncovered(
                self._of_blocks(all_reduce, sent, everyone, blocks),
                micro_batch_s * 2 / 3,
                collectives,
                self.rates,
                load(everyone, self.rates),
            )
        return self._sharded(parameters, ranks, blocks, micro_batch_s)

    def _sent_share(self) -> float:
        """Returns the share of the bytes of the gradients that compression leaves."""
        strategy = self.config.strategy
        return SENT_SHARE.get(strategy.compression, strategy.compression_share)

    def _sharded(self, parameters: float, ranks: Holders, blocks: int, micro_batch_s: float) -> float:
        """Returns the exposed time for ZeRO, where ``micro_batch_s`` is the time of the passes of one micro-batch."""
        layout = self.layout
        rates = self.rates
        shards = group_of(ranks.shard, ranks.stride, self.machine.devices_per_node)
        gathered = self._of_blocks(gather, parameters * self.narrow, shards, blocks)
        scattered = self._of_blocks(scatter, parameters * self.width * self._sent_share(), shards, blocks)
        replicas = ranks.number // ranks.shard
        per_node = 1  # the replicas of a shard on a node
        if not shards.spans_nodes:
            per_node = max(1, self.machine.devices_per_node // max(1, ranks.shard * ranks.stride))
        across = Group(replicas, per_node)
        reduced = self._of_blocks(all_reduce, parameters / ranks.shard * self.width, across, blocks)
        batches = layout.micro_batches
        busy = load(shards, rates)
        gathers = scatters = 1
        again = 0.0
        if "parameters" in layout.shards_between_passes:
            gathers = batches
            again = gathered  # a second time for the backward
        if "gradients" in layout.shards_between_passes:
            scatters = batches
        exposed = gathers * uncovered(gathered, micro_batch_s / 3, blocks, rates, busy)
        exposed += scatters * uncovered(scattered + again, micro_batch_s * 2 / 3, blocks, rates, busy)
        # the backward of the last micro-batch also covers the sum over the replicas, which takes other links
        return exposed + uncovered(reduced, micro_batch_s * 2 / 3, blocks, rates, load(across, rates))

    def _of_blocks(self, collective: Collective, size: float, group: Group, blocks: int) -> float:
        """Returns the seconds of a collective of each block, of ``size`` bytes together; on CPUs as one collective."""
        count = 1 if self.rates.cores else blocks
        return count * collective(size / count, group, self.rates)

    def _optimizer(self) -> float:
        """Returns the time in which memory moves parameters, gradients and state, with the norm of the gradients."""
        strategy = self.config.strategy
        updated = sum(count / shard for count, shard in zip(self._parameters(), self._shards(), strict=True))
        moved = updated * self.width * (2 + 2 + 2 * values_per_parameter(self.config.optim))
        weight = self.passes.weight
        if weight < self.width:  # reads gradients and writes weights, in addition to masters
            moved += updated * (2 * weight + self.width)
        if strategy.offload == "none":
            return moved / self.rates.memory_bytes_per_s
        return updated * 2 * weight / self.rates.host_bytes_per_s


@dataclass(frozen=True)
class Event:
    """Describes an action of a rank, with its start and end in seconds from the start of the step."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Holds the events of each rank."""

    ranks: tuple[tuple[Event, ...], ...]

    @property
    def seconds(self) -> float:
        return max(events[-1].end for events in self.ranks)

    @property
    def busy(self) -> float:
        """Returns the seconds in which the busiest rank computes."""
        return max(sum(event.end - event.begin for event in events) for events in self.ranks)


def step_seconds(
    layout: Layout, forwards: Sequence[float], backwards: Sequence[float], messages: Sequence[float]
) -> float:
    """Returns the seconds from the first forward to the last backward of a step.

    Steps of many micro-batches repeat themselves, so their middle is extrapolated from two shorter steps. ``forwards``
    and ``backwards`` list the seconds that each stage takes for the forward and the backward of one micro-batch,
    ``messages`` the seconds of a message from each stage to the next one.
    """
    count = layout.micro_batches
    turn = layout.pp
    short = count - max(0, count - 3 * layout.stages) // turn * turn
    seconds = simulate(layout, short, forwards, backwards, messages).seconds
    if short == count:
        return seconds
    longer = simulate(layout, short + turn, forwards, backwards, messages).seconds
    return seconds + (longer - seconds) * (count - short) / turn


def simulate(
    layout: Layout, micro_batches: int, forwards: Sequence[float], backwards: Sequence[float], messages: Sequence[float]
) -> Timeline:
    """Returns when each rank computes what in a step of ``micro_batches``.

    An action begins when its rank has completed the previous action and its inputs have arrived. Raises ValueError if
    the order of the schedule is unknown, or its ranks wait for each other.
    """
    order = layout.pipeline.order
    if order is None:
        raise ValueError(f"the order of the schedule {layout.schedule} is unknown")
    shape = PipelineShape(layout.pp, layout.stages_per_rank, micro_batches)
    orders = [order(shape, rank) for rank in range(layout.pp)]
    arrived: dict[tuple[bool, int, int], float] = {}  # when forwards (True) and backwards can begin
    events: list[list[Event]] = [[] for _ in orders]
    left = sum(map(len, orders))
    while left:
        before = left
        for rank_events, actions in zip(events, orders, strict=True):
            began = len(rank_events)
            last = len(forwards) - 1
            clock = rank_events[-1].end if rank_events else 0.0
            for action in actions[began:]:
                work, stage, batch = action
                ready: float | None = 0.0
                if work == BACKWARD_WEIGHT:
                    ready = clock
                elif work != FORWARD or stage:
                    ready = arrived.get((work == FORWARD, stage, batch))
                if ready is None:
                    break
                begin = max(ready, clock)
                clock = begin + _duration(work, stage, forwards, backwards)
                rank_events.append(Event(action, begin, clock))
                if work == FORWARD and stage < last:
                    arrived[True, stage + 1, batch] = clock + messages[stage]
                elif work == FORWARD:
                    arrived[False, stage, batch] = clock
                elif work != BACKWARD_WEIGHT and stage:
                    arrived[False, stage - 1, batch] = clock + messages[stage - 1]
            left -= len(rank_events) - began
        if left == before:
            raise ValueError(f"the ranks of the schedule {layout.schedule} wait for each other")
    return Timeline(tuple(map(tuple, events)))


def _duration(work: str, stage: int, forwards: Sequence[float], backwards: Sequence[float]) -> float:
    """Returns the seconds of a pass; the gradients of inputs and the gradients of weights each take half of a
    backward."""
    if work == FORWARD:
        return forwards[stage]
    if work == FULL_BACKWARD:
        return backwards[stage]
    return backwards[stage] / 2
