"""Computes the sizes of the parts of a model on one rank: parameters, activations, logits. It does not import torch.

The numbers assume the fused GPU kernels for attention and RMS norms, which keep less than the operations that they
replace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hpc_train.config.extensions import Activations, experts_of, family_of
from hpc_train.config.schema import Config, ModelConfig, PrecisionConfig
from hpc_train.config.values import LayerMode
from hpc_train.layout.counted import CountedModel
from hpc_train.layout.layout import Layout
from hpc_train.layout.loss_chunks import loss_form
from hpc_train.layout.optimizers import averages_of_weights, target_of, values_per_parameter
from hpc_train.layout.recomputation import compute_width, layer_bytes, moved_by_mode, residual_width

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8  # per weight: its code, and its share of a scale and of a factor
MATRIX_SHARE = 0.25  # the share of a layer's parameters in its largest matrix; 0.33 in a ViT, 0.22 in a Llama


@dataclass(frozen=True)
class Parameters:
    """Holds the numbers of parameters on one rank of a tensor-parallel group, before data-parallel ranks shard them.

    Attributes:
        stem, layer, head: the parameters of each block; an embedding table that stem and head share counts in the stem.
            Of the experts of a layer, those that the rank holds.
        state: the parameters of a layer as the state that ZeRO shards counts them: ``layer``, unless expert-parallel
            ranks leave fewer ranks to share an expert than other parameters.
        table: the parameters of this shared table; 0 without one.
        matrix: the parameters of the largest matrix of a layer.
        trained: the share of parameters that train.
        quantized: the share of the parameters of the layers that is held in NF4.
    """

    stem: float
    layer: float
    state: float
    head: float
    table: float
    matrix: float
    trained: float
    quantized: float = 0.0


@dataclass(frozen=True)
class PerParameter:
    """Holds the bytes per parameter of a rank.

    Attributes:
        held: the shard of the parameters and their masters.
        optimizer, hooks: the state of the optimizer, and the state of the hooks.
        cast: the copy in the compute type that a step keeps; 0 without one.
        gathered: the full copy of stem and head that ZeRO gathers; 0 without ZeRO.
        of_layer: the full copy of a layer that ZeRO gathers.
        unpacked: a weight of NF4 while its matrix is multiplied: in fp32, and then in the compute type.
        fresh: a gradient in the type in which the backward computes it.
        whole: a gradient in the type in which micro-batches are summed.
        shard: a gradient after ZeRO has reduced it; 0 without ZeRO.
        updated: the fp32 copy of a bf16 gradient while masters are updated; 0 without masters.
    """

    held: float
    optimizer: float
    hooks: float
    cast: float
    gathered: float
    of_layer: float
    unpacked: float
    fresh: float
    whole: float
    shard: float
    updated: float


@dataclass(frozen=True)
class PerMicroBatch:
    """Holds the bytes of the activations of one micro-batch on one rank.

    Attributes:
        kept: the bytes that a layer keeps for its backward, by recomputation mode.
        moved: the part of these bytes that is in host memory, if the layer's activations are offloaded.
        gradients: the additional bytes of a layer's backward at its peak.
        products: the gradients of the results of a layer's products and norms, which a backward in two parts keeps
            between the parts.
        hidden: the hidden states between two layers.
        tables: tables that all layers share, such as rotary tables; the CUDA graph of each layer keeps a copy.
        head: the bytes that the head keeps for its backward.
        forward, backward: the temporary bytes of the head's forward and backward.
        logits: the gradient of the logits in the compute type; 0 if the loss is fused with its gradients.
        matrix: the gradient of the output matrix, which a fused loss keeps from the forward to the backward.
    """

    kept: Mapping[LayerMode, float]
    moved: Mapping[LayerMode, float]
    gradients: float
    products: float
    hidden: float
    tables: float
    head: float
    forward: float
    backward: float
    logits: float
    matrix: float

    def on_device(self, mode: LayerMode, moves: bool) -> float:
        """Returns the bytes that a layer keeps on the device."""
        return self.kept[mode] - self.restored(mode, moves)

    def recomputed(self, mode: LayerMode) -> float:
        """Returns the bytes that the backward of a layer computes again; ``full`` keeps a copy of the input."""
        if mode == "none":
            return 0.0
        if mode == "ops":
            return max(0.0, self.kept["none"] - self.kept["ops"])
        return self.kept["none"]

    def restored(self, mode: LayerMode, moves: bool) -> float:
        """Returns the bytes that are copied back from host memory for the backward of a layer."""
        return self.moved[mode] * moves


@dataclass(frozen=True)
class Sizes:
    """The sizes of one rank: parameters, bytes per parameter, and activations."""

    parameters: Parameters
    per_parameter: PerParameter
    activations: PerMicroBatch


def sizes_of(config: Config, layout: Layout) -> Sizes:
    """Returns the sizes of a rank of ``layout``. The family of the model, or the counts of the model, must define
    them."""
    count = family_of(config.model).activations
    assert count is not None
    return Sizes(
        parameters_of(config, layout),
        per_parameter(config, layout),
        per_micro_batch(config, layout, count(config.model, config.data)),
    )


def parameters_of(config: Config, layout: Layout) -> Parameters:
    """Returns the numbers of parameters of a rank. Norms count as if tensor-parallel ranks also shared them."""
    model = config.model
    tp = layout.tp
    count = parameter_count(model)
    layer = layer_parameters(model)
    assert count is not None
    if family_of(model).layer_parameters is None:
        outside = parameter_count(replace(model, n_layers=0)) or 0
    else:
        outside = count - model.n_layers * layer
    of_stem = family_of(model).stem_parameters
    tied = bool(getattr(model, "tied_embeddings", False))
    if of_stem is None:
        stem = outside if tied else outside // 2
    else:
        count = of_stem(model)
        stem = outside // 2 if count is None else count
    experts = experts_of(model)
    routed = 0 if experts is None else experts.number * experts.parameters
    _, expert_shards, ep = layout.expert_sizes
    # the shares of a layer's experts that the rank holds, and that count in what ZeRO shards over ``layout.shard``
    held = 1 / ep
    of_state = layout.shard / expert_shards / ep if layout.shards_state else held
    # tensor-parallel ranks do not divide experts, of which the first matrices are stacked
    largest = max(MATRIX_SHARE * (layer - routed) / tp, routed * held / 3)
    return Parameters(
        stem=stem / tp,
        layer=(layer - routed) / tp + routed * held,
        state=(layer - routed) / tp + routed * of_state,
        head=(outside - stem) / tp,
        table=stem / tp * tied,
        matrix=largest,
        trained=trained_share(model),
        quantized=quantized_count(model) / max(1, model.n_layers * layer),
    )


def per_parameter(config: Config, layout: Layout) -> PerParameter:
    """Returns the bytes per parameter on the device, without the parts that ``strategy.offload`` moves to the host."""
    narrow = compute_width(config.precision)
    width = max(4, narrow)
    sharded = layout.shards_state
    offload = config.strategy.offload
    shard = layout.shard if sharded else 1
    trained = trained_share(config.model)
    moments = values_per_parameter(config.optim) * (2 if config.optim.moments == "bf16" else width)
    if config.strategy.local_steps is not None:
        moments += 2 * width  # the anchors and the momentum of the outer steps
    if (sharded or layout.tp > 1) and not target_of(config.optim).elementwise:
        # the rank that updates a parameter has a full copy of it, and of some at a time full gradients and an undo copy
        moments += 2 * width
    on_device = offload != "all"
    masters = config.precision.weights == "bf16"
    weight = narrow if masters else width
    of_masters = trained * width * masters / shard * (offload == "none")
    rounded = narrow_share(config.model)
    quantized = quantized_count(config.model) / max(1, parameter_count(config.model) or 0)
    of_layers = parameters_of(config, layout).quantized if quantized else 0.0
    held = weight - rounded * (weight - narrow) - quantized * (narrow - NF4_BYTES)
    return PerParameter(
        held=held / shard * on_device + of_masters,
        optimizer=trained * moments / shard * (offload == "none"),
        hooks=trained * width * averages_of_weights(config) / shard * on_device,
        cast=narrow * (1 - rounded) * (narrow < weight and not sharded),
        gathered=narrow * sharded,
        of_layer=(narrow - of_layers * (narrow - NF4_BYTES)) * sharded,
        unpacked=(4 + narrow) * (quantized > 0),
        fresh=trained * narrow,
        whole=trained * (width if sharded else weight),  # FSDP sums the gradients of micro-batches in fp32
        shard=trained * weight / shard * on_device * sharded,
        updated=of_masters,
    )


def per_micro_batch(config: Config, layout: Layout, counts: Activations) -> PerMicroBatch:
    """Returns the bytes of the activations of a micro-batch of ``layout``."""
    narrow = compute_width(config.precision)
    tokens = layout.micro_size * counts.tokens / layout.cp
    tp = layout.tp
    split = family_of(config.model).tensor_parallel
    hidden = float(counts.layer_input * residual_width(config.precision))
    if split is not None and split.shards_sequence:
        hidden /= tp
    form = loss_form(config, layout)
    head, forward, backward = (_fused_head_bytes if form.fused else _head_bytes)(config, layout, counts, hidden)
    gradients = counts.layer // 4 if counts.backward is None else counts.backward
    of_layer = gradients * narrow / tp + hidden
    if tp > 1:
        of_layer += counts.layer_input * narrow  # a gathered gradient
    of_layer += _ring_bytes(config, layout, counts)
    matrix = 0.0
    if form.fused and trained_share(config.model) == 1:  # with adapters, the matrix is frozen
        matrix = counts.logits * counts.layer_input / tp * max(4, narrow)
    return PerMicroBatch(
        kept=layer_bytes(config, layout),
        moved=moved_by_mode(config, layout),
        gradients=tokens * of_layer + _float8_bytes(config, layout, tokens, counts),
        products=tokens * (counts.products * narrow / tp + 2 * hidden),
        hidden=tokens * hidden,
        tables=4 * counts.tables * counts.tokens / layout.cp,
        head=tokens * head,
        forward=tokens * forward,
        backward=tokens * backward,
        logits=tokens * counts.logits / form.chunks * narrow * (not form.fused),
        matrix=matrix,
    )


def _ring_bytes(config: Config, layout: Layout, counts: Activations) -> float:
    """Returns the temporary bytes per token of the backward pass of a ring: keys and values that are here and that
    arrive, and in at least fp32 their gradients, of this rank and of the ranks before, and the gradient of queries."""
    heads = family_of(config.model).context_heads
    if layout.ring == 1 or heads is None:
        return 0.0
    narrow = compute_width(config.precision)
    queries, keys = (getattr(config.model, name) / layout.tp for name in heads)
    held = 2 * max(keys, float(layout.cp // layout.ring)) / queries  # keys and values, relative to the queries
    return counts.mixed / layout.tp * (2 * held * narrow + (3 * held + 1) * max(4, narrow))


def _float8_bytes(config: Config, layout: Layout, tokens: float, counts: Activations) -> float:
    """Returns the temporary bytes of the casts to fp8 for the largest product: both operands, and one of them
    transposed. Without the compiler, torchao scales and clamps an operand in fp32 before the cast. Tensor-parallel
    ranks shard the matrix and its results, but gather the inputs.
    """
    if config.precision.fp8 is None or not counts.layer_input:
        return 0.0
    matrix = parameters_of(config, layout).matrix
    products = [(matrix, tokens * max(matrix / counts.layer_input, counts.layer_input))]
    if isinstance(config.model, CountedModel):
        products = [*_counted_products(config.model, config.precision, tokens)]
    eager = 0 if config.train.compile else 8
    return max((2 * rows + matrix + eager * max(rows, matrix) for matrix, rows in products), default=0.0)


def _counted_products(model: CountedModel, precision: PrecisionConfig, samples: float) -> Iterator[tuple[float, float]]:
    """Yields, for each matrix that computes in fp8, its number of values and the larger of the numbers of its inputs
    and results."""
    for group in model.counts.products:
        for count, outputs in zip(group.chosen(precision), group.outputs, strict=True):
            if count:
                yield group.inputs * outputs, samples * group.rows * max(group.inputs, outputs)


def _fused_head_bytes(config: Config, layout: Layout, counts: Activations, hidden: float) -> tuple[float, float, float]:
    """Returns the values of ``_head_bytes`` for a loss that computes its gradients in the forward.

    The head keeps the input of the norm and the gradient of the norm's result. Its forward holds the logits of a chunk;
    in half precision, these exist together with their softmax in fp32. Tensor-parallel ranks shard the vocabulary.
    """
    narrow = compute_width(config.precision)
    wide = max(4, narrow)
    gradient = counts.layer_input * narrow
    logits = counts.logits / loss_form(config, layout).chunks / layout.tp
    return hidden + gradient, logits * (wide + narrow * (narrow < wide)) + gradient, hidden


def _head_bytes(config: Config, layout: Layout, counts: Activations, hidden: float) -> tuple[float, float, float]:
    """Returns the bytes per token that the head keeps, and the temporary bytes per token of its forward and backward.

    The result of the softmax is kept. Its backward allocates two gradients of the same size, or one with a z-loss, all
    in at least fp32. A loss in chunks keeps only the hidden states and computes the rest again for each chunk.
    """
    if not counts.logits:
        return 0.0, 0.0, 0.0
    narrow = compute_width(config.precision)
    wide = max(4, narrow)
    chunks = loss_form(config, layout).chunks
    logits = counts.logits / chunks
    gradients = logits * wide * (1 if config.train.z_loss else 2)
    widened = logits * (wide + narrow * (narrow < wide))  # before the softmax
    results = hidden + counts.layer_input * narrow + logits * wide  # of the norm, the product and the softmax
    if chunks == 1:
        return results, widened, gradients
    return hidden, results + widened, results + gradients


def layer_parameters(model: ModelConfig) -> int:
    """Returns the number of parameters of one layer; with experts in some layers, of one that has them."""
    count = family_of(model).layer_parameters
    if count is not None:
        return count(model) or 0
    sized: Any = model  # such a model has ``n_layers``
    given = parameter_count(sized)
    larger = parameter_count(replace(sized, n_layers=sized.n_layers + 1))
    assert given is not None and larger is not None
    return larger - given


def active_count(model: ModelConfig) -> int | None:
    """Returns the number of parameters that compute a token; None if it is unknown."""
    total = parameter_count(model)
    experts = experts_of(model)
    if total is None or experts is None:
        return total
    return total - experts.layers * (experts.number - experts.chosen) * experts.parameters


def describe_active(model: ModelConfig) -> str | None:
    """Describes how many parameters compute a token; None if all do."""
    total = parameter_count(model)
    active = active_count(model)
    if total is None or active is None or active == total:
        return None
    unit, size = ("billion", 1e9) if active >= 1e9 else ("million", 1e6)
    return f"{total / size:.3g} {unit} parameters, of which {active / size:.3g} {unit} compute a token"


def trained_share(model: ModelConfig) -> float:
    """Returns the share of the parameters that train; the others have no gradients and no optimizer state."""
    count = parameter_count(model)
    trained = trained_count(model)
    if not count or trained is None:
        return 1.0
    return trained / count


def narrow_share(model: ModelConfig) -> float:
    """Returns the share of the parameters that do not train and are held in the compute type, if it is bf16 or fp16:
    the base model of adapters, and what a counted model holds in it."""
    if isinstance(model, CountedModel):
        return sum(block.narrow for block in model.counts.blocks) / max(1, parameter_count(model) or 0)
    return 1 - trained_share(model)


def quantized_count(model: ModelConfig) -> int:
    """Returns the number of parameters that are held in NF4. All of them are in the layers."""
    count = family_of(model).quantized_parameters
    return 0 if count is None else count(model) or 0


def trained_count(model: ModelConfig) -> int | None:
    """Returns the number of parameters that train, i.e. the parameters in a checkpoint; None if it is unknown."""
    count = family_of(model).trained_parameters
    return parameter_count(model) if count is None else count(model)


def parameter_count(model: ModelConfig) -> int | None:
    """Returns the number of parameters; None if the model's family cannot compute it."""
    count = family_of(model).parameters
    return None if count is None else count(model)
