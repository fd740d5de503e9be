"""States which techniques cannot be combined, one row for each exclusion. This module does not import torch.

Submissions and attempts check this table, and ``docs/compatibility.md`` is generated from it. A row names a technique,
a condition that excludes it, the reason, and the alternative. Numeric limits, such as too few layers for the stages,
are not in this table: the module that computes with the numbers checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from hpc_train.config import hf_config
from hpc_train.config.extensions import IMAGES, family_of, is_import_path
from hpc_train.config.import_path import method_parameters
from hpc_train.config.schema import Config, CustomModelConfig, GPTConfig, HFModelConfig, StreamDataConfig
from hpc_train.config.values import parse_recomputation
from hpc_train.errors import UserError, check_all
from hpc_train.layout.layout import Layout
from hpc_train.layout.optimizers import EMA, own_targets
from hpc_train.layout.recomputation import knows_sizes
from hpc_train.layout.techniques import (
    ATTENTION_KERNELS,
    CARRYING,
    KINDS,
    CompilerMode,
    DataParallelKind,
    PipelineSchedule,
    asked_kind,
    compiler_mode,
    find_kind,
    kinds_where,
    schedules_where,
    supports,
)
from hpc_train.units import counted

EARLY_STOPPING = "hpc_train.train.hooks.early_stopping.EarlyStopping"
SAMPLES = "hpc_train.train.hooks.samples.Samples"
Value = Callable[[Config, Layout], Any]


@dataclass(frozen=True)
class Condition:
    """A technique that a config uses, or another fact about a config and its layout.

    Attributes:
        name: the description on the page.
        value: returns the value that messages show; falsy if the condition does not hold.
        where: the keys that set it, in which ``{}`` stands for the value; empty if messages do not name them.
        message: the message if a row excludes the technique; ``{reason}`` stands for the reason of the row.
        fix: the fix if a row excludes the technique; ``{instead}`` stands for the alternative of the row.
    """

    name: str
    value: Value
    where: str = ""
    message: str = "{reason}"
    fix: str = "{instead}"


@dataclass(frozen=True)
class Exclusion:
    """A row of the table, which excludes the combination of two conditions.

    In the texts ``{this}`` stands for the value of ``technique`` and ``{it}`` for the value of ``excluded``.
    """

    technique: Condition
    excluded: Condition
    reason: str
    instead: str = ""

    def check(self, config: Config, layout: Layout) -> None:
        """Raises UserError if both conditions hold for ``config`` and ``layout``."""
        this = self.technique.value(config, layout)
        it = this and self.excluded.value(config, layout)
        if it:
            raise self.refusal(this, it)

    @property
    def message(self) -> str:
        return self.technique.message.replace("{reason}", self.reason)

    @property
    def fix(self) -> str:
        return self.technique.fix.replace("{instead}", self.instead)

    def refusal(self, this: object, it: object) -> UserError:
        """Returns the error for the values of the two conditions."""
        keys = [self.technique.where.format(this), self.excluded.where.format(it)]
        what = self.message.format(this=this, it=it)
        return UserError(what, where=", ".join(filter(None, keys)), fix=self.fix.format(this=this, it=it))


def _key(key: str, value: str | None = None, *, where: str | None = None, **texts: str) -> Condition:
    """Returns the condition that a key is set, or that it has ``value``."""
    read = attrgetter(key)

    def holds(config: Config, _: Layout) -> Any:
        current = read(config)
        if value is None:
            return current != "none" and current
        return current == value

    name = f"`{key}`" if value is None else f"`{key}={value}`"
    return Condition(name, holds, key if where is None else where, **texts)


def _other_than(value: str, key: str, name: str) -> Condition:
    """Returns the condition that a key does not have ``value``."""
    read = attrgetter(key)
    return Condition(name, lambda config, _: read(config) != value and read(config), key)


def _kind(name: str, holds: Callable[[DataParallelKind], object]) -> Condition:
    """Returns the condition that several ranks synchronize gradients with a kind for which ``holds`` is true."""

    def value(config: Config, layout: Layout) -> Any:
        kind = find_kind(asked_kind(config))
        return layout.dp_cp > 1 and holds(kind) and kind.name

    return Condition(name, value, "strategy.data_parallel")


def _schedule(name: str, holds: Callable[[PipelineSchedule], bool]) -> Condition:
    """Returns the condition that a pipeline runs a schedule for which ``holds`` is true."""

    def value(_: Config, layout: Layout) -> Any:
        return layout.pp > 1 and holds(layout.pipeline) and layout.pipeline

    return Condition(name, value, "strategy.schedule")


def _compression(name: str, holds: Callable[[str], bool]) -> Condition:
    """Returns the condition that several ranks compress gradients with a technique for which ``holds`` is true."""

    def value(config: Config, layout: Layout) -> Any:
        technique = config.strategy.compression
        return layout.dp_cp > 1 and technique != "none" and holds(technique) and technique

    return Condition(name, value, "strategy.compression")


def _optimizer(name: str, built_in: bool) -> Condition:
    """Returns the condition that an optimizer updates whole parameters. With ``built_in`` it may be one of
    ``torch.optim``."""

    def value(config: Config, _: Layout) -> Any:
        full = (target for target in own_targets(config.optim) if not target.elementwise)
        return next((target for target in full if built_in or target.torch_name is None), None)

    return Condition(name, value, "{0.where}._target_")


def _any_of(*conditions: Condition, where: str = "") -> Condition:
    """Returns the condition that one of ``conditions`` holds. Its value is the name of the first that holds."""

    def value(config: Config, layout: Layout) -> str:
        return next((condition.name for condition in conditions if condition.value(config, layout)), "")

    return Condition(" or ".join(condition.name for condition in conditions), value, where)


def _hook(name: str, target: str, where: str = "") -> Condition:
    """Returns the condition that a built-in hook is used."""

    def value(config: Config, _: Layout) -> str:
        return next((f"hooks.{key}" for key, hook in config.hooks.items() if hook._target_ == target), "")

    return Condition(name, value, where)


def _other_task(config: Config, _: Layout) -> str:
    """Returns the kind or the task of a model that does not predict the next token."""
    if family_of(config.model).learns_from == IMAGES:
        return f"model kind {config.model.kind}"
    task = getattr(config.model, "task", "causal_lm")
    return "" if task == "causal_lm" else f"model.task={task}"


def _fixed_micro_batches(_: Config, layout: Layout) -> str:
    """Returns the number of micro-batches of a replica if it is too small for any of them to move."""
    if len(layout.possible_counts()) > 1:
        return ""
    return counted(layout.micro_batches, "micro-batch", "micro-batches")


def _keeps_more(config: Config, layout: Layout) -> Any:
    """Returns the schedule if a stage keeps the activations of more micro-batches if a replica computes more."""
    most = replace(layout, micro_batches=layout.possible_counts()[-1])
    return SCHEDULE.value(config, layout) if most.in_flight(0) > layout.in_flight(0) else None


def _comparing_loss(config: Config, _: Layout) -> str:
    """Returns the loss of a custom model if its source has the parameter ``gather``. The workers check other models."""
    target = config.model._target_ if isinstance(config.model, CustomModelConfig) else ""
    return f"{target}.loss" if target and "gather" in method_parameters(target, "loss") else ""


def _balances_experts(config: Config, _: Layout) -> bool:
    """Returns whether the config.json of a model requests a load-balancing loss and ``model.split_dependent_loss`` is
    false. The workers check families with a default coefficient.
    """
    model = config.model
    if not isinstance(model, HFModelConfig) or model.split_dependent_loss:
        return False
    values = hf_config.read(model.name_or_path, model.revision, model.config) or {}
    return hf_config.balances_experts(values, model.task)


def _why_not_stages(config: Config, _: Layout) -> str:
    family = family_of(config.model)
    return "" if family.why_not_stages is None else family.why_not_stages(config.model)


def _unsupported_head(config: Config, _: Layout) -> str:
    """Returns the width of the model's heads if it is known and the kernel of ``train.attention`` does not support it,
    with the widths that it supports."""
    kernel = ATTENTION_KERNELS.get(config.train.attention)
    if kernel is None:
        return ""
    model: Any = config.model
    values = vars(model)
    if isinstance(model, HFModelConfig):
        values = hf_config.read(model.name_or_path, model.revision, model.config) or {}
    width = values.get("head_dim")
    heads = values.get("n_heads", values.get("num_attention_heads"))
    if width is None and isinstance(heads, int):
        width = values.get("dim", values.get("hidden_size", 0)) // heads
    if not width or (width <= kernel.widest and width % 8 == 0):
        return ""
    return f"multiples of 8 up to {kernel.widest}, not {width}"


def _shards_sequence(config: Config) -> bool:
    plan = family_of(config.model).tensor_parallel
    return plan is None or plan.shards_sequence


# The split of the model and the batch
PIPELINE = Condition("a pipeline", lambda _, layout: layout.pp > 1 and layout.pp, "strategy.pp={}")
TENSOR = Condition("tensor parallelism", lambda _, layout: layout.tp > 1 and layout.tp, "strategy.tp={}")
CONTEXT = Condition("context parallelism", lambda _, layout: layout.cp > 1 and layout.cp, "strategy.cp={}")
RING = Condition(
    "`strategy.context=ring` or `both`",
    lambda config, layout: layout.ring > 1 and config.strategy.context,
    "strategy.context",
    fix="strategy.context=ulysses, or {instead}",
)
EXPERT = Condition("expert parallelism", lambda _, layout: layout.ep > 1 and layout.ep, "strategy.ep={}")
NO_TENSOR = Condition("no tensor parallelism", lambda _, layout: layout.tp == 1)
SEVERAL_RANKS = Condition("several ranks with the same parameters", lambda _, layout: layout.dp_cp > 1 and layout.dp_cp)
SEVERAL_BATCHES = Condition(
    "several micro-batches in a step",
    lambda _, layout: layout.micro_batches > 1 and layout.micro_batches,
    "batch.micro_size, batch.micro_batches",
)
SET_BATCHES = Condition(
    "`batch.micro_size` or `batch.micro_batches`",
    lambda config, _: not config.batch.micro_size == config.batch.micro_batches == "auto",
    "batch.micro_size, batch.micro_batches",
)
PROFILED_SPLIT = Condition(
    "stages that are divided when the workers start",
    lambda config, layout: (
        layout.pp > 1 and config.strategy.pp_split in ("flops", "measured") and config.strategy.pp_split
    ),
    "strategy.pp_split",
)
SCHEDULE = Condition("a pipeline schedule", lambda _, layout: layout.pp > 1 and layout.pipeline, "strategy.schedule")
TWO_PART_BACKWARD = _schedule("a schedule that is not compiled", lambda row: not row.compiles)
NO_STORED_RESULTS = _schedule("a schedule that recomputes in two parts", lambda row: not row.ops_checkpointing)
REPRODUCIBLE = _key("train.reproducible")
BALANCE = Condition(
    "`batch.balance`",
    lambda config, layout: layout.dp > 1 and config.batch.balance,
    "batch.balance",
    message="batch.balance is true, but {reason}",
    fix="{instead}, or batch.balance=false",
)
FIXED_BATCHES = Condition("too few micro-batches", _fixed_micro_batches, "batch.micro_batches")
LARGER_WITH_MORE = Condition("a schedule that keeps all micro-batches", _keeps_more, "strategy.schedule")

# Data parallelism
UNSUPPORTED_KIND = Condition(
    "a kind that the schedule does not support",
    lambda config, layout: (
        layout.dp_cp > 1 and not supports(layout.schedule, asked_kind(config)) and find_kind(asked_kind(config)).name
    ),
    "strategy.data_parallel",
)
SHARDED = Condition("ZeRO", lambda _, layout: layout.shards_state and layout.kind.name, "strategy.data_parallel={}")
NO_TENSOR_KIND = _kind("`ddp`", lambda kind: not kind.tensor_parallel)
NO_COMPRESSED_KIND = _kind("a kind that cannot compress", lambda kind: kind.compressed_as is None)
SCATTERING_KIND = _kind("ZeRO", lambda kind: kind.shards and kind.compressed_as)
UNORDERED_KIND = Condition(
    "ZeRO",
    lambda config, _: (
        not find_kind(config.strategy.data_parallel).reproducible and find_kind(config.strategy.data_parallel).name
    ),
    "strategy.data_parallel",
)
ONE_REPLICA = Condition(
    "`zero2` or `zero3` over all data-parallel ranks",
    lambda _, layout: layout.lockstep_ranks == layout.dp and layout.kind.name,
    "strategy.data_parallel",
)
SHARDED_STAGES = Condition(
    "ZeRO with several stages of a pipeline on a rank",
    lambda _, layout: layout.stages_per_rank > 1 and layout.shards_state and layout.kind.name,
    "strategy.data_parallel, strategy.stages_per_rank",
)
LOCAL = Condition(
    "`strategy.local_steps`",
    lambda config, _: config.strategy.local_steps,
    "strategy.local_steps",
    message="strategy.local_steps does not support {reason}",
    fix="strategy.local_steps=null{instead}",
)
CUSTOM_KIND = Condition(
    "a custom kind",
    lambda _, layout: is_import_path(layout.data_parallel) and layout.data_parallel,
    "strategy.data_parallel",
)
LATE_KIND = Condition(
    "a kind that cannot update in the backward",
    lambda config, layout: (
        layout.dp_cp > 1
        and layout.kind.updated_as is None
        and not layout.kind.shards
        and config.train.reproducible is None
        and layout.kind.name
    ),
    "strategy.data_parallel",
)
DEVICE_KIND = Condition(
    "a kind that cannot offload",
    lambda _, layout: layout.dp_cp > 1 and "optimizer" not in layout.kind.offloads and layout.kind.name,
)
NOT_GATHERED = Condition(
    "any other layout than `zero2` or `zero3` on several ranks",
    lambda _, layout: layout.dp_cp == 1 or "all" not in layout.kind.offloads,
)
COMPRESSION = _compression("`strategy.compression`", lambda _: True)
UNCAST = _compression("compression other than `bf16`", lambda technique: technique != "bf16")
CARRIED = _compression("compression that carries errors", lambda technique: technique in CARRYING)
USER_BUFFERS = Condition(
    "`strategy.comm=user_buffers`",
    lambda config, layout: layout.shards_state and config.strategy.comm == "user_buffers",
    "strategy.comm",
)
REPLICA_COMPRESSION = Condition(
    "compression between replicas",
    lambda config, layout: not layout.shards_state and COMPRESSION.value(config, layout),
    "strategy.compression",
)

# Optimizers
IN_BACKWARD = _key(
    "optim.in_backward", message="optim.in_backward is true, but {reason}", fix="{instead}, or optim.in_backward=false"
)
CLIPPING = _key("optim.clip_norm")
MOMENTS = _other_than("fp32", "optim.moments", "`optim.moments`")
NOT_ADAMW = Condition(
    "any optimizer but `adamw`",
    lambda config, _: config.optim._target_ or (config.optim.name != "adamw" and config.optim.name),
)
FULL_UPDATES = _optimizer("an optimizer that updates whole parameters", built_in=True)
UNKNOWN_UPDATES = _optimizer("a custom optimizer that updates whole parameters", built_in=False)

# Memory
OFFLOAD = _key("strategy.offload")
OPTIMIZER_OFFLOAD = _key("strategy.offload", "optimizer")
ALL_OFFLOAD = _key("strategy.offload", "all")
ACTIVATION_OFFLOAD = _key("train.activation_offload")
OPS = _key("train.activation_checkpointing", "ops")
BUDGET = Condition(
    "a budget of `train.activation_checkpointing`",
    lambda config, _: (
        parse_recomputation(config.train.activation_checkpointing).budget is not None
        and config.train.activation_checkpointing
    ),
    "train.activation_checkpointing",
)
LOSS_CHUNKS = Condition(
    "`train.loss_chunks`",
    lambda config, _: config.train.loss_chunks not in ("auto", 1) and config.train.loss_chunks,
    "train.loss_chunks",
)

# Number formats and the compiler
FP8 = _key("precision.fp8", fix="{instead}, or precision.fp8=null")
FP16 = _key("precision.name", "fp16", where="precision")
NOT_BF16 = _other_than("bf16", "precision.name", "any other precision than `bf16`")
WEIGHTS = _key(
    "precision.weights",
    "bf16",
    message="precision.weights=bf16 does not support {reason}",
    fix="precision.weights=fp32{instead}",
)
NOT_HALF = Condition(
    "`fp32` or `fp64`",
    lambda config, _: config.precision.name not in ("bf16", "fp16") and config.precision.name,
    "precision.name",
)
ATTENTION = Condition(
    "`train.attention`",
    lambda config, _: config.train.attention != "auto" and config.train.attention,
    "train.attention",
    message="train.attention={this} needs {reason}",
    fix="train.attention=auto{instead}",
)
COMPILED = _key("train.compile")
COMPILED_EXCHANGE = Condition(
    "`train.compile` with tensor or context parallelism",
    lambda config, layout: layout.tp * layout.cp > 1 and config.train.compile,
    "train.compile",
)
INTERPRETED = Condition("no `train.compile`", lambda config, _: not config.train.compile)
CUDA_GRAPHS = Condition(
    "`train.cuda_graphs`",
    lambda config, _: compiler_mode(config) == CompilerMode.CUDA_GRAPHS,
    "train.cuda_graphs",
    message="train.cuda_graphs does not support {reason}",
    fix="train.cuda_graphs=false{instead}",
)
ASYNC_TP = _key(
    "strategy.async_tp", message="strategy.async_tp needs {reason}", fix="strategy.async_tp=false, or set what it needs"
)
CPUS = Condition("CPUs", lambda config, _: config.cluster.gpus_per_node == 0)
ISOLATED_GPU = Condition(
    "`cluster.visible_gpus=own`",
    lambda config, _: config.cluster.gpus_per_node != 0 and config.cluster.visible_gpus == "own",
)

# Models, data and hooks
UNCUT_MODEL = Condition("a model that cannot be cut", _why_not_stages, "model")
NO_TENSOR_MODEL = Condition(
    "a model without a tensor-parallel plan",
    lambda config, _: family_of(config.model).tensor_parallel is None and config.model.kind,
)
NO_SEQUENCE_SHARDS = Condition(
    "a model that does not shard the sequence", lambda config, _: not _shards_sequence(config)
)
NO_CONTEXT_MODEL = Condition(
    "any model but a `gpt`", lambda config, _: family_of(config.model).context_heads is None and config.model.kind
)
UNCHUNKED_LOSS = Condition(
    "a model that computes its loss in one piece",
    lambda config, _: not family_of(config.model).chunks_loss(config.model) and config.model.kind,
)
CAPPED_SCORES = Condition(
    "`model.attention_softcap`", lambda config, _: getattr(config.model, "attention_softcap", None)
)
WIDE_HEADS = Condition("heads that the kernel does not support", _unsupported_head)
UNKNOWN_LAYERS = Condition(
    "a model whose activations are unknown", lambda config, _: not knows_sizes(config) and config.model.kind
)
Z_LOSS = _key("train.z_loss")
NO_NEXT_TOKEN = Condition("a model that predicts no next token", _other_task, "model")
COMPARED_SAMPLES = Condition(
    "a loss that compares samples",
    _comparing_loss,
    message="{this} compares samples, as its parameter gather declares, so it needs each rank's samples of a step in "
    "one micro-batch; {reason}",
)
# this loss is a product of means over the batch, so a single rank has to hold the full batch
BALANCED_EXPERTS = Condition(
    "`output_router_logits` of `model=hf`",
    _balances_experts,
    "model.name_or_path, model.config",
    message="the config of the model has output_router_logits=true, which adds a load-balancing loss; it is not a sum "
    "over samples, and {reason} compute the loss of a batch in parts, so the result would depend on their number",
    fix="model.split_dependent_loss=true, which accepts this; +strategy=single batch.micro_batches=1 "
    "batch.micro_size=auto; or +model.config.output_router_logits=false, which trains without that loss",
)
MIXTURE = Condition(
    "`model.moe`",
    lambda config, _: isinstance(config.model, GPTConfig) and config.model.moe.experts,
    "model.moe.experts={}",
)
CAPACITY = Condition(
    "`model.moe.capacity_factor`",
    lambda config, _: isinstance(config.model, GPTConfig) and config.model.moe.capacity_factor is not None,
    "model.moe.capacity_factor",
)
NO_MIXTURE = Condition("a model without `model.moe`", lambda config, layout: not MIXTURE.value(config, layout), "model")
EPOCHS = _key("train.epochs")
VERIFIED = _key("train.verify.every")
STREAM = Condition("a stream", lambda config, _: isinstance(config.data, StreamDataConfig))
NO_SEQUENCES = Condition(
    "data without sequences",
    lambda config, _: getattr(config.data, "sequence_length", None) is None and config.data.kind,
)
DALI = Condition(
    "`data.decoder=dali`", lambda config, _: getattr(config.data, "decoder", None) == "dali", "data.decoder"
)
SHARED_BUFFERS = _other_than("refuse", "train.buffers", "`train.buffers=rank0` or `mean`")
COLLATE = Condition("`data.collate`", lambda config, _: config.data.collate, "data.collate")
DEBUG = _key("train.debug")
AVERAGES = _hook("the hook `ema`", EMA, where="hooks.ema")
EARLY_STOP = _hook("the hook `early_stopping`", EARLY_STOPPING)
SAMPLE_TEXTS = _hook("the hook `samples`", SAMPLES, where="{}")
NO_EVALUATIONS = Condition("`train.eval_every=0`", lambda config, _: config.train.eval_every == 0, "train.eval_every")

_WITHOUT_STAGES = "strategy=single, dp, zero1, zero2, zero3 or hsdp"
_REPLICAS = "strategy=single or dp"
_OR_REPLICAS = f", or {_REPLICAS}"
_ORDERED = "strategy=single or dp, or train.reproducible=null"
_ELEMENTWISE = "{it.where}.elementwise=true if it computes each element alone"
_GATHERED = kinds_where(lambda row: "all" in row.offloads)
_NO_ALL = f"strategy.offload=optimizer, which every strategy supports, or strategy={_GATHERED}"
_COMPRESSING = kinds_where(lambda row: row.compressed_as == row.name and not row.shards)
_UPDATING = f"strategy.data_parallel={kinds_where(lambda row: row.updated_as is not None)}"

# Rows that are checked again when an attempt derives its layout from its nodes
OF_LAYOUT: tuple[Exclusion, ...] = (
    Exclusion(
        TENSOR,
        NO_TENSOR_KIND,
        "strategy.data_parallel={it} cannot reduce the gradients of tensor-parallel parameters",
        f"strategy.data_parallel={kinds_where(lambda row: row.tensor_parallel)}",
    ),
    Exclusion(
        SCHEDULE,
        UNSUPPORTED_KIND,
        "the schedule {this.name} does not support data_parallel={it}: {this.data_parallel_reason}",
        "strategy.data_parallel={this.kinds}",
    ),
    Exclusion(
        COMPILED,
        TWO_PART_BACKWARD,
        "train.compile does not support the schedule {it.name}, which runs the backward in two parts",
        f"train.compile=false, or strategy.schedule={schedules_where(lambda row: row.compiles)}",
    ),
    Exclusion(
        OPS,
        NO_STORED_RESULTS,
        "train.activation_checkpointing=ops does not support the schedule {it.name}, because both parts of its "
        "backward would need the stored results",
        "train.activation_checkpointing=full or selective, or strategy.schedule="
        f"{schedules_where(lambda row: row.ops_checkpointing)}",
    ),
    Exclusion(
        COMPRESSION,
        NO_COMPRESSED_KIND,
        "strategy.data_parallel={it} cannot compress gradients",
        f"strategy.compression=none, or strategy.data_parallel={_COMPRESSING}",
    ),
    Exclusion(
        UNCAST,
        SCATTERING_KIND,
        "strategy.data_parallel={it} scatters gradients, so no rank has a complete gradient to compress by {this}",
        f"strategy.compression=bf16 or none, or strategy.data_parallel={_COMPRESSING}",
    ),
    Exclusion(
        USER_BUFFERS,
        COMPRESSION,
        "strategy.comm=user_buffers does not support strategy.compression={it}, which sends copies of the buffers",
        "strategy.comm=default, or strategy.compression=none",
    ),
    Exclusion(
        CARRIED,
        TENSOR,
        "{this} does not support tensor parallelism, where a rank has slices of gradients whose unsent parts would not "
        "fit another layout",
        "strategy.compression=bf16 or none, or strategy.tp=1",
    ),
    Exclusion(
        CARRIED,
        FP16,
        "{this} does not support precision=fp16: the unsent part of a gradient is in units of the loss scale, which "
        "changes",
        "precision=bf16, or strategy.compression=fp16",
    ),
    Exclusion(
        REPRODUCIBLE,
        _any_of(PIPELINE, TENSOR, CONTEXT, where="strategy.pp, strategy.cp, strategy.tp"),
        "train.reproducible does not support {it}, where the order of sums depends on the number of ranks",
        _ORDERED,
    ),
    Exclusion(
        REPRODUCIBLE,
        UNORDERED_KIND,
        "train.reproducible does not support strategy.data_parallel={it}, which reduces gradients in an order that "
        "depends on the number of ranks",
        _ORDERED,
    ),
    Exclusion(
        REPRODUCIBLE,
        COMPRESSION,
        "train.reproducible does not support compression, whose error depends on how many ranks share the batch",
        "strategy.compression=none, or train.reproducible=null",
    ),
    Exclusion(
        REPRODUCIBLE,
        COMPILED,
        "train.reproducible does not support train.compile, because compiled code may round differently on each "
        "machine",
        "train.compile=false",
    ),
    Exclusion(
        REPRODUCIBLE,
        SET_BATCHES,
        "train.reproducible determines the micro-batches, but batch.micro_size or batch.micro_batches is set too",
        "batch.micro_size=auto and batch.micro_batches=auto; set batch.logical_micro_batches instead",
    ),
    Exclusion(
        BALANCE,
        REPRODUCIBLE,
        "train.reproducible={it} fixes which rank computes a micro-batch",
        "train.reproducible=null",
    ),
)

# Rows that are checked before a submission
OF_RUN: tuple[Exclusion, ...] = (
    Exclusion(
        BALANCE,
        FIXED_BATCHES,
        "a replica computes {it} of a step and keeps at least one, or one for each stage of a pipeline, so none can "
        "move",
        "batch.micro_size=auto and a larger batch.micro_batches",
    ),
    Exclusion(
        BALANCE,
        ONE_REPLICA,
        "strategy.data_parallel={it} exchanges parameters or gradients between all ranks in each micro-batch, so all "
        "compute equally many",
        "strategy.data_parallel=allreduce or zero1, or a smaller strategy.shard",
    ),
    Exclusion(
        BALANCE,
        CUDA_GRAPHS,
        "train.cuda_graphs was never run with a number of micro-batches that changes",
        "train.cuda_graphs=false",
    ),
    Exclusion(
        BALANCE,
        COMPRESSION,
        "the error of strategy.compression={it} depends on the rank that computes a micro-batch",
        "strategy.compression=none",
    ),
    Exclusion(
        BALANCE,
        EXPERT,
        "the ranks of strategy.ep={it} exchange tokens in each micro-batch",
        "strategy.ep=1",
    ),
    Exclusion(
        BALANCE,
        CUSTOM_KIND,
        "strategy.data_parallel={it} is not known to reduce gradients of different numbers of micro-batches",
        f"strategy.data_parallel={' or '.join(name for name, row in KINDS.items() if not row.shards)}",
    ),
    Exclusion(
        BALANCE,
        SHARDED_STAGES,
        "the order in which strategy.data_parallel={it} gathers the stages of a rank depends on the number of "
        "micro-batches",
        "strategy.data_parallel=allreduce",
    ),
    Exclusion(
        BALANCE,
        LARGER_WITH_MORE,
        "the schedule {it.name} keeps the activations of all micro-batches, so more of them may not fit into memory",
        "strategy.schedule=1f1b",
    ),
    Exclusion(
        BALANCE,
        COMPILED_EXCHANGE,
        "the waits of a rank cannot be measured inside of compiled layers",
        "train.compile=false",
    ),
    Exclusion(BALANCE, STREAM, "a rank reads its own items of a stream", "data that has indices"),
    Exclusion(
        BALANCE,
        SHARED_BUFFERS,
        "with train.buffers={it}, buffers depend on the rank that computes a micro-batch",
        "train.buffers=refuse",
    ),
    Exclusion(PIPELINE, UNCUT_MODEL, "{it}", _WITHOUT_STAGES),
    Exclusion(
        TENSOR,
        NO_TENSOR_MODEL,
        "model kind {it} has no tensor-parallel plan",
        "strategy.tp=1, or model=gpt_tiny or another model that has one",
    ),
    Exclusion(
        CONTEXT,
        NO_CONTEXT_MODEL,
        "model kind {it} does not support context parallelism, because nothing states how its attention could exchange "
        "heads for tokens",
        "strategy.cp=1, or model=gpt_tiny or another gpt",
    ),
    Exclusion(
        RING,
        CAPACITY,
        "strategy.context={this} does not support model.moe.capacity_factor, which leaves places to earlier tokens: a "
        "rank of a ring holds tokens that are not consecutive",
        "model.moe.capacity_factor=null",
    ),
    Exclusion(
        RING,
        ATTENTION,
        "train.attention={it} was never called by a ring",
        "train.attention=auto",
    ),
    Exclusion(
        CONTEXT,
        CUSTOM_KIND,
        "strategy.data_parallel={it} is not known to sum gradients over context-parallel ranks",
        f"strategy.data_parallel={' or '.join(KINDS)}, or strategy.cp=1",
    ),
    Exclusion(COMPARED_SAMPLES, PIPELINE, "a pipeline splits them into several", _WITHOUT_STAGES),
    Exclusion(COMPARED_SAMPLES, TENSOR, "it is not supported under tensor parallelism", _WITHOUT_STAGES),
    Exclusion(COMPARED_SAMPLES, CONTEXT, "context parallelism splits each of them", _WITHOUT_STAGES),
    Exclusion(
        COMPARED_SAMPLES,
        REPRODUCIBLE,
        "train.reproducible=any_world_size splits them into logical micro-batches",
        "train.reproducible=null",
    ),
    Exclusion(
        COMPARED_SAMPLES,
        SEVERAL_BATCHES,
        "this layout splits them into {it}",
        "batch.micro_batches=1 and batch.micro_size=auto",
    ),
    Exclusion(BALANCED_EXPERTS, SEVERAL_RANKS, "{it} ranks"),
    Exclusion(BALANCED_EXPERTS, SEVERAL_BATCHES, "{it} micro-batches"),
    Exclusion(BALANCED_EXPERTS, REPRODUCIBLE, "logical micro-batches"),
    Exclusion(
        REPRODUCIBLE,
        MIXTURE,
        "train.reproducible does not sum the losses and choices of routers in an order that is independent of the "
        "ranks",
        "train.reproducible=null",
    ),
    Exclusion(
        EXPERT,
        NO_MIXTURE,
        "strategy.ep is {this}, but hpc_train divides only the experts of `model.moe`, not those of a custom model or "
        "of transformers",
        "strategy.ep=1, or model=moe_tiny or another gpt with model.moe.experts; checkpoint import reads Mixtral and "
        "Qwen3-MoE, and docs/howto/moe.md shows your own experts",
    ),
    Exclusion(
        EXPERT,
        CUSTOM_KIND,
        "strategy.data_parallel={it} is not known to sum the gradients of experts over the ranks that hold them",
        f"strategy.data_parallel={' or '.join(KINDS)}, or strategy.ep=1",
    ),
    Exclusion(
        EXPERT,
        REPLICA_COMPRESSION,
        "strategy.compression={it} compresses the sum over all data-parallel ranks, and fewer ranks hold an expert",
        "strategy.compression=none, or strategy.ep=1",
    ),
    Exclusion(
        EXPERT,
        IN_BACKWARD,
        "optim.in_backward computes the norm of gradients that every rank holds whole, and a rank holds only some "
        "experts",
        "optim.in_backward=false, or strategy.ep=1",
    ),
    Exclusion(
        LOCAL,
        REPRODUCIBLE,
        "train.reproducible: the number of replicas changes what is computed",
        ", or train.reproducible=null",
    ),
    Exclusion(
        LOCAL,
        COMPRESSION,
        "strategy.compression={it}, whose state checkpoints have for one replica only",
        ", or strategy.compression=none",
    ),
    Exclusion(
        LOCAL,
        BALANCE,
        "batch.balance, which would move samples from one replica to another",
        ", or batch.balance=false",
    ),
    Exclusion(LOCAL, FP16, "precision=fp16: each replica would have another loss scale", ", or precision=bf16"),
    Exclusion(
        LOCAL,
        OFFLOAD,
        "strategy.offload={it}: the outer step exchanges weights on devices",
        ", or strategy.offload=none",
    ),
    Exclusion(
        LOCAL,
        VERIFIED,
        "train.verify, which compares ranks that have equal weights",
        ", or train.verify.every=null",
    ),
    Exclusion(
        LOCAL,
        AVERAGES,
        "hooks.ema: each replica would average its weights, and checkpoints have the averages of one",
        ", or no hook that averages weights",
    ),
    Exclusion(CUDA_GRAPHS, MIXTURE, "experts, which were never run as CUDA graphs"),
    Exclusion(FP8, MIXTURE, "precision.fp8 does not support the products of experts", "model.moe.experts=null"),
    Exclusion(
        EPOCHS,
        STREAM,
        "train.epochs is {this:g}, but the length of a stream is not known",
        "train.epochs=null train.steps=N; data.repeat=false also ends the run where the stream ends",
    ),
    Exclusion(
        DALI,
        COLLATE,
        "data.collate={it} gets decoded images, but DALI decodes whole micro-batches",
        "data.decoder=pillow",
    ),
    Exclusion(
        DALI,
        REPRODUCIBLE,
        "it was never measured whether DALI decodes an image to the same pixels on every GPU",
        "data.decoder=pillow, or train.reproducible=null",
    ),
    Exclusion(
        LOSS_CHUNKS,
        UNCHUNKED_LOSS,
        "train.loss_chunks is {this}, but this model of kind {it} computes its loss in one piece",
        "train.loss_chunks=1, or a language model, such as model=gpt_tiny",
    ),
    Exclusion(
        Z_LOSS,
        NO_NEXT_TOKEN,
        "train.z_loss is {this:g}, but {it} predicts no next token, and a z-loss is for the vocabulary of a language "
        "model",
        "train.z_loss=0",
    ),
    Exclusion(
        BUDGET,
        UNKNOWN_LAYERS,
        "train.activation_checkpointing is {this}, but it is not known what the layers of model kind {it} keep",
        "train.activation_checkpointing=ops, selective or full",
    ),
    Exclusion(
        BUDGET,
        PROFILED_SPLIT,
        "train.activation_checkpointing is {this}, but strategy.pp_split={it} divides the layers only when "
        "the workers start",
        "strategy.pp_split=even or a list, or train.activation_checkpointing=ops, selective or full",
    ),
    Exclusion(
        BUDGET,
        ACTIVATION_OFFLOAD,
        "train.activation_checkpointing={this} is a budget for what stays on a device, but train.activation_offload "
        "moves it",
        "train.activation_checkpointing=none or full, or train.activation_offload=none",
    ),
    Exclusion(
        OPTIMIZER_OFFLOAD,
        DEVICE_KIND,
        "strategy.data_parallel={it} does not support an optimizer state in host memory",
        "strategy.offload=none",
    ),
    Exclusion(
        ALL_OFFLOAD,
        NOT_GATHERED,
        f"strategy.offload=all requires {_GATHERED} on several ranks, which gather parameters in each step",
        _NO_ALL,
    ),
    Exclusion(
        ALL_OFFLOAD,
        _any_of(TENSOR, PIPELINE),
        "strategy.offload=all does not support tensor or pipeline parallelism, which exchange gradients on devices",
        _NO_ALL,
    ),
    Exclusion(
        ALL_OFFLOAD,
        FULL_UPDATES,
        "{it.path} updates whole parameters, which strategy.offload=all cannot gather: their shards are in host memory",
        f"strategy.offload=optimizer, or {_ELEMENTWISE}",
    ),
    Exclusion(
        MOMENTS,
        NOT_ADAMW,
        "optim.moments is {this}, but {it} has no such moments",
        "optim.moments=fp32, or optim=adamw",
    ),
    Exclusion(
        IN_BACKWARD,
        PIPELINE,
        "a pipeline adds the gradients of several micro-batches before any of them is final",
        _REPLICAS,
    ),
    Exclusion(
        IN_BACKWARD,
        TENSOR,
        "the gradients of norms are partial sums on tensor-parallel ranks until the backward pass has ended",
        _REPLICAS,
    ),
    Exclusion(
        IN_BACKWARD, REPRODUCIBLE, "train.reproducible sums whole gradients over a tree", "train.reproducible=null"
    ),
    Exclusion(
        IN_BACKWARD,
        SHARDED,
        "{it} reduces the gradients of a whole block at once and keeps only the shard of each rank",
        _UPDATING,
    ),
    Exclusion(
        IN_BACKWARD,
        LATE_KIND,
        "strategy.data_parallel={it} reduces gradients by code that cannot update parameters",
        _UPDATING,
    ),
    Exclusion(
        IN_BACKWARD,
        SEVERAL_BATCHES,
        "a step adds the gradients of {it} micro-batches, so none is final before the last",
        "a larger batch.micro_size, a smaller batch.global_size or more ranks",
    ),
    Exclusion(
        IN_BACKWARD,
        CLIPPING,
        "clipping to optim.clip_norm={it:g} needs the norm of all gradients before the first update",
        "optim.clip_norm=0",
    ),
    Exclusion(
        IN_BACKWARD,
        FP16,
        "fp16 skips a step if any of its gradients overflows, which is known after the last",
        "precision=bf16",
    ),
    Exclusion(
        IN_BACKWARD,
        WEIGHTS,
        "the optimizer updates the fp32 masters of the weights, not the parameters that have the gradients",
        "precision.weights=fp32",
    ),
    Exclusion(
        IN_BACKWARD,
        CARRIED,
        "{it} keeps the unsent part of gradients only if all gradients of a step are finite",
        "strategy.compression=bf16",
    ),
    Exclusion(IN_BACKWARD, OFFLOAD, "the host updates parameters after the backward", "strategy.offload=none"),
    Exclusion(IN_BACKWARD, DEBUG, "train.debug looks at all gradients after the backward", "train.debug=false"),
    Exclusion(
        IN_BACKWARD,
        UNKNOWN_UPDATES,
        "{it.path} may need the gradients of several parameters for an update",
        _ELEMENTWISE,
    ),
    Exclusion(
        FP8,
        NOT_BF16,
        "precision.fp8 is {this}, which replaces products in bf16, but precision.name is {it}",
        "precision=bf16",
    ),
    Exclusion(
        FP8,
        ASYNC_TP,
        "precision.fp8 does not support strategy.async_tp, which joins products with the collectives of their "
        "operands: casts to fp8 are between the two",
        "strategy.async_tp=false",
    ),
    Exclusion(WEIGHTS, NOT_BF16, "precision.name={it}: products are not computed in bf16", ", or precision=bf16"),
    Exclusion(
        WEIGHTS, TENSOR, "strategy.tp={it}: the ranks would add up gradients of norms in bf16", ", or strategy.tp=1"
    ),
    Exclusion(
        WEIGHTS,
        REPRODUCIBLE,
        "train.reproducible={it}: it adds up the gradients of many small micro-batches, for which bf16 is too coarse",
        ", or train.reproducible=null",
    ),
    Exclusion(
        WEIGHTS,
        ALL_OFFLOAD,
        "strategy.offload=all: masters would be a second copy of the weights in host memory",
        ", or strategy.offload=optimizer, which keeps the masters there",
    ),
    Exclusion(
        WEIGHTS,
        REPLICA_COMPRESSION,
        "strategy.compression={it}: gradients are in bf16 already",
        ", or strategy.compression=none",
    ),
    Exclusion(
        WEIGHTS,
        AVERAGES,
        "hooks.ema: weights in bf16 change too coarsely to be averaged",
        ", or no hook that averages weights",
    ),
    Exclusion(
        WEIGHTS, FULL_UPDATES, "{it.where}._target_={it.path}: it updates whole parameters, not shards of masters"
    ),
    Exclusion(
        CUDA_GRAPHS,
        PIPELINE,
        "pipelines: a graph has memory for the activations of one micro-batch, and a stage keeps several",
        _OR_REPLICAS,
    ),
    Exclusion(
        CUDA_GRAPHS,
        SHARDED,
        "{it}: a graph replays fixed addresses, and ZeRO gathers parameters into other memory",
        _OR_REPLICAS,
    ),
    Exclusion(
        CUDA_GRAPHS,
        _any_of(TENSOR, CONTEXT),
        "tensor or context parallelism, whose collectives are inside the compiled layers",
        _OR_REPLICAS,
    ),
    Exclusion(
        CUDA_GRAPHS,
        ACTIVATION_OFFLOAD,
        "train.activation_offload: the memory of a graph stays allocated, so a copy in host memory saves nothing",
    ),
    Exclusion(
        CUDA_GRAPHS,
        IN_BACKWARD,
        "optim.in_backward: gradients stay in the memory of a graph, so freeing them saves nothing",
    ),
    Exclusion(ASYNC_TP, INTERPRETED, "train.compile=true, since the compiler changes the products"),
    Exclusion(ASYNC_TP, NO_TENSOR, "strategy.tp=2 or more"),
    Exclusion(ASYNC_TP, NO_SEQUENCE_SHARDS, "a model whose ranks hold shards of the sequence, such as a gpt"),
    Exclusion(ASYNC_TP, CPUS, "GPUs"),
    Exclusion(ASYNC_TP, MIXTURE, "a model without `model.moe`, whose products have not been run with it"),
    Exclusion(ATTENTION, NOT_HALF, "queries in bf16 or fp16, but precision.name is {it}", ", or precision=bf16"),
    Exclusion(ATTENTION, CAPPED_SCORES, "scores without model.attention_softcap, which no kernel has"),
    Exclusion(ATTENTION, WIDE_HEADS, "heads whose widths are {it}"),
    Exclusion(ASYNC_TP, ISOLATED_GPU, "cluster.visible_gpus=all, since ranks write to the memory of each other's GPUs"),
    Exclusion(
        EARLY_STOP,
        NO_EVALUATIONS,
        "early stopping needs evaluations during the run, but train.eval_every=0 evaluates only at its end",
        "train.eval_every=N, the number of steps between evaluations",
    ),
    Exclusion(
        SAMPLE_TEXTS,
        PIPELINE,
        "{this} generates text with a whole model on each rank, but a pipeline splits it",
        "remove the hook, or use a strategy without stages, such as zero3 or tp",
    ),
    Exclusion(
        SAMPLE_TEXTS,
        NO_SEQUENCES,
        "{this} generates text, but the data source {it} has no sequences",
        "remove the hook, or use data=text or data=tokens",
    ),
)


def check_compatibility(rows: Iterable[Exclusion], config: Config, layout: Layout) -> None:
    """Raises UserError with all combinations in ``config`` and ``layout`` that ``rows`` exclude."""
    check_all(*(partial(row.check, config, layout) for row in rows))


def refusals(technique: Condition, config: Config, layout: Layout, this: object = True) -> Iterator[UserError]:
    """Yields an error for each row that excludes ``technique``, even if ``config`` does not use the technique.

    Args:
        this: the value of the technique in messages.
    """
    for row in (*OF_LAYOUT, *OF_RUN):
        it = row.technique is technique and row.excluded.value(config, layout)
        if it:
            yield row.refusal(this, it)
