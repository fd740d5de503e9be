"""Holds what a plan is asked for: a composed config and the keys that the user has set. It writes the commands for
chosen values."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from hydra.core.global_hydra import GlobalHydra

from hpc_train.config.arguments import STRATEGY, with_right_plus
from hpc_train.config.command_line import CommandLine, JobComposer
from hpc_train.config.compose import packaged, typed
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.resolve import SIMPLEST
from hpc_train.layout.sizes import parameter_count
from hpc_train.layout.techniques import AUTO
from hpc_train.layout.validate import checked_layout
from hpc_train.planner.candidates import Candidate, with_values
from hpc_train.planner.machine import Machine

STRATEGIES = ("dp", "zero1", "zero2", "zero3", "hsdp", "tp", "hybrid", "hybrid3d")  # the simplest first
_SCHEMA = "/schema/model/"
_RECOMPUTED = "train.activation_checkpointing"
_OF_LAYOUT = ("strategy.", "batch.")  # groups whose keys make up the layout, but for those below
_BESIDE_LAYOUT = ("strategy.offload", "strategy.compression")
_SPLIT = {"strategy.dp", *(name for name in SIMPLEST if name.startswith("strategy."))}  # what a strategy chooses


class Asked:
    """One training that is planned. Its composer must be open while a command is looked for.

    Attributes:
        kept: the config keys whose values are those of the command, with those of a strategy that it names.

    Args:
        strategy: what chooses a strategy: ``+strategy`` or ``strategy``.
        model: its name in a plan that compares models, otherwise empty.
    """

    def __init__(self, line: CommandLine, compose: JobComposer, strategy: str = "+strategy", model: str = "") -> None:
        self.line, self.model, self._compose, self._strategy = line, model, compose, strategy
        self.config: Config = typed(compose(list(line.overrides)))
        self.kept = {_key(override) for override in line.overrides}
        if "strategy" in self.kept:
            self.kept |= _SPLIT

    @property
    def parameters(self) -> int | None:
        return parameter_count(self.config.model)

    def with_models(self) -> Iterator[Asked]:
        """Yields this training with each model of ``conf/model`` that is of the same kind."""
        others = [override for override in self.line.overrides if not override.lstrip("+").startswith("model=")]
        loader = GlobalHydra.instance().config_loader()
        for name in loader.get_group_options("model"):
            if not self.line.directories and not _may_be(self.config.model.kind, name):
                continue
            try:
                found = Asked(
                    replace(self.line, overrides=(f"model={name}", *others)), self._compose, self._strategy, name
                )
            except UserError:  # a model that needs more keys, or has none of those that are set
                continue
            if found.config.model.kind == self.config.model.kind and found.parameters is not None:
                yield found

    def command(self, candidate: Candidate, machine: Machine) -> list[str]:
        """Returns the words after the user's overrides of the shortest command that trains with ``candidate``."""
        workers = candidate.devices // candidate.nodes
        values = {**candidate.values, "cluster.nodes": candidate.nodes}
        if not machine.rates.cores and workers < machine.devices_per_node:
            values["cluster.gpus_per_node"] = workers
        chosen = _without(values, self.kept)
        counts = {name: len(_different(chosen, base)) for name, base in self.with_strategies.items()}
        strategy = min(counts, key=lambda name: counts[name])
        base = self.with_strategies[strategy]
        needed = _needed(base, _different(chosen, base), candidate.layout, (candidate.nodes, workers))
        named = [f"{self._strategy}={strategy}"] if strategy else []
        return [*named, *(f"{name}={value}" for name, value in needed.items())]

    @cached_property
    def with_strategies(self) -> Mapping[str, Config]:
        """Returns the config with each strategy by its name, or as it is if the user has named one.

        The files of the package set only keys of ``strategy``, which need no composition of all files: unless an
        interpolation of the user may refer to them, or a directory of the user may hide them, they replace the values.
        """
        if "strategy" in self.kept:
            return {"": self.config}
        simple = self._strategy == "+strategy" and not self.line.directories
        if not simple or any("${" in override for override in self.line.overrides):
            words = self.line.overrides
            return {name: typed(self._compose([*words, f"{self._strategy}={name}"])) for name in STRATEGIES}
        files = {name: packaged(f"strategy/{name}").items() for name in STRATEGIES}
        values = {name: {f"strategy.{key}": value for key, value in file} for name, file in files.items()}
        return {name: with_values(self.config, _without(values[name], self.kept)) for name in STRATEGIES}


def without_auto(line: CommandLine) -> CommandLine:
    """Returns ``line`` without ``strategy=auto``, since a plan compares all strategies unless one is named."""
    kept = (text for text in line.overrides if _key(text) != "strategy" or text.partition("=")[2] != AUTO)
    return replace(line, overrides=tuple(kept))


def _may_be(kind: str, model: str) -> bool:
    """Returns whether the packaged file of ``model`` may be of ``kind``, which is the schema that it names."""
    schemas = [each for each in packaged(f"model/{model}").get("defaults", []) if str(each).startswith(_SCHEMA)]
    return not schemas or f"{_SCHEMA}{kind}@_here_" in schemas


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def strategy_key(line: CommandLine) -> str:
    """Returns ``+strategy``, or ``strategy`` if the config of an experiment or the user already chooses one."""
    if any(STRATEGY.match(override) for override in line.overrides):
        return "strategy"
    words = with_right_plus([*line.overrides, f"+strategy={STRATEGIES[0]}", *_directory(line)])
    return next(word.partition("=")[0] for word in words if STRATEGY.match(word))


def full_command(line: CommandLine, words: Collection[str]) -> str:
    return shlex.join(["python", "-m", "hpc_train", *_directory(line), *line.overrides, *words, "-m"])


def _directory(line: CommandLine) -> list[str]:
    return [] if line.config_directory is None else ["-cd", str(line.config_directory)]


def _different(values: Mapping[str, Any], base: Config) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _value(base, name) != value}


def _value(config: Config, name: str) -> Any:
    group, _, key = name.partition(".")
    value = getattr(getattr(config, group), key)
    return "none" if name == _RECOMPUTED and value == "auto" else value  # a fixed strategy does not recompute


def _needed(base: Config, values: dict[str, Any], layout: Layout, places: tuple[int, int]) -> dict[str, Any]:
    """Returns ``values`` without those that do not change the layout on ``places``, which are nodes and workers."""
    for name in [name for name in values if name.startswith(_OF_LAYOUT) and name not in _BESIDE_LAYOUT]:
        fewer = {other: value for other, value in values.items() if other != name}
        try:
            found = checked_layout(with_values(base, fewer), *places)
        except UserError:
            continue
        if replace(found, notes=layout.notes) == layout:
            values = fewer
    return values
