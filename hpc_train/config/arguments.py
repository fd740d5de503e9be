"""Parses the command line before Hydra does, lists the jobs of a sweep, and finds all wrong overrides.

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
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.command_line import CommandLine, is_choice, parsed_override
from hpc_train.config.compose import WITH_STRATEGY, initialized
from hpc_train.config.conf_files import PRIMARY
from hpc_train.config.hydra_settings import (
    check_callbacks,
    has_glob,
    is_search,
    refuse_without_effect,
    swept_params,
    with_listed_globs,
    with_params,
)
from hpc_train.config.own_files import check_files, refuse_unreadable_files, with_file
from hpc_train.config.removed import RENAMED, tell_new_name
from hpc_train.config.schema import Config
from hpc_train.config.secrets import refuse_secret_arguments
from hpc_train.config.translate import of_deletion, translate
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
OPTIONAL = ("strategy", "metrics", "hooks", "eval_sets")  # groups whose choice ~GROUP may remove
# keys whose value is a Slurm list with commas, which never means a sweep: cluster.exclude=n1,n2
SLURM_LISTS = re.compile(
    r"""(\+{0,2}cluster\.(?:(?:exclude|nodelist|gres|extra\.[\w-]+)=|constraint=(?=\[)))([^'"{$][^'"]*)"""
)
SWEPT_BY_NAME = re.compile(r"(choice|range|interval|glob|tag|shuffle|sort)\(")


def with_right_plus(arguments: Sequence[str]) -> list[str]:
    """Returns ``arguments`` with the plus signs that Hydra requires before ``strategy=`` and ``experiment=``.

    Slurm lists such as ``cluster.exclude=n1,n[3-4]`` are quoted, so that they are one value and not a sweep.
    Settings of Hydra are applied as well: ``hydra.sweeper.params`` become overrides, ``hydra.mode=MULTIRUN`` becomes
    ``-m``, and ``glob()`` becomes the options that it matches. Overrides come first, because Hydra's own parser does
    not accept overrides on both sides of an option. Raises UserError if the command line contains a secret, sweeps a
    key that has one value for all jobs, sweeps experiments of which only some choose a strategy, or sets a key of Hydra
    that has no effect.
    """
    refuse_secret_arguments(arguments)
    arguments = [_with_quoted_list(_with_new_name(word)) for word in arguments if word != WITH_STRATEGY]
    line = CommandLine.parse(arguments)
    refuse_unreadable_files(line)
    options = list(arguments)
    for override in reversed(line.overrides):
        # removes the last one, because an equal text before it is the value of an option
        del options[len(options) - 1 - options[::-1].index(override)]
    line = replace(line, overrides=tuple(EXPERIMENT.sub("experiment=", text, count=1) for text in line.overrides))
    line = _without_globs(line)
    chosen = _chosen(line)
    if chosen.overrides_strategy:
        options.insert(0, WITH_STRATEGY)
    if line.multirun or chosen.multirun:
        line = _without_globs(replace(line, overrides=tuple(with_params(line.overrides, chosen.params))))
        if line.runs and not line.multirun:
            options.append("--multirun")
    lists = [text.partition("=")[0] for text in swept(line.overrides)]
    for parsed in map(parsed_override, line.overrides):
        key = parsed.key_or_group
        if parsed.is_delete() and key in vars(Config()) and key not in OPTIONAL:
            raise of_deletion(key)
        if key in ONE_VALUE and any(f"${{{name}}}" in str(parsed.value()) for name in lists):
            raise UserError(
                f"{parsed.input_line} refers to a key that the sweep varies, but all jobs share one value of {key}",
                where=key,
                fix=f"{key}=VALUE; run.json of each job, `status` and `compare` show the values of the sweep",
            )
        if key in ONE_VALUE and parsed.is_sweep_override():
            raise UserError(
                f"{parsed.input_line} lists several values, but all jobs of a sweep share one value of this key",
                where=key,
                fix=f"{key}=VALUE; in a sweep run.name names the parent directory of the jobs",
            )
    plus = "" if chosen.strategy else "+"
    return [*(STRATEGY.sub(f"{plus}strategy=", text, count=1) for text in line.overrides), *options]


def _without_globs(line: CommandLine) -> CommandLine:
    if not has_glob(line.overrides):
        return line
    with initialized(line.primary_directory):
        return replace(line, overrides=tuple(with_listed_globs(line.overrides, line.directories)))


def _with_new_name(argument: str) -> str:
    key, equals, value = argument.partition("=")
    earlier = key.lstrip("+~")
    if earlier not in RENAMED:
        return argument
    tell_new_name(earlier, "the command line")
    return f"{'~' if key[0] == '~' else '++'}{RENAMED[earlier]}{equals}{value}"


def _with_quoted_list(argument: str) -> str:
    match = SLURM_LISTS.fullmatch(argument)
    if match is None or not re.search(r"[,\[]", match[2]) or SWEPT_BY_NAME.match(match[2]):
        return argument
    return f"{match[1]}'{match[2]}'"


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of each job of a sweep: every combination of the values that are listed with commas. Raises
    UserError if the sweep requires an optimizing sweeper.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    parsed = list(map(parsed_override, overrides))
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


def swept(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if parsed_override(text).is_sweep_override()]


def first_values(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides of one possible job of a search: the first value of each sweep or interval."""
    texts = []
    for override in map(parsed_override, overrides):
        value = override.value()
        if isinstance(value, IntervalSweep):
            texts.append(f"{override.get_key_element()}={value.start}")
        elif override.is_sweep_override():
            texts.append(f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}")
        else:
            texts.append(str(override.input_line))
    return texts


def refuse_search(line: CommandLine, what: str) -> None:
    """Raises UserError if the jobs of ``line`` are known only during a search; ``what`` needs them."""
    if searches(line):
        message = f"{what} needs all jobs in advance, but this sweeper chooses values by the results of earlier jobs"
        raise UserError(message, where="hydra/sweeper", fix="hydra/sweeper=hpc_train and values with commas")


def wants_dry_run(overrides: Sequence[str]) -> bool:
    values = [override.split("=", 1)[1] for override in overrides if override.lstrip("+").startswith("launch.dry_run=")]
    return bool(values) and values[-1].lower() in ("true", "1", "yes", "on")


@dataclass(frozen=True)
class _Chosen:
    """Holds the choices that the chosen files and the settings of Hydra on the command line make.

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
    """Returns the choices, composed for each experiment of the sweep if the command line may make any."""
    parsed = list(map(parsed_override, line.overrides))
    experiments = [override for override in parsed if override.key_or_group == "experiment"]
    has_strategy = _names_strategy(line.overrides)
    has_files = line.directories or line.config_name != PRIMARY
    if not has_files and not (experiments and has_strategy) and not any(map(_is_of_hydra, parsed)):
        return _Chosen()
    listed = [str(override.input_line) for override in experiments]
    others = [str(override.input_line) for override in parsed if _is_fixed_choice(override)]
    with line.initialized():
        choices = {_choice(line, experiment, others) for experiment in expand(listed)}
    # if no override chooses a strategy, it does not matter which experiments do
    if not has_strategy and not any(_names_strategy(choice.params) for choice in choices):
        choices = {replace(choice, strategy=choice.strategy and choice.overrides_strategy) for choice in choices}
    if len(choices) > 1:
        raise UserError(
            "the experiments of this sweep differ in how they choose a strategy, or in Hydra's sweeper or mode",
            where="experiment, strategy",
            fix="one sweep for each kind of experiment; or let all of them choose a strategy with `- /strategy: NAME`",
        )
    return choices.pop()


def _is_of_hydra(override: Override) -> bool:
    return override.is_hydra_override() and override.key_or_group != "hydra.searchpath"


def _is_fixed_choice(override: Override) -> bool:
    """Returns whether the override may decide Hydra's settings: one option of a group, or a setting of Hydra."""
    if override.is_sweep_override() or override.key_or_group in ("strategy", "experiment", "hydra.searchpath"):
        return False
    return _is_of_hydra(override) or is_choice(override)


def _choice(line: CommandLine, experiment: Sequence[str], others: Sequence[str]) -> _Chosen:
    """Returns what the command line chooses together with one choice of experiments. Raises UserError if a setting of
    Hydra has no effect.
    """
    overrides_strategy = False
    try:
        node = _with_hydra(line, [*others, *experiment])
    except (HydraException, OmegaConfBaseException) as error:
        overrides_strategy = OVERRIDES_STRATEGY.search(str(error)) is not None
        try:
            node = _with_hydra(line, [WITH_STRATEGY, *others, *experiment] if overrides_strategy else experiment)
        except (HydraException, OmegaConfBaseException):
            if overrides_strategy or _names_strategy(line.overrides):
                raise
            return _Chosen()  # the composition of the job reports the error and the file
    settings = node.hydra
    refuse_without_effect(settings)
    check_callbacks(settings)
    return _Chosen(
        strategy=overrides_strategy or OmegaConf.select(settings, "runtime.choices.strategy") is not None,
        overrides_strategy=overrides_strategy,
        multirun=settings.mode == RunMode.MULTIRUN,
        params=tuple(swept_params(settings)),
        searches=is_search(settings),
    )


def _names_strategy(overrides: Sequence[str]) -> bool:
    return any(STRATEGY.match(override) for override in overrides)


def _with_hydra(line: CommandLine, overrides: Sequence[str]) -> DictConfig:
    return hydra.compose(line.config_name, [*line.search_path, *overrides], return_hydra_config=True)


def override_value(value: Any) -> str:
    """Returns a number, a text, or a list or dict of them as the value of an override, in Hydra's grammar. Raises
    UserError if the value is of another type.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
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

    An error of Hydra is replaced by all mistakes of the command line. Raises UserError if a file is not valid YAML, or
    has a value of the wrong kind.
    """
    check_files(line)
    try:
        yield
    except Exception as error:
        mistake = translate(error)
        if mistake is None:
            raise
        if isinstance(error, HydraException | OmegaConfBaseException):
            mistake = all_mistakes(line, mistake)
        located = with_file(mistake, line)
        if located is error:
            raise
        raise located from error


def all_mistakes(line: CommandLine, first: UserError) -> UserError:
    """Returns ``first``, or all mistakes in the overrides of ``line`` if there are several.

    Hydra raises an error for the first one. The overrides are therefore applied one after the other, those that choose
    files first, and each that fails is left out of the compositions that follow. A sweep is checked value by value. The
    keys of a group are not checked if the choice of its file is wrong. ``first`` is the mistake that Hydra has
    reported."""
    try:
        parsed = list(map(parsed_override, line.overrides))
    except (HydraException, OmegaConfBaseException):
        return first
    if len(parsed) > MOST:
        return first
    # experiments, which contain choices, before other choices, then values
    parsed.sort(key=lambda override: (override.key_or_group != "experiment", not is_choice(override)))
    accepted: list[str] = []
    mistakes: dict[str, UserError] = {}
    unknown: list[str] = []  # groups without a valid choice
    with line.composer() as compose:
        for override in parsed:
            key = override.key_or_group
            if key.startswith(tuple(f"{group}." for group in unknown)):
                continue
            values = expand([str(override.input_line)])
            wrong = [mistake for value in values if (mistake := _mistake([*accepted, *value], compose)) is not None]
            for mistake in wrong:
                # the fix adds the key with all values of the sweep, not only with this one
                if len(values) > 1 and [mistake.fix.removeprefix("+")] in values and mistake.fix.startswith("+"):
                    mistake = UserError(mistake.what, where=mistake.where, fix=f"+{override.input_line}")  # noqa: PLW2901
                mistakes.setdefault(f"{mistake.where}: {mistake.what}", mistake)
            if not wrong:
                accepted += values[0]
            elif is_choice(override):
                unknown.append(key)
    if len(mistakes) > 1:
        return UserErrors(mistakes.values())
    only = next(iter(mistakes.values()), first)
    return only if only.what == first.what else first


def _mistake(overrides: list[str], compose: Callable[[Sequence[str]], object]) -> UserError | None:
    try:
        compose(overrides)
    except (HydraException, OmegaConfBaseException, UserError) as error:
        return translate(error)
    return None
