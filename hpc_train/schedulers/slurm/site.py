"""The partitions, nodes and limits of the Slurm cluster of this machine.

They are parsed from plain text, since ``--json`` is missing or different in many versions. What is unknown, as on a
site without accounting, is None and refuses nothing.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from hpc_train.schedulers.slurm.client import BRIEF_S, Query, query, show_nodes
from hpc_train.schedulers.slurm.variables import preset_clusters
from hpc_train.users import own_name

MIG = re.compile(r"\d+g\.\d+gb")  # NVIDIA's names of profiles


@dataclass(frozen=True)
class NodeKind:
    """Identical nodes of a partition. ``gpus`` maps type to count, with type "" if the site names none.

    ``cores`` and ``memory_mb`` are those that jobs may use, as far as Slurm tells them. ``features`` are the features
    for ``--constraint``.
    """

    count: int
    cores: int
    memory_mb: int
    gpus: Mapping[str, int]
    features: frozenset[str] = frozenset()

    def meets(self, constraint: str | None) -> bool:
        """Returns whether the nodes satisfy ``--constraint``; True if it has operators other than ``&`` and ``|``."""
        if not constraint or re.search(r"[^\w.&|-]", constraint):
            return True
        return any(self.features.issuperset(together.split("&")) for together in constraint.split("|"))

    def gpus_of(self, gpu_type: str | None) -> int:
        return self.gpus.get(gpu_type, 0) if gpu_type else sum(self.gpus.values())

    def slices_of(self, gpu_type: str | None) -> int:
        """Returns how many of ``gpus_of`` are MIG slices, by the names of their types (``a100_1g.5gb``)."""
        return sum(self.gpus_of(name) for name in self.gpus if gpu_type in (None, name) and MIG.search(name))


@dataclass(frozen=True)
class Partition:
    """A partition and its limits; None for no limit.

    ``accounts`` and ``qos`` are those that may use it. The limits of ``own_qos`` apply to all its jobs.
    """

    name: str
    default: bool = False
    state: str = "UP"
    nodes: int = 0
    max_nodes: int | None = None
    max_time_s: int | None = None
    accounts: frozenset[str] | None = None
    qos: frozenset[str] | None = None
    own_qos: str | None = None
    cores_per_gpu: int | None = None
    memory_default: bool = False  # jobs get memory without an option
    kinds: tuple[NodeKind, ...] = ()


@dataclass(frozen=True)
class PartitionLimits:
    """Limits of an association or a QOS, which also has ``flags`` such as ``PartitionTimeLimit``."""

    max_jobs: int | None = None  # in the queue at the same time
    max_time_s: int | None = None
    max_nodes: int | None = None
    max_gpus: int | None = None
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Association:
    """The association of this user with one account, in all partitions or in one.

    ``default`` tells whether jobs without an account are charged to this account.
    """

    account: str
    qos: frozenset[str]
    default: bool
    limits: PartitionLimits
    partition: str | None = None
    default_qos: str | None = None


@dataclass(frozen=True)
class Site:
    """Describes a cluster. ``associations`` and ``qos`` are None if the accounting database does not respond.

    Attributes:
        keeps_comments: whether ``sacct`` knows the comments of jobs, where each run leaves a summary.
    """

    name: str
    max_array_size: int | None = None
    enforced: frozenset[str] = frozenset()
    keeps_comments: bool = False
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    associations: tuple[Association, ...] | None = None
    qos: Mapping[str, PartitionLimits] | None = None

    def partition(self, name: str | None) -> Partition | None:
        """Returns the partition ``name``, or the default partition."""
        if name is not None:
            return self.partitions.get(name)
        return next((found for found in self.partitions.values() if found.default), None)


def other_clusters(asked: str | None, site: Site) -> str | None:
    """Returns the clusters that a job goes to, of ``cluster.clusters`` or the shell; None for that of this machine.

    Args:
        asked: ``cluster.clusters``.
    """
    clusters = asked or preset_clusters()
    return None if asked is None and clusters == site.name else clusters


def read_site(ask: Query = query) -> Site:
    """Queries the controller and accounting. A query that fails leaves its part of the site unknown."""
    return begin_site(ask)()


@cache
def begun_site(path: str | None, conf: str | None) -> Callable[[], Site]:
    """Returns what waits for the site of this machine; the first call asks Slurm. Cached per process.

    Args:
        path, conf: PATH and SLURM_CONF, which select the commands and the controller.
    """
    return begin_site()


def begin_site(ask: Query = query) -> Callable[[], Site]:
    """Starts the queries of ``read_site``, all at once; returns what waits for their answers.

    A process that ends before that does not wait for them.
    """
    user = own_name()
    commands = {
        "config": ["scontrol", "show", "config"],
        "partitions": ["scontrol", "--all", "show", "partition", "--oneliner"],
        "sizes": ["sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%G|%f"],
        "nodes": ["scontrol", "--all", "show", "node", "--oneliner"],
        "associations": ["sacctmgr", "-nP", "show", "assoc", f"user={user}", f"format={','.join(ASSOCIATION)}"],
        "user": ["sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount"],
        "qos": ["sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS)}"],
    }
    answers: dict[str, str | None] = dict.fromkeys(commands)

    def answer(name: str, command: Sequence[str]) -> None:
        answers[name] = ask(command)

    threads = [threading.Thread(target=answer, args=item, daemon=True) for item in commands.items()]
    for thread in threads:
        thread.start()

    def wait() -> Site:
        for thread in threads:
            thread.join()
        return _site(answers)

    return wait


def _site(answers: Mapping[str, str | None]) -> Site:
    """Returns the site that Slurm's answers describe."""
    text = {name: answer or "" for name, answer in answers.items()}
    config = dict(_pairs(text["config"].splitlines()))
    kinds = {**_kinds(_total_sizes(text["sizes"])), **_kinds(_sizes_for_jobs(text["nodes"]))}
    memory_default = _number(config.get("DefMemPerNode") or config.get("DefMemPerCPU")) is not None
    lines = [line for line in text["partitions"].splitlines() if line.startswith("PartitionName=")]
    partitions = [_partition(line, kinds, memory_default) for line in lines]
    known = answers["associations"] is not None
    associations = _associations(text["associations"], text["user"].strip(), config.get("ClusterName", ""))
    return Site(
        name=config.get("ClusterName", ""),
        max_array_size=_number(config.get("MaxArraySize")),
        enforced=frozenset(config.get("AccountingStorageEnforce", "none").split(",")),
        keeps_comments="job_comment" in config.get("AccountingStoreFlags", "").split(","),
        partitions={found.name: found for found in partitions},
        associations=associations if known else None,
        qos=_qos(text["qos"]),
    )


ASSOCIATION = ("Cluster", "Account", "Partition", "QOS", "DefaultQOS", "MaxSubmitJobs", "MaxWall", "MaxTRES")
QOS = ("Name", "Flags", "MaxSubmitJobsPerUser", "MaxWall", "MaxTRESPerJob")


def _pairs(parts: Iterable[str]) -> list[tuple[str, str]]:
    found = (part.partition("=") for part in parts)
    return [(name.strip(), value.strip()) for name, equals, value in found if equals]


def _partition(line: str, kinds: Mapping[str, tuple[NodeKind, ...]], memory_default: bool) -> Partition:
    values = dict(_pairs(line.split()))
    defaults = dict(_pairs(values.get("JobDefaults", "").split(",")))
    own_memory = _number(values.get("DefMemPerNode") or values.get("DefMemPerCPU"))
    return Partition(
        name=values["PartitionName"],
        default=values.get("Default") == "YES",
        state=values.get("State", "UP"),
        nodes=_number(values.get("TotalNodes")) or 0,
        max_nodes=_number(values.get("MaxNodes")),
        max_time_s=seconds(values.get("MaxTime")),
        accounts=_names(values.get("AllowAccounts")),
        qos=_names(values.get("AllowQos")),
        own_qos=None if values.get("QoS") == "N/A" else values.get("QoS"),
        cores_per_gpu=_number(defaults.get("DefCpuPerGPU")),
        memory_default=memory_default or own_memory is not None or "DefMemPerGPU" in defaults,
        kinds=kinds.get(values["PartitionName"], ()),
    )


Size = tuple[str, int, int, int, str, str]  # partition, number of nodes, cores, memory in MiB, GRES, features


def _total_sizes(text: str) -> Iterator[Size]:
    """Yields what ``sinfo`` prints, which includes the cores and the memory that Slurm reserves for the system."""
    for line in text.splitlines():
        name, count, cores, memory, gres, features = (line.split("|", 5) + [""] * 6)[:6]
        yield name, _number(count) or 0, _number(cores) or 0, _number(memory) or 0, gres, features


def _sizes_for_jobs(text: str) -> Iterator[Size]:
    """Yields the sizes of the nodes in ``scontrol show node --oneliner`` without what Slurm reserves for the system."""
    counts: Counter[tuple[str, int, int, str, str]] = Counter()
    for line in text.splitlines():
        node = dict(reversed(re.findall(r"(\w+)=(\S*)", line)))  # the first value counts, since free text is at the end
        size = _cores_for_jobs(node), _memory_for_jobs(node), node.get("Gres", ""), node.get("AvailableFeatures", "")
        counts.update((name, *size) for name in node.get("Partitions", "").split(",") if name)
    for (name, cores, memory, gres, features), count in counts.items():
        yield name, count, cores, memory, gres, features


def _cores_for_jobs(node: Mapping[str, str]) -> int:
    """Returns the CPUs without those of ``CoreSpecCount``, which versions before 22.05 do not subtract themselves."""
    effective = _number(node.get("CPUEfctv"))
    if effective is not None:
        return effective
    reserved = (_number(node.get("CoreSpecCount")) or 0) * (_number(node.get("ThreadsPerCore")) or 1)
    return max(0, (_number(node.get("CPUTot")) or 0) - reserved)


def _memory_for_jobs(node: Mapping[str, str]) -> int:
    return max(0, (_number(node.get("RealMemory")) or 0) - (_number(node.get("MemSpecLimit")) or 0))


def _kinds(sizes: Iterable[Size]) -> dict[str, tuple[NodeKind, ...]]:
    kinds: dict[str, tuple[NodeKind, ...]] = {}
    for name, count, cores, memory, gres, features in sizes:
        kind = NodeKind(count, cores, memory, gpus_of(gres), frozenset(features.split(",")) - {"", "(null)"})
        kinds[name] = (*kinds.get(name, ()), kind)
    return kinds


def gpus_of(gres: str) -> dict[str, int]:
    """GPUs by type in a GRES text: ``gpu:a100:4(S:0-1),gpu:2``."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)(?:gres/)?gpu:(?:([^:,()]+):)??(?:no_consume:)?(\d+)", gres):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def _associations(text: str, default: str, cluster: str) -> tuple[Association, ...]:
    return tuple(
        Association(
            account=row["Account"],
            qos=frozenset(filter(None, row["QOS"].split(","))),
            default=row["Account"] == default,
            limits=_limits(row["MaxSubmitJobs"], row["MaxWall"], row["MaxTRES"]),
            partition=row["Partition"] or None,
            default_qos=row["DefaultQOS"] or None,
        )
        for row in _rows(text, ASSOCIATION)
        if row["Cluster"] == cluster
    )


def _qos(text: str) -> dict[str, PartitionLimits] | None:
    rows = _rows(text, QOS)
    limits = (_limits(row["MaxSubmitJobsPerUser"], row["MaxWall"], row["MaxTRESPerJob"], row["Flags"]) for row in rows)
    return {row["Name"]: found for row, found in zip(rows, limits, strict=True)} or None


def _rows(text: str, names: Sequence[str]) -> list[dict[str, str]]:
    split = (line.split("|") for line in text.splitlines())
    return [dict(zip(names, values, strict=True)) for values in split if len(values) == len(names)]


def _limits(jobs: str, wall: str, tres: str, flags: str = "") -> PartitionLimits:
    counts = dict(_pairs(tres.split(",")))
    nodes, gpus = _number(counts.get("node")), _number(counts.get("gres/gpu"))
    return PartitionLimits(_number(jobs), seconds(wall), nodes, gpus, frozenset(flags.split(",")) - {""})


def _names(text: str | None) -> frozenset[str] | None:
    return None if text in (None, "", "ALL", "(null)") else frozenset(str(text).split(","))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def clock(span_s: int) -> str:
    """Formats seconds as Slurm prints for time limits: 2-12:00:00."""
    days, rest = divmod(span_s, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


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


def node_features(nodes: Iterable[str]) -> dict[str, frozenset[str]]:
    """Returns the active features of each node; empty if Slurm does not respond."""
    return parse_features(show_nodes([*nodes], BRIEF_S))


def parse_features(text: str) -> dict[str, frozenset[str]]:
    """Returns the active features of each node in ``scontrol show node``, with or without ``--oneliner``."""
    nodes = re.findall(r"\bNodeName=(\S+).*?\bActiveFeatures=(\S+)", text, flags=re.DOTALL)
    return {name: frozenset(features.split(",")) - {"(null)"} for name, features in nodes}
