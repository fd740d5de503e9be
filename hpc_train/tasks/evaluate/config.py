"""Composes the config of an evaluation: that of the run, with the groups and keys that the command line changes.

A group that the command line chooses, such as ``data=text`` or ``+strategy=dp``, replaces the group of the run. All
other groups are those of the run, except for ``cluster``: an evaluation uses the workers of the machine or the Slurm
step that it is started on. ``key=value`` changes a key of the result, and ``~key`` deletes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, fields

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from hpc_train.config.arguments import expand, with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import PRIMARY, escaped, typed
from hpc_train.config.schema import Config
from hpc_train.errors import UserError, nearest

OF_RUN = (
    *("model", "strategy", "optim", "precision", "batch", "data", "train", "checkpoint", "elastic"),
    *("metrics", "eval_sets"),
)
# What only backward passes do, and may not fit the layout and the batch of an evaluation.
WITHOUT_BACKWARD = {
    "optim.in_backward": False,
    "train.activation_checkpointing": "none",
    "train.activation_offload": "none",
    "train.cuda_graphs": False,
    "train.reproducible": None,
    "precision.weights": "fp32",
}
TRAINING_ONLY = re.compile(r"[+~]*(?:(?:optim|checkpoint|hooks|launch)[=.]|train\.(?:steps|epochs)=)")


def evaluation_config(run: Config, arguments: Sequence[str]) -> Config:
    """Returns the config under which a checkpoint of ``run`` is evaluated.

    Args:
        arguments: overrides, and Hydra's ``-cd``.

    Raises:
        UserError: the arguments are invalid, describe a sweep, or choose another model.
        hydra.errors.HydraException, OmegaConfBaseException: an unknown group, option or key, or a wrong type.
    """
    line = CommandLine.parse(with_right_plus(arguments))
    _check(line)
    parsed = OverridesParser.create().parse_overrides(list(line.overrides))
    choices = [each for each in parsed if "." not in each.key_or_group]
    with line.composer() as compose:
        node = compose([each.input_line or "" for each in choices])
    _check_groups(choices)
    changed = set(map(_group, choices))
    kept = [group for group in OF_RUN if group not in changed]
    node = _with_groups(node, run, kept)
    for key, value in WITHOUT_BACKWARD.items():
        OmegaConf.update(node, key, value)
    for each in parsed:
        if "." in each.key_or_group:
            _apply(node, each)
    return typed(node)


def _check(line: CommandLine) -> None:
    if line.multirun or len(expand(line.overrides)) > 1:
        raise UserError(
            "one checkpoint is used under one config, but the overrides describe a sweep",
            where="the command line",
            fix="give each key one value and drop -m",
        )
    if (line.config_name, line.config_path) != (PRIMARY, None):
        raise UserError(
            "another primary config has no effect: the settings are those of the run",
            where="-cn, -cp",
            fix="give the settings that differ as overrides, e.g. precision=bf16",
        )
    changed = [each for each in line.overrides if each.lstrip("+~").partition("=")[0].partition(".")[0] == "model"]
    if changed:
        raise UserError(
            f"{changed[0]} changes the model, but a checkpoint fits only the model that was trained",
            where="the command line",
            fix="leave it out; the model is that of the run",
        )
    unused = [each for each in line.overrides if TRAINING_ONLY.match(each)]
    if unused:
        raise UserError(
            f"{unused[0]} has no effect: it is a setting of the training, and the checkpoint is trained",
            where="the command line",
            fix="leave it out; data, strategy, batch and precision can be changed",
        )


def _with_groups(node: DictConfig, run: Config, groups: Sequence[str]) -> DictConfig:
    """Returns ``node`` with the ``groups`` of ``run``, as plain values that ``typed`` converts."""
    values = OmegaConf.to_container(node)
    assert isinstance(values, dict)
    of_run = asdict(run)
    return OmegaConf.create(values | {group: escaped(of_run[group]) for group in groups})


def _group(choice: Override) -> str:
    """Returns the top-level key that a choice of a group fills: ``eval_sets`` for ``+data@eval_sets.a=text``."""
    return re.split(r"[./]", choice.package or choice.key_or_group)[0]


def _check_groups(choices: Sequence[Override]) -> None:
    """Raises UserError for a choice whose file sets keys of other groups, such as an experiment.

    The groups of the run would replace them.
    """
    known = {each.name for each in fields(Config)} | {"hydra"}
    for each in choices:
        if _group(each) not in known:
            raise UserError(
                f"{each.input_line} has no effect: {_group(each)} is no group of the config, whose groups are those of "
                "the run",
                where="the command line",
                fix="give the settings of that file themselves, e.g. precision=bf16 batch.micro_size=2",
            )


def _apply(node: DictConfig, override: Override) -> None:
    """Deletes a key, or sets one that exists or that a ``+`` adds.

    Raises:
        UserError: the config has no such key, or a deletion names another value.
    """
    key, value = override.key_or_group, override.value()
    new = bool(override.is_add() or override.is_force_add())
    found = OmegaConf.select(node, key, default=node)
    if not new and found is node:
        known = sorted(map(str, node.get(key.partition(".")[0], node)))
        raise UserError(f"there is no key {key}", where="the command line", fix=nearest(key.rpartition(".")[2], known))
    if not override.is_delete():
        OmegaConf.update(node, key, value, merge=True, force_add=new)
        return
    if value not in (None, found):
        raise UserError(f"{key} is {found}, not {value}", where="the command line", fix=f"~{key}")
    parent, _, name = key.rpartition(".")
    del OmegaConf.select(node, parent)[name]
