"""Completes the words of ``hpc-train`` in bash, zsh and fish: commands, options and run names, and overrides as Hydra
completes them.

``eval "$(hpc-train --shell-completion install=bash)"`` defines a function of the shell that calls
``--shell-completion query=bash`` at each Tab with the line so far in the variable ``COMP_LINE``, as Hydra's does.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path

from hpc_train.commands import COMMANDS, OVERRIDES, RUNS, function_of
from hpc_train.errors import UserError
from hpc_train.run.exits import Exit

FLAGS = ("--shell-completion", "-sc")
BASH = """\
_hpc_train() {
    COMP_WORDBREAKS=${COMP_WORDBREAKS//[=:]/}
    COMPREPLY=($(COMP_LINE=${COMP_LINE:0:COMP_POINT} "${COMP_WORDS[0]}" --shell-completion query=bash 2> /dev/null))
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} != *[=./] ]]; then compopt +o nospace; fi
}
complete -o nospace -o default -F _hpc_train hpc-train
"""
ZSH = """\
_hpc_train() {
    local -a found
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    found=(${(f)"$(COMP_LINE=$line $words[1] --shell-completion query=zsh 2> /dev/null)"})
    compadd -- ${found:#*[=./]}
    compadd -S '' -- ${(M)found:#*[=./]}
    (( $#found )) || _files
}
compdef _hpc_train hpc-train
"""
FISH = """\
function __hpc_train_complete
    set -lx COMP_LINE (commandline -cp)
    set -l words (commandline -cpo)
    $words[1] --shell-completion query=fish 2> /dev/null
end
complete --command hpc-train --no-files --arguments '(__hpc_train_complete)'
"""
SHELLS = {  # shell -> (the code that defines the completion, the code that removes it)
    "bash": (BASH, "complete -r hpc-train; unset -f _hpc_train\n"),
    "zsh": (ZSH, "compdef -d hpc-train; unfunction _hpc_train\n"),
    "fish": (FISH, "complete --command hpc-train --erase; functions --erase __hpc_train_complete\n"),
}
ACTIONS = ("install", "uninstall", "query")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def main(arguments: list[str]) -> int:
    """Prints the function for the shell, its removal, or the words that may stand at the end of ``COMP_LINE``. Raises
    UserError if ``arguments`` name no action or no shell of this module, or ``COMP_LINE`` is not set."""
    action, _, shell = arguments[-1].partition("=")
    if len(arguments) != 2 or action not in ACTIONS or shell not in SHELLS:
        choices = " | ".join(f"install={name}" for name in SHELLS)
        what = f"{' '.join(arguments)} names no action and shell"
        raise UserError(what, where=arguments[0], fix=f"{arguments[0]} followed by one of {choices}")
    install, uninstall = SHELLS[shell]
    if action == "install":
        print(install, end="")
    elif action == "uninstall":
        print(uninstall, end="")
    else:
        line = os.environ.get("COMP_LINE")
        if line is None:
            what = "the line to complete is unknown: COMP_LINE is not set"
            raise UserError(what, where=" ".join(arguments), fix=f"hpc-train --shell-completion install={shell}")
        print("\n".join(complete(line)))
    return Exit.DONE


def is_completion(arguments: Sequence[str]) -> bool:
    return bool(arguments) and arguments[0] in FLAGS


def complete(line: str) -> list[str]:
    """Returns the words that may replace the last word of ``line``, sorted."""
    *before, word = line.split(" ")
    rest = [argument for argument in before[1:] if argument]
    is_named = bool(rest) and rest[0] in COMMANDS
    name = rest.pop(0) if is_named else "train"
    command = COMMANDS[name]
    candidates: Iterable[str] = ()
    if word.startswith("--"):
        candidates = _options(name, rest)
    elif name == "help" or not (is_named or rest):
        candidates = COMMANDS
    elif not rest and command.actions:
        candidates = command.actions
    elif command.takes & RUNS:
        candidates = _run_names(word)
    words = {candidate for candidate in candidates if candidate.startswith(word)}
    if not words and word and command.takes & OVERRIDES:  # slow, since Hydra composes the config
        words.update(_overrides([*(argument for argument in rest if "=" in argument), word]))
    return sorted(words)


def _options(name: str, rest: Sequence[str]) -> list[str]:
    action = [word for word in rest[:1] if word in COMMANDS[name].actions]
    page = io.StringIO()
    with redirect_stdout(page), suppress(SystemExit):  # argparse exits
        function_of("help" if name == "train" else name)([*action, "--help"])
    return OPTION.findall(page.getvalue())


def _run_names(word: str) -> Iterator[str]:
    """Yields the names of runs and sweeps; the runs of a sweep only if ``word`` starts with the name of the sweep.

    bash inserts them as they are. Other users may have made directories whose names a shell would execute; they are
    left out.
    """
    from hpc_train.config.run_path import NAME, default_root
    from hpc_train.runs.lookup import run_directories

    root = Path(default_root()).absolute()
    for path in run_directories(root):
        name = path.relative_to(root).as_posix()
        sweep = name.rpartition("/")[0]
        if NAME.fullmatch(name) is None:
            continue
        if sweep and not word.startswith(f"{sweep}/"):
            name = sweep
        yield name


def _overrides(words: Sequence[str]) -> list[str]:
    """Returns what Hydra proposes for the last of ``words``."""
    from hpc_train.commands.train import main as train

    before = os.environ.get("COMP_LINE", "")
    os.environ["COMP_LINE"] = " ".join(["hpc-train", *words])
    proposals = io.StringIO()
    try:
        with redirect_stdout(proposals):
            train(["-sc", "query=bash"])
    finally:
        os.environ["COMP_LINE"] = before
    return proposals.getvalue().split()
