"""The keys that ``strategy=auto`` leaves to the planner, and the layouts that it has frozen for other numbers of nodes.

A key is open while its value is ``auto``. The submission replaces it by the planner's choice, so a frozen config has no
open key, and agents and workers choose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.config.values import runs_own_code
from hpc_train.errors import UserError

NAME = "auto"  # of the strategy
ONLY_CHOSEN = ("tp", "data_parallel", "shard", "stages_per_rank")  # auto has no other meaning there
# what the planner starts from where a key is open
SIMPLEST: Mapping[str, Any] = {
    "strategy.tp": 1,
    "strategy.data_parallel": "ddp",
    "strategy.shard": "fill",
    "strategy.stages_per_rank": 1,
    "strategy.pp": 1,
    "strategy.schedule": "1f1b",
    "train.activation_checkpointing": "none",
}


def open_keys(config: Config) -> tuple[str, ...]:
    """Returns the dotted names of the keys that the planner chooses; none after it has chosen."""
    if config.strategy.name != NAME:
        return ()
    found = [name for name in SIMPLEST if getattr(getattr(config, _group(name)), _key(name)) == "auto"]
    batch, is_divided = config.batch, config.train.reproducible is not None  # which determines the micro-batches
    size = batch.micro_size == batch.micro_batches == "auto" and not is_divided
    return (*found, "batch.micro_size") if size else tuple(found)


def _group(name: str) -> str:
    return name.partition(".")[0]


def _key(name: str) -> str:
    return name.partition(".")[2]


def check_chosen(config: Config) -> None:
    """Raises UserError if a key of the layout is open, or ``auto`` without ``strategy=auto``."""
    left = [f"strategy.{name}" for name in ONLY_CHOSEN if getattr(config.strategy, name) == "auto"]
    if not left:
        return
    if config.strategy.name != NAME:
        raise UserError(
            f"{left[0]} is auto, which only strategy=auto chooses",
            where=left[0],
            fix=f"+strategy=auto, or {left[0]}=VALUE",
        )
    if runs_own_code(config):
        raise UserError(
            "strategy=auto cannot choose a layout for custom code, because it does not know the model",
            where="strategy, run.entry or run.command",
            fix="a strategy with a layout, such as +strategy=dp",
        )
    raise UserError(
        f"strategy=auto chooses {left[0]} when a training is submitted, but this command does not submit one",
        where="strategy",
        fix="a strategy with a layout, such as +strategy=dp; the command plan shows which layouts are fast",
    )


def for_nodes(config: Config, nodes: int) -> Config:
    """Returns ``config`` with the layout that was chosen for ``nodes`` nodes.

    Raises:
        UserError: no layout fitted this number of nodes.
    """
    others = config.strategy.for_nodes
    if str(nodes) not in others:
        return config
    chosen = others[str(nodes)]
    if chosen is None:
        raise UserError(
            f"strategy=auto found no layout for {nodes} nodes when the run was submitted",
            where="cluster.nodes, elastic.min_nodes",
            fix="other numbers of nodes",
        )
    found = with_groups(config, chosen)
    return replace(found, strategy=replace(found.strategy, for_nodes={}))


def with_groups(config: Config, groups: Mapping[str, Mapping[str, Any]]) -> Config:
    """Returns ``config`` with other values of keys, by group and name.

    Raises:
        UserError: there is no such group or key.
    """
    try:
        return replace(config, **{name: replace(getattr(config, name), **keys) for name, keys in groups.items()})
    except (AttributeError, TypeError) as error:
        where = "strategy.for_nodes"
        raise UserError(
            f"{where} holds {groups!r}: {error}", where=where, fix="{'NODES': {GROUP: {KEY: VALUE}}}"
        ) from error
