"""Nodes that a run avoids, as they failed too often, and what to ask the site's administrator about them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hpc_train.elastic.nodes import TOO_OFTEN, NodeFailures
from hpc_train.run.directory import RunDirectory


@dataclass(frozen=True)
class Avoided:
    """``until``: seconds since 1970; then its failures count no more."""

    node: str
    failures: tuple[str, ...]
    until: float

    @property
    def words(self) -> str:
        """With the command that takes the node out of service, for who may do so."""
        told = ", ".join(self.failures)
        one = len(self.failures) == 1
        count, reason = (
            ("once", "failure") if one else (f"{len(self.failures)} times", f"{len(self.failures)} failures")
        )
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.until))
        drain = f"scontrol update nodename={self.node} state=drain reason='{reason}: {told}'"
        return f"{self.node} failed {count} ({told}) and is avoided until {until}; for the staff: {drain}"


def avoided(run: RunDirectory, exclude_hours: float) -> list[Avoided]:
    """In the order of their names; ``exclude_hours`` is that of the run's config."""
    failures, found = NodeFailures(run, exclude_hours * 3600), []
    lately = failures.lately()
    for node in sorted(failures.too_often()):
        own = [line for line in lately if line["node"] == node]
        times = sorted(line["time"] for line in own for _ in range(line.get("times", 1)))
        found.append(Avoided(node, tuple(line["class"] for line in own), times[-TOO_OFTEN] + exclude_hours * 3600))
    return found
