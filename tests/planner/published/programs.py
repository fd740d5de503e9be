"""What the engines of published measurements hold in memory where they differ from hpc_train's.

``peak`` replays the step of a row with the program of its source: the same order of passes as the product's estimate
(``hpc_train.layout.memory``), with other sizes. Facts that a source states or its code shows are in the docstrings;
numbers that are fitted to its rows say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from unittest.mock import patch

from hpc_train.config.schema import Config
from hpc_train.layout import sizes as rank_sizes
from hpc_train.layout.layout import Layout
from hpc_train.layout.loss_chunks import LossForm
from hpc_train.layout.memory import Memory, Rank, estimate, peak_of, ranks_of
from hpc_train.layout.sizes import PerParameter, Sizes, sizes_of

Row = Mapping[str, str]
IN_BF16 = PerParameter(
    held=2, optimizer=0, hooks=0, cast=0, gathered=0, of_layer=0, unpacked=0, fresh=2, whole=2, shard=0, updated=0
)


@dataclass(frozen=True)
class Program:
    """How the engine of a source differs.

    Attributes:
        sizes: takes the row, the config, the layout and hpc_train's sizes, and returns those of the source.
        rank: takes hpc_train's passes and buffers and returns those of the source.
        update: bytes per parameter of the rank that the update of the parameters holds beside the state and the
            gradients, when there are no activations.
    """

    sizes: Callable[[Row, Config, Layout, Sizes], Sizes]
    rank: Callable[[Layout, Rank], Rank] = lambda layout, rank: replace(rank, micro_batches=0)
    update: Callable[[Row, Layout], float] = lambda row, layout: 0.0


def peak(row: Row, config: Config, layout: Layout) -> Memory | None:
    """Returns the memory of the fullest rank of a row, in the engine of its source, which keeps whole logits."""
    with patch.object(rank_sizes, "loss_form", lambda config, layout: LossForm()):
        return _peak(row, config, layout)


def _peak(row: Row, config: Config, layout: Layout) -> Memory | None:
    program = PROGRAMS.get(row["source"])
    if program is None:
        return estimate(config, layout)
    sizes = program.sizes(row, config, layout, sizes_of(config, layout))
    ranks = [program.rank(layout, rank) for rank in ranks_of(config, layout)]
    found = [peak_of(sizes, rank) for rank in ranks]
    update = program.update(row, layout)
    found += [_at_update(sizes, rank, update) for rank in ranks if update]
    return max(found, key=lambda memory: memory.total)


def _at_update(sizes: Sizes, rank: Rank, update: float) -> Memory:
    """Returns what ``rank`` holds while it updates its parameters, with ``update`` bytes of each beside gradients."""
    of, per = sizes.parameters, sizes.per_parameter
    tables = any(stage.first or (stage.last and of.table) for stage in rank.stages.values())
    count = sum(stage.layers * of.layer + of.head * stage.last for stage in rank.stages.values()) + of.stem * tables
    return Memory(count * per.held, count * (per.whole + update), count * per.optimizer, 0.0)


def _tokens(config: Config, layout: Layout) -> int:
    return layout.micro_size * int(config.data.sequence_length)  # type: ignore[attr-defined]


def _aleph_alpha(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """Parameters and gradients are bf16, and ZeRO-1 shares the fp32 copies and moments (12 bytes per parameter).

    Without sequence parallelism each tensor-parallel rank holds the hidden states and norms whole; with it, the inputs
    that it gathers. Fitted: the inputs and results that a norm without the kernel keeps (12 bytes per element of the
    width and layer more), one more hidden state per layer, and the logits (14 bytes each, and 10 more where
    tensor-parallel ranks gather them).
    """
    model, tp, tokens = config.model, layout.tp, _tokens(config, layout)
    dim, ffn, vocabulary = model.dim, model.ffn_dim, model.vocab_size  # type: ignore[attr-defined]
    shared = tp if "sequence parallel" in row["notes"] else 1
    normed = 8 * dim if "RMS kernel" in row["notes"] else 20 * dim
    gathered = 4 * dim if shared > 1 else 0
    activations = replace(
        ours.activations,
        kept={
            "none": tokens * ((8 * dim + 8 * ffn) / tp + normed / shared + gathered + 2 * dim),
            "full": tokens * 2 * dim / shared,
        },
        gradients=tokens * (4 * ffn / tp + 4 * dim / shared + 2 * dim * (tp > 1)),
        head=tokens * (4 * vocabulary + 4 * dim / shared),
        forward=tokens * 6 * vocabulary,
        backward=tokens * vocabulary * (10 + 10 * (tp > 1)),
        logits=tokens * 2 * vocabulary,
    )
    return replace(ours, per_parameter=replace(IN_BF16, optimizer=12 / layout.dp), activations=activations)


def _kempnerforge(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """All state is bf16. FSDP shards stem and head, too, and sums whole gradients in fp32 over micro-batches.

    Fitted: the logits (9 bytes each; with tensor parallelism 10, or 12 where it is alone).
    """
    tokens, logits = _tokens(config, layout), config.model.vocab_size  # type: ignore[attr-defined]
    sharded, shard = layout.shards_state, layout.dp
    per = replace(
        IN_BF16, held=2 / shard, optimizer=4 / shard, gathered=2 * sharded, whole=4 if sharded else 2,
        shard=2 / shard if sharded else 0,
    )  # fmt: skip
    of = replace(ours.activations, head=tokens * 4 * logits, forward=0.0, logits=tokens * 2 * logits)
    return replace(
        ours,
        per_parameter=per,
        activations=replace(of, backward=tokens * logits * (5 if layout.tp == 1 else 6 if sharded else 8)),
    )


def _accumulating(layout: Layout, rank: Rank) -> Rank:
    return replace(rank, reduces="last" if layout.shards_state and layout.micro_batches > 1 else rank.reduces)


def _internevo(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """Parameters and gradients are bf16; ZeRO-1 shares the rest, and FSDP shares all.

    Fitted: 24 bytes of fp32 copies, moments, gradients and temporaries of an unfused AdamW per parameter, 22 with FSDP.
    """
    shards = 8 if "over 8 ranks" in row["notes"] or "zero1=8" in row["notes"] else layout.dp
    shards = 4 if "zero1=4" in row["notes"] else min(shards, layout.dp)
    if row["zero_stage"] == "3":
        per = replace(IN_BF16, held=2 / shards, optimizer=22 / shards, gathered=2, shard=2 / shards)
        per = per if layout.shards_state else replace(per, gathered=0, shard=0)
    else:
        per = replace(IN_BF16, optimizer=24 / shards)
    return replace(ours, per_parameter=per)


def _whole(layout: Layout, rank: Rank) -> Rank:
    """Parameters and gradients are whole unless FSDP shares them."""
    if "parameters" in layout.kind.shards:
        return replace(rank, micro_batches=0)
    return replace(rank, micro_batches=0, gathers="never", reduces="after", keeps_gradients=True)


def _litgpt(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """All state is bf16 (``bf16-true``). Norms are not fused: each keeps its input and result in fp32. Keys and values
    are expanded to all heads, and the training loop holds the logits.
    """
    model, tokens, shard = config.model, _tokens(config, layout), layout.shard if layout.shards_state else 1
    dim, heads, groups = model.dim, model.n_heads, model.n_kv_heads  # type: ignore[attr-defined]
    sharded = layout.shards_state
    expanded = 2 * dim * (1 - groups / heads)
    more = tokens * (2 * 6 * dim + 2 * expanded)
    of = ours.activations
    per = replace(IN_BF16, held=2 / shard, optimizer=4 / shard, gathered=2 * sharded, shard=2 / shard if sharded else 0)
    logits = tokens * 2 * model.vocab_size  # type: ignore[attr-defined]
    kept = {**of.kept, "none": of.kept["none"] + more}
    return replace(ours, per_parameter=per, activations=replace(of, kept=kept, head=of.head + logits))


def _megatron_layer(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """A layer of GPT in 16 bits with unfused attention and dropout, as Korthikanti et al. count it (arXiv:2205.05198,
    equation 2): of each token, 10 h bytes that each tensor-parallel rank has, and (24 h + 5 a s) / t that they share,
    where h is the width, a the heads, s the length and t the ranks. With sequence parallelism and recomputation of the
    scores it is 34 h / t (their table 2). A recomputed layer keeps its input, which each rank has whole.

    In the backward the gradients of two tensors of a branch live at a time: of the 4 h wide ones of the feed-forward
    branch, or of the scores, and those of two hidden states. Vocabularies are split: each rank keeps the softmax of its
    share in fp32, beside which the logits or their gradient are in 16 bits. The inputs of the last norm and of the head
    are kept.
    """
    model, tp, tokens = config.model, layout.tp, _tokens(config, layout)
    dim, words = model.dim, model.vocab_size  # type: ignore[attr-defined]
    scores = model.n_heads * int(config.data.sequence_length)  # type: ignore[attr-defined]
    shared = row["recompute"] == "selective"
    layer = 34 * dim / tp if shared else 10 * dim + (24 * dim + 5 * scores) / tp
    branch = max(16 * dim, 4 * scores + 5 * scores * shared) / tp
    hidden = tokens * 2 * dim / (tp if shared else 1)
    logits = tokens * 2 * words / tp
    of = replace(
        ours.activations,
        kept={"none": tokens * layer, "full": hidden},
        gradients=tokens * branch + 2 * hidden,
        hidden=hidden,
        head=2 * logits + 2 * hidden,
        forward=logits,
        backward=logits,
        logits=logits,
    )
    return replace(ours, parameters=replace(ours.parameters, matrix=ours.parameters.layer / 3), activations=of)


def _bloom(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """Megatron-DeepSpeed. Parameters and gradients are in 16 bits, and ZeRO-1 shares the fp32 copies and moments (12
    bytes per parameter). The later BF16 optimizer also holds whole gradients in fp32, in which it sums those in bf16
    (deepspeed/runtime/bf16_optimizer.py). The layers are those of Megatron-LM without sequence parallelism.
    """
    summed = 4 if _sums_in_fp32(row) else 0
    per = replace(IN_BF16, optimizer=12 / _shards(row, layout) + summed)
    return replace(_megatron_layer(row, config, layout, ours), per_parameter=per)


def _sums_in_fp32(row: Row) -> bool:
    return "accumulated in fp32" in row["notes"]


def _shards(row: Row, layout: Layout) -> int:
    return layout.dp if row["zero_stage"] == "1" else 1


def _bloom_update(row: Row, layout: Layout) -> float:
    """ZeRO-1 copies its share of the gradients to one tensor, and this one to fp32 (deepspeed/runtime/zero/
    stage_1_and_2.py). Without ZeRO each gradient is copied to fp32, and all of them to one tensor
    (deepspeed/runtime/fp16/fused_optimizer.py). The BF16 optimizer copies nothing.
    """
    return 0.0 if _sums_in_fp32(row) else 6 / layout.dp if row["zero_stage"] == "1" else 8.0


def _megatron_lm(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """Parameters are fp16; gradients are summed in fp32, and an fp32 copy and two moments are whole (12 bytes)."""
    per = replace(IN_BF16, whole=4, optimizer=12)
    return replace(_megatron_layer(row, config, layout, ours), per_parameter=per)


def _torchtune(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """All state is bf16, with two moments. Norms, keys and values are those of ``_litgpt``; the logits are freed."""
    found = _litgpt(row, config, layout, ours)
    of = replace(found.activations, head=ours.activations.head)
    return replace(found, per_parameter=replace(IN_BF16, optimizer=4), activations=of)


def _ml_engineering(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """DeepSpeed with Liger's kernels. Parameters and gradients are bf16; where the CPU computes the update, it also has
    the reduced gradients, the fp32 copies and the moments. Liger's loss computes the logits in as many chunks as the
    vocabulary is times as large as the width, in 16 bits beside fp32, and keeps the gradients of its input and of the
    output matrix (liger_kernel/ops/fused_linear_cross_entropy.py).
    """
    model, tokens, shard = config.model, _tokens(config, layout), layout.shard
    dim, words = model.dim, model.vocab_size  # type: ignore[attr-defined]
    offloaded, gathers = row["offload"] == "1", row["zero_stage"] == "3"
    per = replace(
        IN_BF16,
        held=2 / shard if gathers else 2,
        optimizer=0 if offloaded else 12 / shard,
        gathered=2 * gathers,
        shard=0 if offloaded else 2 / shard,
    )
    of = replace(
        ours.activations,
        head=tokens * 4 * dim,
        forward=tokens * 6 * dim,
        backward=tokens * 2 * dim,
        logits=0,
        matrix=2 * words * dim,
    )
    return replace(ours, per_parameter=per, activations=of)


def _torchtitan(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """Tensor-parallel ranks compute the loss of their share of the vocabulary each ("loss parallel")."""
    of, tp = ours.activations, layout.tp
    return replace(
        ours,
        activations=replace(
            of, head=of.head / tp, forward=of.forward / tp, backward=of.backward / tp, logits=of.logits / tp
        ),
    )


def _fms(row: Row, config: Config, layout: Layout, ours: Sizes) -> Sizes:
    """HFU / MFU - 1 is a third of the share of blocks that are recomputed: of 34B and 70B nearly all are."""
    of, hfu = ours.activations, row["notes"].partition("HFU ")[2].partition(";")[0]
    every = float(hfu) / float(row["mfu"]) > 1.2
    kept = {**of.kept, "none": of.kept["full"]}
    return replace(ours, activations=replace(of, kept=kept)) if every else ours


PROGRAMS = {
    "aleph-alpha-layouts": Program(_aleph_alpha, _whole),
    "kempnerforge": Program(_kempnerforge, _accumulating),
    "internevo": Program(_internevo, _whole),
    "bloom": Program(_bloom, _whole, _bloom_update),
    "korthikanti-2022": Program(_megatron_lm, _whole),
    "torchtune": Program(_torchtune),
    "ml-engineering-h200-b200": Program(_ml_engineering),
    "fms-fsdp": Program(_fms, lambda layout, rank: rank),
    "torchtitan-asynctp": Program(_torchtitan, lambda layout, rank: rank),
    "torchtitan-h100": Program(_torchtitan, lambda layout, rank: rank),
    "torchtitan-405b": Program(_torchtitan, lambda layout, rank: rank),
    "litgpt-thunder": Program(_litgpt, lambda layout, rank: replace(rank, keeps_gradients=rank.gathers == "never")),
}
