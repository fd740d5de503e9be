"""Separates the command line into options and overrides with Hydra's own parser, and composes its jobs."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.compose import WITH_STRATEGY, initialized
from hpc_train.config.conf_files import PRIMARY
from hpc_train.config.run_path import relative
from hpc_train.config.schema import Config
from hpc_train.config.translate import meant
from hpc_train.config.values import refuse_other_encoding
from hpc_train.errors import UserError


@dataclass(frozen=True)
class CommandLine:
    """Holds the command line, which Hydra's own parser has separated into options and overrides.

    Attributes:
        runs: False if the command only shows something: --help, --cfg, --info or completion.
        config_directory: the value of ``-cd``. ``config_path`` holds the value of ``-cp``, ``config_name`` the value of
            ``-cn``.
        overrides_strategy: ``with_right_plus`` has found a file that overrides ``strategy`` in the Defaults List.
        package: the value of ``-p``: the key, or table of keys, that ``--cfg`` shows.
    """

    overrides: tuple[str, ...]
    multirun: bool
    runs: bool
    config_directory: Path | None
    config_path: str | None
    config_name: str
    overrides_strategy: bool = False
    package: str | None = None

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> CommandLine:
        """Parses ``arguments``. Raises UserError if an option is unknown or misses its value, or an override has no
        key.
        """
        for argument in arguments:
            key, _, value = argument.partition("=")
            refuse_other_encoding(key if value else "the command line", value or key)
        parser = get_args_parser()
        setattr(parser, "error", _refuse)  # noqa: B010 - Hydra's own prints its usage, which hides those of hpc_train
        args = parser.parse_intermixed_args(list(arguments))
        for override in args.overrides:
            if not override.strip() or override.lstrip("+~").startswith("="):
                fix = "KEY=VALUE without spaces around =; a shell variable may be unset"
                what = f"the argument {override!r} names no config key"
                raise UserError(what, where="the command line", fix=fix)
        if args.resolve and not (args.cfg or args.help):
            raise UserError("--resolve shows nothing by itself", where="--resolve", fix="--cfg job --resolve")
        if args.package and not args.cfg:
            raise UserError(
                f"--package shows nothing by itself, and this command would train with -p {args.package}",
                where="--package",
                fix=f"--cfg job --package {args.package}",
            )
        if args.experimental_rerun:
            what = "--experimental-rerun reads a config.pickle, which runs of hpc_train do not have"
            raise UserError(what, where="--experimental-rerun", fix="python -m hpc_train resume RUN")
        shows = args.help or args.hydra_help or args.cfg or args.info or args.shell_completion
        return cls(
            overrides=tuple(override for override in args.overrides if override != WITH_STRATEGY),
            multirun=bool(args.multirun),
            runs=not shows,
            config_directory=Path(args.config_dir).absolute() if args.config_dir else None,
            config_path=args.config_path,
            config_name=args.config_name or PRIMARY,
            overrides_strategy=WITH_STRATEGY in args.overrides,
            package=args.package,
        )

    def initialized(self) -> AbstractContextManager[None]:
        """Initializes Hydra's compose API with the directories in which Hydra searches a primary config."""
        return initialized(self.primary_directory, self.config_directory if self.config_name != PRIMARY else None)

    @property
    def options(self) -> tuple[str, ...]:
        """Returns the options that choose files, with paths relative to the working directory if they are below it."""
        paths = {"-cd": self.config_directory, "-cp": self.primary_directory}
        words = [word for option, path in paths.items() if path is not None for word in (option, relative(path))]
        if self.config_name != PRIMARY:
            words += ["-cn", self.config_name]
        return tuple(words)

    @property
    def primary_directory(self) -> Path | None:
        return Path(self.config_path).absolute() if self.config_path else None

    @property
    def directories(self) -> list[Path]:
        """Returns the directories of the user's config groups, in the order in which Hydra searches them."""
        given = [_search_directories(override) for override in self.overrides if is_search_path(override)]
        listed = [Path(part.removeprefix("file://")) for parts in given for part in parts]
        directories = (self.primary_directory, self.config_directory)
        return [*(directory for directory in directories if directory is not None), *listed]

    @contextmanager
    def composer(self) -> Iterator[JobComposer]:
        """Yields a composer for the jobs of this command line. It writes nothing."""
        schema = [WITH_STRATEGY] if self.overrides_strategy else []
        with self.initialized():

            def compose(overrides: list[str]) -> DictConfig:
                others = [override for override in overrides if not is_search_path(override)]
                return hydra.compose(self.config_name, [*self.search_path, *schema, *others])

            yield JobComposer(compose)

    @property
    def search_path(self) -> list[str]:
        """Returns the ``-cd`` directory as an override, since the compose API has no such option."""
        given = [override for override in self.overrides if is_search_path(override)]
        if self.config_directory is None:
            return given
        if not self.config_directory.is_dir():
            raise UserError(
                f"{self.config_directory} is a file"
                if self.config_directory.exists()
                else f"the directory {self.config_directory} does not exist",
                where="--config-dir",
                fix="-cd DIR, with an existing directory",
            )
        listed = [part for item in given for part in _search_directories(item)]
        return [f"hydra.searchpath=[{','.join([f'file://{self.config_directory}', *listed])}]"]


def _refuse(message: str) -> NoReturn:
    fix = "`python -m hpc_train help` and --hydra-help list the options"
    if match := re.match(r"unrecognized arguments: -+(\w[\w.-]*)(?:=(\S+))?(?:\s|$)", message):
        name = match[1]
        value = match[2] or "VALUE"
        known = "." in name or hasattr(Config(), name)
        override = f"{name}={value}" if known else meant(name, value)
        if override == "launch.dry_run=VALUE":
            override = "launch.dry_run=true"
        if override:
            fix = f"{override}; an override has no dashes before its key"
    raise UserError(message, where="the command line", fix=fix)


def is_search_path(override: str) -> bool:
    return override.lstrip("+").startswith("hydra.searchpath=")


def _search_directories(override: str) -> list[str]:
    value = parsed_override(override).value()
    return [str(part) for part in value] if isinstance(value, list) else [str(value)]


@dataclass
class JobComposer:
    """Composes the jobs of a sweep. Hydra, which takes 70 ms, composes each combination of groups once; the values of
    the other overrides are merged into a copy. ``compose`` composes one job with Hydra."""

    compose: Callable[[list[str]], DictConfig]
    # pickled, because a deep copy takes five times as long
    _composed: dict[tuple[str, ...], bytes] = field(default_factory=dict)

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """Returns the composed config of one job. Raises hydra.errors.HydraException or OmegaConfBaseException for an
        unknown group, option or key, or a wrong type."""
        parsed = [parsed_override(text) for text in overrides]
        choices = [override for override in parsed if is_choice(override)]
        values = [override for override in parsed if not is_choice(override)]
        if not all(_sets_key(override) for override in values):
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


@lru_cache(maxsize=4096)
def parsed_override(text: str) -> Override:
    """Parses one override; cached, because the jobs of a sweep share most of theirs."""
    (parsed,) = OverridesParser.create().parse_overrides([text])
    return parsed


def is_choice(override: Override) -> bool:
    """Returns whether only Hydra can apply the override: ``group=option`` or one of Hydra's own settings."""
    key = override.key_or_group
    return key.startswith("hydra.") or ("." not in key and not isinstance(override.value(), dict))


def _sets_key(override: Override) -> bool:
    """Returns whether the override is ``key=value`` for a key below a group. The order of other overrides matters."""
    adds = override.is_add() or override.is_force_add()
    return "." in override.key_or_group and not adds and not override.is_delete()
