"""The command line: ``python -m hpc_train [COMMAND] [overrides]``. Without a command it trains.

It finds the command, and turns what it raises into one message and an exit code: a user's mistake is 2, whoever found
it, Hydra or we.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hpc_train import commands
from hpc_train.config.errors import ConfigError
from hpc_train.config.wording import nearest
from hpc_train.run.exits import Exit

COMMAND = re.compile(r"[a-z][a-z0-9_]*")


def main() -> None:
    """Entry of ``python -m hpc_train`` and ``hpc-train``; ends the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code; messages of mistakes go to standard error."""
    try:
        with _whole_errors():
            function, rest = _command(list(arguments))
            return function(rest)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.REFUSED
    except BrokenPipeError:  # the reader left: `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except Exception as error:
        message = _mistake(error)
        if message is None:
            raise
        print(message, file=sys.stderr)
        return Exit.REFUSED


def _command(arguments: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    name, rest = "train", arguments
    if arguments and COMMAND.fullmatch(arguments[0]):
        name, rest = arguments[0], arguments[1:]
    known = sorted(module.name for module in pkgutil.iter_modules(commands.__path__))
    if name not in known:
        raise ConfigError(f"there is no command {name!r}", where="the command line", mend=nearest(name, known))
    function: Callable[[list[str]], int] = importlib.import_module(f"hpc_train.commands.{name}").main
    return function, rest


@contextmanager
def _whole_errors() -> Iterator[None]:
    """Has Hydra raise its errors instead of printing them with a stack and exit code 1. Children do not inherit it."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _mistake(error: Exception) -> str | None:
    """The message of an error of Hydra's or OmegaConf's that means a wrong config; None for any other error."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    for cause in _causes(error):
        if isinstance(cause, ConfigError):
            return str(cause)
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return None
    lines = [
        str(cause).strip() for cause in _causes(error) if isinstance(cause, HydraException | OmegaConfBaseException)
    ]
    return "\n".join(dict.fromkeys(lines))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
