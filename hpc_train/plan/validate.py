"""All checks of a config before a submission: allowed words, ranges, combinations of options, and the layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpc_train.config.schema import Config, GPTConfig, SyntheticDataConfig, ViTConfig
from hpc_train.config.values import check_profiled_steps, node_range, parse_hang_timeout, parse_save_every
from hpc_train.errors import UserError, nearest
from hpc_train.plan.compression import COMPRESSION
from hpc_train.plan.inputs import check_inputs, check_profile
from hpc_train.plan.layout import SPLITS, Layout, resolve_layout
from hpc_train.plan.recomputation import parse_recomputation
from hpc_train.plan.reproducible import ANY_WORLD_SIZE
from hpc_train.plan.techniques import AUTO, find_kind, find_schedule, kinds_where

ALLOWED: dict[str, tuple[str, ...]] = {
    "cluster.kind": ("auto", "local", "slurm"),
    "cluster.preflight": ("quick", "full", "off"),
    "cluster.preflight_action": ("warn", "stop"),
    "cluster.container.runtime": ("auto", "apptainer", "pyxis"),
    "strategy.compression": COMPRESSION,
    "model.loss": ("cross_entropy", "mse"),
    "data.task": ("tokens", "images"),
    "optim.name": ("adamw", "sgd"),
    "optim.moments": ("fp32", "bf16", "8bit"),
    "strategy.offload": ("none", "optimizer", "all"),
    "optim.lr_scaling": ("none", "linear", "sqrt"),
    "optim.schedule": ("constant", "linear", "cosine", "wsd"),
    "precision.name": ("fp64", "fp32", "bf16", "fp16"),
    "train.reproducible": (ANY_WORLD_SIZE,),
    "checkpoint.verify": ("full", "sizes"),
    "checkpoint.commit": ("auto", "rename", "marker"),
    "checkpoint.keep_best": ("val_loss", "val_accuracy"),
    "telemetry.wandb.mode": ("auto", "online", "offline", "disabled"),
}
WORDS: dict[str, tuple[str, ...]] = {  # keys that hold a number or one of these words
    "cluster.gpus_per_node": ("auto",),
    "cluster.cpus_per_gpu": ("auto",),
    "strategy.dp": ("fill",),
    "strategy.pp": ("auto", "fill"),
    "strategy.shard": ("fill", "node"),
    "strategy.bucket_cap_mb": ("auto",),
    "train.threads": ("auto",),
    "batch.micro_size": ("auto",),
    "batch.micro_batches": ("auto",),
    "batch.logical_micro_batches": ("auto",),
    "batch.loader_workers": ("auto",),
    "launch.array_parallelism": ("auto",),
    "elastic.stop_grace_s": ("auto",),
}


@dataclass(frozen=True)
class Range:
    """Numbers that a key may hold."""

    holds: Callable[[float], bool]
    words: str


POSITIVE = Range(lambda value: value > 0, "a number above 0")
NOT_NEGATIVE = Range(lambda value: value >= 0, "0 or more")
AT_LEAST_ONE = Range(lambda value: value >= 1, "1 or more")
SHARE = Range(lambda value: 0 <= value <= 1, "a share between 0 and 1")
BELOW_ONE = Range(lambda value: 0 <= value < 1, "0 or more, below 1")
PART = Range(lambda value: 0 < value <= 1, "above 0, at most 1")
INSIDE = Range(lambda value: 0 < value < 1, "above 0 and below 1")

RANGES: dict[Range, tuple[str, ...]] = {
    POSITIVE: (
        "strategy.bucket_cap_mb", "model.rope_theta", "model.norm_eps", "optim.lr", "optim.eps", "train.epochs",
        "precision.loss_scale_init", "elastic.collective_timeout_s", "elastic.stop_grace_s",
        "elastic.heartbeat_timeout_s", "elastic.join_timeout_s", "run.max_gpu_hours",
    ),
    NOT_NEGATIVE: (
        "cluster.gpus_per_node", "optim.weight_decay", "optim.clip_norm", "optim.warmup_steps", "train.eval_every",
        "train.seed", "train.spike_mads", "train.max_rollbacks", "strategy.compression_warmup_steps",
        "batch.loader_workers", "checkpoint.keep_every", "checkpoint.visibility_timeout_s",
        "checkpoint.wait_for_room_s", "launch.confirm_gpu_hours", "elastic.spares", "elastic.exclude_hours",
    ),
    AT_LEAST_ONE: (
        "cluster.cpu_workers", "cluster.cpus_per_gpu", "strategy.dp", "strategy.pp", "strategy.tp", "strategy.shard",
        "strategy.stages_per_rank", "model.vocab_size", "model.n_layers", "model.dim", "model.n_heads",
        "model.n_kv_heads", "model.ffn_dim", "model.image_size", "model.patch_size", "model.channels",
        "model.n_classes", "model.mlp_dim", "data.sequence_length", "data.vocab_size", "data.image_size",
        "data.channels", "data.n_classes", "data.samples", "data.validation_samples", "optim.base_batch",
        "train.steps", "train.threads", "train.loss_chunks", "batch.global_size", "batch.micro_size",
        "batch.micro_batches", "batch.logical_micro_batches", "checkpoint.keep", "telemetry.log_every",
        "launch.array_parallelism", "launch.chain", "elastic.min_nodes", "train.nonfinite_limit",
        "precision.loss_scale_growth_interval", "strategy.compression_rank",
    ),
    SHARE: ("optim.min_lr_ratio", "optim.decay_share"),
    BELOW_ONE: ("model.dropout", "optim.momentum", "strategy.compression_momentum"),
    PART: ("strategy.compression_share",),
    INSIDE: ("data.validation_share",),
}  # fmt: skip
TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")  # minutes, minutes:seconds, hours:minutes:seconds, days-hours…


def validate(config: Config, nodes: int, workers_per_node: int) -> Layout:
    """Checks ``config`` as a whole and lays it out on ``nodes`` x ``workers_per_node`` workers. Imports no torch.

    Raises:
        UserError: the first thing that is wrong.
    """
    check_values(config)
    _check_length(config)
    _check_model(config)
    check_inputs(config.data)
    layout = resolve_layout(config, nodes, workers_per_node)
    _check_tensor_parallel(config, layout)
    _check_pieces(config, layout)
    check_savers(config, layout)
    check_profiled_steps(config.telemetry.profile, layout.world_size)
    return layout


def check_values(config: Config) -> None:
    """Each value on its own: allowed words and ranges."""
    for key, allowed in ALLOWED.items():
        value = _get(config, key)
        if value is not None and value not in allowed:
            raise UserError(f"{key} is {value!r}", where=key, fix=nearest(value, allowed))
    for key, words in WORDS.items():
        value = _get(config, key)
        if isinstance(value, str) and value not in words:
            raise UserError(f"{key} is {value!r}", where=key, fix=f"a number, or {' or '.join(words)}")
    for span, keys in RANGES.items():
        for key in keys:
            value = _get(config, key)
            if isinstance(value, int | float) and not span.holds(value):
                raise UserError(f"{key} is {value}", where=key, fix=f"{key}={span.words}")
    _check_lists(config)


def _check_lists(config: Config) -> None:
    betas, split = config.optim.betas, config.strategy.pp_split
    find_kind(config.strategy.data_parallel)
    if config.strategy.schedule != AUTO:
        find_schedule(config.strategy.schedule)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"betas are {list(betas)}", where="optim.betas", fix="two numbers, 0 or more and below 1")
    numbers = isinstance(split, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in split)
    if split not in SPLITS and not numbers:
        raise UserError(
            f"pp_split is {split!r}",
            where="strategy.pp_split",
            fix=f"{', '.join(SPLITS)}, or the layers of each stage as [1,2,…]",
        )
    node_range(config.cluster)
    check_profile(config.cluster.fabric)
    parse_save_every(config.checkpoint.every)
    parse_recomputation(config.train.activation_checkpointing)
    parse_hang_timeout(config.elastic.hang_timeout_s)
    for name in ("time", "time_min"):
        limit = getattr(config.cluster, name)
        if limit is not None and not TIME.fullmatch(limit):
            raise UserError(
                f"the time limit is {limit!r}",
                where=f"cluster.{name}",
                fix="as sbatch takes it: 01:30:00, 2-12:00:00",
            )


def _check_length(config: Config) -> None:
    steps, epochs = config.train.steps, config.train.epochs
    if (steps is None) == (epochs is None):
        both = steps is not None
        raise UserError(
            f"training for {steps} steps and for {epochs} epochs" if both else "the length of training is not set",
            where="train.steps, train.epochs",
            fix="give one of them" if both else "train.steps=N or train.epochs=N",
        )


def _check_model(config: Config) -> None:
    model, data = config.model, config.data
    if isinstance(model, GPTConfig):
        _divides(model.n_heads, model.dim, "model.n_heads", "the width model.dim")
        _divides(model.n_kv_heads, model.n_heads, "model.n_kv_heads", "model.n_heads")
        if model.dim // model.n_heads % 2:
            raise UserError(
                f"rotary positions need an even head width, not {model.dim // model.n_heads}",
                where="model.dim, model.n_heads",
                fix="a dim that is an even multiple of n_heads",
            )
        _check_rope_scaling(model.rope_scaling)
        vocabulary = getattr(data, "vocab_size", None)
        if vocabulary is not None and model.vocab_size < vocabulary:
            raise UserError(
                f"the data has {vocabulary} token ids, the model knows {model.vocab_size}",
                where="model.vocab_size",
                fix=f"model.vocab_size={vocabulary} or more",
            )
    if isinstance(model, ViTConfig):
        _divides(model.n_heads, model.dim, "model.n_heads", "the width model.dim")
        _divides(model.patch_size, model.image_size, "model.patch_size", "model.image_size")
        _check_images(model, data)


def _check_rope_scaling(scaling: dict[str, float]) -> None:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if not scaling:
        return
    if set(scaling) != set(names) or min(scaling.values()) <= 0:
        raise UserError(
            f"model.rope_scaling is {dict(scaling)}",
            where="model.rope_scaling",
            fix=f"{', '.join(names)}, all above 0",
        )
    if scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise UserError(
            f"low_freq_factor is {scaling['low_freq_factor']:g}, high_freq_factor {scaling['high_freq_factor']:g}",
            where="model.rope_scaling",
            fix="a high_freq_factor above low_freq_factor; Llama 3.1 has 4 and 1",
        )


def _check_images(model: ViTConfig, data: Any) -> None:
    for name in ("image_size", "channels"):
        given, taken = getattr(data, name, None), getattr(model, name)
        if given is not None and given != taken:
            raise UserError(
                f"the data's {name} is {given}, the model's {taken}",
                where=f"model.{name}",
                fix=f"model.{name}={given}",
            )
    classes = getattr(data, "n_classes", None)
    if classes is not None and model.n_classes < classes:
        raise UserError(
            f"the data has {classes} classes, the model {model.n_classes}",
            where="model.n_classes",
            fix=f"model.n_classes={classes} or more",
        )


def _check_tensor_parallel(config: Config, layout: Layout) -> None:
    model, tp = config.model, layout.tp
    if tp == 1:
        return
    for name in ("n_heads", "n_kv_heads", "ffn_dim", "mlp_dim"):
        width = getattr(model, name, None)
        if width is not None:
            _divides(tp, width, "strategy.tp", f"model.{name}")
    if not isinstance(model, GPTConfig | ViTConfig):
        raise UserError(
            "tensor parallelism has no plan for a custom model",
            where="strategy.tp",
            fix="strategy.tp=1, or a gpt or vit",
        )
    length = getattr(config.data, "sequence_length", None)
    if isinstance(model, GPTConfig) and length is not None:
        _divides(tp, length, "strategy.tp", "data.sequence_length")


def _check_pieces(config: Config, layout: Layout) -> None:
    """Raises UserError for options that the engines cannot combine."""
    kind = layout.kind
    if config.strategy.static_graph and not kind.static_graph:
        raise UserError(
            f"the data-parallel kind {kind.name} knows no static graph",
            where="strategy.static_graph",
            fix=f"strategy.static_graph=false, or strategy.data_parallel={kinds_where(lambda row: row.static_graph)}",
        )
    if config.strategy.bucket_cap_mb == "auto" and layout.pp > 1 and kind.bucket_search == "without_pipeline":
        raise UserError(
            f"the buckets of {kind.name} cannot change once a pipeline's schedule holds the module",
            where="strategy.bucket_cap_mb",
            fix=f"strategy.data_parallel={kinds_where(lambda row: row.bucket_search == 'always')}, or "
            "strategy.bucket_cap_mb=25",
        )
    short = isinstance(config.data, SyntheticDataConfig) and config.data.samples < config.batch.global_size
    if short and config.batch.drop_last:
        raise UserError(
            f"{getattr(config.data, 'samples', 0)} samples do not fill one global batch of {config.batch.global_size}",
            where="data.samples, batch.global_size",
            fix=f"data.samples={config.batch.global_size} or more, or batch.drop_last=false",
        )


def _divides(divisor: int, number: int, key: str, what: str) -> None:
    if number % divisor:
        below = max(n for n in range(1, divisor) if number % n == 0)
        raise UserError(
            f"{key}={divisor} does not divide {what}={number}", where=key, fix=f"{key}={below}, for example"
        )


def _get(config: Config, key: str) -> Any:
    """The value at a dotted key; None where this kind of model or data has no such key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def check_savers(config: Config, layout: Layout) -> None:
    """
    Raises:
        UserError: what is asked for is not possible with this model or layout.
    """
    _check_loss_chunks(config, layout)
    _check_offload(config, layout)
    if config.optim.moments != "fp32" and config.optim.name != "adamw":
        raise UserError(
            f"{config.optim.name} has no moments that could be kept as {config.optim.moments}",
            where="optim.moments",
            fix="optim.moments=fp32, or optim=adamw",
        )


def _check_loss_chunks(config: Config, layout: Layout) -> None:
    chunks, length = config.train.loss_chunks, getattr(config.data, "sequence_length", None)
    if chunks > 1 and not isinstance(config.model, GPTConfig):
        raise UserError(
            "the loss is taken in chunks of a sequence of tokens, and this model has none",
            where="train.loss_chunks",
            fix="train.loss_chunks=1, or a gpt",
        )
    most = chunks if length is None else length // layout.tp
    if chunks > most:
        raise UserError(
            f"a rank's {most} tokens of a sequence cannot be cut into {chunks} chunks",
            where="train.loss_chunks",
            fix=f"train.loss_chunks={most} or fewer",
        )


def _check_offload(config: Config, layout: Layout) -> None:
    offload, kind = config.strategy.offload, layout.kind
    if offload == "none":
        return
    if offload == "optimizer":
        if layout.dp > 1 and offload not in kind.offloads:
            raise UserError(
                f"the data-parallel kind {kind.name} does not go with an optimizer in host memory",
                where="strategy.offload",
                fix="strategy.offload=none",
            )
        return
    others = kinds_where(lambda row: offload in row.offloads)
    fix = f"strategy.offload=optimizer, which goes with every strategy, or strategy={others}"
    if layout.dp == 1 or offload not in kind.offloads:
        raise UserError(
            f"parameters can be in host memory only where they are gathered for each step, by {others}",
            where="strategy.offload",
            fix=fix,
        )
    if layout.pp > 1 or layout.tp > 1:
        raise UserError(
            "tensor-parallel ranks and pipeline stages with tied weights exchange gradients, and gradients in host "
            "memory cannot be exchanged",
            where="strategy.offload",
            fix=fix,
        )
