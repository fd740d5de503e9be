"""Explains why a job is pending, suggests changes that start it sooner, and reads what Slurm knows about a job.

``scontrol`` knows a job until some minutes after its end; ``sacct`` knows it for longer, on sites with accounting.
Values that neither has stay empty.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from hpc_train.config.schema import ClusterConfig
from hpc_train.config.values import node_range
from hpc_train.schedulers.scheduler import Reason
from hpc_train.schedulers.slurm.client import Query, query
from hpc_train.schedulers.slurm.records import (
    NODE_STATES,
    Free,
    JobRecord,
    NodeState,
    clock,
    rows,
    seconds,
    size_bytes,
)
from hpc_train.units import format_bytes

RELEASE = "scontrol release {job}"
AGAIN = "cancel it (python -m hpc_train cancel), correct the setting, and submit it again"
STAFF = "ask the site's support"

# As squeue prints them; https://slurm.schedmd.com/job_reason_codes.html
REASONS: Mapping[str, Reason] = {
    "None": Reason("Slurm has not considered it yet, which takes up to a minute"),
    "Priority": Reason("jobs with a higher priority wait for the same nodes", by_size=True),
    "Resources": Reason("it is next in the queue, and the requested nodes are not free yet", by_size=True),
    "BeginTime": Reason(
        "its begin time has not come: cluster.extra.begin, or about two minutes after a requeue"
    ),
    "Dependency": Reason("it depends on another job (cluster.extra.dependency)",
                         "squeue --job={job} --Format=dependency"),
    "DependencyNeverSatisfied": Reason("its dependency can no longer be satisfied, so it never starts", AGAIN),
    "JobHeldUser": Reason("it is held by its user", RELEASE),
    "JobHeldAdmin": Reason("it is held by an administrator", STAFF),
    "JobHoldMaxRequeue": Reason("it failed to start too often and is held", f"read its log, then: {RELEASE}"),
    "job requeued in held state": Reason("it was requeued and is held", RELEASE),
    "launch failed requeued held": Reason(
        "its nodes failed to launch it, and it is held", f"{RELEASE}; cluster.exclude=NODE excludes a bad node"
    ),
    "JobArrayTaskLimit": Reason("the maximum number of jobs of its array is running (launch.array_parallelism)"),
    "JobLaunchFailure": Reason("it could not be launched: a wrong path or a faulty node", STAFF),
    "ReqNodeNotAvail": Reason(
        "requested nodes are down, drained, or reserved, usually for maintenance",
        "remove cluster.nodelist, or shorten cluster.time to end before the reservation (scontrol show res)",
        by_size=True,
    ),
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": Reason(
        "too few nodes of its partition are available", "sinfo -R lists why nodes are down", by_size=True
    ),
    "NodeDown": Reason("a requested node is down", "remove cluster.nodelist", by_size=True),
    "Reservation": Reason("its reservation has not begun", "remove cluster.extra.reservation"),
    "ReservationDeleted": Reason("its reservation was deleted", "remove cluster.extra.reservation"),
    "Licenses": Reason("a requested license is in use (cluster.extra.licenses)", "scontrol show licenses"),
    "PartitionDown": Reason("its partition is down", "another cluster.partition"),
    "PartitionInactive": Reason("its partition is inactive", "another cluster.partition"),
    "PartitionTimeLimit": Reason(
        "its time limit exceeds that of its partition, so it never starts", "reduce cluster.time", by_size=True
    ),
    "PartitionNodeLimit": Reason(
        "it requests more nodes than its partition allows, so it never starts", "reduce cluster.nodes", by_size=True
    ),
    "PartitionConfig": Reason("it requests resources that its partition does not allow", "another cluster.partition"),
    "AccountNotAllowed": Reason("its account may not use the partition", "another cluster.account, or partition"),
    "QOSNotAllowed": Reason("its QOS may not be used in its partition", "another cluster.qos or cluster.partition"),
    "InvalidAccount": Reason("its account is not valid", "another cluster.account"),
    "InvalidQOS": Reason("its QOS is not valid", "another cluster.qos"),
    "AccountingPolicy": Reason("a limit of its account or QOS is reached", "submit fewer or smaller jobs"),
    "BadConstraints": Reason("no node satisfies its constraints", "another cluster.constraint, gpus_per_node, mem"),
    "Constraints": Reason("no node satisfies its constraints", "another cluster.constraint, gpus_per_node or mem"),
    "Cleaning": Reason("Slurm is still cleaning up after its last start"),
    "Prolog": Reason("its nodes run the prolog of the site"),
    "InactiveLimit": Reason("it was inactive for too long"),
    "DeadLine": Reason("it can no longer end before its deadline, so it never starts", AGAIN),
    "BurstBufferOperation": Reason("the burst buffer is busy or has failed", STAFF),
    "BurstBufferResources": Reason("the burst buffer has no room for it"),
    "BurstBufferStageIn": Reason("its data is being copied into the burst buffer"),
    "FedJobLock": Reason("the clusters of the federation are deciding which one starts it"),
    "FrontEndDown": Reason("no front-end node is up", STAFF),
    "SystemFailure": Reason("Slurm, a file system or the network failed", STAFF),
    "NonZeroExitCode": Reason("it ended with an error and was requeued"),
    "OutOfMemory": Reason("it ran out of memory and was requeued", "increase cluster.mem"),
    "TimeLimit": Reason("it reached its time limit and was requeued"),
    "SchedDefer": Reason("it waits for the next scheduling cycle"),
    "MaxBBRequeue": Reason("the burst buffer failed too often", STAFF),
    "ResvInvalid": Reason("its reservation is not valid", "remove cluster.extra.reservation"),
}  # fmt: skip

NODES_START = Reason(
    "its nodes are powered up, booted or configured; if one does not register within ResumeTimeout, Slurm requeues it"
)

_LIMIT = re.compile(r"(?P<whose>QOS|Assoc|Association)(?P<kind>Grp|Max|Min)?(?P<what>\w*?)(?P<scope>Per\w+?)?(Limit)?$")
_WHAT = (
    ("run minutes", "RunMinutes"), ("minutes of use", "Minutes"), ("wall time", "Wall"), ("wall time", "Time"),
    ("nodes", "Node"), ("cores", "Cpu"), ("memory", "Mem"), ("GPUs", "GRES"), ("jobs in the queue", "SubmitJob"),
    ("running jobs", "Job"), ("billing units", "Billing"), ("licenses", "License"), ("energy", "Energy"),
    ("burst buffer", "BB"), ("use", "Usage"), ("resources", "Resource"),
)  # fmt: skip


def explain(reason: str) -> Reason:
    """Returns the explanation of a reason as ``squeue`` prints it; an unknown reason is repeated."""
    plain = reason.replace("_", " ").strip("() ")
    for name in (plain, plain.partition(",")[0], plain.replace(" ", "")):
        if name in REASONS:
            return REASONS[name]
    limit = _LIMIT.match(plain)
    if limit is None:
        return Reason(f"Slurm reports {plain or 'nothing'}", STAFF)
    source = "QOS" if limit["whose"] == "QOS" else "account (association)"
    what = next((words for words, mark in _WHAT if mark.lower() in limit["what"].lower()), "resources")
    if limit["kind"] == "Min":
        return Reason(
            f"it requests fewer {what} than the minimum of the {source}, so it never starts",
            "request more, or use another cluster.qos",
        )
    if limit["scope"] in ("PerJob", "PerNode") or (what == "wall time" and limit["kind"] != "Grp"):
        return Reason(
            f"it requests more {what} than the {source} allows per job, so it may never start",
            "request less, or use another cluster.qos",
            by_size=True,
        )
    holders = "all of its jobs together" if limit["kind"] == "Grp" else "your jobs"
    return Reason(
        f"{holders} have reached the limit of the {source} for {what}",
        "wait until others of them end, submit a smaller job, or use another cluster.account or cluster.qos",
    )


def sooner(cluster: ClusterConfig, gpus: int, free: Iterable[Free], needed_s: float | None = None) -> list[str]:
    """Returns changes of the config with which the job would start sooner, given the idle nodes.

    Args:
        gpus: the number of GPUs per node.
        needed_s: the estimated duration of the rest of the run, if known.
    """
    partitions = {partition.partition: partition for partition in free}
    fewest, most = node_range(cluster)
    limit_s = seconds(cluster.time)
    configured = [partitions[name] for name in _configured(cluster, partitions.values()) if name in partitions]
    changes = [
        f"cluster.nodes={item.idle}-{most}: {item.idle} of the {item.nodes} nodes of {item.partition} are idle"
        for item in configured
        if 0 < item.idle < fewest
    ]
    for other in partitions.values():
        if other in configured or other.idle < fewest or other.gpus < gpus:
            continue
        time = ""
        if other.max_time_s is not None and limit_s is not None and limit_s > other.max_time_s:
            time = f" cluster.time={clock(other.max_time_s)}"
        changes.append(f"cluster.partition={other.partition}{time}: {other.idle} of its {other.nodes} nodes are idle")
    # backfill starts shorter jobs sooner; a longer run continues after a requeue
    if limit_s is not None and needed_s is not None and needed_s * 1.5 < limit_s:
        time = clock(max(60, int(needed_s * 1.5)))
        changes.append(f"cluster.time={time}: the rest of the run takes {clock(int(needed_s))}")
    elif limit_s is not None:
        half = clock(max(60, limit_s // 2))
        changes.append(f"cluster.time={half}: short jobs are backfilled; the run continues in its next job")
    return changes


def with_gpus(cluster: ClusterConfig, free: Sequence[Free]) -> int:
    """Returns the GPUs per node that another partition must have: 1 if the job's own partition has any, else 0."""
    configured = _configured(cluster, free)
    return int(any(partition.gpus for partition in free if partition.partition in configured))


def _configured(cluster: ClusterConfig, partitions: Iterable[Free]) -> Sequence[str]:
    if cluster.partition:
        return cluster.partition.split(",")
    return [partition.partition for partition in partitions if partition.default]


@dataclass(frozen=True)
class JobFacts:
    """Holds what Slurm knows about a job. Exit codes are ``code:signal``; ``max_rss_bytes`` belongs to the largest
    task.

    ``use`` is what the monitoring of the site has measured (``describe_use``).
    """

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
    use: tuple[str, ...] = ()


SACCT = ("JobID", "State", "ExitCode", "DerivedExitCode", "MaxRSS", "NodeList", "AdminComment")


def read_facts(job_id: str, ask: Query = query) -> JobFacts | None:
    """Returns what Slurm knows about a job; None if Slurm does not respond or no longer knows the job."""
    job = JobRecord.read(ask(["scontrol", "show", "job", "--oneliner", job_id]) or "")
    facts = None
    if job.state:
        facts = JobFacts(
            job_id=job_id,
            state=job.state,
            reason=job.reason,
            exit_code=job.exit_code,
            derived_exit_code=job.derived_exit_code,
            node_list=job.node_list,
            restarts=job.restarts or 0,
            dependency=job.dependency,
        )
    text = ask(["sacct", "--jobs", job_id, "--noheader", "--parsable2", f"--format={','.join(SACCT)}"]) or ""
    accounted = rows(text, SACCT, 6)
    if accounted:
        row = next((row for row in accounted if "." not in row["JobID"]), accounted[0])
        if facts is None:
            state = row["State"].split()[0]  # "CANCELLED by 1000"
            nodes = "" if row["NodeList"] == "None assigned" else row["NodeList"]
            facts = JobFacts(job_id, state, "", row["ExitCode"], row["DerivedExitCode"], nodes)
        largest = max(size_bytes(step["MaxRSS"]) for step in accounted)
        facts = replace(facts, max_rss_bytes=largest or None, use=describe_use(row.get("AdminComment", "")))
    if facts is None or not facts.node_list:
        return facts
    states = NodeState.read_all(ask([*NODE_STATES, f"--nodes={facts.node_list}"]) or "")
    return replace(facts, nodes=tuple(states))


PREFIX = "JS1:"


def describe_use(admin_comment: str) -> tuple[str, ...]:
    """Returns lines about the use of GPUs, CPUs and memory from Jobstats, the monitoring of some sites; or nothing.

    The comment is ``JS1:`` and base64 of compressed JSON. For each node it has ``gpu_utilization`` (percent, the mean
    over the job), ``gpu_used_memory`` and ``gpu_total_memory`` (bytes, the highest use) by GPU, ``used_memory`` and
    ``total_memory`` of the host, ``cpus`` and ``total_time`` (CPU seconds); ``total_time`` at the top is the elapsed
    time (github.com/PrincetonUniversity/jobstats).
    """
    if not admin_comment.startswith(PREFIX):
        return ()
    try:
        summary = json.loads(gzip.decompress(base64.b64decode(admin_comment.removeprefix(PREFIX))))
        nodes: dict[str, dict[str, Any]] = summary["nodes"]
        lines = []
        used = {
            f"GPU {gpu} of {name}": float(share)
            for name, node in nodes.items()
            for gpu, share in node.get("gpu_utilization", {}).items()
        }
        if used:
            lowest = min(used, key=lambda name: used[name])
            mean = fmean(used.values())
            lines.append(f"Jobstats: GPU utilization {mean:.0f} % (lowest {used[lowest]:.0f} %, {lowest})")
            memory = [
                (node["gpu_used_memory"][gpu], node["gpu_total_memory"][gpu])
                for node in nodes.values()
                for gpu in node.get("gpu_used_memory", {})
            ]
            bytes_used, size = max(memory, key=lambda pair: pair[0] / pair[1])
            lines.append(f"Jobstats: GPU memory {format_bytes(bytes_used)} of {format_bytes(size)} on the fullest")
        available_s = sum(node["cpus"] for node in nodes.values()) * summary["total_time"]
        share = sum(node["total_time"] for node in nodes.values()) / available_s
        fullest = max(nodes.values(), key=lambda node: node["used_memory"] / node["total_memory"])
        host = f"{format_bytes(fullest['used_memory'])} of {format_bytes(fullest['total_memory'])}"
        return (*lines, f"Jobstats: CPU utilization {100 * share:.0f} %, host memory of the fullest node {host}")
    except (ValueError, EOFError, OSError, KeyError, TypeError, AttributeError, ZeroDivisionError):  # e.g. JS1:Short
        return ()
