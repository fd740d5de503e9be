"""When the devices are kept from computing for several lines of metrics in a row: what by, and what could be changed.

Values only: no torch. Each limit is told once in an attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_train.measure.mends import Mend, Setting, mends

LEAST_UTILISATION = 0.6
IN_A_ROW = 3  # lines of metrics, after the first of an attempt, which has the start of everything in it
SHARES = {  # limit -> key of the metrics, and the share of the time that is too much in any case
    "data": ("data_wait_share", 0.1),
    "communication": ("comm_share", 0.3),
    "bubble": ("bubble_share", 0.3),
    "host": ("host_share", 0.3),
}
RATIOS = {  # limit -> key of the metrics, and the largest of the ranks over their mean that is too much
    "imbalance": ("compute_imbalance", 1.25),
    "memory": ("memory_imbalance", 1.3),
}
LEAST_SHARE = 0.1  # what takes less is not to blame
WORDS = {
    "data": "the ranks wait for data {:.0%} of the time",
    "communication": "the ranks wait for communication {:.0%} of the time",
    "bubble": "the pipeline's bubble takes {:.0%} of the time",
    "host": "the GPUs wait for the host {:.0%} of the time",
    "imbalance": "one rank computes {:.2f} times as long as the mean of all",
    "memory": "one rank holds {:.2f} times as much memory as the mean of all",
}


@dataclass(frozen=True)
class Advice:
    """``limit``: what keeps the devices from computing; ``value``: its share of the time, or the ratio of ranks."""

    limit: str
    value: float
    mends: tuple[Mend, ...]

    @property
    def message(self) -> str:
        said = WORDS[self.limit].format(self.value)
        return f"{said}; what may help: " + ", or ".join(map(str, self.mends)) if self.mends else said

    def details(self) -> dict[str, Any]:
        """For the event."""
        told = [[f"{key}={value}" for key, value in mend.overrides.items()] for mend in self.mends]
        return {"limit": self.limit, "value": round(self.value, 4), "message": self.message, "overrides": told}


@dataclass
class AdviceWatch:
    """Looks at every line of metrics of an attempt."""

    setting: Setting
    _lines: int = field(default=0, init=False)
    _suspect: tuple[str, int] = field(default=("", 0), init=False)  # limit, lines in a row
    _told: set[str] = field(default_factory=set, init=False)

    def look(self, line: Mapping[str, Any]) -> Advice | None:
        """Advice on a limit that ``IN_A_ROW`` lines agree on and that was not told before."""
        self._lines += 1
        limit = find_limit(line, self._told) if self._lines > 1 else None
        before, count = self._suspect
        self._suspect = (limit, count + 1 if limit == before else 1) if limit is not None else ("", 0)
        if limit is None or self._suspect[1] < IN_A_ROW:
            return None
        self._told.add(limit)
        self._suspect = "", 0
        key, _ = (SHARES | RATIOS)[limit]
        return Advice(limit, line[key], tuple(mends(limit, self.setting)))


def find_limit(line: Mapping[str, Any], told: set[str] | frozenset[str] = frozenset()) -> str | None:
    """The limit that takes most, where utilisation is low or its own threshold is passed; then uneven ranks.

    Utilisation is the share of the time that is left for computing, or NVML's where that is lower. A share that is
    not in ``line`` is not known and not blamed.
    """
    shares = {limit: line[key] for limit, (key, _) in SHARES.items() if line.get(key) is not None}
    utilisation = min(1.0 - sum(shares.values()), line.get("gpu_util", 1.0))
    worst = max(shares, key=lambda limit: shares[limit], default=None)
    if worst is not None and utilisation < LEAST_UTILISATION and shares[worst] >= LEAST_SHARE and worst not in told:
        return worst
    excess = {limit: share - SHARES[limit][1] for limit, share in shares.items() if limit not in told}
    most_excess = max(excess, key=lambda limit: excess[limit], default=None)
    if most_excess is not None and excess[most_excess] > 0:
        return most_excess
    for limit, (key, most) in RATIOS.items():
        if limit not in told and line.get(key, 1.0) > most:
            return limit
    return None
