"""The few environment variables that a worker needs, each with its reason. What the user has set always wins."""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping
from dataclasses import asdict, dataclass

from hpc_train.config.errors import ConfigError


@dataclass(frozen=True)
class Variable:
    """One environment variable of the workers and why it has this value."""

    name: str
    value: str
    reason: str


def own_environment(threads: int) -> tuple[Variable, ...]:
    """The variables of this node's workers that do not depend on other nodes."""
    return (Variable("OMP_NUM_THREADS", str(threads), "the ranks of a node share its cores"),)


def apply(variables: Iterable[Variable], environment: MutableMapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Sets what is not set yet; returns what is in force, with reasons, for ``run.json``."""
    record = []
    for variable in variables:
        found = environment.get(variable.name)
        if found is None:
            environment[variable.name] = variable.value
            record.append(asdict(variable))
        else:
            reason = variable.reason if found == variable.value else "set by the user"
            record.append({"name": variable.name, "value": found, "reason": reason})
    return record


def threads_per_rank(asked: int | str, local_workers: int, bound_cores: int = 0) -> int:
    """Intra-op threads of a rank; ``auto``: one per core that it is bound to, or where it is not bound, an equal share
    of this process's affinity mask.

    Raises:
        ConfigError: neither ``auto`` nor a number of at least 1.
    """
    if asked == "auto":
        return bound_cores or max(1, len(os.sched_getaffinity(0)) // local_workers)
    if not isinstance(asked, int) or asked < 1:
        raise ConfigError(f"threads is {asked!r}", where="train.threads", mend="a number >= 1, or auto")
    return asked
