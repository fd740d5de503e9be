"""The time of the passes of a block on one rank for one micro-batch, and of collectives. Imports no torch.

A pass takes the time of its matrix products, its attention and the movement of its activations, plus the time of its
tensor-parallel and context-parallel traffic, which nothing covers without ``strategy.async_tp``, except that attention
covers the messages of a ring. On GPUs it takes at least as long as the host starts its kernels; the CUDA graph of a
layer (``train.cuda_graphs``) starts like one kernel, and a tensor-parallel layer that is not compiled starts several
times as slowly, since each operation passes DTensor. FSDP's hooks and collectives take the host some time for each
layer, compiled or not.
On CPUs the cores run the kernels, start them and move the bytes of collectives, so nothing overlaps.

In fp8 each product and each of its two gradients scales and casts both operands anew
(``parallel/precision/float8.py``). What the casts move was counted in torchao 0.18 as the bytes that all kernels read
and write, per value of an operand:

- Compiled, as torch 2.13's Inductor counts them for one product with its gradients. ``tensorwise`` reads an operand
  for its largest magnitude and again for each of two layouts, which have a byte per value: 2 + 2 (2 + 1). ``rowwise``
  needs the magnitudes of rows and of columns as well.
- ``mxfp8`` has a kernel for each layout, which reads an operand once.
- Not compiled, each operation is a kernel, most of them in fp32: 33 bytes for each cast, and 2 to transpose the result.

With ``strategy.async_tp`` torch cuts a product and the gather of its input, or the scatter of its result, into a piece
for each rank. A rank has its own piece, and while it computes one it copies another, so all pieces but one cover the
traffic. Not covered are the copy of the own piece for the other ranks and the sum of the pieces after a scatter, which
take memory bandwidth (``_pipelined_multi_all_gather_and_consume`` and ``_fused_matmul_reduce_scatter_impl`` in
torch/distributed/_symmetric_memory, torch 2.13). Pieces are taken to be as fast as the whole, since two streams compute
at once. The compiler joins a scatter only with a product whose result it scatters (``_find_producer_matmul`` in
torch/_inductor/fx_passes/micro_pipeline_tp.py). In the backward of several products of one input their results are
added up before, so this scatter stays as it was.

The time of a collective of n ranks on S bytes is ``latency + c (n - 1) / n S / B`` with c = 2 for an all-reduce and 1
for an all-gather or a reduce-scatter, where B is the bus bandwidth (nccl-tests, doc/PERFORMANCE.md). The latency grows
with the logarithm of the ranks of a node. Between nodes, an all-gather or a reduce-scatter is a ring, whose latency
grows with the number of nodes; an all-reduce is a ring or, if it takes less, goes up and down a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Literal

from hpc_train.config.extensions import LinearLayers, family_of
from hpc_train.config.schema import Config
from hpc_train.config.values import LayerMode
from hpc_train.errors import UserError
from hpc_train.layout.counted import CountedModel, counted
from hpc_train.layout.float8 import OFF, WHERE, Products, check_gpus
from hpc_train.layout.layout import Layout
from hpc_train.layout.techniques import CompilerMode, compiler_mode
from hpc_train.planner.machine import Machine, Rates
from hpc_train.planner.work import Block, Work


@dataclass(frozen=True)
class Group:
    """Ranks of a collective.

    Attributes:
        ranks: how many there are.
        per_node: how many of them a node has.
    """

    ranks: int
    per_node: int

    @property
    def spans_nodes(self) -> bool:
        return self.ranks > self.per_node


def group_of(ranks: int, stride: int, devices_per_node: int) -> Group:
    """Returns the group of ``ranks`` ranks whose global numbers are ``stride`` apart."""
    return Group(ranks, max(1, min(ranks, devices_per_node // stride)))


def all_reduce(size: float, group: Group, rates: Rates) -> float:
    """Returns the seconds of an all-reduce of ``size`` bytes."""
    nodes = group.ranks / group.per_node
    return _seconds(2 * size, group, min(2 * log2(nodes), nodes - 1), rates)


def gather(size: float, group: Group, rates: Rates) -> float:
    """Returns the seconds of an all-gather to ``size`` bytes."""
    return _seconds(size, group, group.ranks / group.per_node - 1, rates)


def scatter(size: float, group: Group, rates: Rates) -> float:
    """Returns the seconds of a reduce-scatter of ``size`` bytes."""
    return gather(size / rates.scatter_share, group, rates)


def exchange(size: float, group: Group, rates: Rates) -> float:
    """Returns the seconds of an all-to-all in which each rank sends ``size`` bytes, with those for itself.

    What goes to ranks of the same node and what goes to other nodes moves at the same time, on other links.
    """
    if group.ranks == 1:
        return 0.0
    inside = size * (group.per_node - 1) / group.ranks / rates.node_bytes_per_s
    across = size * (group.ranks - group.per_node) / group.ranks / rates.fabric_bytes_per_s
    latency = rates.node_latency_s * log2(group.per_node) + rates.fabric_latency_s * group.spans_nodes
    return latency + max(inside, across)


def load(group: Group, rates: Rates) -> float:
    """Returns how busy a collective keeps a device, as a share of a collective within a node."""
    return min(1.0, _bandwidth(group, rates) / rates.node_bytes_per_s)


def message(size: float, between_nodes: bool, rates: Rates) -> float:
    """Returns the seconds of a message of ``size`` bytes to another rank."""
    if between_nodes:
        return rates.fabric_latency_s + size / rates.fabric_bytes_per_s
    return rates.node_latency_s + size / rates.node_bytes_per_s


def _seconds(moved: float, group: Group, hops: float, rates: Rates) -> float:
    """Returns the seconds of a collective that passes from node to node ``hops`` times."""
    if group.ranks == 1:
        return 0.0
    share = (group.ranks - 1) / group.ranks
    latency = rates.node_latency_s * log2(group.per_node) + rates.fabric_latency_s * hops
    return latency + share * moved / _bandwidth(group, rates)


def _bandwidth(group: Group, rates: Rates) -> float:
    if not group.spans_nodes:
        return rates.node_bytes_per_s
    # the ranks of a node send through as many network ports, but not faster than within the node
    bandwidth = group.per_node * rates.fabric_bytes_per_s
    if group.per_node == 1:
        return bandwidth
    return min(bandwidth, rates.node_bytes_per_s)


PRODUCTS = 7  # matrix products of a layer, which share its operations
# Fused attention computes two products in the forward. The backward computes four and, since no scores are kept, the
# first one again (Dao 2023, arXiv:2307.08691, section 3.1).
ATTENTION_BACKWARD = 2.5
# What FSDP does on the host for a layer, as the number of kernels that start in the same time: its hooks in a forward
# or a backward, a gather of parameters, and a scatter of gradients. From processor times of torch 2.13 with the backend
# ``fake``, relative to a layer without FSDP, which has 120 kernels.
FSDP_HOOKS = 27
FSDP_GATHER = 53
FSDP_SCATTER = 29


class Passes:
    """The passes of a layout's blocks on a machine; raises UserError if the devices do not compute in the precision of
    ``config``."""

    def __init__(self, config: Config, layout: Layout, machine: Machine, work: Work) -> None:
        check_float8_rate(config, machine)
        self.layout = layout
        self.work = work
        self.rates: Rates = machine.rates
        self.width = 8 if config.precision.name == "fp64" else 4
        self.narrow = {"bf16": 2, "fp16": 2}.get(config.precision.name, self.width)
        self.weight = self.narrow if config.precision.weights == "bf16" else self.width
        self.gradient = self.width if layout.shards_state else self.weight  # FSDP sums gradients in fp32
        share = self.rates.matmul_share * (self.rates.tp_matmul_share if layout.tp > 1 else 1.0)
        self.flops_per_s = machine.peak(config.precision.name) * share
        self.attention_per_s = machine.peak(config.precision.name) * self.rates.attention_share
        self.tensor_ranks = group_of(layout.tp, 1, machine.devices_per_node)
        self.exchanging = group_of(layout.cp // layout.ring, layout.tp, machine.devices_per_node)
        stride = layout.tp * layout.cp // layout.ring
        self.ring = group_of(layout.ring, stride, machine.devices_per_node)
        self.expert_ranks = group_of(layout.ep, 1, machine.devices_per_node)
        self.split = layout.cp * layout.tp  # the ranks that share the work of a block
        self.key_share = _key_share(config, layout)
        self.mode = compiler_mode(config)
        self.fsdp = fsdp_kernels(layout)
        self.launches = 1.0 if layout.tp == 1 or config.train.compile else self.rates.tp_launches
        self.linear_layers = None  # those that cover their traffic
        tell = family_of(config.model).linear_layers
        if self.mode == CompilerMode.ASYNC_TP and tell is not None:
            self.linear_layers = tell(config.model)
        self.float8 = IN_BF16 if self.rates.cores else float8_of(config, layout, work.tokens)
        self.float8_per_s = self.rates.fp8_flops * share * self.rates.fp8_share
        self.layers = {id(layer) for layer in work.blocks[1:-1]}
        self.in_float8 = self.layers or {id(work.blocks[0])}  # a model without layers is in its stem
        self._known: dict[tuple[int, LayerMode | None], float] = {}  # by a block's id; ``work`` keeps the blocks

    def forward(self, block: Block) -> float:
        """Returns the seconds of the forward of ``block``."""
        seconds = self._known.get((id(block), None))
        if seconds is None:
            products = self._products(block)
            float8 = self._float8(block)
            device = products + self._attention(block) + self._moved(block) + self._cast(float8.forward)
            started = self._started(block, block.kernels + float8.kernels[0]) + self._sharded(block, "forward")
            seconds = pass_seconds(device, started, self.rates) + self._traffic(block, "forward", products)
            self._known[id(block), None] = seconds
        return seconds

    def backward(self, block: Block, recomputed: LayerMode) -> float:
        """Returns the seconds of the backward of ``block``, with the recomputation of all or only cheap operations."""
        seconds = self._known.get((id(block), recomputed))
        if seconds is None:
            seconds = self._known[id(block), recomputed] = self._backward(block, recomputed)
        return seconds

    def _backward(self, block: Block, recomputed: LayerMode) -> float:
        products = self._products(block)
        float8 = self._float8(block)
        device = 2 * products + ATTENTION_BACKWARD * self._attention(block) + 2 * self._moved(block)
        device += self._cast(float8.backward) + self.accumulated(block)
        started = self._started(block, 2 * block.kernels + float8.kernels[1]) + self._sharded(block, "backward")
        seconds = pass_seconds(device, started, self.rates) + self._traffic(block, "backward", products)
        if recomputed == "none":
            return seconds
        return seconds + self._again(block, recomputed)

    def _again(self, block: Block, recomputed: LayerMode) -> float:
        """Returns the seconds of computing the forward of ``block`` again.

        It ends with the last tensor that the backward needs, which is the input of the layer's last product, so the
        product and the reduce-scatter of its result are left out (torch.utils.checkpoint with use_reentrant=False).
        """
        if recomputed == "ops":
            return self._moved(block)
        float8 = self._float8(block)
        products = self._products(block) - self._at_full_rate(block, block.last)
        device = products + self._attention(block) + self._moved(block) + self._cast(float8.forward)
        started = self._started(block, block.kernels + float8.kernels[0])
        return pass_seconds(device, started, self.rates) + self._traffic(block, "again", self._products(block))

    def _started(self, block: Block, kernels: int) -> float:
        """Returns the seconds in which the host starts the kernels of a pass."""
        if id(block) not in self.layers:
            return kernels * self.rates.launch_s
        if self.mode == CompilerMode.CUDA_GRAPHS:
            return self.rates.launch_s
        return kernels * self.rates.launch_s * self.launches

    def _sharded(self, block: Block, of: Pass) -> float:
        """Returns the seconds that FSDP takes on the host in a pass."""
        if id(block) not in self.layers:
            return 0.0
        return self.fsdp[of] * self.rates.launch_s

    def _products(self, block: Block) -> float:
        if not block.products:
            return 0.0
        small = PRODUCTS * self.rates.half_rate_flops / self.flops_per_s
        slower = block.grouped * (1 / self.rates.grouped_share - 1)
        return self._at_full_rate(block, block.products + slower) + small

    def _at_full_rate(self, block: Block, operations: float) -> float:
        """Returns the seconds of ``operations`` of a sample in matrix products, part of them in fp8."""
        of_rank = operations * self.layout.micro_size / self.split
        share = self._float8(block).share
        if not share:
            return of_rank / self.flops_per_s
        return (1 - share) * of_rank / self.flops_per_s + share * of_rank / self.float8_per_s

    def _float8(self, block: Block) -> Float8:
        if id(block) in self.in_float8:
            return self.float8
        return IN_BF16

    def _cast(self, moved: float) -> float:
        return moved / self.rates.memory_bytes_per_s

    def _attention(self, block: Block) -> float:
        return block.attention * self.layout.micro_size / self.split / self.attention_per_s

    def _moved(self, block: Block) -> float:
        elements = block.elements * self.layout.micro_size / self.split
        return elements * self.narrow * self.work.touches / 2 / self.rates.memory_bytes_per_s

    def accumulated(self, block: Block) -> float:
        """Returns the seconds of adding the gradients to those of the micro-batches before: two are read, one written.

        The first of a step's micro-batches has nothing to add to.
        """
        layout = self.layout
        shard, expert_shard = 1, 1
        if "gradients" in layout.shards_between_passes:
            shard, expert_shard = layout.shard, layout.expert_sizes[1]
        held = (block.parameters - block.experts) / layout.tp / shard + block.experts / layout.ep / expert_shard
        added = held * (1 - 1 / layout.micro_batches)
        return 3 * self.gradient * added / self.rates.memory_bytes_per_s

    def _traffic(self, block: Block, of: Pass, products: float) -> float:
        """Returns the seconds of the all-gathers and reduce-scatters of the hidden states of a layer, and the seconds
        of its exchanges of heads: two of each, of which ``again`` leaves out the last. They may overlap with
        ``products`` seconds of products. Rows travel to their experts and back, in each pass."""
        exchanged = self._exchange(block) + self._passed_on(block, of) + 2 * self._dispatch(block)
        rates = self.rates
        if self.layout.tp == 1 or not block.products:
            return exchanged
        size = self.work.hidden * self.layout.micro_size * self.narrow / self.layout.cp
        gather_s, scatter_s = gather(size, self.tensor_ranks, rates), scatter(size, self.tensor_ranks, rates)
        if self.linear_layers is not None and id(block) in self.layers:
            traffic = Traffic(gather_s, scatter_s, size / rates.memory_bytes_per_s, self.layout.tp)
            return exchanged + traffic_left(self.linear_layers, products, of, traffic)
        branches = 2.0
        if block.rows:  # each rank sends its tokens to the experts; the traffic of shared experts is not counted
            branches = 1.0
        elif of == "again":
            branches = 1.5
        return exchanged + branches * (gather_s + scatter_s)

    def _dispatch(self, block: Block) -> float:
        """Returns the seconds in which expert-parallel ranks send the rows of a layer to their experts."""
        size = block.rows * self.layout.micro_size * self.narrow / self.split
        return exchange(size, self.expert_ranks, self.rates) if size else 0.0

    def _exchange(self, block: Block) -> float:
        """Returns the seconds of two all-to-alls: of queries, keys and values, and of the result of attention.

        Queries and the result are as wide as the hidden states; with fewer key and value heads these are narrower, but
        each rank gets at least one. An all-to-all sends as much as an all-gather to the same size.
        """
        if self.exchanging.ranks == 1 or not block.attention:
            return 0.0
        size = self.work.hidden * self.layout.micro_size * self.narrow / self.split
        return sum(gather(tensors * size, self.exchanging, self.rates) for tensors in (1 + 2 * self.key_share, 1))

    def _passed_on(self, block: Block, of: Pass) -> float:
        """Returns the seconds of the messages of a ring that its attention does not cover: in each round keys and
        values, and in the backward also their gradients, in at least fp32, of which the last round covers none.

        A ring through several nodes is as slow as its messages between them. As chunks are in zigzag order, each round
        takes as long as another. On CPUs nothing covers a message.
        """
        if self.ring.ranks == 1 or not block.attention:
            return 0.0
        size = 2 * self.key_share * self.work.hidden * self.layout.micro_size / self.split
        products = 0.0 if self.rates.cores else self._attention(block) / self.ring.ranks
        sent = message(size * self.narrow, self.ring.spans_nodes, self.rates)
        if of != "backward":
            return (self.ring.ranks - 1) * max(0.0, sent - products)
        returned = message(size * max(4, self.narrow), self.ring.spans_nodes, self.rates)
        return (self.ring.ranks - 1) * max(0.0, sent + returned - ATTENTION_BACKWARD * products) + returned


def fsdp_kernels(layout: Layout) -> dict[Pass, float]:
    """Returns how many kernels start while the host runs FSDP for a layer, in each pass of a mean micro-batch."""
    if not layout.shards_state:
        return {"forward": 0.0, "backward": 0.0}
    once = 1 / layout.micro_batches
    forward = FSDP_HOOKS + FSDP_GATHER * once
    backward = FSDP_HOOKS + FSDP_SCATTER * once
    if "gradients" in layout.shards_between_passes:
        backward = FSDP_HOOKS + FSDP_SCATTER
    if "parameters" in layout.shards_between_passes:
        forward = FSDP_HOOKS + FSDP_GATHER
        backward += FSDP_GATHER
    return {"forward": forward, "backward": backward}


def _key_share(config: Config, layout: Layout) -> float:
    """Returns how wide the keys are that context-parallel ranks exchange, as a share of the queries."""
    heads = family_of(config.model).context_heads
    if heads is None:
        return 1.0
    queries, keys = (getattr(config.model, name) / layout.tp for name in heads)
    return max(keys, float(layout.cp // layout.ring)) / queries


@dataclass(frozen=True)
class Casts:
    """Counts what the casts of one product move, in bytes per value, and the kernels that they take.

    Attributes:
        forward, backward: of the input and of the weight, in each pass.
        gradient: of the gradient of the result, in the backward.
        kernels: in the forward and in the backward.
    """

    forward: float
    backward: float
    gradient: float
    kernels: tuple[int, int]


_OF_BLOCKS = 2 + 1 + 1 / 32  # mxfp8 writes the scale of each block, too
COMPILED = {
    "tensorwise": Casts(5, 3, 8, (4, 8)),
    "rowwise": Casts(6, 4, 6, (20, 15)),
    "mxfp8": Casts(_OF_BLOCKS, _OF_BLOCKS, 2 * _OF_BLOCKS, (2, 4)),
}
EAGER = {
    "tensorwise": Casts(33, 35, 68, (22, 47)),
    "rowwise": Casts(33, 35, 68, (28, 59)),
    "mxfp8": COMPILED["mxfp8"],
}


@dataclass(frozen=True)
class Float8:
    """The products of a layer in fp8, of the mean layer if ``precision.fp8_skip`` names some layers.

    Attributes:
        share: of the operations of all its products.
        forward, backward: bytes that the casts of a micro-batch move on one rank.
        kernels: of these casts, in the forward and in the backward.
    """

    share: float
    forward: float
    backward: float
    kernels: tuple[int, int]


IN_BF16 = Float8(0.0, 0.0, 0.0, (0, 0))


def float8_of(config: Config, layout: Layout, tokens: int) -> Float8:
    """Returns the products of the mean layer in fp8, or of the stem of a model without layers, which counts as a whole;
    none of them if neither the family of the model nor its counts define its linear layers.

    Args:
        tokens: the positions of a sample.
    """
    recipe = config.precision.fp8
    if recipe is None:
        return IN_BF16
    model: Any = counted(config).model
    products = products_of(model, tokens)
    if products is None:
        return IN_BF16
    layers = max(1, model.n_layers)
    casts = (COMPILED if config.train.compile else EAGER)[recipe]
    chosen = forward = backward = 0.0
    kernels = [0.0, 0.0]
    for group in products:
        shares = [count / layers for count in group.chosen(config.precision)]
        rows = layout.micro_size * group.rows / layout.cp
        in_fp8 = sum(share * group.inputs * outputs for share, outputs in zip(shares, group.outputs, strict=True))
        # the compiler casts an input once that several products share
        inputs = rows * group.inputs * (max(shares) if config.train.compile else sum(shares))
        results = rows * sum(share * outputs for share, outputs in zip(shares, group.outputs, strict=True))
        forward += casts.forward * (inputs + in_fp8) / layout.tp
        backward += (casts.backward * (inputs + in_fp8) + casts.gradient * results) / layout.tp
        kernels = [have + sum(shares) * more for have, more in zip(kernels, casts.kernels, strict=True)]
        chosen += 2 * group.rows * in_fp8
    share = chosen * layers / (_operations(model, products) or 1.0)
    return Float8(share, forward, backward, (round(kernels[0]), round(kernels[1])))


def products_of(model: Any, tokens: int) -> Sequence[Products] | None:
    """Returns the linear layers of all layers of ``model``; None if they are unknown."""
    if isinstance(model, CountedModel):
        return model.counts.products
    tell = family_of(model).linear_layers
    if tell is None or (groups := tell(model)) is None:
        return None
    numbers = range(model.n_layers)
    products = list[Products]()
    for group in groups:
        names = tuple(tuple(f"{group.layer.format(number)}.{name}" for number in numbers) for name in group.names)
        products.append(Products(names, group.inputs, group.outputs, tokens))
    return products


def _operations(model: Any, products: Sequence[Products]) -> float:
    """Returns the operations of the forward of a sample in all products of the layers, with those that stay in bf16."""
    if isinstance(model, CountedModel):
        return sum(block.products for block in model.layers or model.counts.blocks[:1])
    return sum(2 * group.rows * group.inputs * sum(group.outputs) * len(group.names[0]) for group in products)


def check_float8_rate(config: Config, machine: Machine) -> None:
    """Checks that the time of products in fp8 can be predicted.

    Raises:
        UserError: the GPUs have no units for this scaling, or their rate is unknown. CPUs emulate it.
    """
    check_gpus(config, {machine.device})
    if config.precision.fp8 is None or machine.rates.cores or machine.rates.fp8_flops:
        return
    raise UserError(
        f"precision.fp8 is {config.precision.fp8}, but {machine.name} ({machine.device}) has no rate of fp8",
        where=f"{WHERE}, --machine",
        fix=f"{OFF}; or add fp8_flops to the machine file if its GPUs have units for fp8",
    )


def why_not_predicted(config: Config, machine: Machine) -> str | None:
    """Returns a sentence if the times assume bf16 although the config computes in fp8; otherwise None."""
    if config.precision.fp8 is None:
        return None
    if machine.rates.cores:
        return "times are those of bf16: CPUs emulate fp8, which is slower"
    if products_of(counted(config).model, 1) is None:
        return f"times are those of bf16: the linear layers of this model of kind {config.model.kind} are unknown"
    return None


Pass = Literal["forward", "backward", "again"]


@dataclass(frozen=True)
class Traffic:
    """The collectives of a layer.

    Attributes:
        gather_s, scatter_s: the seconds of each.
        moved_s: the seconds in which memory reads or writes the whole hidden states once.
        ranks: of a tensor-parallel group.
    """

    gather_s: float
    scatter_s: float
    moved_s: float
    ranks: int

    def gathered(self, products_s: float) -> float:
        """Returns the seconds of a gather that ``products_s`` seconds of products leave."""
        return self._left(self.gather_s, products_s) + 2 / self.ranks * self.moved_s

    def scattered(self, products_s: float) -> float:
        """Returns the same of a scatter."""
        return self._left(self.scatter_s, products_s) + (1 + 1 / self.ranks) * self.moved_s

    def _left(self, seconds: float, products_s: float) -> float:
        return max(0.0, seconds - products_s * (self.ranks - 1) / self.ranks)


def traffic_left(layers: Sequence[LinearLayers], products_s: float, of: Pass, traffic: Traffic) -> float:
    """Returns the seconds of the traffic of a layer in one pass that its products leave.

    Args:
        layers: the linear layers, in the order of the forward. Those whose input is gathered alternate with those whose
            result is scattered.
        products_s: the seconds of all of them in the forward, which the gradients of their inputs take as well.
        of: ``again`` is the forward that recomputation repeats, without the last scatter.
    """
    sizes = [group.inputs * sum(group.outputs) for group in layers]
    seconds = [products_s * size / sum(sizes) for size in sizes]
    if of == "backward":
        return sum(_backward(layers, seconds, traffic))
    parts = [
        traffic.scattered(group_s) if place % 2 else traffic.gathered(group_s) for place, group_s in enumerate(seconds)
    ]
    if of == "again":
        parts.pop()
    return sum(parts)


def _backward(layers: Sequence[LinearLayers], beside: Sequence[float], traffic: Traffic) -> Iterator[float]:
    for place, (group, seconds) in enumerate(zip(layers, beside, strict=True)):
        if place % 2:
            yield traffic.gathered(seconds)
        else:
            yield traffic.scattered(seconds) if len(group.names) == 1 else traffic.scatter_s


def pass_seconds(computed: float, started: float, rates: Rates) -> float:
    """Returns the time of a pass whose kernels take ``computed`` seconds to run and ``started`` seconds to start."""
    if rates.cores:
        return computed + started
    return max(computed, started)


def uncovered(traffic: float, window: float, blocks: int, rates: Rates, load: float = 1.0) -> float:
    """Returns the part of ``traffic`` that ``window`` seconds of computation do not cover: at least that of a block.

    On GPUs the part that they cover slows them (``overlap_share``), the less the longer it waits for the network.
    ``traffic`` counts the seconds of the collectives of ``blocks`` blocks, on CPUs as one collective. ``load`` states
    how busy the collectives keep a device, relative to collectives within a node.
    """
    if rates.cores:
        if traffic:
            return traffic + (blocks - 1) * rates.node_latency_s
        return 0.0
    alone = traffic / blocks
    covered = min(traffic - alone, window)
    return traffic - covered + rates.overlap_share * load * covered


def pipeline_seconds(simulated: float, busy: float, ranks: int, rates: Rates) -> float:
    """Returns the time of a pipeline's passes when its ``ranks`` ranks on a node share the cores.

    With more ranks than cores, the ranks that compute take the cores of those that wait: a step takes as long as with a
    core per rank, but no less than all cores need for the work of all ranks. If each rank always has only its share of
    a core, the passes take ``simulated`` seconds, and the busiest rank computes for ``busy`` seconds.
    """
    if ranks <= rates.cores or not rates.cores:
        return simulated
    return max(busy, simulated / (ranks / rates.cores))
