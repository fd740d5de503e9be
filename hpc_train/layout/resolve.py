"""Derives the effective layout of one attempt from the frozen config and the allocated nodes and workers.

This module imports no torch, so the submission refuses an impossible layout before the job waits in a queue.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from hpc_train.config.schema import Config, StrategyConfig
from hpc_train.config.values import runs_own_code
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.notices import notices
from hpc_train.layout.open_keys import check_chosen, for_nodes
from hpc_train.layout.pipeline_ranks import Ranks, pipeline_ranks, stages_of_rank
from hpc_train.layout.recomputation import describe_recomputation
from hpc_train.layout.schedule import check_reproducible, choose_schedule, divide
from hpc_train.layout.techniques import (
    CARRYING,
    TREE,
    DataParallelKind,
    find_kind,
    kinds_where,
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
    asked = _asked_kind(config)
    _check_tensor_parallel(config, asked, dp * cp, tp)
    synchronized = asked if dp * cp > 1 else None
    schedule, (micro_batches, micro_size) = choose_schedule(config, synchronized, dp, pp, stages_per_rank, notes)
    kind = _used_kind(config, asked, dp * cp, tp, notes)
    reproducible, logical = config.train.reproducible is not None, 0
    if reproducible:
        check_reproducible(config, pp, tp, cp)
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


def _asked_kind(config: Config) -> str:
    """Returns the kind of the config, or the kind that replaces it under ``train.debug``."""
    kind = config.strategy.data_parallel
    return (find_kind(kind).debugged_as if config.train.debug else None) or kind


def _used_kind(config: Config, asked: str, holders: int, tp: int, notes: list[str]) -> str:
    """Returns the kind that sums the gradients. Compressed gradients may need another kind than ``asked``."""
    kind = find_kind(asked)
    if holders == 1:
        return asked
    check_compression(config, kind, tp)
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


def _check_tensor_parallel(config: Config, asked: str, holders: int, tp: int) -> None:
    if tp > 1 and holders > 1 and not find_kind(asked).tensor_parallel:
        raise UserError(
            f"strategy.data_parallel={find_kind(asked).name} cannot reduce the gradients of tensor-parallel parameters",
            where="strategy.data_parallel",
            fix=f"strategy.data_parallel={kinds_where(lambda row: row.tensor_parallel)}",
        )


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


_WHERE = "strategy.compression"


def check_compression(config: Config, kind: DataParallelKind, tp: int) -> None:
    """Raises UserError if the layout does not support ``strategy.compression``."""
    technique = config.strategy.compression
    if technique == "none":
        return
    if kind.compressed_as is None or (kind.shards and technique != "bf16"):
        _refuse_compression(technique, kind)
    if config.train.reproducible is not None:
        raise UserError(
            "train.reproducible does not support compression, whose error depends on how many ranks share the batch",
            where=f"{_WHERE}, train.reproducible",
            fix=f"{_WHERE}=none, or train.reproducible=null",
        )
    if technique in CARRYING:
        _check_carried(config, tp)


def _refuse_compression(technique: str, kind: DataParallelKind) -> NoReturn:
    sharded = (
        f"strategy.data_parallel={kind.name} scatters gradients, so no rank has a complete gradient to compress by "
        f"{technique}"
    )
    others = kinds_where(lambda row: row.compressed_as == row.name and not row.shards)
    casts = "bf16 or none" if kind.compressed_as is not None else "none"
    raise UserError(
        sharded if kind.shards else f"strategy.data_parallel={kind.name} cannot compress gradients",
        where=f"strategy.data_parallel, {_WHERE}",
        fix=f"{_WHERE}={casts}, or strategy.data_parallel={others}",
    )


def _check_carried(config: Config, tp: int) -> None:
    """Raises UserError for techniques that add the unsent part of a gradient to the next one."""
    technique = config.strategy.compression
    if tp > 1:
        raise UserError(
            f"{technique} does not support tensor parallelism, where a rank has slices of gradients whose unsent parts "
            "would not fit another layout",
            where=f"{_WHERE}, strategy.tp",
            fix=f"{_WHERE}=bf16 or none, or strategy.tp=1",
        )
    if config.precision.name == "fp16":
        raise UserError(
            f"{technique} does not support precision=fp16: the unsent part of a gradient is in units of the loss "
            "scale, which changes",
            where=f"{_WHERE}, precision",
            fix=f"precision=bf16, or {_WHERE}=fp16",
        )
