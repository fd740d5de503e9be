"""The command that trains with a row of a plan."""

from __future__ import annotations

import shlex

from hpc_train.commands.plan.rows import Row
from hpc_train.config.arguments import CommandLine


def command_of(row: Row, line: CommandLine) -> str:
    """Returns the command that trains with the layout of ``row``."""
    kept = keys_of(line)
    chosen = [f"{key}={value}" for key, value in row.candidate.values.items() if key not in kept]
    base = [] if any(override.lstrip("+").startswith("strategy=") for override in line.overrides) else ["+strategy=dp"]
    nodes = [f"cluster.nodes={row.candidate.nodes}"]
    return shlex.join(["python", "-m", "hpc_train", *line.overrides, *base, *chosen, *nodes, "-m"])


def keys_of(line: CommandLine) -> set[str]:
    """Returns the keys that the overrides set."""
    return {override.partition("=")[0].lstrip("+") for override in line.overrides}
