"""Derives which operations each layer recomputes in the backward pass, and the bytes that it keeps, without torch.

Under a budget (``train.activation_checkpointing=8GiB``) each layer keeps all results (``none``), the results of matrix
products and attention (``ops``), or only its input (``full``). ``ops`` recomputes only cheap operations, so as many
layers as necessary use it first; ``full`` follows only if ``ops`` in all layers keeps too much. If a stage keeps more
micro-batches than another stage of its rank, its layers come first, because they save more memory for the same work.
Within a stage, the first layers come first, because the backward reaches them when the other layers have freed their
memory.

The budget limits the bytes that ``kept_by_layers`` counts. The memory estimate adds the logits of the loss, the layer
that is being recomputed, and the gradients that a split backward keeps between its two parts.

With ``train.activation_offload``, the module ``parallel.activation_offload`` moves activations that are kept to host
memory and back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from hpc_train.config.extensions import Activations, experts_of, family_of
from hpc_train.config.schema import Config, PrecisionConfig
from hpc_train.config.values import LayerMode, Recomputation, parse_recomputation, runs_own_code
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.partition import layer_counts
from hpc_train.units import format_bytes, parse_bytes

CHECKPOINTING = "train.activation_checkpointing"
OFFLOAD = "train.activation_offload"
_MIB = 2**20
# The largest load of a rank's experts that the memory allows for, relative to the mean: that of the fullest expert of
# moe_tiny after 300 steps with a balance loss (docs/howto/moe.md)
IMBALANCE = 1.3


@dataclass(frozen=True)
class HeldLayer:
    """A layer of a rank: its global number, and the number of micro-batches for which the rank keeps its
    activations."""

    number: int
    in_flight: int


def recomputation_of(config: Config, layout: Layout) -> Recomputation:
    """Returns the recomputation of each layer under ``layout``. If no choice meets a budget, all layers recompute
    everything."""
    recomputation = parse_recomputation(config.train.activation_checkpointing)
    if recomputation.budget is None or not knows_sizes(config):
        return recomputation
    sizes = layer_bytes(config, layout)
    has_ops = layout.pp == 1 or layout.pipeline.ops_checkpointing
    cheapest_first: list[LayerMode] = ["ops", "full"] if has_ops and sizes["ops"] < sizes["none"] else ["full"]
    chosen: dict[int, LayerMode] = {}
    for pp_rank in range(layout.pp):
        layers = sorted(layers_of_rank(config, layout, pp_rank), key=lambda layer: (-layer.in_flight, layer.number))
        modes = _greedy([layer.in_flight for layer in layers], sizes, recomputation.budget, cheapest_first)
        chosen |= {layer.number: mode for layer, mode in zip(layers, modes, strict=True)}
    return replace(recomputation, chosen=tuple(mode for _, mode in sorted(chosen.items())))


def kept_by_layers(config: Config, layout: Layout, pp_rank: int) -> float:
    """Returns the bytes that the layers of a rank keep for the backward passes of the micro-batches in flight."""
    sizes = layer_bytes(config, layout)
    mode_of = recomputation_of(config, layout).mode
    return sum(layer.in_flight * sizes[mode_of(layer.number)] for layer in layers_of_rank(config, layout, pp_rank))


def compute_width(precision: PrecisionConfig) -> int:
    """Returns the bytes of an element of a layer's results."""
    return {"fp64": 8, "fp32": 4}.get(precision.name, 2)


def residual_width(precision: PrecisionConfig) -> int:
    """Returns the bytes of an element of the hidden states between layers."""
    narrow = compute_width(precision)
    return narrow if precision.residual == "compute" else max(4, narrow)


def layer_bytes(config: Config, layout: Layout) -> Mapping[LayerMode, float]:
    """Returns the bytes that a layer keeps for the backward of one micro-batch on one rank.

    Tensor parallelism splits all results except the inputs of the column-parallel products, which each rank gathers in
    full. If the family does not split the sequence, each rank also holds the full hidden states and inputs of norms.
    """
    count = family_of(config.model).activations
    assert count is not None
    counts = _without_scores(config, layout, count(config.model, config.data))
    narrow = compute_width(config.precision)
    normed = residual_width(config.precision)
    inputs = float(counts.layer_input * normed)
    # the inputs of norms are sums of the layer's input and the branches; compiled code keeps the results of the
    # branches
    branches = max(0, counts.norm_inputs - counts.layer_input) if config.train.compile else 0
    norms = float((counts.norm_inputs - branches) * normed + branches * narrow)
    results = counts.layer - counts.fused if config.train.compile else counts.layer
    of_scores = 2 * max(4, narrow) + narrow * (narrow < 4)
    copies, received = _exchanged(config, layout, counts)
    of_router = counts.routing * max(4, narrow) + counts.widened * narrow * (narrow < 4)
    sizes: dict[LayerMode, float] = {
        "none": norms + (results + copies) * narrow + counts.scores * of_scores + of_router,
        "ops": inputs + (counts.products + counts.scores + received) * narrow,
        "full": inputs,
    }
    experts = experts_of(config.model)
    if experts is not None and layout.ep > 1:  # with one rank, the load of an expert is the relief of others
        margin = min(IMBALANCE, experts.capacity or IMBALANCE) - 1
        rows = max(0.0, margin) * experts.chosen * narrow
        sizes["none"] += rows * (experts.row + 4 * experts.width)
        sizes["ops"] += rows * (experts.row + 2 * experts.width)
    if layout.tp > 1:
        split = family_of(config.model).tensor_parallel
        gathered = 2.0 * counts.layer_input * narrow  # the inputs of attention and of the feed-forward branch
        # with ops, the sums of both branches take the place of the products whose partial sums they add up
        shared: dict[LayerMode, float] = {"none": gathered + norms, "ops": gathered + inputs, "full": inputs}
        if split is not None and split.shards_sequence:
            shared = {"none": gathered, "ops": gathered, "full": 0.0}
            sizes["ops"] += gathered
        sizes = {mode: shared[mode] + (size - shared[mode]) / layout.tp for mode, size in sizes.items()}
    return {mode: layout.micro_size * counts.tokens / layout.cp * size for mode, size in sizes.items()}


def _without_scores(config: Config, layout: Layout, counts: Activations) -> Activations:
    """Returns ``counts`` with attention of a ring, which keeps neither scores nor the keys and values of every query if
    there is a soft cap."""
    heads = family_of(config.model).context_heads
    if layout.ring == 1 or heads is None or not counts.scores:
        return counts
    queries, keys = (getattr(config.model, name) for name in heads)
    return replace(counts, scores=0, layer=counts.layer - 2 * counts.mixed * (queries - keys) // queries)


def _exchanged(config: Config, layout: Layout, counts: Activations) -> tuple[float, float]:
    """Returns the additional results per token that a layer keeps because context-parallel ranks exchange heads:
    without recomputation, and with ``ops``.

    Without recomputation, these are a second copy of the result of attention and, if ranks share a key-value head, the
    copies of this head. Attention that keeps its scores keeps the keys and values of every query in any case. ``ops``
    keeps all that is received: queries, keys and values, and the result of attention.
    """
    heads = family_of(config.model).context_heads
    if layout.cp == 1 or heads is None:
        return 0.0, 0.0
    queries, keys = (getattr(config.model, name) for name in heads)
    exchanging = layout.cp // layout.ring
    if exchanging == 1:
        return 0.0, 0.0
    copies = max(0, exchanging // max(1, keys // layout.tp) - 1)
    received = counts.mixed * (2 + 2 * (1 + copies) * keys / queries)
    if counts.scores:
        return counts.mixed, received
    return counts.mixed * (1 + 2 * copies * keys / queries), received


def layers_of_rank(config: Config, layout: Layout, pp_rank: int) -> list[HeldLayer]:
    """Returns the layers of all stages of a rank."""
    split = config.strategy.pp_split if layout.pp > 1 else "even"
    counts = layer_counts(config.model.n_layers, layout.stages, split)
    layers = []
    first = 0
    for stage, (count, rank) in enumerate(zip(counts, layout.placement, strict=True)):
        if rank == pp_rank:
            layers += [HeldLayer(number, layout.in_flight(stage)) for number in range(first, first + count)]
        first += count
    return layers


def _greedy(
    in_flight: Sequence[int], sizes: Mapping[LayerMode, float], budget: int, cheapest_first: Sequence[LayerMode]
) -> list[LayerMode]:
    """Returns the mode of each layer. The layers that save the most memory are the first to recompute."""
    modes: list[LayerMode] = ["none"] * len(in_flight)
    total = sum(in_flight) * sizes["none"]
    for mode in cheapest_first:
        for place, batches in enumerate(in_flight):
            if total <= budget:
                break
            total += batches * (sizes[mode] - sizes[modes[place]])
            modes[place] = mode
    for place in reversed(range(len(modes))):  # the last change to ``full`` may have saved more than necessary
        more = in_flight[place] * (sizes["none"] - sizes["ops"])
        if modes[place] == "ops" and total + more <= budget:
            total += more
            modes[place] = "none"
    return modes


def describe_recomputation(config: Config, layout: Layout) -> str | None:
    """Describes the recomputation that a budget has chosen, for the notes of a layout; None without a budget."""
    recomputation = recomputation_of(config, layout)
    if recomputation.budget is None or not knows_sizes(config):
        return None
    modes = recomputation.chosen
    most = max(kept_by_layers(config, layout, rank) for rank in range(layout.pp))
    text = f"activation checkpointing recomputes {modes.count('full')} of {len(modes)} layers"
    if "ops" in modes:
        text += f" and the cheap operations of {modes.count('ops')} more"
    return f"{text}, and keeps {format_bytes(most)} of {format_bytes(recomputation.budget)}"


def check_budget(config: Config, layout: Layout) -> None:
    """Raises UserError if ``train.activation_checkpointing`` is a budget that no choice of recomputation meets."""
    budget = parse_recomputation(config.train.activation_checkpointing).budget
    if budget is None or not knows_sizes(config):
        return
    most = max(kept_by_layers(config, layout, rank) for rank in range(layout.pp))
    if most > budget:
        raise UserError(
            f"{CHECKPOINTING} is {config.train.activation_checkpointing}, but the layers of a rank keep "
            f"{format_bytes(most)} even if all are recomputed",
            where=CHECKPOINTING,
            fix=f"{CHECKPOINTING}={ceil(most / _MIB)}MiB or more, or a smaller batch.micro_size",
        )


def knows_sizes(config: Config) -> bool:
    """Returns whether the family of the model defines the sizes of activations."""
    if runs_own_code(config):
        return False
    family = family_of(config.model)
    count = family.parameters
    return family.activations is not None and count is not None and count(config.model) is not None


def parse_activation_offload(text: str) -> int | None:
    """Returns the minimum size in bytes of the saved tensors that are moved to host memory; None if none are moved.
    Raises UserError if ``text`` is neither ``none`` nor a size.
    """
    if text == "none":
        return None
    size = parse_bytes(text)
    if size:
        return size
    raise UserError(
        f"{OFFLOAD} is {text!r}, which is not a size", where=OFFLOAD, fix=f"{OFFLOAD}=1MiB, or none to offload nothing"
    )


def kept_if_less(config: Config, layout: Layout) -> float | None:
    """Returns the bytes that a layer keeps for a micro-batch, if they are fewer than the minimum size for offloading,
    so that no tensor is moved. Returns None otherwise, and if the activations of the model are unknown."""
    least = parse_activation_offload(config.train.activation_offload)
    if least is None or family_of(config.model).activations is None:
        return None
    size = layer_bytes(config, layout)["none"]
    return size if size < least else None


def offloaded_bytes(config: Config, layout: Layout, pp_rank: int) -> float:
    """Returns the bytes in host memory that a rank's layers need between forward and backward."""
    layers = layers_of_rank(config, layout, pp_rank)
    return sum(layer.in_flight * moved_bytes(config, layout, layer.number) for layer in layers)


def moved_bytes(config: Config, layout: Layout, layer: int) -> float:
    """Returns the bytes that ``layer``, by global number, moves to host memory and back for one micro-batch.

    With ``ops``, as with ``full``, this is the input. The input is the smallest of a layer's large tensors; if it is
    too small, no tensor is moved. The activations of the last layer stay on the device, since its backward pass comes
    next.
    """
    if config.train.activation_offload == "none" or layer == config.model.n_layers - 1:
        return 0.0
    return moved_by_mode(config, layout)[recomputation_of(config, layout).mode(layer)]


def moved_by_mode(config: Config, layout: Layout) -> Mapping[LayerMode, float]:
    """Returns ``moved_bytes`` of a layer that is not the last, by its recomputation mode."""
    least = parse_activation_offload(config.train.activation_offload)
    sizes = layer_bytes(config, layout)
    if least is None or sizes["full"] < least:
        return {"none": 0.0, "ops": 0.0, "full": 0.0}
    return {"none": sizes["none"], "ops": sizes["full"], "full": sizes["full"]}


def node_bytes(config: Config, layout: Layout, nodes: int) -> float | None:
    """Returns the bytes of host memory that the activations of a node's ranks take; None if unknown or zero."""
    if not knows_sizes(config):
        return None
    of_ranks = sum(offloaded_bytes(config, layout, rank) for rank in range(layout.pp))
    return of_ranks * layout.stage_ranks / nodes or None
