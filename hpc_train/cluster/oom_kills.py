"""Whether the kernel killed for memory: its own counters, which every user may read. A kill leaves no other trace.

A process that goes over the limit of its control group (Slurm's ``--mem``, a container's) is killed without a word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
COUNTER = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class OomKills:
    """Processes killed so far: in the control group of this process, and on the whole node."""

    group: int = 0
    node: int = 0

    @classmethod
    def now(cls, groups: Path = CGROUPS, processes: Path = Path("/proc")) -> OomKills:
        """What cannot be read counts as 0."""
        return cls(_counter(_events_file(groups, processes)), _counter(processes / "vmstat"))

    def __sub__(self, before: OomKills) -> OomKills:
        return OomKills(self.group - before.group, self.node - before.node)


def _events_file(groups: Path, processes: Path) -> Path:
    """Version 1 of control groups has a hierarchy for memory, version 2 one for all."""
    try:
        lines = (processes / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return groups / "unknown"
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    if "memory" in paths:
        return groups / "memory" / paths["memory"].lstrip("/") / "memory.oom_control"
    return groups / paths.get("", "").lstrip("/") / "memory.events"


def _counter(path: Path) -> int:
    try:
        found = COUNTER.search(path.read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0
