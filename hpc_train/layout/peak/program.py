"""States what one rank allocates and frees in a step, in the order in which the engine does. Imports no torch.

The order of the passes is that of the pipeline's schedule. What a pass allocates is that of the engines in ``parallel``
and of torch: a step keeps copies of the matrices in the compute type; the softmax of the head and its two gradients are
fp32, or a fused loss keeps the gradient of its matrix from the forward; a recomputed layer is whole for a moment; a
gradient is allocated by the first backward of a step; ZeRO gathers and reduces one block at a time; ``allreduce`` sums
copies of buckets.

CUDA graphs (``train.cuda_graphs``) hold what the layers compute in a separate memory pool, which all graphs of a
device share. The blocks that one graph has freed serve the next, as in an ordinary step, but nothing else can use them
(``CUDAGraphTreeManager`` in torch/_inductor/cudagraph_trees.py, torch 2.13). So a rank needs the peak of the pool and
the peak of all else, even if they are at different moments. In the pool are the activations of the layers, the cast of
one matrix at a time, since the step keeps none, all gradients of one layer, which its graph returns together, and
copies of the inputs that are neither parameters nor results of a graph: the rotary tables, for each layer. The
gradients of all parameters have memory outside from step to step. The warm-up allocates from the pool, too, and what
it frees is used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hpc_train.config.values import LayerMode
from hpc_train.layout.orders import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Work
from hpc_train.layout.peak.ranks import Rank, Stage
from hpc_train.layout.peak.replay import Change, Memory, Part, Passage, exceeds, passage, replay
from hpc_train.layout.peak.sizes import Sizes
from hpc_train.layout.techniques import IN_FLIGHT

WIDENED_BYTES = 2.0**28  # of the gradients that the optimizer has in fp32 at once (train/optimizers/optimizer.py)


@dataclass
class _Step:
    """Follows the passes of a rank.

    Attributes:
        in_layer: whether to follow only what compiled layers hold, or only what they do not; None: everything.
        gathered: the stages whose parameters are whole.
        summed: the stages whose gradients have memory.
        left: the backwards that are left for each stage.
        computed: the bytes of the gradients of this backward, if they are used inside it; else of those in buckets
            that are final.
        waiting: what of them waits for its sum over the ranks, with the copies that are sent; else these copies.
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
        """Returns the passes; those of a stage that begin alike are alike."""
        yield self._passage(self._begin())
        for work, stage, _ in self.rank.actions:
            if work in (FULL_BACKWARD, BACKWARD_WEIGHT):
                self.left[stage] = self.left.get(stage, 0) + 1
        known: dict[tuple[Work, int, bool, bool, bool], Passage] = {}
        for work, stage, _ in self.rank.actions:
            self.left[stage] -= work in (FULL_BACKWARD, BACKWARD_WEIGHT)
            key = work, stage, stage in self.gathered, stage in self.summed, not self.left[stage]
            if key not in known:
                known[key] = self._passage(self._pass(work, stage))
            yield known[key]
            self._passed(work, stage)
        yield self._passage(self._update())

    def _passage(self, changes: Iterable[Change]) -> Passage:
        return passage(each for each in changes if self.in_layer in (None, each.in_layer))

    def _pass(self, work: Work, stage: int) -> Iterator[Change]:
        if work == FORWARD:
            return self._forward(stage)
        return self._inputs(stage) if work == BACKWARD_INPUT else self._backward(stage, work == BACKWARD_WEIGHT)

    def _passed(self, work: Work, stage: int) -> None:
        if work == FORWARD:
            self.gathered.add(stage)
        elif work != BACKWARD_INPUT:
            self.summed.add(stage)
            if self._reshards(stage):
                self.gathered.discard(stage)

    def _reshards(self, stage: int) -> bool:
        """Returns whether a backward of ``stage`` frees its gathered parameters."""
        return self.rank.gathers == "layer" or (self.rank.gathers == "step" and not self.left[stage])

    def _parameters(self, stage: Stage) -> tuple[float, float, float]:
        """Returns the parameters of the stem, one layer and the head of a stage, as far as it has them."""
        of = self.sizes.parameters
        stem = of.stem if stage.first else 0.0
        # the last stage has a copy of a shared table, unless the first one is on the same rank
        copies = of.table and not any(each.first for each in self.rank.stages.values())
        return stem, of.layer, (of.head + (of.table if copies else 0.0)) if stage.last else 0.0

    def _begin(self) -> Iterator[Change]:
        """Allocates the state, its casts, and the buffers of messages, which torch has for each micro-batch."""
        count = cast = 0.0
        of, per = self.sizes.parameters, self.sizes.per_parameter
        for stage in self.rank.stages.values():
            stem, layer, head = self._parameters(stage)
            count += stem + stage.layers * layer + head
            cast += (0 if self.rank.captured else stage.layers * layer) + (of.head + of.table if stage.last else 0.0)
        yield Change("parameters", cast * per.cast)
        state: tuple[tuple[Part, float], ...] = (
            ("parameters", per.held), ("optimizer", per.optimizer), ("hooks", per.hooks),
        )  # fmt: skip
        for part, size in state:
            yield Change(part, count * size)
        if self.rank.keeps_gradients or self.rank.captured:
            yield Change("gradients", count * per.whole)
            if self.rank.micro_batches < 2 or self.rank.captured:  # else DDP sums the first ones outside its buckets
                self.summed |= {*self.rank.stages}
        messages = sum((not stage.first) + (not stage.last) for stage in self.rank.stages.values())
        yield Change("activations", messages * self.rank.micro_batches * self.sizes.activations.hidden)
        yield Change("activations", self._on_the_way())

    def _update(self) -> Iterator[Change]:
        """Sends the last bucket, and updates masters, if there are any, of which so many at once have gradients in
        fp32."""
        if self.rank.reduces == "after":
            yield Change("gradients", min(self.rank.bucket, self.computed), moment=True)
            yield Change("gradients", -self.waiting)
        count = sum(
            stem + stage.layers * layer + head
            for stage in self.rank.stages.values()
            for stem, layer, head in [self._parameters(stage)]
        )
        per = self.sizes.per_parameter
        yield Change("gradients", min(count * per.updated, WIDENED_BYTES), moment=True)

    def _on_the_way(self) -> float:
        """Returns what is on the device of activations that are kept in host memory: those of the layer that computes
        and of its neighbor. The last layer of the model, which stays, replaces one of them.
        """
        stages, moved = self.rank.stages.values(), self.sizes.activations.moved
        sizes = [moved[run.mode] for stage in stages for run in stage.runs for _ in range(run.layers * run.moves)]
        return sum(sorted(sizes)[-1 if any(stage.last for stage in stages) else -2 :])

    def _forward(self, number: int) -> Iterator[Change]:
        stage, held = self.rank.stages[number], self.sizes.activations
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
        """Returns the bytes of a stage's output, which is kept, less its input, which is in the buffer of a message."""
        return ((not stage.last) - (not stage.first)) * self.sizes.activations.hidden

    def _gather(self, number: int) -> Iterator[Change]:
        """Gathers what stays whole until the backward, or until the last one of the step."""
        if self.rank.gathers == "never" or number in self.gathered:
            return
        stage, per = self.rank.stages[number], self.sizes.per_parameter
        stem, layer, head = self._parameters(stage)
        yield Change("parameters", (stem + head) * per.gathered)
        yield Change("parameters", (stem + head) * per.gathered, moment=True)  # the buffer of the collective
        if self.rank.gathers == "step":
            yield Change("parameters", stage.layers * layer * per.gathered)

    def _one_layer(self, layer: float) -> Iterator[Change]:
        """Holds a gathered layer, and the buffer in which the next one arrives."""
        buffers = {"never": 0, "step": 1, "layer": 2}[self.rank.gathers]
        yield Change("parameters", buffers * layer * self.sizes.per_parameter.gathered, moment=True)

    def _inputs(self, number: int) -> Iterator[Change]:
        """Computes the gradients of inputs only. Nothing is freed, and gradients of results are kept."""
        stage, held = self.rank.stages[number], self.sizes.activations
        if stage.first:
            return  # which torch leaves to the second part
        if stage.last:
            yield Change("activations", held.backward, moment=True)
        recomputes = any(run.mode != "none" for run in stage.runs)
        yield Change("activations", held.gradients + (held.kept["none"] if recomputes else 0.0), moment=True)
        yield Change("activations", stage.layers * held.products + held.hidden + held.logits * stage.last)
        yield Change("activations", sum(run.layers * held.restored(run.mode, run.moves) for run in stage.runs))

    def _backward(self, number: int, split: bool) -> Iterator[Change]:
        """Computes all gradients, or those of parameters if those of inputs are ``split`` off and done."""
        stage, held = self.rank.stages[number], self.sizes.activations
        _, layer, _ = self._parameters(stage)
        inputs_done = split and not stage.first
        if stage.last:
            yield from self._head_backward(number, inputs_done)
        for mode, moves, count in reversed(stage.runs):
            kept = held.on_device(mode, moves) + self._tables
            kept += held.products + held.restored(mode, moves) if inputs_done else 0.0
            # layers that follow each other are alike: the first and the last one tell the peak
            for several in (1, count - 2, 1) if count > 2 else (1,) * count:
                yield from self._layer_backward(number, mode, layer, several)
                yield Change("activations", -several * kept, in_layer=True)
        yield Change("activations", -self._boundary(stage) - held.hidden * inputs_done)
        yield from self._end(number)

    def _head_backward(self, number: int, inputs_done: bool) -> Iterator[Change]:
        per, held = self.sizes.per_parameter, self.sizes.activations
        _, _, head = self._parameters(self.rank.stages[number])
        if not inputs_done:
            yield Change("activations", held.backward, moment=True)
        yield Change("activations", held.logits - held.head)
        if self._shares:  # ZeRO reduces it with that of the stem
            yield Change("gradients", head * per.fresh)
        elif held.matrix:  # it exists already, and passes a cast
            yield Change("gradients", head * per.fresh if per.fresh != per.whole else 0.0, moment=True)
            yield Change("gradients", self._kept(number, head))
            yield from self._copied(number, head, head)
        else:
            yield from self._gradient(number, head, head)
        yield Change("gradients", self._of_table(number) - held.matrix)
        yield Change("activations", -held.logits - held.logits * inputs_done)

    @property
    def _tables(self) -> float:
        return self.sizes.activations.tables if self.rank.captured else 0.0

    @property
    def _shares(self) -> bool:
        """Returns whether ranks share gradients after they have reduced them."""
        return self.rank.reduces in ("each", "last")

    def _of_table(self, number: int) -> float:
        """Returns the bytes of the head's part of the gradient of a shared table, which waits for that of the stem."""
        stage = self.rank.stages[number]
        waits = stage.first and stage.last and not self._shares
        return self.sizes.parameters.table * self.sizes.per_parameter.whole if waits else 0.0

    def _layer_backward(self, number: int, mode: LayerMode, layer: float, several: int) -> Iterator[Change]:
        """Computes the gradients of ``several`` equal layers, of which the peak of one counts."""
        per, held, matrix = self.sizes.per_parameter, self.sizes.activations, self.sizes.parameters.matrix
        recomputed = 0.0 if mode == "none" else held.kept["none"]
        gathered = 2 * layer * per.gathered if self.rank.gathers == "layer" else 0.0
        # with ZeRO, that in which the gradients of the layer before are sent
        fresh = layer * per.whole if self._shares else matrix * self._copies(number)
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
        if self.rank.captured:  # they are added to memory that exists
            yield from self._copied(number, several * layer, matrix)
        else:
            yield from self._gradient(number, several * layer, layer if self._shares else matrix)

    def _copies(self, number: int) -> float:
        """Returns the bytes per parameter of a gradient while it is computed and added."""
        per = self.sizes.per_parameter
        return per.whole + (per.fresh if number in self.summed and per.fresh != per.whole else 0.0)

    def _gradient(self, number: int, parameters: float, block: float) -> Iterator[Change]:
        """Adds the gradients of ``parameters``, which are computed or reduced in blocks of ``block``."""
        per = self.sizes.per_parameter
        copies = per.whole + (per.fresh if per.fresh != per.whole or self._shares else 0.0)
        yield Change("gradients", block * copies, moment=True)
        yield Change("gradients", self._kept(number, parameters))
        yield from self._copied(number, parameters, block)
        if self.rank.reduces == "last" and not self.left[number]:
            yield Change("gradients", parameters * (per.shard - per.whole))

    def _copied(self, number: int, parameters: float, block: float) -> Iterator[Change]:
        """Sends copies of buckets when the last backward of a step has computed the gradients of ``parameters``.

        A gradient that is larger than a bucket is sent itself, unless it is compressed.
        """
        bucket, copied, whole = self.rank.bucket, self.rank.copied, self.sizes.per_parameter.whole
        if self.rank.reduces != "after" or self.left[number] or not bucket or (block * whole > bucket and copied == 1):
            return
        self.computed += parameters * whole
        size = max(bucket, block * whole)
        sent = min(self.computed // size, IN_FLIGHT - 1) * size * copied
        if self.computed >= size:
            yield Change("gradients", size, moment=True)  # the copy of one more bucket, before it is compressed
        yield Change("gradients", sent - self.waiting)
        self.waiting = sent

    def _kept(self, number: int, parameters: float) -> float:
        """Returns the bytes by which the gradients grow that are kept, if those of ``parameters`` are added."""
        per = self.sizes.per_parameter
        if self.rank.reduces != "inside":
            kept = per.shard if self.rank.reduces == "each" else per.whole
            return parameters * kept if number not in self.summed else 0.0
        self.computed += parameters * per.whole
        before, self.waiting = self.waiting, self._waiting()
        return self.waiting - before

    def _waiting(self) -> float:
        """Returns the bytes of gradients in the bucket that is filled and in those on the way. A bucket of several
        parameters is sent as a copy."""
        bucket, matrix = self.rank.bucket, self.sizes.parameters.matrix * self.sizes.per_parameter.whole
        if not bucket:
            return 0.0
        if matrix > bucket:
            return min(self.computed, (IN_FLIGHT - 1) * matrix)
        sent = min(self.computed // bucket, IN_FLIGHT - 1) * bucket
        return sent + min(self.computed, sent + bucket)

    def _end(self, number: int) -> Iterator[Change]:
        """Ends the backward of a micro-batch with the stem and, for ZeRO, what is reduced and resharded with it."""
        per, stage = self.sizes.per_parameter, self.rank.stages[number]
        stem, layer, head = self._parameters(stage)
        if not self._shares:
            yield from self._gradient(number, stem, stem)
            yield Change("gradients", min(self.rank.bucket, self.waiting), moment=True)  # the copy of the last bucket
            yield Change("gradients", -self.waiting - self._of_table(number))
        else:
            yield Change("gradients", -head * per.fresh)
            yield from self._gradient(number, stem + head, stem + head)
        if self._reshards(number):
            layers = stage.layers if self.rank.gathers == "step" else 0
            yield Change("parameters", -(stem + head + layers * layer) * per.gathered)


def peak_of(sizes: Sizes, rank: Rank) -> Memory:
    """Returns what ``rank`` holds at the peak of a step."""
    if not rank.captured:
        return replay(_Step(sizes, rank).run())
    pool, outside = (replay(_Step(sizes, rank, in_layer).run()) for in_layer in (True, False))
    return pool + outside


def peak_exceeds(sizes: Sizes, rank: Rank, limit: float) -> bool:
    """Returns whether ``rank`` holds more than ``limit`` bytes at a moment of a step."""
    if rank.captured:
        return peak_of(sizes, rank).total > limit
    return exceeds(_Step(sizes, rank).run(), limit)
