"""Translates the errors of Hydra and OmegaConf into ``UserError``: what is wrong, where it was set and the fix."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from hpc_train.errors import UserError, nearest


def translate(error: BaseException) -> UserError | None:
    """Returns the ``UserError`` for ``error``; None if the user did not cause it.

    OmegaConf drops the cause of its errors, so a ``UserError`` that a resolver raised is found as the context.
    """
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, UserError):
            return link
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return _of_python(error)
    for link in chain:
        if isinstance(link, MissingConfigException) and link.options:
            return _unknown_option(link)
        if isinstance(link, OmegaConfBaseException):
            return _of_omegaconf(link)
    if isinstance(error, OverrideParseException):
        return _of_override(error)
    fix = "python -m hpc_train --help lists groups and keys"
    return UserError(str(error).strip(), where="the command line or conf/", fix=fix)


def _of_override(error: OverrideParseException) -> UserError:
    override = str(error.override)
    key, _, value = override.partition("=")
    fix = "python -m hpc_train --help lists groups and keys"
    if value.strip() and value.strip()[0] not in "'\"":
        quoted = value.replace('"', r"\"")
        fix = f"put a value with special characters in quotes: '{key}=\"{quoted}\"'"
    return UserError(f"Hydra cannot parse the override {override}", where=override, fix=fix)


def _of_python(error: BaseException) -> UserError | None:
    if isinstance(error, ValueError) and str(error).startswith(
        "Config group override"
    ):  # Hydra raises it for group=null
        return UserError(str(error), where="the command line", fix="GROUP=NAME, with a file of conf/GROUP")
    if isinstance(error, PermissionError) and error.filename:
        fix = "run.root=DIR with a directory that you may write; for a shared run its owner must set run.group=GROUP"
        return UserError(
            f"you have no permission to access {error.filename}", where="the permissions of the file", fix=fix
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "free some space, or set another run.root or TMPDIR; python -m hpc_train doctor shows which disk is full"
        return UserError(f"the disk or quota is full ({error.strerror})", where="run.root or TMPDIR", fix=fix)
    return None


def _of_omegaconf(error: OmegaConfBaseException) -> UserError:
    key = str(error.full_key or "")
    if isinstance(error, MissingMandatoryValue):
        return UserError(f"{key} has no value", where=key, fix=f"{key}=VALUE on the command line")
    if isinstance(error, ConfigAttributeError | ConfigKeyError) and (names := _names_beside(error)):
        return UserError(f"{key} is not a config key", where=key, fix=nearest(error.key, names))
    group = key.split(".", maxsplit=1)[0]
    first = (error.msg or str(error)).strip().splitlines()[0]
    wrong = re.match(r"Value '(.*)' (?:of type '.*' could not be converted to|is not a valid) (\w+)", first)
    if wrong and wrong[2] in _KINDS:
        return UserError(f"{key} is {wrong[1]!r}, but must be {_KINDS[wrong[2]]}", where=key, fix=f"{key}=VALUE")
    if "is not Optional" in first:
        return UserError(f"{key} is null, but must have a value", where=key, fix=f"{key}=VALUE, or remove the override")
    shows = f"python -m hpc_train --cfg job{f' --package {group}' if group else ''} shows the current values"
    return UserError(first, where=key or "the config", fix=shows)


def _names_beside(error: OmegaConfBaseException) -> list[str]:
    """Returns the keys of the node in which the key of ``error`` does not exist."""
    if is_dataclass(error.object_type):
        return [field.name for field in fields(error.object_type)]
    return [str(name) for name in error.parent_node] if isinstance(error.parent_node, DictConfig) else []


_KINDS = {"Float": "a number", "Integer": "an integer", "bool": "true or false", "String": "text"}


def _unknown_option(error: MissingConfigException) -> UserError:
    name = str(error.missing_cfg_file or "")
    group, _, option = name.rpartition("/")
    return UserError(
        f"{name} does not exist", where=group or "the defaults", fix=nearest(option, list(error.options or ()))
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
