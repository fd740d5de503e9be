"""Derives the effective layout of one attempt from the frozen config and the allocated nodes and workers.

This module imports no torch, so the submission refuses an impossible layout before the job waits in a queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpc_train.config.schema import Config, CustomModelConfig, OptimConfig, StrategyConfig, TextDataConfig
from hpc_train.config.values import runs_own_code
from hpc_train.errors import UserError
from hpc_train.layout.compatibility import OF_LAYOUT, check_compatibility
from hpc_train.layout.layout import Layout
from hpc_train.layout.open_keys import check_chosen, for_nodes
from hpc_train.layout.pipeline_ranks import Ranks, pipeline_ranks, stages_of_rank
from hpc_train.layout.recomputation import describe_recomputation
from hpc_train.layout.schedule import choose_schedule, divide
from hpc_train.layout.techniques import (
    TREE,
    DataParallelKind,
    asked_kind,
    find_kind,
)


def resolve_layout(config: Config, nodes: int, workers_per_node: int, device_bytes: float | None = None) -> Layout:
    """Derives the layout of ``config`` on ``nodes`` x ``workers_per_node`` ranks.

    Args:
        device_bytes: the memory of the smallest GPU, for ``strategy.pp=auto`` on several nodes; None if unknown.

    Raises:
        UserError: the strategy does not fit these ranks.
    """
    config = for_nodes(config, nodes)
    check_chosen(config)
    tp = _tensor_parallel(config.strategy, workers_per_node)
    ranks = Ranks(nodes, workers_per_node, tp, _context_parallel(config.strategy, nodes * workers_per_node // tp))
    notes: list[str] = []
    if runs_own_code(config):
        return _of_own_code(config, ranks, notes)
    pp = pipeline_ranks(config, ranks, lambda candidate: _lay_out(config, ranks, candidate, []), device_bytes, notes)
    return _lay_out(config, ranks, pp, notes)


def _lay_out(config: Config, ranks: Ranks, pp: int, notes: list[str]) -> Layout:
    """Returns the layout with ``pp`` pipeline ranks.

    Raises:
        UserError: the strategy does not fit these ranks.
    """
    strategy, tp, cp = config.strategy, ranks.tp, ranks.cp
    dp = _data_parallel(strategy, ranks, pp)
    _check_use(dp * pp * cp * tp, ranks.nodes, ranks.available, notes)
    stages_per_rank = stages_of_rank(strategy) if pp > 1 else 1
    asked = asked_kind(config)
    synchronized = asked if dp * cp > 1 else None
    schedule, (micro_batches, micro_size) = choose_schedule(config, synchronized, dp, pp, stages_per_rank, notes)
    kind = _used_kind(config, asked, dp * cp, notes)
    reproducible, logical = config.train.reproducible is not None, 0
    if reproducible:
        logical, micro_batches, micro_size = divide(config, dp)
    layout = Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        shard=_shard(strategy, find_kind(asked), dp * cp, ranks.per_node // tp),
        data_parallel=TREE.name if reproducible else kind,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        micro_batches=micro_batches,
        micro_size=micro_size,
        notes=(*notes, *notices(config)),
        logical_micro_batches=logical,
        cp=cp,
    )
    check_compatibility(OF_LAYOUT, config, layout)
    chosen = describe_recomputation(config, layout)
    return layout if chosen is None else replace(layout, notes=(*layout.notes, chosen))


def _of_own_code(config: Config, ranks: Ranks, notes: list[str]) -> Layout:
    """Returns the ranks of custom code, which has no micro-batches that hpc_train knows of.

    Raises:
        UserError: the strategy does not fit these ranks.
    """
    strategy, tp, cp = config.strategy, ranks.tp, ranks.cp
    pp = strategy.pp
    if pp == "fill" and isinstance(strategy.dp, int):
        pp = ranks.columns // max(1, strategy.dp)
    if not isinstance(pp, int) or pp < 1:
        raise UserError(
            f"strategy.pp is {strategy.pp!r}, which depends on a model that custom code does not tell",
            where="strategy.pp",
            fix="strategy.pp=N",
        )
    dp = _data_parallel(strategy, ranks, pp)
    _check_use(dp * pp * cp * tp, ranks.nodes, ranks.available, notes)
    return Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        shard=_shard(strategy, find_kind(strategy.data_parallel), dp * cp, ranks.per_node // tp),
        data_parallel=strategy.data_parallel,
        schedule=strategy.schedule,
        stages_per_rank=1,
        micro_batches=0,
        micro_size=0,
        notes=tuple(notes),
        cp=cp,
    )


def _divisors(number: int) -> str:
    return " or ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


def _tensor_parallel(strategy: StrategyConfig, workers_per_node: int) -> int:
    if not isinstance(strategy.tp, int) or strategy.tp < 1 or workers_per_node % strategy.tp:
        raise UserError(
            f"strategy.tp is {strategy.tp}, which does not divide the {workers_per_node} workers of a node",
            where="strategy.tp",
            fix=f"strategy.tp={_divisors(workers_per_node)}, because tensor parallelism stays within a node",
        )
    return strategy.tp


def _context_parallel(strategy: StrategyConfig, columns: int) -> int:
    """Returns ``strategy.cp``, of which each of ``columns`` tensor-parallel groups holds one rank.

    Raises:
        UserError: it is not a number, or there are too few ranks.
    """
    if not isinstance(strategy.cp, int) or not 1 <= strategy.cp <= columns:
        raise UserError(
            f"strategy.cp is {strategy.cp!r}, but there are {columns} ranks that can share the tokens of a sample",
            where="strategy.cp",
            fix=f"a number from 1 to {columns}, or more workers (cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return strategy.cp


def _data_parallel(strategy: StrategyConfig, ranks: Ranks, pp: int) -> int:
    room = ranks.columns // pp
    if strategy.dp == "fill":
        return room
    if not isinstance(strategy.dp, int) or strategy.dp < 1:
        raise UserError(f"strategy.dp is {strategy.dp!r}", where="strategy.dp", fix="a number from 1, or fill")
    if strategy.dp > room:
        context = f" x cp {ranks.cp}" if ranks.cp > 1 else ""
        raise UserError(
            f"dp {strategy.dp} x pp {pp}{context} x tp {ranks.tp} needs {strategy.dp * pp * ranks.cp * ranks.tp} "
            f"workers, but only {ranks.available} are available",
            where="strategy.dp",
            fix="strategy.dp=fill, or more workers (cluster.nodes, cluster.gpus_per_node, cluster.cpu_workers)",
        )
    return strategy.dp


def _used_kind(config: Config, asked: str, holders: int, notes: list[str]) -> str:
    """Returns the kind that sums the gradients. Compressed gradients may need another kind than ``asked``."""
    kind = find_kind(asked)
    if holders == 1:
        return asked
    replacements = (
        (config.strategy.compression != "none", kind.compressed_as, "compress gradients"),
        (config.optim.in_backward, kind.updated_as, "update parameters inside the backward"),
    )
    for wanted, other, what in replacements:
        if wanted and other is not None and other != asked:
            notes.append(f"the data-parallel kind {other} replaces {kind.name}, which cannot {what}")
            return other
    return asked


def _check_use(world_size: int, nodes: int, available: int, notes: list[str]) -> None:
    if world_size == available:
        return
    if nodes > 1:
        raise UserError(
            f"the layout uses {world_size} of {available} workers on {nodes} nodes",
            where="strategy",
            fix="strategy.dp=fill, or fewer nodes, because idle nodes also cost GPU-hours",
        )
    notes.append(f"the layout uses {world_size} of {available} workers")


def _shard(strategy: StrategyConfig, kind: DataParallelKind, holders: int, per_node: int) -> int:
    if not kind.shards:
        return 1
    if strategy.shard == "fill":
        return holders
    shard = min(holders, max(1, per_node)) if strategy.shard == "node" else strategy.shard
    if not isinstance(shard, int) or shard < 1 or holders % shard:
        raise UserError(
            f"strategy.shard is {strategy.shard!r}, which does not divide {holders} data-parallel ranks",
            where="strategy.shard",
            fix=f"fill, node, or a divisor of {holders}",
        )
    return shard


def notices(config: Config) -> Iterator[str]:
    """Yields the notices about the settings of a run."""
    if config.train.steps is not None:
        yield from long_warmup(config.optim, config.train.steps)
    data = config.data
    if isinstance(config.model, CustomModelConfig) and isinstance(data, TextDataConfig) and data.path is None:
        yield "the data is the source of Python's standard library as bytes, because neither data nor data.path is set"


def long_warmup(optim: OptimConfig, steps: int) -> Iterator[str]:
    """Yields a notice if a run of ``steps`` steps ends during the warm-up of the learning rate."""
    if 0 < steps < optim.warmup_steps:
        yield (
            f"the learning rate never reaches optim.lr: optim.warmup_steps={optim.warmup_steps}, but the run has "
            f"{steps} steps"
        )
