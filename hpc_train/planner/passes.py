"""The time of the forward and the backward of a block on one rank for one micro-batch. Imports no torch.

A pass takes the time of its matrix products and its attention, that of moving its activations, and that of its
tensor-parallel and context-parallel traffic, which nothing covers without ``strategy.async_tp``. On GPUs it takes at
least as long as the host starts its kernels; the CUDA graph of a layer (``train.cuda_graphs``) starts like one kernel.
"""

from __future__ import annotations

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.config.values import LayerMode
from hpc_train.layout.layout import Layout
from hpc_train.layout.techniques import CompilerMode, compiler_mode
from hpc_train.planner.async_tp import Pass, Traffic, traffic_left
from hpc_train.planner.collectives import gather, group_of, scatter
from hpc_train.planner.float8 import IN_BF16, Float8, check_float8_rate, float8_of
from hpc_train.planner.machine import Machine, Rates
from hpc_train.planner.shared_cores import pass_seconds
from hpc_train.planner.work import Block, Work

PRODUCTS = 7  # matrix products of a layer, which share its operations
# Fused attention computes two products in the forward. The backward computes four and, since no scores are kept, the
# first one again (Dao 2023, arXiv:2307.08691, section 3.1).
ATTENTION_BACKWARD = 2.5


class Passes:
    """The passes of a layout's blocks on a machine.

    Raises:
        UserError: the devices do not compute in the precision of ``config``.
    """

    def __init__(self, config: Config, layout: Layout, machine: Machine, work: Work) -> None:
        check_float8_rate(config, machine)
        self.layout, self.work = layout, work
        self.rates: Rates = machine.rates
        self.narrow = 2 if config.precision.name in ("bf16", "fp16") else 8 if config.precision.name == "fp64" else 4
        self.width = 8 if config.precision.name == "fp64" else 4
        self.weight = self.narrow if config.precision.weights == "bf16" else self.width
        self.gradient = self.width if layout.shards_state else self.weight  # FSDP sums gradients in fp32
        self.flops_per_s = machine.peak(config.precision.name) * self.rates.matmul_share
        self.attention_per_s = machine.peak(config.precision.name) * self.rates.attention_share
        self.tensor_ranks = group_of(layout.tp, 1, machine.devices_per_node)
        self.context_ranks = group_of(layout.cp, layout.tp, machine.devices_per_node)
        self.split = layout.cp * layout.tp  # the ranks that share the work of a block
        self.key_share = _key_share(config, layout)
        self.mode = compiler_mode(config)
        known = family_of(config.model).linear_layers if self.mode == CompilerMode.ASYNC_TP else None
        self.linear_layers = None if known is None else known(config.model)  # if they cover their traffic
        self.float8 = IN_BF16 if self.rates.cores else float8_of(config, layout, work.tokens)
        self.float8_per_s = self.rates.fp8_flops * self.rates.matmul_share * self.rates.fp8_share
        self.layers = {id(layer) for layer in work.blocks[1:-1]}
        self.in_float8 = self.layers or {id(work.blocks[0])}  # a model without layers is in its stem
        self._known: dict[tuple[int, LayerMode | None], float] = {}  # by a block's id; ``work`` keeps the blocks

    def forward(self, block: Block) -> float:
        """Returns the seconds of the forward of ``block``."""
        found = self._known.get((id(block), None))
        if found is None:
            found = self._known[id(block), None] = self._forward(block)
        return found

    def backward(self, block: Block, recomputed: LayerMode) -> float:
        """Returns the seconds of the backward of ``block``, with the recomputation of all or only cheap operations."""
        found = self._known.get((id(block), recomputed))
        if found is None:
            found = self._known[id(block), recomputed] = self._backward(block, recomputed)
        return found

    def _forward(self, block: Block) -> float:
        products, float8 = self._products(block), self._float8(block)
        device = products + self._attention(block) + self._moved(block) + self._cast(float8.forward)
        started = self._started(block, block.kernels + float8.kernels[0])
        return pass_seconds(device, started, self.rates) + self._traffic(block, "forward", products)

    def _backward(self, block: Block, recomputed: LayerMode) -> float:
        products, float8 = self._products(block), self._float8(block)
        device = 2 * products + ATTENTION_BACKWARD * self._attention(block) + 2 * self._moved(block)
        device += self._cast(float8.backward) + self.accumulated(block)
        started = self._started(block, 2 * block.kernels + float8.kernels[1])
        own = pass_seconds(device, started, self.rates) + self._traffic(block, "backward", products)
        return own + (0.0 if recomputed == "none" else self._again(block, recomputed))

    def _again(self, block: Block, recomputed: LayerMode) -> float:
        """Returns the seconds of computing the forward of ``block`` again.

        It ends with the last tensor that the backward needs, which is the input of the layer's last product, so the
        product and the reduce-scatter of its result are left out (torch.utils.checkpoint with use_reentrant=False).
        Results of collectives are not kept, so that cheap operations include the other collectives.
        """
        if recomputed == "ops":
            return self._moved(block) + self._traffic(block, "again", 0.0)
        float8 = self._float8(block)
        products = self._products(block) - self._at_full_rate(block, block.last)
        device = products + self._attention(block) + self._moved(block) + self._cast(float8.forward)
        started = self._started(block, block.kernels + float8.kernels[0])
        return pass_seconds(device, started, self.rates) + self._traffic(block, "again", self._products(block))

    def _started(self, block: Block, kernels: int) -> float:
        """Returns the seconds in which the host starts the kernels of a pass."""
        replayed = self.mode == CompilerMode.CUDA_GRAPHS and id(block) in self.layers
        return (1 if replayed else kernels) * self.rates.launch_s

    def _products(self, block: Block) -> float:
        if not block.products:
            return 0.0
        small = PRODUCTS * self.rates.half_rate_flops / self.flops_per_s
        return self._at_full_rate(block, block.products) + small

    def _at_full_rate(self, block: Block, operations: float) -> float:
        """Returns the seconds of ``operations`` of a sample in matrix products, part of them in fp8."""
        own, share = operations * self.layout.micro_size / self.split, self._float8(block).share
        in_fp8 = share * own / self.float8_per_s if share else 0.0
        return (1 - share) * own / self.flops_per_s + in_fp8

    def _float8(self, block: Block) -> Float8:
        return self.float8 if id(block) in self.in_float8 else IN_BF16

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
        shards = layout.shard if "gradients" in layout.kind.shards else 1
        added = block.parameters / layout.tp / shards * (1 - 1 / layout.micro_batches)
        return 3 * self.gradient * added / self.rates.memory_bytes_per_s

    def _traffic(self, block: Block, of: Pass, products: float) -> float:
        """Returns the seconds of the all-gathers and reduce-scatters of the hidden states of a layer, and those of its
        exchange of heads: two of each, of which ``again`` leaves out the last. ``products`` seconds are beside them."""
        exchanged, rates = self._exchange(block), self.rates
        if self.layout.tp == 1 or not block.products:
            return exchanged
        size = self.work.hidden * self.layout.micro_size * self.narrow / self.layout.cp
        gather_s, scatter_s = gather(size, self.tensor_ranks, rates), scatter(size, self.tensor_ranks, rates)
        if self.linear_layers is not None and id(block) in self.layers:
            found = Traffic(gather_s, scatter_s, size / rates.memory_bytes_per_s, self.layout.tp)
            return exchanged + traffic_left(self.linear_layers, products, of, found)
        return exchanged + (3 if of == "again" else 4) / 2 * (gather_s + scatter_s)

    def _exchange(self, block: Block) -> float:
        """Returns the seconds of two all-to-alls: of queries, keys and values, and of the result of attention.

        Queries and the result are as wide as the hidden states; with fewer key and value heads these are narrower, but
        each rank gets at least one. An all-to-all sends as much as an all-gather to the same size.
        """
        if self.layout.cp == 1 or not block.attention:
            return 0.0
        size = self.work.hidden * self.layout.micro_size * self.narrow / self.split
        return sum(gather(tensors * size, self.context_ranks, self.rates) for tensors in (1 + 2 * self.key_share, 1))


def _key_share(config: Config, layout: Layout) -> float:
    """Returns how wide the keys are that context-parallel ranks exchange, as a share of the queries."""
    heads = family_of(config.model).context_heads
    if heads is None:
        return 1.0
    queries, keys = (getattr(config.model, name) / layout.tp for name in heads)
    return max(keys, float(layout.cp)) / queries
