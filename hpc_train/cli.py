"""Runs the command line ``python -m hpc_train [COMMAND] [overrides]``; the default command is ``train``.

A user's mistake, found by Hydra or by hpc_train, becomes one message and exit code 2.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from hpc_train.commands import COMMANDS, RUNS, function_of
from hpc_train.commands.completion import is_completion
from hpc_train.commands.completion import main as complete_words
from hpc_train.errors import UserError, UserErrors, nearest
from hpc_train.run.exits import Exit
from hpc_train.run.files import keep_others_from_writing
from hpc_train.run.processes import out_of_resources
from hpc_train.run.streams import (
    escape_controls,
    flush_output,
    open_closed_streams,
    reader_is_gone,
    replace_unencodable,
)
from hpc_train.search_path import append_working_directory, shadowing_file

COMMAND = re.compile(r"[a-z][a-z0-9_]*")
JSON = "--json"
VERSION = "--version"


def main() -> None:
    """Runs the command line of the process and exits; the entry point of ``python -m hpc_train`` and ``hpc-train``."""
    open_closed_streams()
    replace_unencodable()
    escape_controls()
    keep_others_from_writing()
    try:
        here = str(Path.cwd())
    except FileNotFoundError:
        print("the working directory has been removed\n  fix:    cd to a directory that exists", file=sys.stderr)
        sys.exit(Exit.REFUSED)
    if not sys.flags.safe_path and here not in sys.path:
        append_working_directory(here)  # only for the console script; `python -m` has put it first
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code.

    Messages about a user's mistakes go to standard error. With ``--json`` standard output gets them as well, as one
    JSON object after what was printed before: ``{"errors": [{"what": ..., "where": ..., "fix": ...}]}``.
    """
    as_json = JSON in takewhile(lambda word: word != "--", arguments)  # what follows -- is a command of `exec`
    try:
        with _hydra_errors_raised():
            function, rest = _command(list(arguments))
            code = function(rest)
            flush_output()
            return code
    except KeyboardInterrupt:  # nothing has started yet; a run in progress handles Ctrl-C itself
        print("interrupted", file=sys.stderr)
        return Exit.DETACHED
    except SystemExit as end:
        if as_json and isinstance(end.__cause__, UserError):  # the command has printed it
            _print_as_json(end.__cause__)
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and (reader_is_gone(sys.stdout) or reader_is_gone(sys.stderr)):
            return Exit.NO_READER
        mistake = _mistake(error)
        if mistake is None:
            raise
        print(mistake, file=sys.stderr)
        if as_json:
            _print_as_json(mistake)
        return Exit.REFUSED
    finally:
        flush_output()


def _mistake(error: Exception) -> UserError | None:
    """Returns the mistake of the user that ``error`` is due to; None if it is not one."""
    shadowing = None if isinstance(error, UserError) else shadowing_file(error)
    if shadowing is not None:
        return UserError(shadowing)
    missing = _missing_dependency(error)
    if missing is not None:
        return missing
    from hpc_train.config.translate import translate  # imports Hydra, which many commands do not need

    mistake = translate(error) or out_of_resources(error)
    if mistake is None and isinstance(error, ValueError):  # may come from an import of torch
        from hpc_train.machine.environment import rejected_variable  # imports psutil, which may be missing

        mistake = rejected_variable(error, os.environ)
    return mistake


def _print_as_json(error: UserError) -> None:
    mistakes = error.found if isinstance(error, UserErrors) else (error,)
    print(json.dumps({"errors": [mistake.as_json() for mistake in mistakes]}))


# modules of the dependencies of pyproject.toml
DEPENDENCIES = ("torch", "submitit", "hydra", "omegaconf", "yaml", "wandb", "numpy", "rich", "psutil", "xxhash")


def _missing_dependency(error: Exception) -> UserError | None:
    """Returns the error for a Python outside of the environment of hpc_train, such as the system's Python on a node."""
    if not isinstance(error, ModuleNotFoundError) or (error.name or "").partition(".")[0] not in DEPENDENCIES:
        return None
    where = "the environment of Python"
    fix = "run the Python of the environment in which hpc_train is installed"
    if "SLURM_JOB_ID" in os.environ:
        where = "cluster.python"
        fix = "cluster.python=PATH of the Python on the nodes whose environment has hpc_train"
    what = f"{sys.executable} on {os.uname().nodename} has no module {error.name}, which hpc_train needs"
    return UserError(what, where=where, fix=fix)


def _command(arguments: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    if is_completion(arguments):
        return complete_words, arguments
    name = "train"
    rest = arguments
    if arguments[:1] in (["--help"], ["-h"]):
        arguments = ["help", *arguments[1:]]
    if arguments and COMMAND.fullmatch(arguments[0]):
        name, *rest = arguments
    elif set(arguments) in ({VERSION}, {VERSION, JSON}):
        return function_of("help"), arguments
    if name == "help" and rest and COMMAND.fullmatch(rest[0]):
        name, *rest = [*rest, "--help"]
    if name not in COMMANDS:
        fix = nearest(name, sorted(COMMANDS))
        if name in COMMANDS["checkpoint"].actions:
            fix = f"checkpoint {name}"
        raise UserError(f"unknown command {name!r}", where="the command line", fix=fix)
    if COMMANDS[name].takes == RUNS:
        # Hydra's commands take run.root=DIR, and this one the path of a run
        for root in (word.partition("=")[2] for word in rest if word.startswith("run.root=")):
            fix = f"HPC_TRAIN_ROOT={root} python -m hpc_train {name}, or the path of the run, {root}/NAME"
            raise UserError(f"{name} takes no overrides", where=f"run.root={root}", fix=fix)
    if name == "train" and not {"--help", "-h"}.isdisjoint(rest):
        name = "help"  # Hydra's own would load every file of every config group
    return function_of(name), rest


@contextmanager
def _hydra_errors_raised() -> Iterator[None]:
    """Makes Hydra raise its errors instead of printing them and exiting with 1; child processes do not inherit this."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
