"""Handles Hydra's own settings (the ``hydra`` node): follows some of them, and refuses the others with a replacement.

The command line or a file of the user may set them. ``hydra.mode``, ``hydra.sweeper``, ``hydra.searchpath``, callbacks
and the choice of a launcher or a sweeper are followed. A setting that would have no effect is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Glob
from omegaconf import DictConfig, OmegaConf

from hpc_train.config.command_line import parsed_override
from hpc_train.config.compose import LAUNCHER, SWEEPER
from hpc_train.config.import_path import check_call
from hpc_train.config.translate import instead_of_key
from hpc_train.errors import UserError, nearest

DIRECTORY = "${hpc_train.directory:${run.root},${run.name},${run.fork}}"  # as in conf/config.yaml
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"

# a setting that has no effect: the values that set nothing, the reason, and what replaces it
WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "run.dir": ((DIRECTORY,), "run.root and run.name set the directory of a run", ""),
    "sweep.dir": ((DIRECTORY,), "run.root and run.name set the directory of a sweep", ""),
    "sweep.subdir": (
        ("${hydra.job.num}",),
        "the runs of a sweep are numbered",
        "remove it; multirun.yaml of the sweep holds the overrides",
    ),
    "job.name": (
        ("hpc_train",),
        "run.name names the run",
        "run.name=NAME, and +cluster.extra.job-name=NAME for the job",
    ),
    "job.chdir": (
        (None, False),
        "the workers run in the directory of the command, to which relative paths refer",
        "remove it; hooks get the run directory as run, scripts of run.command as $HPC_TRAIN_RUN_DIR",
    ),
    "job.env_set": ((None, {}), "cluster.env sets variables of the workers", "+cluster.env.NAME=VALUE"),
    "verbose": (
        (None, False),
        "it sets the level of Python's loggers in the process that submits, and workers are other processes",
        "remove it; call logging.basicConfig(level=...) in your module, or +cluster.env.TORCH_LOGS=... for torch",
    ),
    "output_subdir": ((None,), "config.yaml and multirun.yaml hold the config and the overrides", "remove it"),
}


def refuse_without_effect(settings: DictConfig) -> None:
    """Raises UserError for a value of the composed ``hydra`` node that would have no effect."""
    raw = OmegaConf.to_container(settings, resolve=False)
    for key, (unset, reason, replacement) in WITHOUT_EFFECT.items():
        value: Any = raw
        for name in key.split("."):
            value = value[name]
        if value not in unset:
            fix = replacement
            if key.endswith(".dir"):  # the overrides for a directory that has no interpolation
                path = Path("DIR/NAME" if "${" in value else value)
                fix = f"run.root={path.parent} run.name={path.name}"
            raise UserError(f"hydra.{key} has no effect: {reason}", where=f"hydra.{key}", fix=fix)
    if settings.launcher._target_ == LAUNCHER:
        for name in settings.launcher:
            if name != "_target_":
                key = f"hydra.launcher.{name}"
                raise UserError(f"{key} has no effect", where=key, fix=instead_of_key(key) or "remove it")


def check_callbacks(settings: DictConfig) -> None:
    """Raises UserError if the class of a callback does not exist, before Hydra builds the callbacks of a submission."""
    callbacks: Any = OmegaConf.to_container(settings.callbacks, resolve=False)
    for name, callback in callbacks.items():
        target = callback.get("_target_") if isinstance(callback, dict) else None
        if isinstance(target, str) and "${" not in target:
            check_call(target, f"hydra.callbacks.{name}._target_", complete=False)


def is_search(settings: DictConfig) -> bool:
    """Returns whether the sweeper chooses values by the results of earlier jobs, as Optuna's does."""
    return settings.sweeper._target_ not in (SWEEPER, BASIC_SWEEPER)


def swept_params(settings: DictConfig) -> list[str]:
    """Returns ``hydra.sweeper.params`` as overrides; none for a sweeper that searches, which reads them itself."""
    params = settings.sweeper.get("params")
    if is_search(settings) or params is None:
        return []
    return [f"{key}={value}" for key, value in params.items()]


def with_params(overrides: Sequence[str], params: Sequence[str]) -> list[str]:
    """Returns the ``params`` whose keys ``overrides`` do not set, followed by ``overrides``."""
    keys = {parsed_override(text).key_or_group for text in overrides}
    return [*(text for text in params if parsed_override(text).key_or_group not in keys), *overrides]


def with_listed_globs(overrides: Sequence[str], directories: Sequence[Path]) -> list[str]:
    """Returns ``overrides`` with the options that each ``GROUP=glob(PATTERN)`` matches, as ``GROUP=A,B``.
    ``directories`` are the user's own config directories. Hydra must be initialized. Raises UserError if a pattern
    matches nothing."""
    path = GlobalHydra.instance().config_loader().get_search_path()
    for directory in directories:
        path.append("hpc_train", f"file://{directory.absolute()}")
    texts = []
    for override in map(parsed_override, overrides):
        pattern = override.value()
        if not isinstance(pattern, Glob):
            texts.append(str(override.input_line))
            continue
        group = override.key_or_group
        options = ConfigLoaderImpl(path).get_group_options(group, results_filter=ObjectType.CONFIG)
        names = pattern.filter(options)
        if not names:
            what = f"{override.input_line} matches no file of conf/{group}"
            fix = nearest("", options) if options else f"{group} is not a config group"
            raise UserError(what, where=group, fix=fix)
        texts.append(f"{override.get_key_element()}={','.join(names)}")
    return texts


def has_glob(overrides: Sequence[str]) -> bool:
    return any(isinstance(override.value(), Glob) for override in map(parsed_override, overrides))
