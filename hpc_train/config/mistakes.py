"""Finds all wrong overrides of a command line after its composition has failed.

Hydra raises an error for the first one. The overrides are therefore applied one after the other, those that choose
files first, and each that fails is reported and left out of the compositions that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.arguments import expand
from hpc_train.config.command_line import CommandLine
from hpc_train.config.jobs import is_choice
from hpc_train.config.own_files import check_files, with_file
from hpc_train.config.translate import translate
from hpc_train.errors import UserError, UserErrors

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
