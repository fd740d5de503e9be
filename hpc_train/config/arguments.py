"""Parses the command line before Hydra does, and composes the configs of a sweep.

``strategy`` is not in the Defaults List, so Hydra requires ``+strategy=dp``; with an experiment that chooses a strategy
it requires ``strategy=dp``. This module accepts both. Composing a config takes about 70 ms and most sweeps vary values
only, so each combination of groups is composed once and values are merged into a copy.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.compose import PRIMARY, initialized
from hpc_train.config.secrets import refuse_secret_arguments
from hpc_train.errors import UserError

STRATEGY = re.compile(r"\+{0,2}strategy=(?![{\[])")
EXPERIMENT = re.compile(r"\+{0,2}experiment=")
ONE_VALUE = (
    "run.name", "run.root", "run.fork", "run.group", "run.snapshot",
    "launch.dry_run", "launch.detach", "launch.array_parallelism",
)  # fmt: skip


@dataclass(frozen=True)
class CommandLine:
    """The command line, which Hydra's own parser has separated into options and overrides.

    Attributes:
        runs: False if the command only shows something: --help, --cfg, --info or completion.
        config_directory: the value of ``-cd``; ``config_path`` is that of ``-cp``, ``config_name`` that of ``-cn``.
    """

    overrides: tuple[str, ...]
    multirun: bool
    runs: bool
    config_directory: Path | None
    config_path: str | None
    config_name: str

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> CommandLine:
        """Parses ``arguments``. An unknown option ends the process, as in Hydra."""
        args = get_args_parser().parse_intermixed_args(list(arguments))
        shows = args.help or args.hydra_help or args.cfg or args.info or args.shell_completion
        return cls(
            overrides=tuple(args.overrides),
            multirun=bool(args.multirun),
            runs=not shows,
            config_directory=Path(args.config_dir).absolute() if args.config_dir else None,
            config_path=args.config_path,
            config_name=args.config_name or PRIMARY,
        )

    @property
    def primary_directory(self) -> Path | None:
        return Path(self.config_path).absolute() if self.config_path else None

    @property
    def directories(self) -> list[Path]:
        """Returns the directories of the user's own config groups, in the order in which Hydra searches them."""
        given = [_search_directories(override) for override in self.overrides if _is_search_path(override)]
        listed = [Path(part.removeprefix("file://")) for parts in given for part in parts]
        own = (self.primary_directory, self.config_directory)
        return [*(directory for directory in own if directory is not None), *listed]

    @contextmanager
    def composer(self) -> Iterator[JobComposer]:
        """Yields a composer for the jobs of this command line. It writes nothing."""
        with initialized(self.primary_directory):

            def compose(overrides: list[str]) -> DictConfig:
                others = [override for override in overrides if not _is_search_path(override)]
                return hydra.compose(self.config_name, [*self.search_path, *others])

            yield JobComposer(compose)

    @property
    def search_path(self) -> list[str]:
        """Returns the ``-cd`` directory as an override, since the compose API has no such option."""
        given = [override for override in self.overrides if _is_search_path(override)]
        if self.config_directory is None:
            return given
        if not self.config_directory.is_dir():
            raise UserError(
                f"the directory {self.config_directory} does not exist",
                where="--config-dir",
                fix="-cd DIR, with an existing directory",
            )
        listed = [part for item in given for part in _search_directories(item)]
        return [f"hydra.searchpath=[{','.join([f'file://{self.config_directory}', *listed])}]"]


def with_right_plus(arguments: Sequence[str]) -> list[str]:
    """Returns ``arguments`` with the plus signs that Hydra requires before ``strategy=`` and ``experiment=``.

    Overrides come first, because Hydra's own parser does not accept overrides on both sides of an option.

    Raises:
        UserError: the command line contains a secret, sweeps a key that has one value for all jobs, or sweeps
            experiments of which only some choose a strategy.
    """
    refuse_secret_arguments(arguments)
    line = CommandLine.parse(arguments)
    _refuse_sweeps(line.overrides)
    overrides = [EXPERIMENT.sub("experiment=", override, count=1) for override in line.overrides]
    options = _without(arguments, line.overrides)
    if any(STRATEGY.match(override) for override in overrides):
        plus = "" if _chosen_already(replace(line, overrides=tuple(overrides))) else "+"
        overrides = [STRATEGY.sub(f"{plus}strategy=", override, count=1) for override in overrides]
    return [*overrides, *options]


def _without(arguments: Sequence[str], taken: Sequence[str]) -> list[str]:
    left = list(arguments)
    for argument in reversed(taken):
        # removes the last one, because an equal text before it is the value of an option
        del left[len(left) - 1 - left[::-1].index(argument)]
    return left


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of each job of a sweep: every combination of the values that are listed with commas.

    Raises:
        UserError: the sweep requires an optimizing sweeper.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.errors import HydraException

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    if not any(override.is_sweep_override() for override in parsed):
        return [list(overrides)]
    try:
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        raise UserError(str(error), where="the command line", fix="values with commas: optim.lr=1e-3,3e-4") from error
    return jobs


def wants_dry_run(overrides: Sequence[str]) -> bool:
    """Returns whether the last override of ``launch.dry_run`` is true."""
    values = [override.split("=", 1)[1] for override in overrides if override.lstrip("+").startswith("launch.dry_run=")]
    return bool(values) and values[-1].lower() in ("true", "1", "yes", "on")


def _refuse_sweeps(overrides: Sequence[str]) -> None:
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.key_or_group in ONE_VALUE and override.is_sweep_override():
            raise UserError(
                f"{override.input_line} lists several values, but all jobs of a sweep share one value of this key",
                where=override.key_or_group,
                fix=f"{override.key_or_group}=VALUE; in a sweep run.name names the parent directory of the jobs",
            )


def _chosen_already(line: CommandLine) -> bool:
    """Returns whether an experiment or the user's primary config adds ``strategy`` to the Defaults List."""
    experiments = [override for override in line.overrides if EXPERIMENT.match(override)]
    own = line.config_path is not None or line.config_name != PRIMARY
    if not experiments and not own:
        return False
    with initialized(line.primary_directory):
        answers = {_chooses(line, choice) for choice in expand(experiments)}
    if len(answers) > 1:
        raise UserError(
            "only some of the experiments of this sweep choose a strategy",
            where="experiment, strategy",
            fix="one sweep over the experiments that choose a strategy, and one over the others",
        )
    return answers.pop()


def _chooses(line: CommandLine, experiment: Sequence[str]) -> bool:
    found = hydra.compose(line.config_name, [*line.search_path, *experiment], return_hydra_config=True)
    return OmegaConf.select(found, "hydra.runtime.choices.strategy") is not None


def _is_search_path(override: str) -> bool:
    return override.lstrip("+").startswith("hydra.searchpath=")


def _search_directories(override: str) -> list[str]:
    parsed: Override = OverridesParser.create().parse_override(override)
    value = parsed.value()
    return [str(part) for part in value] if isinstance(value, list) else [str(value)]


@dataclass
class JobComposer:
    """Composes jobs from their overrides.

    Attributes:
        compose: composes one job with Hydra, which takes about 70 ms.
    """

    compose: Callable[[list[str]], DictConfig]
    _composed: dict[tuple[str, ...], bytes] = field(
        default_factory=dict
    )  # pickled: a deep copy takes five times as long

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """Returns the composed config of one job.

        Raises:
            hydra.errors.HydraException, OmegaConfBaseException: an unknown group, option or key, or a wrong type.
        """
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        choices = [override for override in parsed if _is_choice(override)]
        values = [override for override in parsed if not _is_choice(override)]
        if not all(_is_plain(override) for override in values):
            return self.compose(list(overrides))
        key = tuple(override.input_line or "" for override in choices)
        if key not in self._composed:
            self._composed[key] = pickle.dumps(self.compose(list(key)))
        config: DictConfig = pickle.loads(self._composed[key])
        try:
            for override in values:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            return self.compose(list(overrides))  # raises Hydra's own error
        return config


def _is_choice(override: Override) -> bool:
    """Returns whether only Hydra can apply the override: ``group=option`` or one of Hydra's own settings."""
    key = override.key_or_group
    return key.startswith("hydra.") or ("." not in key and not isinstance(override.value(), dict))


def _is_plain(override: Override) -> bool:
    """Returns whether the override is ``key=value`` for a key below a group. The order of other overrides matters."""
    changes = not (override.is_add() or override.is_force_add() or override.is_delete())
    return changes and "." in override.key_or_group


def override_value(value: Any) -> str:
    """Returns a number, a text, or a list or dict of them as the value of an override, in Hydra's grammar.

    Raises:
        UserError: the value is of another type.
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", "\\'")
        return f"'{escaped}'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{override_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(override_value, value))}]"
    raise UserError(f"{value!r} cannot be in a config", where="args", fix="numbers, text, and lists and dicts of them")
