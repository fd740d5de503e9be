"""Checks the full config before anything is submitted: values, sizes, input files, the layout and the user's model.

``config.schema.key`` checks the values that a single key accepts. This module does not import torch, so it builds a
user's model in another process, which compares the model with its description.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil

from hpc_train.config.evaluation import check_evaluation, sequence_lengths
from hpc_train.config.extensions import family_of, is_import_path, source_of
from hpc_train.config.import_path import check_call
from hpc_train.config.schema import Config, FabricConfig, GPTConfig, StreamDataConfig, SyntheticDataConfig
from hpc_train.config.schema.key import check_keys
from hpc_train.config.values import (
    check_divides,
    check_profiled_steps,
    check_prometheus,
    growing_nodes,
    node_range,
    parse_hang_timeout,
    parse_recomputation,
    parse_save_every,
    preflight_actions,
    runs_own_code,
    server_uri,
)
from hpc_train.errors import Mistakes, UserError, check_all
from hpc_train.layout.compatibility import OF_RUN, check_compatibility
from hpc_train.layout.float8 import check_float8, check_skip
from hpc_train.layout.layout import Layout
from hpc_train.layout.loss_chunks import check_loss_chunks
from hpc_train.layout.optimizers import check_optimizers, own_code
from hpc_train.layout.recomputation import check_budget, parse_activation_offload
from hpc_train.layout.resolve import for_nodes, resolve_layout
from hpc_train.layout.techniques import AUTO, find_kind, find_schedule
from hpc_train.layout.user_code import (
    check_built_model,
    check_own_code,
    check_own_layout,
    check_own_model,
    check_packages,
    check_targets,
    check_tried_optimizer,
    own_code_notes,
)

TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")  # minutes, minutes:seconds, hours:minutes:seconds, days-hours:…


def validate(config: Config, nodes: int, workers_per_node: int, device_bytes: float | None = None) -> Layout:
    """Checks ``config`` as a whole and returns its layout on ``nodes`` x ``workers_per_node`` workers.

    Args:
        device_bytes: the memory of the smallest GPU, for ``strategy.pp=auto`` on several nodes; None if unknown.

    Raises:
        UserError: the config is invalid. The message reports all problems with values; if there are none, all problems
            with input files, packages, the user's code and the layout; if there are none of these either, the first
            problem with the user's model or optimizer.
    """
    config = for_nodes(config, nodes)
    check_values(config)
    check_own_code(config)
    if runs_own_code(config):
        layout = resolve_layout(config, nodes, workers_per_node)
        check_own_layout(config, layout)
        return replace(layout, notes=(*layout.notes, *own_code_notes(config)))
    layout = _check_parts(config, nodes, workers_per_node, device_bytes)
    if is_import_path(config.model.kind):
        check_built_model(config)
    if own_code(config.optim) or config.optim.groups:
        check_tried_optimizer(config)
    return layout


def _check_parts(config: Config, nodes: int, workers_per_node: int, device_bytes: float | None) -> Layout:
    """Checks independent parts and returns the layout. Raises UserError with all problems."""
    family = family_of(config.model)
    source = source_of(config.data)
    mistakes = Mistakes()
    with mistakes.collected():
        _check_length(config)
    with mistakes.collected():
        if family.check is not None:
            family.check(config.model, config.data)
    with mistakes.collected():
        if source.check_inputs is not None:
            source.check_inputs(config.data)
    with mistakes.collected():
        if config.data.collate is not None:
            check_call(config.data.collate, "data.collate", positional=1, optional=("random",))
    with mistakes.collected():
        check_evaluation(config)
    layout = None
    with mistakes.collected():
        layout = resolve_layout(config, nodes, workers_per_node, device_bytes)
    with mistakes.collected():
        check_own_model(config, 1 if layout is None else layout.pp)
    for check in CHECKS_OF_LAYOUT if layout is not None else ():
        with mistakes.collected():
            check(config, layout)
    with mistakes.collected():
        _check_retention(config, 1 if layout is None else layout.dp)
    with mistakes.collected():
        check_packages(config)
    mistakes.report()
    assert layout is not None
    return layout


def checked_layout(config: Config, nodes: int, workers_per_node: int) -> Layout:
    """Returns the layout on ``nodes`` x ``workers_per_node`` workers. Raises UserError if the strategy does not fit
    these ranks, or the model, the data or another key does not support it.
    """
    layout = resolve_layout(config, nodes, workers_per_node)
    for check in CHECKS_OF_LAYOUT:
        check(config, layout)
    return layout


def check_values(config: Config) -> None:
    """Raises UserError with all keys that do not accept their values."""
    check_all(
        lambda: check_keys(config),
        # the layout refuses a value of auto that strategy=auto has not replaced
        lambda: None if config.strategy.data_parallel == AUTO else find_kind(config.strategy.data_parallel),
        lambda: None if config.strategy.schedule == AUTO else find_schedule(config.strategy.schedule),
        lambda: _check_betas(config),
        lambda: _check_pp_split(config),
        lambda: check_optimizers(config.optim, in_container=config.cluster.container.image is not None),
        lambda: check_skip(config.precision),
        lambda: node_range(config.cluster),
        lambda: growing_nodes(config),
        lambda: _check_fabric_variables(config.cluster.fabric),
        lambda: preflight_actions(config.cluster),
        lambda: check_prometheus(config.telemetry.prometheus),
        lambda: None if config.telemetry.mlflow.uri is None else server_uri(config.telemetry.mlflow),
        lambda: parse_save_every(config.checkpoint.every),
        lambda: parse_recomputation(config.train.activation_checkpointing),
        lambda: parse_activation_offload(config.train.activation_offload),
        lambda: parse_hang_timeout(config.elastic.hang_timeout_s),
        lambda: _check_time("time", config.cluster.time),
        lambda: _check_time("time_min", config.cluster.time_min),
    )


def _check_betas(config: Config) -> None:
    betas = config.optim.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise UserError(
            f"optim.betas is {list(betas)}, but must be two numbers, at least 0 and below 1",
            where="optim.betas",
            fix="optim.betas=[0.9,0.95]",
        )


def _check_pp_split(config: Config) -> None:
    split = config.strategy.pp_split
    numbers = isinstance(split, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in split)
    if not isinstance(split, str) and not numbers:
        raise UserError(
            f"strategy.pp_split is {split!r}, which is unknown",
            where="strategy.pp_split",
            fix="even, flops, measured, or the number of layers of each stage: [1,2,2]",
        )


def _check_time(name: str, limit: str | None) -> None:
    if limit is not None and not TIME.fullmatch(limit):
        raise UserError(
            f"cluster.{name} is {limit!r}, which is not a duration in the format of Slurm",
            where=f"cluster.{name}",
            fix=f"cluster.{name}=01:30:00, or 2-12:00:00 with days",
        )


def _check_length(config: Config) -> None:
    steps = config.train.steps
    epochs = config.train.epochs
    where = "train.steps, train.epochs"
    if steps is None and epochs is None:
        what = "neither train.steps nor train.epochs is set"
        raise UserError(what, where=where, fix="train.steps=N or train.epochs=N")
    if steps is not None and epochs is not None:
        what = f"train.steps is {steps} and train.epochs is {epochs}; only one may be set"
        raise UserError(what, where=where, fix="train.steps=null or train.epochs=null")
    ends = isinstance(config.data, StreamDataConfig) and not config.data.repeat
    if ends and config.data.shards > config.batch.global_size:
        raise UserError(
            f"data.shards is {config.data.shards}, but a global batch of a stream that ends must have an item of each "
            f"shard, and batch.global_size is {config.batch.global_size}",
            where="data.shards",
            fix=f"data.shards={config.batch.global_size} or fewer, or data.repeat=true",
        )


def _check_tensor_parallel(config: Config, layout: Layout) -> None:
    """Raises UserError for all sizes of the model and the data that the ranks do not divide."""
    family = family_of(config.model)
    plan = family.tensor_parallel
    tp = layout.tp
    if tp == 1 or plan is None:
        return
    sizes = {f"model.{name}": getattr(config.model, name) for name in plan.divisible}
    if plan.shards_sequence:
        sizes |= sequence_lengths(config)
    mistakes = Mistakes()
    for name, size in sizes.items():
        with mistakes.collected():
            check_divides(tp, size, "strategy.tp", name)
    words = getattr(config.model, "vocab_size", None)
    with mistakes.collected():  # all ranks except the last have the same number of words
        if family.fuses_loss(config.model) and words and ceil(words / tp) * (tp - 1) >= words:
            raise UserError(
                f"model.vocab_size is {words}, which leaves tensor-parallel ranks without words: strategy.tp is {tp}",
                where="model.vocab_size, strategy.tp",
                fix="a smaller strategy.tp, or a larger vocabulary",
            )
    mistakes.report()


def _check_context_parallel(config: Config, layout: Layout) -> None:
    """Raises UserError for all sizes of the model and the data that the ranks do not divide."""
    family = family_of(config.model)
    cp = layout.cp
    exchanging = cp // layout.ring
    if cp == 1 or family.context_heads is None:
        return
    heads, shared_heads = (getattr(config.model, key) // layout.tp for key in family.context_heads)
    queries, keys = (f"model.{key}" for key in family.context_heads)
    if layout.tp > 1:
        queries, keys = (f"the heads per tensor-parallel rank of {key}" for key in (queries, keys))
    mistakes = Mistakes()
    with mistakes.collected():
        check_divides(exchanging, heads, "strategy.cp", queries, "strategy.context=ring")
    with mistakes.collected():
        # each rank needs the same number of key-value heads, or shares a head with the same number of ranks
        if exchanging % max(1, shared_heads):
            check_divides(exchanging, max(1, shared_heads), "strategy.cp", keys, "strategy.context=ring")
    parts = cp if layout.ring == 1 else 2 * cp
    by = f"strategy.cp={cp}" if layout.ring == 1 else f"2 x strategy.cp = {parts}"
    if layout.tp > 1 and family.tensor_parallel is not None and family.tensor_parallel.shards_sequence:
        parts = layout.token_unit
        by = f"{'2 x ' if layout.ring > 1 else ''}strategy.cp x strategy.tp = {parts}"
    with mistakes.collected():
        for key, length in sequence_lengths(config).items():
            if length % parts:
                what = f"{by} does not divide {key}={length}"
                raise UserError(what, where=f"strategy.cp, {key}", fix=f"use a multiple of {parts} as {key}")
    mistakes.report()


def _check_experts(config: Config, layout: Layout) -> None:
    """Raises UserError if the expert-parallel ranks do not divide the experts, or the tensor-parallel ranks the shared
    ones."""
    model = config.model
    if isinstance(model, GPTConfig) and model.moe.experts is not None:
        check_divides(layout.ep, model.moe.experts, "strategy.ep", "model.moe.experts")
        shared_width = model.moe.shared_experts * (model.moe.expert_dim or model.ffn_dim)
        check_divides(layout.tp, shared_width, "strategy.tp", "the width of model.moe.shared_experts")


def _check_samples(config: Config, layout: Layout) -> None:
    data = config.data
    if not isinstance(data, SyntheticDataConfig) or not config.batch.drop_last:
        return
    if data.samples < config.batch.global_size:
        raise UserError(
            f"data.samples is {data.samples}, less than one global batch of {config.batch.global_size}",
            where="data.samples, batch.global_size",
            fix=f"data.samples={config.batch.global_size} or more, or batch.drop_last=false",
        )


def _check_retention(config: Config, dp: int) -> None:
    """Raises UserError if checkpoints may be removed before ``train.verify`` can prove them. The check needs both
    intervals in steps."""
    every = config.train.verify.every
    interval = parse_save_every(config.checkpoint.every).steps
    if not isinstance(every, int) or not interval or config.optim.in_backward:
        return
    keep = config.checkpoint.keep
    needed = every * (2 if dp > 1 else 1)  # replicas compute the passes of each other in every second
    if keep * interval < needed:
        raise UserError(
            f"train.verify.every={every} proves a checkpoint within {needed} steps, but checkpoint.keep={keep} with "
            f"checkpoint.every={interval} keeps the checkpoints of the last {keep * interval} steps",
            where="train.verify.every, checkpoint.keep",
            fix=f"checkpoint.keep={ceil(needed / interval)}, a larger checkpoint.every or a smaller train.verify.every",
        )


CHECKS_OF_LAYOUT: tuple[Callable[[Config, Layout], None], ...] = (
    partial(check_compatibility, OF_RUN),
    check_targets,
    _check_tensor_parallel,
    _check_context_parallel,
    _check_experts,
    _check_samples,
    check_loss_chunks,
    check_budget,
    check_float8,
    lambda config, layout: check_profiled_steps(config.telemetry.profile, layout.world_size),
)


VARIABLE = re.compile(r"(NCCL|TORCH_NCCL|GLOO|TP|FI|OFI|UCX|SHARP|MLX5|RDMAV)_[A-Z0-9_]+")


def _check_fabric_variables(fabric: FabricConfig) -> None:
    """Raises UserError for a name that no communication library reads, or a value that cannot be exported."""
    for name, value in fabric.variables.items():
        where = f"cluster.fabric.variables.{name}"
        if not VARIABLE.fullmatch(name):
            raise UserError(
                f"{name} is not a variable of NCCL, libfabric, UCX or gloo",
                where=where,
                fix=f"correct the name, or set any other variable with +cluster.env.{name}=VALUE",
            )
        if not value or not value.isprintable():
            raise UserError(f"{name} is {value!r}", where=where, fix=f"{where}=VALUE, or remove the key")
