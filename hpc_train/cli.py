"""Runs the command line ``python -m hpc_train [COMMAND] [overrides]``; the default command is ``train``.

A user's mistake, found by Hydra or by hpc_train, becomes one message and exit code 2.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpc_train.commands import COMMANDS, RUNS, function_of
from hpc_train.commands.completion import is_completion
from hpc_train.commands.completion import main as complete_words
from hpc_train.errors import UserError, nearest
from hpc_train.machine.environment import rejected_variable
from hpc_train.run.exits import Exit
from hpc_train.run.files import keep_others_from_writing
from hpc_train.run.processes import out_of_resources
from hpc_train.run.streams import escape_controls, open_closed_streams, replace_unencodable
from hpc_train.search_path import append_working_directory, shadowing_file

COMMAND = re.compile(r"[a-z][a-z0-9_]*")


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
        append_working_directory(here)  # of the console script; `python -m` has put it first
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code. Messages about a user's mistakes go to standard error."""
    try:
        with _hydra_errors_raised():
            function, rest = _command(list(arguments))
            return function(rest)
    except KeyboardInterrupt:  # nothing has started yet; a run in progress handles Ctrl-C itself
        print("interrupted", file=sys.stderr)
        return Exit.DETACHED
    except BrokenPipeError:  # the reader has exited, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except Exception as error:
        shadowing = None if isinstance(error, UserError) else shadowing_file(error)
        if shadowing is not None:
            print(shadowing, file=sys.stderr)
            return Exit.REFUSED
        missing = _missing_dependency(error)
        if missing is not None:
            print(missing, file=sys.stderr)
            return Exit.REFUSED
        from hpc_train.config.translate import translate  # imports Hydra, which many commands do not need

        mistake = translate(error) or out_of_resources(error)
        if mistake is None and isinstance(error, ValueError):  # from an import of torch
            mistake = rejected_variable(error, os.environ)
        if mistake is None:
            raise
        print(mistake, file=sys.stderr)
        return Exit.REFUSED


# modules of the dependencies of pyproject.toml
DEPENDENCIES = ("torch", "submitit", "hydra", "omegaconf", "yaml", "wandb", "numpy", "rich", "psutil", "xxhash")


def _missing_dependency(error: Exception) -> UserError | None:
    """Returns the error for a Python that is not that of hpc_train's environment, as on a node with another one."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or name.partition(".")[0] not in DEPENDENCIES:
        return None
    in_job = "SLURM_JOB_ID" in os.environ
    return UserError(
        f"{sys.executable} on {os.uname().nodename} has no module {name}, which hpc_train needs",
        where="cluster.python" if in_job else "the environment of Python",
        fix="cluster.python=PATH of the Python on the nodes whose environment has hpc_train"
        if in_job
        else "run the Python of the environment in which hpc_train is installed",
    )


def _command(arguments: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    if is_completion(arguments):
        return complete_words, arguments
    named = bool(arguments) and COMMAND.fullmatch(arguments[0]) is not None
    name, rest = (arguments[0], arguments[1:]) if named else ("train", arguments)
    if name == "help" and rest and COMMAND.fullmatch(rest[0]):
        name, rest = rest[0], ["--help"]
    if name not in COMMANDS:
        fix = nearest(name, sorted(COMMANDS))
        if name in COMMANDS["checkpoint"].actions:
            fix = f"checkpoint {name}"
        raise UserError(f"unknown command {name!r}", where="the command line", fix=fix)
    if COMMANDS[name].takes == RUNS:
        _refuse_root(name, rest)
    if name == "train" and not {"--help", "-h"}.isdisjoint(rest):
        name = "help"  # Hydra's own would load every file of every config group
    if not named and arguments == ["--version"]:
        name, rest = "help", ["--version"]
    return function_of(name), rest


def _refuse_root(name: str, rest: Sequence[str]) -> None:
    """Rejects ``run.root=DIR``, which Hydra's commands take, as a word of one that takes the path of a run."""
    for root in (word.partition("=")[2] for word in rest if word.startswith("run.root=")):
        fix = f"HPC_TRAIN_ROOT={root} python -m hpc_train {name}, or the path of the run, {root}/NAME"
        raise UserError(f"{name} takes no overrides", where=f"run.root={root}", fix=fix)


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
