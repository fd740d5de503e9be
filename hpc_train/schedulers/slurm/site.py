"""Reads the partitions, nodes and limits of the Slurm cluster of this machine.

They are parsed from plain text, since ``--json`` is missing or different in many versions. An unknown value, as on a
site without accounting, is None and refuses no job.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from hpc_train.schedulers.slurm.client import BRIEF_S, Query, asked_once, query, show_nodes
from hpc_train.schedulers.slurm.records import NodeRecord, gpus_of, names_in, number, rows, seconds, values_of
from hpc_train.users import own_name

MIG = re.compile(r"\d+g\.\d+gb")  # NVIDIA's names of profiles


@dataclass(frozen=True)
class NodeKind:
    """Describes identical nodes of a partition. ``gpus`` maps type to count, with type "" if the site names none.

    ``cores`` and ``memory_mb`` count what jobs may use, if Slurm reports it. ``features`` are the features for
    ``--constraint``.
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
    """Describes a partition and its limits; None for no limit.

    Only ``accounts`` and ``qos`` may use it. The limits of ``own_qos`` apply to all its jobs. ``architectures`` holds
    those of its nodes, such as aarch64, if Slurm names them.
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
    architectures: frozenset[str] = frozenset()

    @property
    def hides_nodes(self) -> bool:
        """Returns whether Slurm shows fewer nodes than the partition has, such as powered down nodes of a cloud."""
        return sum(kind.count for kind in self.kinds) < self.nodes


@dataclass(frozen=True)
class PartitionLimits:
    """Holds the limits of an association or a QOS, which also has ``flags`` such as ``PartitionTimeLimit``."""

    max_jobs: int | None = None  # jobs in the queue at the same time
    max_time_s: int | None = None
    max_nodes: int | None = None
    max_gpus: int | None = None
    user_nodes: int | None = None  # of all jobs of a user
    user_gpus: int | None = None
    group_nodes: int | None = None  # of all jobs of the account or of the QOS
    group_gpus: int | None = None
    min_nodes: int | None = None
    min_gpus: int | None = None
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Association:
    """Describes the association of this user with one account, in all partitions or in one.

    If ``default``, jobs without an account are charged to this account. ``groups`` has the limits that the account and
    each account above it set for all of its jobs together, with their names; ``limits`` does not include them.
    """

    account: str
    qos: frozenset[str]
    default: bool
    limits: PartitionLimits
    partition: str | None = None
    default_qos: str | None = None
    groups: tuple[tuple[str, PartitionLimits], ...] = ()


@dataclass(frozen=True)
class Site:
    """Describes a cluster. ``associations`` and ``qos`` are None if the accounting database does not respond.

    Attributes:
        keeps_comments: whether ``sacct`` knows the comments of jobs, where each run leaves a summary.
        has_blocks: whether Slurm places jobs in blocks of nodes, such as the NVLink domains of NVL72.
    """

    name: str
    max_array_size: int | None = None
    enforced: frozenset[str] = frozenset()
    keeps_comments: bool = False
    has_blocks: bool = False
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    associations: tuple[Association, ...] | None = None
    qos: Mapping[str, PartitionLimits] | None = None

    def partition(self, name: str | None) -> Partition | None:
        """Returns the partition ``name``, or the default partition."""
        if name is not None:
            return self.partitions.get(name)
        return next((partition for partition in self.partitions.values() if partition.default), None)


def other_clusters(configured: str | None, site: Site) -> str | None:
    """Returns the clusters of a job, from ``cluster.clusters`` or the shell; None for the cluster of this machine."""
    clusters = configured or os.environ.get("SBATCH_CLUSTERS") or os.environ.get("SLURM_CLUSTERS") or None
    return None if configured is None and clusters == site.name else clusters


def read_site(ask: Query = query) -> Site:
    """Queries the controller and accounting. A query that fails leaves its part of the site unknown."""
    return begin_site(ask)()


def begin_site(ask: Query = query) -> Callable[[], Site]:
    """Starts the queries of ``read_site``, all at once; returns a function that waits for their answers.

    A process that ends earlier does not wait for the answers.
    """
    user = own_name()
    commands = {
        "config": ["scontrol", "show", "config"],
        "partitions": ["scontrol", "--all", "show", "partition", "--oneliner"],
        "sizes": ["sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%G|%f"],
        "nodes": ["scontrol", "--all", "show", "node", "--oneliner"],
        "associations": ["sacctmgr", "-nP", "show", "assoc", f"user={user}", f"format={','.join(ASSOCIATION)}"],
        "accounts": ["sacctmgr", "-nP", "show", "assoc", "user=", f"format={','.join(ACCOUNT)}"],
        "user": ["sacctmgr", "-nP", "show", "user", user, "format=DefaultAccount"],
        "qos": ["sacctmgr", "-nP", "show", "qos", f"format={','.join(QOS)}"],
    }
    answers: dict[str, str | None] = dict.fromkeys(commands)

    def answer(name: str, command: Sequence[str]) -> None:
        answers[name] = ask(command)

    threads = [threading.Thread(target=answer, args=item, daemon=True) for item in commands.items()]
    for thread in threads:
        thread.start()

    @cache
    def wait() -> Site:
        for thread in threads:
            thread.join()
        return _site(answers)

    return wait


begun_site = asked_once(begin_site)
TRES = {"MaxTRES": "max", "MaxTRESPerJob": "max", "MaxTRESPerUser": "user", "GrpTRES": "group", "MinTRES": "min"}
ASSOCIATION = ("Cluster", "Account", "Partition", "QOS", "DefaultQOS", "MaxSubmitJobs", "MaxWall", "MaxTRES", "GrpTRES")
ACCOUNT = ("Cluster", "Account", "ParentName", "GrpSubmitJobs", "GrpTRES")
QOS = ("Name", "Flags", "MaxSubmitJobsPerUser", "MaxWall", "MaxTRESPerJob", "MaxTRESPerUser", "GrpTRES", "MinTRES")


def _site(answers: Mapping[str, str | None]) -> Site:
    """Returns the site that Slurm's answers describe."""
    text = {name: answer or "" for name, answer in answers.items()}
    config = dict(_pairs(text["config"].splitlines()))
    cluster = config.get("ClusterName", "")

    nodes = NodeRecord.read_all(text["nodes"])
    kinds = _node_kinds(text["sizes"], nodes)
    architectures: dict[str, set[str]] = {}
    for node in nodes:
        for name in node.partitions if node.architecture else ():
            architectures.setdefault(name, set()).add(node.architecture)
    memory_default = number(config.get("DefMemPerNode") or config.get("DefMemPerCPU")) is not None
    lines = [line for line in text["partitions"].splitlines() if line.startswith("PartitionName=")]
    partitions = [_partition(line, kinds, architectures, memory_default) for line in lines]

    accounts = {row["Account"]: row for row in rows(text["accounts"], ACCOUNT) if row["Cluster"] == cluster}
    associations = tuple(
        Association(
            account=row["Account"],
            qos=names_in(row["QOS"]),
            default=row["Account"] == text["user"].strip(),
            limits=_limits(row["MaxSubmitJobs"], row),
            partition=row["Partition"] or None,
            default_qos=row["DefaultQOS"] or None,
            groups=_groups(row["Account"], accounts),
        )
        for row in rows(text["associations"], ASSOCIATION)
        if row["Cluster"] == cluster
    )
    qos = {row["Name"]: _limits(row["MaxSubmitJobsPerUser"], row) for row in rows(text["qos"], QOS)}
    return Site(
        name=cluster,
        max_array_size=number(config.get("MaxArraySize")),
        enforced=frozenset(config.get("AccountingStorageEnforce", "none").split(",")),
        keeps_comments="job_comment" in config.get("AccountingStoreFlags", "").split(","),
        has_blocks=config.get("TopologyPlugin") == "topology/block",
        partitions={partition.name: partition for partition in partitions},
        associations=None if answers["associations"] is None else associations,
        qos=qos or None,
    )


def _groups(account: str, accounts: Mapping[str, Mapping[str, str]]) -> tuple[tuple[str, PartitionLimits], ...]:
    """Returns the limits of an account and of those above it for all of their jobs, which Slurm lists with no user."""
    groups: dict[str, PartitionLimits] = {}
    while account in accounts and account not in groups:
        row = accounts[account]
        groups[account] = _limits(row["GrpSubmitJobs"], row)
        account = row["ParentName"]
    return tuple(groups.items())


def _pairs(parts: Iterable[str]) -> list[tuple[str, str]]:
    pairs = (part.partition("=") for part in parts)
    return [(name.strip(), value.strip()) for name, equals, value in pairs if equals]


def _partition(
    line: str,
    kinds: Mapping[str, Sequence[NodeKind]],
    architectures: Mapping[str, Collection[str]],
    memory_default: bool,
) -> Partition:
    values = values_of(line)
    defaults = dict(_pairs(values.get("JobDefaults", "").split(",")))
    partition_memory = number(values.get("DefMemPerNode") or values.get("DefMemPerCPU"))
    return Partition(
        name=values["PartitionName"],
        default=values.get("Default") == "YES",
        state=values.get("State", "UP"),
        nodes=number(values.get("TotalNodes")) or 0,
        max_nodes=number(values.get("MaxNodes")),
        max_time_s=seconds(values.get("MaxTime")),
        accounts=_allowed(values.get("AllowAccounts")),
        qos=_allowed(values.get("AllowQos")),
        own_qos=None if values.get("QoS") == "N/A" else values.get("QoS"),
        cores_per_gpu=number(defaults.get("DefCpuPerGPU")),
        memory_default=memory_default or partition_memory is not None or "DefMemPerGPU" in defaults,
        kinds=tuple(kinds.get(values["PartitionName"], ())),
        architectures=frozenset(architectures.get(values["PartitionName"], ())),
    )


def _node_kinds(sizes: str, nodes: Iterable[NodeRecord]) -> dict[str, list[NodeKind]]:
    """Returns the kinds of nodes of each partition.

    Args:
        sizes: the output of ``sinfo``, which includes the cores and the memory that Slurm reserves for the system.
        nodes: the records of the nodes, which do not include these, but which some sites do not show.
    """
    totals: Counter[tuple[str, int, int, str, frozenset[str]]] = Counter()
    for line in sizes.splitlines():
        name, count_text, cpus, mib, gres, names = (line.split("|", 5) + [""] * 6)[:6]
        totals[name, number(cpus) or 0, number(mib) or 0, gres, names_in(names)] += number(count_text) or 0
    for_jobs = Counter(
        (name, node.cores, node.memory_mb, node.gres, node.features) for node in nodes for name in node.partitions
    )
    by_partition: dict[str, list[NodeKind]] = {}
    for counts in (totals, for_jobs):
        kinds: dict[str, list[NodeKind]] = {}
        for (name, cores, memory_mb, gres, features), count in counts.items():
            kinds.setdefault(name, []).append(NodeKind(count, cores, memory_mb, gpus_of(gres), features))
        by_partition.update(kinds)
    return by_partition


def _limits(jobs: str, row: Mapping[str, str]) -> PartitionLimits:
    sizes = {}
    for column, kind in TRES.items():
        counts = dict(_pairs(row.get(column, "").split(",")))
        if column in row:
            sizes[f"{kind}_nodes"] = number(counts.get("node"))
            sizes[f"{kind}_gpus"] = number(counts.get("gres/gpu"))
    flags = names_in(row.get("Flags", ""))
    return PartitionLimits(max_jobs=number(jobs), max_time_s=seconds(row.get("MaxWall")), flags=flags, **sizes)


def _allowed(text: str | None) -> frozenset[str] | None:
    return None if text in (None, "", "ALL", "(null)") else frozenset(str(text).split(","))


def node_features(nodes: Iterable[str]) -> dict[str, frozenset[str]]:
    """Returns the active features of each node; empty if Slurm does not respond."""
    return {node.name: node.active_features for node in show_nodes([*nodes], BRIEF_S)}
