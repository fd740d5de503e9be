"""``python -m hpc_train help [COMMAND]`` lists the commands and the config groups, or the options of one command."""

from __future__ import annotations

import importlib.metadata
import json
import textwrap
from pathlib import Path

from hpc_train.commands import COMMANDS
from hpc_train.config.conf_files import config_groups
from hpc_train.run.exits import Exit
from hpc_train.version import __version__

EXAMPLES = """\
Examples
  python -m hpc_train +strategy=hybrid                           train here, in the foreground
  python -m hpc_train +strategy=hybrid -m                        submit to Slurm, or without Slurm to this machine
  python -m hpc_train +strategy=dp,pp optim.lr=1e-3,3e-4 -m      submit a sweep
  python -m hpc_train +strategy=hybrid -m launch.dry_run=true    check a submission, and write nothing

Options of train
  -m                    submit; with several values of a key, a sweep
  -cd DIR, -cn NAME     a directory with your own config groups; another primary config
  --cfg job [-p KEY]    print the composed config and do nothing
  --shell-completion install=SHELL    print the code that enables completion in bash, zsh or fish
  --hydra-help          further options of Hydra
  --version             print the versions of hpc_train, torch and Hydra
"""
WIDTH = 120
SHORT = (
    "hpc-train is short for python -m hpc_train. `help COMMAND` and `COMMAND --help` print the options of a command."
)


def main(arguments: list[str]) -> int:
    """Prints the help page, which is also the help of ``train``, or the versions. ``arguments`` may contain overrides
    and options of Hydra; options such as ``-cd`` add config groups."""
    if "--version" in arguments:
        versions = {name: _version_of(name) for name in ("torch", "hydra-core", "submitit")}
        if "--json" in arguments:
            print(json.dumps({"hpc_train": __version__} | versions))
        else:
            print(f"hpc_train {__version__} ({', '.join(map(' '.join, versions.items()))})")
        return Exit.DONE
    options = [argument for argument in arguments if argument not in ("--help", "-h", "--json")]
    directories: list[Path] = []
    if options:
        from hpc_train.config.command_line import CommandLine  # it imports Hydra

        directories = CommandLine.parse(options).directories
    groups = config_groups(directories)
    if "--json" in arguments:
        commands = {name: command.summary for name, command in COMMANDS.items()}
        print(json.dumps({"commands": commands, "groups": groups}))
        return Exit.DONE
    lines = ["python -m hpc_train [COMMAND] [ARGUMENTS]", ""]
    for name, command in COMMANDS.items():
        if command.heading not in lines:
            lines.append(command.heading)
        lines.append(f"  {name:<12}{command.summary}")
    lines += ["", SHORT, "", EXAMPLES, "Config groups: GROUP=OPTION, or +strategy=OPTION"]
    for group, names in groups.items():
        text = f"{group}: {', '.join(names)}"
        lines.append(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    "))
    print("\n".join([*lines, ""]))
    print("`--cfg job` prints all keys with their values; KEY=VALUE sets one. docs/config.md describes each key.")
    return Exit.DONE


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
