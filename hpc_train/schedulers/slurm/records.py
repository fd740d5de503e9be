"""Parses the output of Slurm's commands about jobs, nodes and partitions into typed rows.

Each kind of record is parsed only here. A value that a version of Slurm does not print is empty or None.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime


def values_of(record: str) -> dict[str, str]:
    """Returns the values by name of a record of ``scontrol show``, without those that are null.

    The first value of a name counts, since free text, such as a comment, is at the end.
    """
    values = reversed(re.findall(r"(?:^|\s)(\w+)=(\S*)", record))
    return {name: value for name, value in values if value != "(null)"}


def number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def seconds(text: str | None) -> int | None:
    """Parses a time limit (minutes, minutes:seconds, hours:minutes:seconds, days-hours…); None if there is no limit."""
    if text is None or not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, last = [*parts, 0, 0][:3]
    else:
        hours, minutes, last = 0, parts[0], [*parts, 0][1]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + last


def clock(span_s: int) -> str:
    """Formats seconds as Slurm prints for time limits: 2-12:00:00."""
    days, rest = divmod(span_s, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def time_of(text: str | None) -> float | None:
    """Parses a local time (2026-01-31T12:00:00) to seconds since 1970; None for None, N/A or Unknown."""
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None


def size_bytes(text: str) -> int:
    """Parses a size (123456K, 1.5G, 0)."""
    size = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    if size is None:
        return 0
    return int(float(size[1]) * 1024 ** " KMGT".index(size[2] or " "))


def gpus_of(gres: str) -> dict[str, int]:
    """Returns the GPUs by type in a GRES text: ``gpu:a100:4(S:0-1),gpu:2``."""
    gpus: Counter[str] = Counter()
    for kind, count in re.findall(r"(?:^|,)(?:gres[/:])?gpu:(?:([^:,()]+):)??(?:no_consume:)?(\d+)", gres):
        gpus[kind] += int(count)
    return dict(gpus)


@dataclass(frozen=True)
class JobRecord:
    """Describes a job in the output of ``scontrol show job``, on one line or several.

    Attributes:
        suspended_at: when it was last suspended or resumed, in seconds since 1970.
        limit_s: its time limit; None without a limit.
        tres: its requests per job, node, socket or task, by Slurm's names such as ``TresPerNode``.
        node_gres: the GRES of each of its nodes, with ``--details``.
    """

    state: str
    reason: str
    exit_code: str
    derived_exit_code: str
    node_list: str
    dependency: str
    restarts: int | None
    may_requeue: bool
    suspended_at: float | None
    limit_s: float | None
    run_s: float | None
    is_preempted: bool
    tres: Mapping[str, str]
    node_gres: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> JobRecord:
        """Returns the first job in ``text``; without one, all its values are empty."""
        values = values_of(text)
        reason = values.get("Reason", "")
        return cls(
            state=values.get("JobState", ""),
            reason="" if reason == "None" else reason.replace("_", " "),
            exit_code=values.get("ExitCode", ""),
            derived_exit_code=values.get("DerivedExitCode", ""),
            node_list=values.get("NodeList", ""),
            dependency=values.get("Dependency", ""),
            restarts=number(values.get("Restarts")),
            may_requeue=values.get("Requeue") != "0",
            suspended_at=time_of(values.get("SuspendTime")),
            limit_s=seconds(values.get("TimeLimit")),
            run_s=seconds(values.get("RunTime")),
            is_preempted=values.get("PreemptTime", "")[:1].isdigit(),
            tres={name: value for name, value in values.items() if name.startswith("TresPer")},
            node_gres=tuple(re.findall(r"^ *Nodes=.* GRES=(\S*)", text, flags=re.MULTILINE)),
        )


@dataclass(frozen=True)
class NodeRecord:
    """Describes a node in the output of ``scontrol show node``.

    Attributes:
        cores, memory_mb: its size without the part that Slurm reserves for the system.
        features: its features for ``--constraint``.
        booted: the time of its boot in seconds since 1970.
        architecture: such as x86_64 or aarch64; empty if it is unknown.
    """

    name: str
    host_name: str
    partitions: tuple[str, ...]
    cores: int
    memory_mb: int
    gres: str
    features: frozenset[str]
    active_features: frozenset[str]
    booted: float | None
    architecture: str

    @classmethod
    def read_all(cls, text: str) -> list[NodeRecord]:
        """Returns the nodes in ``text``, which has each on one line or on several."""
        nodes = []
        for record in re.split(r"(?:^|\n)\s*(?=NodeName=)", text):
            if not record.startswith("NodeName="):
                continue
            values = values_of(record)
            counts = {name: number(value) or 0 for name, value in values.items()}
            cores = number(values.get("CPUEfctv"))
            if cores is None:  # versions before 22.05 do not subtract the reserved cores themselves
                reserved = counts.get("CoreSpecCount", 0) * (counts.get("ThreadsPerCore") or 1)
                cores = max(0, counts.get("CPUTot", 0) - reserved)
            node = cls(
                name=values["NodeName"],
                host_name=values.get("NodeHostName", ""),
                partitions=tuple(filter(None, values.get("Partitions", "").split(","))),
                cores=cores,
                memory_mb=max(0, counts.get("RealMemory", 0) - counts.get("MemSpecLimit", 0)),
                gres=values.get("Gres", ""),
                features=names_in(values.get("AvailableFeatures", "")),
                active_features=names_in(values.get("ActiveFeatures", "")),
                booted=time_of(values.get("BootTime")),
                architecture=values.get("Arch", ""),
            )
            nodes.append(node)
        return nodes


def names_in(text: str) -> frozenset[str]:
    return frozenset(text.split(",")) - {"", "(null)"}


NODE_STATES = ("sinfo", "--noheader", "--Node", "--format=%N|%T|%E")
_UNUSABLE = ("down", "drain", "fail", "unknown")
# the last character of a state, https://slurm.schedmd.com/sinfo.html
_POWER = {"~": "powered down", "#": "starting", "%": "powering down", "!": "about to be powered down"}
# reasons of nodes that Slurm, or the ResumeProgram of a cloud, could not power up
_NOT_POWERED_UP = re.compile(r"Resume(Timeout|Program)|resuming|InsufficientInstanceCapacity", re.IGNORECASE)


@dataclass(frozen=True)
class NodeState:
    """Describes a node as ``NODE_STATES`` prints it, with the reason why it is down or drained."""

    node: str
    state: str
    reason: str = ""

    @classmethod
    def read_all(cls, text: str) -> list[NodeState]:
        """Returns the nodes in ``text``, each once, although it may be in several partitions."""
        lines = (line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2)
        nodes = [cls(node, state, "" if reason.strip() == "none" else reason.strip()) for node, state, reason in lines]
        return [*dict.fromkeys(nodes)]

    @property
    def is_usable(self) -> bool:
        return not self.state.startswith(_UNUSABLE)

    @property
    def was_not_powered_up(self) -> bool:
        return not self.is_usable and _NOT_POWERED_UP.search(self.reason) is not None

    @property
    def words(self) -> str:
        """Returns the node with its state, what the power saving of Slurm does with it, and the reason."""
        power = _POWER.get(self.state[-1:], "")
        notes = f" ({', '.join(filter(None, [power, self.reason]))})"
        return f"{self.node} {self.state}{notes}".removesuffix(" ()")


FREE = ("sinfo", "--noheader", "--format=%R|%a|%F|%l|%G|%P")


@dataclass(frozen=True)
class Free:
    """Counts the idle nodes of a partition."""

    partition: str
    idle: int
    nodes: int
    max_time_s: int | None
    gpus: int
    default: bool = False

    @classmethod
    def read_all(cls, text: str) -> list[Free]:
        """Returns the partitions that are up, from the output of ``FREE``."""
        partitions: dict[str, Free] = {}
        for line in text.splitlines():
            name, up, counts, limit, gres, starred = (line.split("|", 5) + [""] * 6)[:6]
            if up != "up" or counts.count("/") != 3:
                continue
            _, idle, _, total = map(int, counts.split("/"))
            before = partitions.get(name, cls(name, 0, 0, seconds(limit), 0))
            partitions[name] = replace(
                before,
                idle=before.idle + idle,
                nodes=before.nodes + total,
                gpus=max(before.gpus, sum(gpus_of(gres).values())),
                default=starred.endswith("*"),
            )
        return list(partitions.values())


def rows(text: str, columns: Sequence[str], fewest: int | None = None) -> list[dict[str, str]]:
    """Returns the lines of ``sacct --parsable2`` or ``sacctmgr --parsable2`` as values by column.

    A line must have all columns, or the ``fewest``.
    """
    lines = (line.split("|") for line in text.splitlines())
    fewest = fewest or len(columns)
    return [dict(zip(columns, values, strict=False)) for values in lines if len(values) >= fewest]
