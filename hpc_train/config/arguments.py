"""Parses the command line before Hydra does, and lists the jobs of a sweep.

``strategy`` is not in the Defaults List, so Hydra requires ``+strategy=dp``; with an experiment that chooses a strategy
it requires ``strategy=dp``. This module accepts both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import PRIMARY, WITH_STRATEGY, initialized
from hpc_train.config.hydra_settings import (
    check_callbacks,
    has_glob,
    is_multirun,
    is_search,
    refuse_without_effect,
    swept_params,
    with_listed_globs,
    with_params,
)
from hpc_train.config.jobs import is_choice
from hpc_train.config.own_files import check_files, refuse_unreadable_files, with_file
from hpc_train.config.secrets import refuse_secret_arguments
from hpc_train.config.translate import translate
from hpc_train.errors import UserError, UserErrors

STRATEGY = re.compile(r"\+{0,2}strategy=(?![{\[])")
OVERRIDES_STRATEGY = re.compile(  # the errors of Hydra 1.3 and 1.4
    r"Could not override 'strategy'\. No match in the defaults list|No earlier Group Default for 'strategy' exists"
)
EXPERIMENT = re.compile(r"\+{0,2}experiment=")
ONE_VALUE = (
    "run.name", "run.root", "run.fork", "run.group", "run.snapshot",
    "launch.dry_run", "launch.detach", "launch.array_parallelism",
)  # fmt: skip
# keys whose value is a list of Slurm with commas, of which a sweep has no use: cluster.exclude=n1,n2
SLURM_LISTS = re.compile(
    r"""(\+{0,2}cluster\.(?:exclude|nodelist|dependency|extra\.(?:licenses|mail-type))=)([^'"{$][^'"]*)"""
)
SWEPT_BY_NAME = re.compile(r"(choice|range|interval|glob|tag|shuffle|sort)\(")


def with_right_plus(arguments: Sequence[str]) -> list[str]:
    """Returns ``arguments`` with the plus signs that Hydra requires before ``strategy=`` and ``experiment=``.

    Lists of Slurm such as ``cluster.exclude=n1,n[3-4]`` are quoted, so that they are one value and not a sweep.
    Settings of Hydra are applied as well: ``hydra.sweeper.params`` become overrides, ``hydra.mode=MULTIRUN`` becomes
    ``-m``, and ``glob()`` becomes the options that it matches.
    Overrides come first, because Hydra's own parser does not accept overrides on both sides of an option.

    Raises:
        UserError: the command line contains a secret, sweeps a key that has one value for all jobs, sweeps experiments
            of which only some choose a strategy, or sets a key of Hydra that has no effect.
    """
    refuse_secret_arguments(arguments)
    arguments = [_with_quoted_list(argument) for argument in arguments if argument != WITH_STRATEGY]
    line = CommandLine.parse(arguments)
    refuse_unreadable_files(line)
    options = _without(arguments, line.overrides)
    line = replace(line, overrides=tuple(EXPERIMENT.sub("experiment=", text, count=1) for text in line.overrides))
    line = _without_globs(line)
    chosen = _chosen(line)
    schema = [WITH_STRATEGY] if chosen.overrides_strategy else []
    multirun = line.multirun or chosen.multirun
    if multirun:
        line = _without_globs(replace(line, overrides=tuple(with_params(line.overrides, chosen.params))))
        options += ["--multirun"] if line.runs and not line.multirun else []
    _refuse_sweeps(line.overrides)
    plus = "" if chosen.strategy else "+"
    return [*(STRATEGY.sub(f"{plus}strategy=", text, count=1) for text in line.overrides), *schema, *options]


def _without_globs(line: CommandLine) -> CommandLine:
    if not has_glob(line.overrides):
        return line
    with initialized(line.primary_directory):
        return replace(line, overrides=tuple(with_listed_globs(line.overrides, line.directories)))


def _with_quoted_list(argument: str) -> str:
    found = SLURM_LISTS.fullmatch(argument)
    if found is None or not re.search(r"[,\[]", found[2]) or SWEPT_BY_NAME.match(found[2]):
        return argument
    return f"{found[1]}'{found[2]}'"


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

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    if not any(override.is_sweep_override() for override in parsed):
        return [list(overrides)]
    try:
        (jobs,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException as error:
        fix = "values with commas: optim.lr=1e-3,3e-4; interval() needs a sweeper that searches: hydra/sweeper=optuna"
        raise UserError(str(error), where="the command line", fix=fix) from error
    if not jobs:
        raise UserError("the sweep has no job: a range is empty", where="the command line", fix="range(FROM,TO)")
    return jobs


def first_values(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides of one possible job of a search: the first value of each sweep or interval."""
    return [_first_value(override) for override in OverridesParser.create().parse_overrides(list(overrides))]


def _first_value(override: Override) -> str:
    value = override.value()
    if isinstance(value, IntervalSweep):
        return f"{override.get_key_element()}={value.start}"
    if override.is_sweep_override():
        return f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
    return str(override.input_line)


def refuse_search(line: CommandLine, what: str) -> None:
    """Raises UserError if the jobs of ``line`` are known only during a search; ``what`` needs them."""
    if searches(line):
        message = f"{what} needs all jobs in advance, but this sweeper chooses values by the results of earlier jobs"
        raise UserError(message, where="hydra/sweeper", fix="hydra/sweeper=hpc_train and values with commas")


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


@dataclass(frozen=True)
class _Chosen:
    """Holds what the chosen files and the settings of Hydra on the command line decide.

    Attributes:
        strategy: a file adds ``strategy`` to the Defaults List, or overrides it.
        overrides_strategy: a file overrides ``strategy``.
        params: ``hydra.sweeper.params`` as overrides.
        searches: the sweeper chooses values by the results of earlier jobs.
    """

    strategy: bool = False
    overrides_strategy: bool = False
    multirun: bool = False
    params: tuple[str, ...] = ()
    searches: bool = False


def searches(line: CommandLine) -> bool:
    """Returns whether the sweeper of ``line`` chooses values by the results of earlier jobs."""
    return _chosen(line).searches


def _chosen(line: CommandLine) -> _Chosen:
    """Composes the choices of groups, for each of the swept experiments, if they can decide anything."""
    parsed = OverridesParser.create().parse_overrides(list(line.overrides))
    experiments = [override for override in parsed if override.key_or_group == "experiment"]
    has_strategy = _names_strategy(line.overrides)
    own = line.directories or line.config_name != PRIMARY
    if not own and not (experiments and has_strategy) and not any(map(_is_of_hydra, parsed)):
        return _Chosen()
    listed = [str(override.input_line) for override in experiments]
    others = [str(override.input_line) for override in parsed if _is_fixed_choice(override)]
    with line.initialized():
        found = {_choice(line, experiment, others) for experiment in expand(listed)}
    # if no override chooses a strategy, it does not matter which experiments do
    if not has_strategy and not any(_names_strategy(choice.params) for choice in found):
        found = {choice if choice.overrides_strategy else replace(choice, strategy=False) for choice in found}
    if len(found) > 1:
        raise UserError(
            "the experiments of this sweep differ in how they choose a strategy, or in Hydra's sweeper or mode",
            where="experiment, strategy",
            fix="one sweep for each kind of experiment; or let all of them choose a strategy with `- /strategy: NAME`",
        )
    return found.pop()


def _is_of_hydra(override: Override) -> bool:
    return override.is_hydra_override() and override.key_or_group != "hydra.searchpath"


def _is_fixed_choice(override: Override) -> bool:
    """Returns whether the override may decide Hydra's settings: one option of a group, or a setting of Hydra."""
    if override.is_sweep_override() or override.key_or_group in ("strategy", "experiment", "hydra.searchpath"):
        return False
    return _is_of_hydra(override) or is_choice(override)


def _choice(line: CommandLine, experiment: Sequence[str], others: Sequence[str]) -> _Chosen:
    """Returns what the command line chooses together with one choice of experiments.

    Raises:
        UserError: a setting of Hydra has no effect.
    """
    try:
        found = _with_hydra(line, [*others, *experiment])
    except (HydraException, OmegaConfBaseException) as error:
        if OVERRIDES_STRATEGY.search(str(error)):
            found = _with_hydra(line, [WITH_STRATEGY, *others, *experiment])
            return replace(_decided(found), strategy=True, overrides_strategy=True)
        try:
            found = _with_hydra(line, experiment)
        except (HydraException, OmegaConfBaseException):
            if _names_strategy(line.overrides):
                raise
            return _Chosen()  # the composition of the job reports what is wrong, and the file
    return _decided(found)


def _names_strategy(overrides: Sequence[str]) -> bool:
    return any(STRATEGY.match(override) for override in overrides)


def _decided(found: DictConfig) -> _Chosen:
    refuse_without_effect(found.hydra)
    check_callbacks(found.hydra)
    return _Chosen(
        strategy=OmegaConf.select(found, "hydra.runtime.choices.strategy") is not None,
        multirun=is_multirun(found.hydra),
        params=tuple(swept_params(found.hydra)),
        searches=is_search(found.hydra),
    )


def _with_hydra(line: CommandLine, overrides: Sequence[str]) -> DictConfig:
    return hydra.compose(line.config_name, [*line.search_path, *overrides], return_hydra_config=True)


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


MOST = 50  # overrides, each of which takes up to 0.2 s


@contextmanager
def own_files_checked(line: CommandLine) -> Iterator[None]:
    """Checks the chosen files, then adds the file to the user's mistakes that the body raises.

    An error of Hydra is replaced by all mistakes of the command line.

    Raises:
        UserError: a file is not valid YAML, or has a value of the wrong kind.
    """
    check_files(line)
    try:
        yield
    except Exception as error:
        mistake = translate(error)
        if mistake is not None and isinstance(error, HydraException | OmegaConfBaseException):
            mistake = all_mistakes(line, mistake)
        located = None if mistake is None else with_file(mistake, line)
        if located is None or located is error:
            raise
        raise located from error


def all_mistakes(line: CommandLine, first: UserError) -> UserError:
    """Returns ``first``, or all mistakes in the overrides of ``line`` if there are several.

    A sweep is checked value by value. The keys of a group are not checked if the choice of its file is wrong.

    Args:
        first: the mistake that Hydra has reported.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(line.overrides))
    except (HydraException, OmegaConfBaseException):
        return first
    if len(parsed) > MOST:
        return first
    with line.composer() as compose:
        found = _mistakes(sorted(parsed, key=_order), compose)
    if len(found) == 1 and found[0].what == first.what:
        return found[0]
    return UserErrors(found) if len(found) > 1 else first


def _mistakes(overrides: Sequence[Override], compose: Callable[[Sequence[str]], object]) -> list[UserError]:
    accepted: list[str] = []
    found: dict[str, UserError] = {}
    unknown: list[str] = []  # groups without a valid choice
    for override in overrides:
        key = override.key_or_group
        if key.startswith(tuple(f"{group}." for group in unknown)):
            continue
        values = expand([str(override.input_line)])
        mistakes = [mistake for value in values if (mistake := _mistake([*accepted, *value], compose)) is not None]
        for mistake in mistakes:
            found.setdefault(f"{mistake.where}: {mistake.what}", _of_all(mistake, override, values))
        if not mistakes:
            accepted += values[0]
        elif is_choice(override):
            unknown.append(key)
    return list(found.values())


def _of_all(mistake: UserError, override: Override, values: Sequence[Sequence[str]]) -> UserError:
    """Returns ``mistake`` with all values of a sweep in its fix, if that adds the key with one of them."""
    if len(values) > 1 and mistake.fix in [f"+{value}" for each in values for value in each]:
        return UserError(mistake.what, where=mistake.where, fix=f"+{override.input_line}")
    return mistake


def _mistake(overrides: list[str], compose: Callable[[Sequence[str]], object]) -> UserError | None:
    try:
        compose(overrides)
    except (HydraException, OmegaConfBaseException, UserError) as error:
        return translate(error)
    return None


def _order(override: Override) -> int:
    """Returns the place of an override: experiments, which contain choices, before other choices, then values."""
    if override.key_or_group == "experiment":
        return 0
    return 1 if is_choice(override) else 2
