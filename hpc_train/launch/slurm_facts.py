"""What Slurm knows of one job besides its state: codes, memory, and how its nodes are.

``scontrol`` knows a job until some minutes after its end, on every site; ``sacct`` for longer, where there is
accounting. What none of them says stays empty.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

TIMEOUT_S = 20.0
Ask = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class NodeState:
    """A node as ``sinfo`` sees it; ``reason`` is an administrator's or Slurm's own."""

    node: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class JobFacts:
    """Codes are Slurm's ``code:signal``; ``max_rss_bytes`` is that of the largest task, None where it is not known."""

    job_id: str
    state: str
    reason: str = ""
    exit_code: str = ""
    derived_exit_code: str = ""
    node_list: str = ""
    nodes: tuple[NodeState, ...] = ()
    max_rss_bytes: int | None = None
    restarts: int = 0
    dependency: str = ""


def read_facts(job_id: str, ask: Ask | None = None) -> JobFacts | None:
    """None where no Slurm answers or it no longer knows the job."""
    asking = ask or _output
    facts = _of_scontrol(job_id, asking(["scontrol", "show", "job", "--oneliner", job_id]) or "")
    accounted = asking(["sacct", "--jobs", job_id, "--noheader", "--parsable2", f"--format={','.join(SACCT)}"]) or ""
    facts = _with_accounting(job_id, facts, accounted)
    if facts is None or not facts.node_list:
        return facts
    nodes = asking(["sinfo", "--noheader", "--Node", f"--nodes={facts.node_list}", "--format=%N|%T|%E"]) or ""
    return replace(facts, nodes=tuple(dict.fromkeys(_node(line) for line in nodes.splitlines())))


SACCT = ("JobID", "State", "ExitCode", "DerivedExitCode", "MaxRSS", "NodeList")


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _of_scontrol(job_id: str, text: str) -> JobFacts | None:
    line = text.splitlines()[0] if text else ""
    found = reversed(re.findall(r"(?:^| )(\w+)=(\S*)", line))  # the first of a name counts: a comment stands last
    values = {name: value for name, value in found if value != "(null)"}
    if "JobState" not in values:
        return None
    reason = values.get("Reason", "")
    return JobFacts(
        job_id=job_id,
        state=values["JobState"],
        reason="" if reason == "None" else reason.replace("_", " "),
        exit_code=values.get("ExitCode", ""),
        derived_exit_code=values.get("DerivedExitCode", ""),
        node_list=values.get("NodeList", ""),
        restarts=int(values.get("Restarts", "0")),
        dependency=values.get("Dependency", ""),
    )


def _with_accounting(job_id: str, facts: JobFacts | None, text: str) -> JobFacts | None:
    rows = [dict(zip(SACCT, line.split("|"), strict=False)) for line in text.splitlines() if line.count("|") >= 5]
    if not rows:
        return facts
    job = next((row for row in rows if "." not in row["JobID"]), rows[0])
    if facts is None:
        state, nodes = job["State"].split()[0], job["NodeList"]  # "CANCELLED by 1000"
        known = "" if nodes == "None assigned" else nodes
        facts = JobFacts(job_id, state, "", job["ExitCode"], job["DerivedExitCode"], known)
    return replace(facts, max_rss_bytes=max((_bytes(row["MaxRSS"]) for row in rows), default=0) or None)


def _bytes(text: str) -> int:
    """Slurm's sizes: 123456K, 1.5G, 0."""
    found = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else 0


def _node(line: str) -> NodeState:
    name, state, reason = [*line.split("|", 2), "", ""][:3]
    return NodeState(name, state, "" if reason == "none" else reason)
