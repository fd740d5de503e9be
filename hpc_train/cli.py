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
from hpc_train.config.translate import translate
from hpc_train.errors import UserError, nearest
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
    except KeyboardInterrupt:  # before anything was started: a run at work has its own answer
        return Exit.DETACHED
    except BrokenPipeError:  # the reader left: `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except Exception as error:
        mistake = translate(error)
        if mistake is None:
            raise
        print(mistake, file=sys.stderr)
        return Exit.REFUSED


def _command(arguments: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    name, rest = "train", arguments
    if arguments and COMMAND.fullmatch(arguments[0]):
        name, rest = arguments[0], arguments[1:]
    known = sorted(module.name for module in pkgutil.iter_modules(commands.__path__))
    if name not in known:
        raise UserError(f"there is no command {name!r}", where="the command line", fix=nearest(name, known))
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
