"""Estimates the memory of each rank from the config by replaying its allocations in a step. It does not import torch.

The passes run in the order of the pipeline's schedule. Each pass allocates the same tensors as the engines in
``parallel`` and torch: a step keeps copies of the matrices in the compute type; the softmax of the head and its two
gradients are fp32, or a fused loss keeps the gradient of its matrix from the forward; a recomputed layer temporarily
exists in full; the first backward of a step allocates the gradients; ZeRO gathers and reduces one block at a time;
``allreduce`` sums copies of buckets. A step of many micro-batches repeats the same pattern, so the replay contains only
the first ones.

CUDA graphs (``train.cuda_graphs``) allocate the results of the layers in a separate memory pool, which all graphs of a
device share. The next graph can use the blocks that a graph has freed, as in an ordinary step, but no other code can
(``CUDAGraphTreeManager`` in torch/_inductor/cudagraph_trees.py, torch 2.13). A rank therefore needs the sum of the peak
of the pool and the peak of all other memory, even if they occur at different moments. The pool contains the activations
of the layers; the cast of one matrix at a time, since the step keeps no casts; all gradients of one layer, which its
graph returns together; and copies of the inputs that are neither parameters nor results of a graph, that is, the rotary
tables for each layer. The gradients of all parameters have memory outside of the pool from step to step. The warm-up
also allocates from the pool, and the graphs reuse this memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import groupby
from operator import add
from typing import Literal, NamedTuple

from hpc_train.config.schema import Config
from hpc_train.config.values import LayerMode, bucket_mb, runs_own_code
from hpc_train.layout.counted import counted
from hpc_train.layout.layout import Layout
from hpc_train.layout.optimizers import averages_of_weights, values_per_parameter
from hpc_train.layout.orders import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Action, PipelineShape, Work
from hpc_train.layout.partition import layer_counts
from hpc_train.layout.recomputation import recomputation_of
from hpc_train.layout.sizes import Sizes, parameter_count, sizes_of, trained_count
from hpc_train.layout.techniques import CARRYING, IN_FLIGHT, CompilerMode, compiler_mode
from hpc_train.units import format_bytes

# Estimates for a GPU
ALLOCATOR_SHARE = 0.05  # the bytes that the allocator reserves in addition, relative to the bytes in use
CONTEXT_BYTES = 1.2e9  # for the CUDA context and libraries
COMMUNICATOR_BYTES = 0.25e9  # for each communicator of NCCL


def reserved_bytes(layout: Layout, context_bytes: float = CONTEXT_BYTES) -> float:
    """Returns the bytes of a GPU that the context, libraries and the communicators of a rank take."""
    return context_bytes + layout.communicators * COMMUNICATOR_BYTES


def needed_bytes(held: float, reserved: float, allocator_share: float = ALLOCATOR_SHARE) -> float:
    """Returns the bytes that a GPU must have for ``held`` bytes of tensors.

    Args:
        reserved: from ``reserved_bytes``.
        allocator_share: from the machine file that describes the GPU, if that file is known.
    """
    return held * (1 + allocator_share) + reserved


def usable_bytes(device_bytes: float, reserved: float) -> float:
    """Returns the bytes of tensors that fit on a GPU with ``device_bytes`` of memory: the inverse of
    ``needed_bytes``."""
    return (device_bytes - reserved) / (1 + ALLOCATOR_SHARE)


def estimate(config: Config, layout: Layout) -> Memory | None:
    """Returns the memory of the rank that needs the most. Returns None for custom code, and for a model whose sizes
    neither its family nor the cache of counts defines.
    """
    config = counted(config)
    if runs_own_code(config) or parameter_count(config.model) is None:
        return None
    sizes = sizes_of(config, layout)
    return max((peak_of(sizes, rank) for rank in ranks_of(config, layout)), key=lambda memory: memory.total)


def state_bytes(config: Config, replicas: int = 1, local_replicas: int = 1) -> int | None:
    """Returns the bytes of a checkpoint; None if unknown.

    A checkpoint contains the trained parameters, the optimizer state of each, and the averages that hooks keep.

    Args:
        replicas: the number of replicas. Each adds the residual of its compressed gradients, if there is one.
        local_replicas: ``Layout.replicas``, of which each adds its weights and optimizer state.
    """
    config = counted(config)
    parameters = None if runs_own_code(config) else trained_count(config.model)
    if parameters is None:
        return None
    width = 8 if config.precision.name == "fp64" else 4
    moment = 2 if config.optim.moments == "bf16" else width
    values = width + moment * values_per_parameter(config.optim)
    values += width * averages_of_weights(config)
    if config.strategy.local_steps is not None:
        values = values * local_replicas + 2 * width  # the anchors and the momentum of the outer steps
    if replicas > 1 and config.strategy.compression in CARRYING:
        values += width * replicas
    return int(parameters * values)


def host_copy_bytes(config: Config, layout: Layout, nodes: int) -> float | None:
    """Returns the bytes of host memory per node that the copies of an asynchronous save take; None if unknown.

    Each byte of a checkpoint is copied on the rank that writes it, and the plan of a save distributes the bytes evenly.
    """
    size = state_bytes(config, layout.dp_cp, layout.replicas)
    if size is None:
        return None
    return size / nodes


Part = Literal["parameters", "gradients", "optimizer", "activations", "hooks"]


class Change(NamedTuple):
    """A change of the memory of a rank.

    Attributes:
        size: the bytes that are allocated, or freed if negative.
        moment: whether they are freed again before the next change.
        in_layer: whether compiled layers hold them. With CUDA graphs, they are in the memory pool of the graphs.
    """

    part: Part
    size: float
    moment: bool = False
    in_layer: bool = False


@dataclass(frozen=True)
class Memory:
    """The bytes on the device of a rank at the peak."""

    parameters: float  # with copies in the compute type
    gradients: float
    optimizer: float
    activations: float
    hooks: float = 0.0  # averages of the weights

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.hooks

    def __add__(self, other: Memory) -> Memory:
        return Memory(*map(add, astuple(self), astuple(other)))

    @property
    def largest(self) -> str:
        """Returns the name of the largest part."""
        return max(vars(self), key=lambda name: float(getattr(self, name)))

    def __str__(self) -> str:
        shown = {name: format_bytes(size) if size else "none at the peak" for name, size in vars(self).items()}
        if not self.hooks:
            del shown["hooks"]
        return f"{format_bytes(self.total)} ({', '.join(f'{name} {size}' for name, size in shown.items())})"


PARTS = {field.name: place for place, field in enumerate(fields(Memory))}


class Passage(NamedTuple):
    """Describes how a pass changes the memory of a rank, in bytes. The tuples have a number for each part.

    Attributes:
        net: the change from the beginning to the end of the pass.
        peak: the change from the beginning to the peak of the pass.
        total: the sum of ``net``.
        height: the sum of ``peak``.
    """

    net: tuple[float, ...]
    peak: tuple[float, ...]
    total: float
    height: float


def passage(changes: Iterable[Change]) -> Passage:
    """Returns the sum of ``changes`` and its peak."""
    held = [0.0] * len(PARTS)
    total = height = 0.0
    peak = tuple(held)
    for part, size, moment, _ in changes:
        place = PARTS[part]
        total += size
        held[place] += size
        if total > height:
            height = total
            peak = tuple(held)
        if moment:
            total -= size
            held[place] -= size
    return Passage(tuple(held), peak, total, height)


def replay(passages: Iterable[Passage]) -> Memory:
    """Returns the bytes held at the peak of ``passages``, starting from zero."""
    held = most = tuple([0.0] * len(PARTS))
    total = height = 0.0
    for step in passages:
        if total + step.height > height:
            height = total + step.height
            most = tuple(map(add, held, step.peak))
        total += step.total
        held = tuple(map(add, held, step.net))
    return Memory(*most)


Gathers = Literal["never", "step", "layer"]
Reduces = Literal["each", "last", "after", "inside"]


class Run(NamedTuple):
    """Describes consecutive layers of a stage that are alike.

    Attributes:
        mode: their recomputation mode.
        moves: whether their activations move to host memory if the config offloads activations; true for all layers
            except the last layer of the model.
        layers: the number of layers.
    """

    mode: LayerMode
    moves: bool
    layers: int


@dataclass(frozen=True)
class Stage:
    """A stage of a rank.

    Attributes:
        first, last: whether it has the stem, and whether it has the head.
        runs: its layers, in the order of the forward.
    """

    first: bool
    last: bool
    runs: tuple[Run, ...]

    @property
    def layers(self) -> int:
        return sum(run.layers for run in self.runs)


@dataclass(frozen=True)
class Rank:
    """Describes what one pipeline rank does in a step.

    Attributes:
        stages: its stages by number.
        actions: its passes; passes that repeat earlier ones are omitted.
        micro_batches: the number of micro-batches that it actually computes.
        gathers: ``step`` if ZeRO keeps full parameters during the step, ``layer`` if ZeRO gathers them for each layer,
            ``never`` without ZeRO.
        reduces: ``each`` if every backward reduces gradients, ``last`` if only the last backward of a step does,
            ``after`` if full gradients are reduced after it, ``inside`` if each gradient is used as soon as it is
            final.
        keeps_gradients: whether gradients have memory from step to step, in DDP's buckets.
        bucket: the bytes of a bucket of gradients that is sent during the backward if ``reduces`` is ``inside`` or
            ``after``; 0 if no bucket is sent, and for DDP, which sends the gradients without a copy.
        copied: the bytes of the copy that is sent, for each byte of a gradient.
        captured: whether its layers run as CUDA graphs.
    """

    stages: dict[int, Stage]
    actions: tuple[Action, ...]
    micro_batches: int
    gathers: Gathers
    reduces: Reduces
    keeps_gradients: bool
    bucket: float = 0.0
    copied: float = 1.0
    captured: bool = False


def ranks_of(config: Config, layout: Layout) -> Iterator[Rank]:
    """Yields the pipeline ranks. Of several ranks with equal stages it yields only the first, which keeps the most
    micro-batches, unless the stages form a V, where the order of the passes decides.
    """
    seen = set[tuple[Stage, ...]]()
    stages = stages_of(config, layout)
    for number in range(layout.pp):
        rank = rank_of(layout, number, stages)
        held = tuple(rank.stages.values())
        if held in seen and layout.pipeline.placement != "v":
            continue
        seen.add(held)
        if rank.reduces == "after" and layout.dp_cp > 1 and layout.kind.buckets and not rank.keeps_gradients:
            copied = 0.5 if config.strategy.compression in ("bf16", "fp16") else 1.0
            device_type = "cpu" if config.cluster.gpus_per_node == 0 else "cuda"
            rank = replace(rank, bucket=bucket_mb(config.strategy, device_type) * 2**20, copied=copied)
        if config.optim.in_backward:
            rank = replace(rank, reduces="inside")
        yield replace(rank, captured=compiler_mode(config) == CompilerMode.CUDA_GRAPHS)


def rank_of(layout: Layout, rank: int, stages: Sequence[Stage]) -> Rank:
    """Returns one pipeline rank of ``layout``. ``stages`` is the result of ``stages_of``."""
    held = {number: stages[number] for number, owner in enumerate(layout.placement) if owner == rank}
    gathers: Gathers = "never"
    reduces: Reduces = "after"
    if layout.shards_state:
        shards = layout.shards_between_passes
        gathers = "layer" if "parameters" in shards else "step"
        reduces = "each" if layout.micro_batches == 1 or "gradients" in shards else "last"
    views = layout.data_parallel == "ddp" and layout.dp_cp > 1  # DDP's gradients are views of its buckets
    return Rank(held, _actions(layout, rank, [*held]), layout.micro_batches, gathers, reduces, views)


def stages_of(config: Config, layout: Layout) -> list[Stage]:
    """Returns the stages of the model."""
    counts = layer_counts(config.model.n_layers, layout.stages, config.strategy.pp_split if layout.pp > 1 else "even")
    recomputation = recomputation_of(config, layout)
    last = config.model.n_layers - 1
    stages = []
    first = 0
    for stage, count in enumerate(counts):
        numbers = range(first, first + count)
        kinds = ((recomputation.mode(number), number < last) for number in numbers)
        runs = tuple(Run(*kind, len([*group])) for kind, group in groupby(kinds))
        stages.append(Stage(stage == 0, stage == layout.stages - 1, runs))
        first += count
    return stages


def _actions(layout: Layout, rank: int, stages: Sequence[int]) -> tuple[Action, ...]:
    """Returns the passes of a rank in the first micro-batches of a step."""
    if layout.pp == 1:
        batches = range(min(2, layout.micro_batches))
        return tuple(Action(work, 0, batch) for batch in batches for work in (FORWARD, FULL_BACKWARD))
    in_flight = {stage: layout.in_flight(stage) for stage in stages}
    order = layout.pipeline.order
    if order is None:
        forwards = [Action(FORWARD, stage, batch) for stage in stages for batch in range(in_flight[stage])]
        works: tuple[Work, ...] = (FULL_BACKWARD,)
        if layout.pipeline.splits_backward:
            works = (BACKWARD_INPUT, BACKWARD_WEIGHT)
        backwards = [action._replace(work=work) for action in reversed(forwards) for work in works]
        repeats = layout.micro_batches > max(in_flight.values())
        return (*forwards, *backwards) * (1 + repeats)
    turn = layout.pp if layout.pipeline.micro_batches == "multiple_of_ranks" else 1
    enough = -(-(max(in_flight.values()) + 2) // turn) * turn
    return order(PipelineShape(layout.pp, layout.stages_per_rank, min(layout.micro_batches, enough)), rank)


WIDENED_BYTES = 2.0**28  # fp32 gradients that the optimizer holds at a time (train/optimizers/held.py)


@dataclass
class _Step:
    """Follows the passes of a rank.

    Attributes:
        in_layer: whether to follow only the memory of compiled layers (True), only other memory (False), or all (None).
        gathered: the stages whose parameters are gathered.
        summed: the stages whose gradients have memory.
        left: the number of remaining backwards of each stage.
        computed: the bytes of the gradients that this backward has computed, if they are used inside it; otherwise the
            bytes of final gradients in buckets.
        waiting: the bytes of gradients and copies that wait for the sum over the ranks, if gradients are used inside
            the backward; otherwise the bytes of the copies that are sent.
    """

    sizes: Sizes
    rank: Rank
    in_layer: bool | None = None
    gathered: set[int] = field(default_factory=set)
    summed: set[int] = field(default_factory=set)
    left: dict[int, int] = field(default_factory=dict)
    computed: float = 0.0
    waiting: float = 0.0

    def run(self) -> Iterator[Passage]:
        """Yields the passes. Passes of a stage that begin in the same state are computed once."""
        yield self._passage(self._begin())
        for work, stage, _ in self.rank.actions:
            if work in (FULL_BACKWARD, BACKWARD_WEIGHT):
                self.left[stage] = self.left.get(stage, 0) + 1
        passages: dict[tuple[Work, int, bool, bool, bool], Passage] = {}
        for work, stage, _ in self.rank.actions:
            self.left[stage] -= work in (FULL_BACKWARD, BACKWARD_WEIGHT)
            key = work, stage, stage in self.gathered, stage in self.summed, not self.left[stage]
            if key not in passages:
                if work == FORWARD:
                    changes = self._forward(stage)
                elif work == BACKWARD_INPUT:
                    changes = self._inputs(stage)
                else:
                    changes = self._backward(stage, work == BACKWARD_WEIGHT)
                passages[key] = self._passage(changes)
            yield passages[key]
            if work == FORWARD:
                self.gathered.add(stage)
            elif work != BACKWARD_INPUT:
                self.summed.add(stage)
                if self._reshards(stage):
                    self.gathered.discard(stage)
        yield self._passage(self._update())

    def _passage(self, changes: Iterable[Change]) -> Passage:
        return passage(change for change in changes if self.in_layer in (None, change.in_layer))

    def _reshards(self, stage: int) -> bool:
        """Returns whether a backward of ``stage`` frees its gathered parameters."""
        return self.rank.gathers == "layer" or (self.rank.gathers == "step" and not self.left[stage])

    def _parameters(self, stage: Stage) -> tuple[float, float, float]:
        """Returns the numbers of parameters of the stem, one layer and the head of a stage; 0 for parts that it does
        not have."""
        of = self.sizes.parameters
        head = of.head
        # the last stage has a copy of a shared table, unless the first stage is on the same rank
        if not any(held.first for held in self.rank.stages.values()):
            head += of.table
        return of.stem * stage.first, of.layer, head * stage.last

    def _begin(self) -> Iterator[Change]:
        """Allocates the state, its casts, and the buffers of messages, which torch allocates for each micro-batch."""
        count = state = cast = 0.0
        of = self.sizes.parameters
        per = self.sizes.per_parameter
        for stage in self.rank.stages.values():
            stem, layer, head = self._parameters(stage)
            count += stem + stage.layers * layer + head
            state += stem + stage.layers * of.state + head
            cast += (of.head + of.table) * stage.last
            if not self.rank.captured:
                cast += stage.layers * layer
        yield Change("parameters", cast * per.cast)
        yield Change("parameters", state * per.held)
        yield Change("optimizer", state * per.optimizer)
        yield Change("hooks", state * per.hooks)
        if self.rank.keeps_gradients or self.rank.captured:
            yield Change("gradients", count * per.whole)
            if self.rank.micro_batches < 2 or self.rank.captured:  # otherwise DDP first sums outside of its buckets
                self.summed |= {*self.rank.stages}
        messages = sum((not stage.first) + (not stage.last) for stage in self.rank.stages.values())
        yield Change("activations", messages * self.rank.micro_batches * self.sizes.activations.hidden)
        yield Change("activations", self._on_the_way())

    def _update(self) -> Iterator[Change]:
        """Sends the last bucket and updates the masters, if there are any; a limited number of them have fp32 gradients
        at a time."""
        if self.rank.reduces == "after":
            yield Change("gradients", min(self.rank.bucket, self.computed), moment=True)
            yield Change("gradients", -self.waiting)
        count = 0.0
        for stage in self.rank.stages.values():
            stem, layer, head = self._parameters(stage)
            count += stem + stage.layers * layer + head
        yield Change("gradients", min(count * self.sizes.per_parameter.updated, WIDENED_BYTES), moment=True)

    def _on_the_way(self) -> float:
        """Returns the bytes of offloaded activations that are on the device: the activations of the layer that computes
        and of its neighbor. The last layer of the model, which is not offloaded, replaces one of them.
        """
        stages = self.rank.stages.values()
        moved = self.sizes.activations.moved
        sizes = [moved[run.mode] for stage in stages for run in stage.runs for _ in range(run.layers * run.moves)]
        sizes.sort(reverse=True)
        return sum(sizes[: 2 - any(stage.last for stage in stages)])

    def _forward(self, number: int) -> Iterator[Change]:
        stage = self.rank.stages[number]
        held = self.sizes.activations
        _, layer, _ = self._parameters(stage)
        yield from self._gather(number)
        for run in stage.runs:
            kept = held.on_device(run.mode, run.moves) + self._tables
            yield Change("activations", run.layers * kept, in_layer=True)
            yield from self._one_layer(layer)
        if stage.last:
            yield Change("activations", held.head)
            yield Change("gradients", held.matrix)
            yield Change("activations", held.forward, moment=True)
        yield Change("activations", self._boundary(stage))

    def _boundary(self, stage: Stage) -> float:
        """Returns the bytes of a stage's output, which is kept, minus the bytes of its input, which is in the buffer of
        a message."""
        return ((not stage.last) - (not stage.first)) * self.sizes.activations.hidden

    def _gather(self, number: int) -> Iterator[Change]:
        """Gathers the parameters that stay gathered until the backward, or until the last backward of the step."""
        if self.rank.gathers == "never" or number in self.gathered:
            return
        stage = self.rank.stages[number]
        per = self.sizes.per_parameter
        stem, layer, head = self._parameters(stage)
        yield Change("parameters", (stem + head) * per.gathered)
        yield Change("parameters", (stem + head) * per.gathered, moment=True)  # the buffer of the collective
        if self.rank.gathers == "step":
            yield Change("parameters", stage.layers * layer * per.of_layer)

    def _one_layer(self, layer: float) -> Iterator[Change]:
        """Holds a gathered layer, the buffer in which the next one arrives, and an unpacked matrix."""
        per = self.sizes.per_parameter
        buffers = {"never": 0, "step": 1, "layer": 2}[self.rank.gathers]
        unpacked = self.sizes.parameters.matrix * per.unpacked
        yield Change("parameters", buffers * layer * per.of_layer + unpacked, moment=True)

    def _inputs(self, number: int) -> Iterator[Change]:
        """Computes only the gradients of inputs. No activation is freed, and the gradients of results are kept."""
        stage = self.rank.stages[number]
        held = self.sizes.activations
        if stage.first:
            return  # torch computes the gradients of the first stage in the second part
        if stage.last:
            yield Change("activations", held.backward, moment=True)
        recomputed = max(held.recomputed(run.mode) for run in stage.runs)
        yield Change("activations", held.gradients + recomputed, moment=True)
        yield Change("activations", stage.layers * held.products + held.hidden + held.logits * stage.last)
        yield Change("activations", sum(run.layers * held.restored(run.mode, run.moves) for run in stage.runs))

    def _backward(self, number: int, split: bool) -> Iterator[Change]:
        """Computes all gradients, or with ``split`` only those of parameters, if the gradients of inputs exist
        already."""
        stage = self.rank.stages[number]
        held = self.sizes.activations
        _, layer, _ = self._parameters(stage)
        inputs_done = split and not stage.first
        if stage.last:
            yield from self._head_backward(number, inputs_done)
        for mode, moves, count in reversed(stage.runs):
            freed = held.on_device(mode, moves) + self._tables
            if inputs_done:
                freed += held.products + held.restored(mode, moves)
            # the layers of a run are equal: the first and the last one determine the peak
            for several in (1, count - 2, 1) if count > 2 else (1,) * count:
                yield from self._layer_backward(number, mode, layer, several, freed)
        yield Change("activations", -self._boundary(stage) - held.hidden * inputs_done)
        yield from self._end(number)

    def _head_backward(self, number: int, inputs_done: bool) -> Iterator[Change]:
        per = self.sizes.per_parameter
        held = self.sizes.activations
        _, _, head = self._parameters(self.rank.stages[number])
        if not inputs_done:
            yield Change("activations", held.backward, moment=True)
        yield Change("activations", held.logits - held.head)
        if self._joins_ends(number):
            yield Change("gradients", head * per.fresh)
        elif self._shares:
            yield from self._gradient(number, head, head)
        elif held.matrix:  # the gradient exists already and is cast
            if per.fresh != per.whole:
                yield Change("gradients", head * per.fresh, moment=True)
            yield Change("gradients", self._grown(number, head, head * per.whole))
            yield from self._copied(number, head, head)
        else:
            yield from self._gradient(number, head, head)
        yield Change("gradients", self._of_table(number) - held.matrix)
        yield Change("activations", -held.logits - held.logits * inputs_done)

    @property
    def _tables(self) -> float:
        return self.sizes.activations.tables * self.rank.captured

    @property
    def _shares(self) -> bool:
        """Returns whether ranks shard gradients after the reduction."""
        return self.rank.reduces in ("each", "last")

    def _joins_ends(self, number: int) -> bool:
        """Returns whether ZeRO reduces the gradients of head and stem together, since both share a table."""
        stage = self.rank.stages[number]
        return self._shares and self.sizes.parameters.table > 0 and stage.first and stage.last

    def _of_table(self, number: int) -> float:
        """Returns the bytes of the head's contribution to the gradient of a shared table, which waits for the stem's
        contribution."""
        stage = self.rank.stages[number]
        waits = stage.first and stage.last and not self._shares
        return self.sizes.parameters.table * self.sizes.per_parameter.whole * waits

    def _layer_backward(
        self, number: int, mode: LayerMode, layer: float, several: int, freed: float
    ) -> Iterator[Change]:
        """Computes the gradients of ``several`` equal layers, of which each frees ``freed`` bytes of activations; the
        peak is the peak of a single layer."""
        per = self.sizes.per_parameter
        held = self.sizes.activations
        matrix = self.sizes.parameters.matrix
        recomputed = held.recomputed(mode)
        gathered = 2 * layer * per.of_layer * (self.rank.gathers == "layer") + matrix * per.unpacked
        adds_copy = number in self.summed and per.fresh != per.whole  # to a gradient of another type
        block = matrix
        fresh = matrix * (per.whole + per.fresh * adds_copy)
        if self._shares:
            block = layer
            fresh = layer * per.whole  # the buffer with which the gradients of the previous layer are sent
        cast = 0.0
        if self.rank.captured:
            fresh += (layer - matrix) * per.whole
            cast = matrix * per.cast
        yield Change("parameters", gathered + cast, in_layer=True)
        yield Change("activations", recomputed, in_layer=True)
        yield Change("gradients", fresh, in_layer=True)
        yield Change("activations", held.gradients, moment=True, in_layer=True)
        yield Change("gradients", -fresh, in_layer=True)
        yield Change("activations", -recomputed, in_layer=True)
        yield Change("parameters", -gathered - cast, in_layer=True)
        activations = Change("activations", -several * freed, in_layer=True)
        if self._shares:  # FSDP reduces the gradients when the layer has freed its activations
            yield activations
        if self.rank.captured:  # the gradients are added to existing memory
            yield from self._copied(number, several * layer, matrix)
        else:
            yield from self._gradient(number, several * layer, block, several * self.sizes.parameters.state)
        if not self._shares:
            yield activations

    def _gradient(self, number: int, parameters: float, block: float, state: float | None = None) -> Iterator[Change]:
        """Adds the gradients of ``parameters`` parameters, which are computed or reduced in blocks of ``block``
        parameters. ``state`` counts them as the state that ZeRO shards; None: they are as many."""
        per = self.sizes.per_parameter
        copies = per.whole + per.fresh * (per.fresh != per.whole or self._shares)
        yield Change("gradients", block * copies, moment=True)
        shard = (parameters if state is None else state) * per.shard
        size = shard if self.rank.reduces == "each" else parameters * per.whole
        yield Change("gradients", self._grown(number, parameters, size))
        yield from self._copied(number, parameters, block)
        if self.rank.reduces == "last" and not self.left[number]:
            yield Change("gradients", shard - parameters * per.whole)

    def _copied(self, number: int, parameters: float, block: float) -> Iterator[Change]:
        """Sends copies of buckets when the last backward of a step has computed the gradients of ``parameters``
        parameters.

        A gradient that is larger than a bucket is sent without a copy, unless it is compressed.
        """
        bucket = self.rank.bucket
        copied = self.rank.copied
        whole = self.sizes.per_parameter.whole
        if self.rank.reduces != "after" or self.left[number] or not bucket or (block * whole > bucket and copied == 1):
            return
        self.computed += parameters * whole
        size = max(bucket, block * whole)
        sent = min(self.computed // size, IN_FLIGHT - 1) * size * copied
        if self.computed >= size:
            yield Change("gradients", size, moment=True)  # the copy of one more bucket, before it is compressed
        yield Change("gradients", sent - self.waiting)
        self.waiting = sent

    def _grown(self, number: int, parameters: float, size: float) -> float:
        """Returns the bytes by which the gradients of a step grow if the gradients of ``parameters`` parameters are
        added, of which the rank keeps ``size`` bytes."""
        per = self.sizes.per_parameter
        if self.rank.reduces != "inside":
            return size * (number not in self.summed)
        # gradients are in the bucket that is being filled and in the buckets that are being sent; a bucket of several
        # parameters is sent as a copy
        self.computed += parameters * per.whole
        before = self.waiting
        bucket = self.rank.bucket
        matrix = self.sizes.parameters.matrix * per.whole
        if not bucket:
            self.waiting = 0.0
        elif matrix > bucket:
            self.waiting = min(self.computed, (IN_FLIGHT - 1) * matrix)
        else:
            sent = min(self.computed // bucket, IN_FLIGHT - 1) * bucket
            self.waiting = sent + min(self.computed, sent + bucket)
        return self.waiting - before

    def _end(self, number: int) -> Iterator[Change]:
        """Ends the backward of a micro-batch with the stem. With ZeRO, the head is reduced and resharded together with
        the stem."""
        per = self.sizes.per_parameter
        stage = self.rank.stages[number]
        stem, layer, head = self._parameters(stage)
        if not self._shares:
            yield from self._gradient(number, stem, stem)
            yield Change("gradients", min(self.rank.bucket, self.waiting), moment=True)  # the copy of the last bucket
            yield Change("gradients", -self.waiting - self._of_table(number))
        else:
            joined = head * self._joins_ends(number)
            yield Change("gradients", -joined * per.fresh)
            yield from self._gradient(number, stem + joined, stem + joined)
        if self._reshards(number):
            layers = stage.layers * (self.rank.gathers == "step")
            yield Change("parameters", -(stem + head) * per.gathered - layers * layer * per.of_layer)


def peak_of(sizes: Sizes, rank: Rank) -> Memory:
    """Returns the memory that ``rank`` holds at the peak of a step."""
    if not rank.captured:
        return replay(_Step(sizes, rank).run())
    pool, outside = (replay(_Step(sizes, rank, in_layer).run()) for in_layer in (True, False))
    return pool + outside
