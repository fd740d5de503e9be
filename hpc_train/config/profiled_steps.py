"""``telemetry.profile``: which steps of which ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import ProfileConfig


@dataclass(frozen=True)
class Profiled:
    """From the step ``first`` to ``last``, as the metrics count them, on ``ranks``; None: on all."""

    first: int
    last: int
    ranks: frozenset[int] | None

    def has(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    @property
    def name(self) -> str:
        """Of files."""
        return f"steps-{self.first}-{self.last}"


def parse_profile(config: ProfileConfig) -> Profiled | None:
    """None where nothing is to be profiled.

    Raises:
        ConfigError: it is not to be understood.
    """
    if config.steps is None:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", config.steps.strip())
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            f"telemetry.profile.steps is {config.steps!r}",
            where="telemetry.profile.steps",
            mend="a step or several in a row: 10, 10-12",
        )
    return Profiled(first, last, _ranks(config.ranks))


def _ranks(given: Any) -> frozenset[int] | None:
    if given == "all":
        return None
    ranks = list(given) if isinstance(given, list) else [given]
    if ranks and all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks):
        return frozenset(ranks)
    raise ConfigError(
        f"telemetry.profile.ranks is {given!r}", where="telemetry.profile.ranks", mend="a rank, [0,3] or all"
    )


def check_profiled_steps(config: ProfileConfig, world_size: int) -> None:
    """Raises ConfigError where it is not to be understood, or names a rank that there is not."""
    profiled = parse_profile(config)
    beyond = sorted(rank for rank in (profiled.ranks or ()) if rank >= world_size) if profiled is not None else []
    if beyond:
        raise ConfigError(
            f"there is no rank {beyond[0]} of {world_size}",
            where="telemetry.profile.ranks",
            mend=f"ranks 0 to {world_size - 1}, or all",
        )
