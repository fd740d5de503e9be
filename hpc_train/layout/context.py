"""Checks whether a layout supports context parallelism (``strategy.cp``). This module imports no torch."""

from __future__ import annotations

from functools import partial

from hpc_train.config.description_file import is_import_path
from hpc_train.config.evaluation import sequence_lengths
from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config
from hpc_train.config.values import check_divides
from hpc_train.errors import UserError, check_all
from hpc_train.layout.layout import Layout
from hpc_train.layout.techniques import KINDS


def check_context_parallel(config: Config, layout: Layout) -> None:
    """Raises UserError if the model or another key does not support ``strategy.cp``, or for all sizes that the ranks
    do not divide."""
    if layout.cp == 1:
        return
    keys = family_of(config.model).context_heads
    if keys is None:
        raise UserError(
            f"model kind {config.model.kind} does not support context parallelism, because nothing tells how its "
            "attention could exchange heads for tokens",
            where="strategy.cp",
            fix="strategy.cp=1, or model=gpt_tiny or another gpt",
        )
    heads, shared = (getattr(config.model, key) for key in keys)
    check_all(
        partial(_check_kind, layout),
        partial(_check_heads, layout, heads, keys[0]),
        partial(_check_shared_heads, layout, shared, keys[1]),
        partial(_check_length, config, layout),
    )


def _check_kind(layout: Layout) -> None:
    """A kind of a user's package may sum gradients over ``dp``, where ``dp_cp`` is needed."""
    if is_import_path(layout.data_parallel):
        raise UserError(
            f"strategy.data_parallel={layout.data_parallel} is not known to sum gradients over context-parallel ranks",
            where="strategy.data_parallel, strategy.cp",
            fix=f"strategy.data_parallel={' or '.join(KINDS)}, or strategy.cp=1",
        )


def _check_heads(layout: Layout, heads: int, key: str) -> None:
    check_divides(layout.cp, heads // layout.tp, "strategy.cp", f"{_per_rank(layout)}model.{key}")


def _check_shared_heads(layout: Layout, heads: int, key: str) -> None:
    """Each rank needs equally many heads of keys and values, or one that it shares with equally many ranks."""
    of_rank = max(1, heads // layout.tp)
    if layout.cp % of_rank:
        check_divides(layout.cp, of_rank, "strategy.cp", f"{_per_rank(layout)}model.{key}")


def _per_rank(layout: Layout) -> str:
    return "the heads per tensor-parallel rank of " if layout.tp > 1 else ""


def _check_length(config: Config, layout: Layout) -> None:
    split = family_of(config.model).tensor_parallel
    shards = layout.tp if split is not None and split.shards_sequence else 1
    by = f"strategy.cp x strategy.tp = {layout.cp * shards}" if shards > 1 else f"strategy.cp={layout.cp}"
    for key, length in sequence_lengths(config).items():
        if length % (layout.cp * shards):
            raise UserError(
                f"{by} does not divide {key}={length}",
                where=f"strategy.cp, {key}",
                fix=f"use a multiple of {layout.cp * shards} as {key}",
            )
