"""The time of the forward and the backward of a block on one rank for one micro-batch. Imports no torch.

A pass takes the time of its matrix products and its attention, that of moving its activations, and that of its
tensor-parallel and context-parallel traffic, which nothing covers. On GPUs it takes at least as long as the host starts
its kernels.
"""

from __future__ import annotations

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.config.values import LayerMode
from hpc_train.plan.layout import Layout
from hpc_train.planner.collectives import gather, group_of, scatter
from hpc_train.planner.machine import Machine, Rates
from hpc_train.planner.shared_cores import pass_seconds
from hpc_train.planner.work import Block, Work

PRODUCTS = 7  # matrix products of a layer, which share its operations
# Fused attention computes two products in the forward. The backward computes four and, since no scores are kept, the
# first one again (Dao 2023, arXiv:2307.08691, section 3.1).
ATTENTION_BACKWARD = 2.5


class Passes:
    """The passes of a layout's blocks on a machine."""

    def __init__(self, config: Config, layout: Layout, machine: Machine, work: Work) -> None:
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
        device = self._products(block) + self._attention(block) + self._moved(block)
        return pass_seconds(device, block.kernels * self.rates.launch_s, self.rates) + self._traffic(block, 4)

    def _backward(self, block: Block, recomputed: LayerMode) -> float:
        device = 2 * self._products(block) + ATTENTION_BACKWARD * self._attention(block) + 2 * self._moved(block)
        device += self.accumulated(block)
        own = pass_seconds(device, 2 * block.kernels * self.rates.launch_s, self.rates) + self._traffic(block, 4)
        return own + (0.0 if recomputed == "none" else self._again(block, recomputed))

    def _again(self, block: Block, recomputed: LayerMode) -> float:
        """Returns the seconds of computing the forward of ``block`` again.

        It ends with the last tensor that the backward needs, which is the input of the layer's last product, so the
        product and the reduce-scatter of its result are left out (torch.utils.checkpoint with use_reentrant=False).
        Results of collectives are not kept, so that cheap operations include the other collectives.
        """
        if recomputed == "ops":
            return self._moved(block) + self._traffic(block, 3)
        last = block.last * self.layout.micro_size / self.split / self.flops_per_s
        device = self._products(block) - last + self._attention(block) + self._moved(block)
        return pass_seconds(device, block.kernels * self.rates.launch_s, self.rates) + self._traffic(block, 3)

    def _products(self, block: Block) -> float:
        if not block.products:
            return 0.0
        operations = block.products * self.layout.micro_size / self.split
        return (operations + PRODUCTS * self.rates.half_rate_flops) / self.flops_per_s

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

    def _traffic(self, block: Block, collectives: int) -> float:
        """Returns the seconds of all-gathers and as many reduce-scatters of the hidden states of a layer, and those of
        its exchange of heads."""
        exchanged = self._exchange(block)
        if self.layout.tp == 1 or not block.products:
            return exchanged
        size = self.work.hidden * self.layout.micro_size * self.narrow / self.layout.cp
        pair = gather(size, self.tensor_ranks, self.rates) + scatter(size, self.tensor_ranks, self.rates)
        return exchanged + collectives / 2 * pair

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
