"""Explains why a job is pending, suggests changes that start it sooner, and reads what Slurm knows of a job.

``scontrol`` knows a job until some minutes after its end; ``sacct`` knows it for longer, on sites with accounting.
Values that neither has stay empty.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from hpc_train.config.schema import ClusterConfig
from hpc_train.config.values import node_range
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


@dataclass(frozen=True)
class Reason:
    """One of Slurm's reasons. ``fix`` is a change or command that helps, where ``{job}`` is the id of the job.

    Attributes:
        by_size: whether a smaller or shorter job, or another partition, would start sooner.
    """

    words: str
    fix: str = ""
    by_size: bool = False


RELEASE = "scontrol release {job}"
AGAIN = "cancel it (python -m hpc_train cancel), correct the setting, and submit it again"
STAFF = "ask the site's support"

# As squeue prints them; https://slurm.schedmd.com/job_reason_codes.html
REASONS: Mapping[str, Reason] = {
    "None": Reason("Slurm has not considered it yet, which takes up to a minute"),
    "Priority": Reason("jobs with a higher priority wait for the same nodes", by_size=True),
    "Resources": Reason("it is next in the queue, and the requested nodes are not free yet", by_size=True),
    "BeginTime": Reason(
        "its begin time has not come: cluster.begin, or about two minutes after a requeue"
    ),
    "Dependency": Reason("it depends on another job (cluster.dependency)",
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
    "Reservation": Reason("its reservation has not begun", "remove cluster.reservation"),
    "ReservationDeleted": Reason("its reservation was deleted", "remove cluster.reservation"),
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
    "ResvInvalid": Reason("its reservation is not valid", "remove cluster.reservation"),
}  # fmt: skip

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
    return _of_limit(limit) if limit else Reason(f"Slurm reports {plain or 'nothing'}", STAFF)


def _of_limit(limit: re.Match[str]) -> Reason:
    whose = "QOS" if limit["whose"] == "QOS" else "account (association)"
    what = next((words for words, mark in _WHAT if mark.lower() in limit["what"].lower()), "resources")
    if limit["kind"] == "Min":
        return Reason(
            f"it requests fewer {what} than the minimum of the {whose}, so it never starts",
            "request more, or use another cluster.qos",
        )
    if limit["scope"] in ("PerJob", "PerNode") or (what == "wall time" and limit["kind"] != "Grp"):
        return Reason(
            f"it requests more {what} than the {whose} allows per job, so it may never start",
            "request less, or use another cluster.qos",
            by_size=True,
        )
    holders = "all of its jobs together" if limit["kind"] == "Grp" else "your jobs"
    return Reason(
        f"{holders} have reached the limit of the {whose} for {what}",
        "wait until others of them end, submit a smaller job, or use another cluster.account or cluster.qos",
    )


def sooner(cluster: ClusterConfig, gpus: int, free: Iterable[Free], needed_s: float | None = None) -> list[str]:
    """Changes of the config with which the job would start sooner, given the idle nodes.

    Args:
        gpus: per node.
        needed_s: the estimated duration of the rest of the run, if known.
    """
    partitions = {one.partition: one for one in free}
    fewest, most = node_range(cluster)
    asked_s = seconds(cluster.time)
    own = [partitions[name] for name in _own(cluster, partitions.values()) if name in partitions]
    changes = [_fewer_nodes(one, fewest, most) for one in own]
    others = [one for one in partitions.values() if one not in own and one.idle >= fewest and one.gpus >= gpus]
    for one in others:
        shorter = one.max_time_s is not None and asked_s is not None and asked_s > one.max_time_s
        time = f" cluster.time={clock(one.max_time_s or 0)}" if shorter else ""
        changes.append(f"cluster.partition={one.partition}{time}: {one.idle} of its {one.nodes} nodes are idle")
    changes.append(_shorter(asked_s, needed_s))
    return [change for change in changes if change]


def with_gpus(cluster: ClusterConfig, free: Sequence[Free]) -> int:
    """Returns the GPUs per node that another partition must have: 1 if the job's own partition has any, else 0."""
    own = _own(cluster, free)
    return int(any(one.gpus for one in free if one.partition in own))


def _own(cluster: ClusterConfig, partitions: Iterable[Free]) -> Sequence[str]:
    if cluster.partition:
        return cluster.partition.split(",")
    return [one.partition for one in partitions if one.default]


def _fewer_nodes(own: Free, fewest: int, most: int) -> str:
    if not 0 < own.idle < fewest:
        return ""
    return f"cluster.nodes={own.idle}-{most}: {own.idle} of the {own.nodes} nodes of {own.partition} are idle"


def _shorter(asked_s: int | None, needed_s: float | None) -> str:
    """Returns a shorter time limit, with which backfill starts a job sooner; a longer run continues after a requeue."""
    if asked_s is None:
        return ""
    if needed_s is not None and needed_s * 1.5 < asked_s:
        return f"cluster.time={clock(max(60, int(needed_s * 1.5)))}: the rest of the run takes {clock(int(needed_s))}"
    half = clock(max(60, asked_s // 2))
    return f"cluster.time={half}: short jobs are backfilled; the run continues in its next job"


@dataclass(frozen=True)
class JobFacts:
    """Holds what Slurm knows of a job. Exit codes are ``code:signal``; ``max_rss_bytes`` belongs to the largest task.

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


def read_facts(job_id: str, ask: Query = query) -> JobFacts | None:
    """Returns what Slurm knows of a job; None if Slurm does not respond or no longer knows the job."""
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
    accounted = ask(["sacct", "--jobs", job_id, "--noheader", "--parsable2", f"--format={','.join(SACCT)}"]) or ""
    facts = _with_accounting(job_id, facts, rows(accounted, SACCT, 6))
    if facts is None or not facts.node_list:
        return facts
    nodes = NodeState.read_all(ask([*NODE_STATES, f"--nodes={facts.node_list}"]) or "")
    return replace(facts, nodes=tuple(nodes))


SACCT = ("JobID", "State", "ExitCode", "DerivedExitCode", "MaxRSS", "NodeList", "AdminComment")


def _with_accounting(job_id: str, facts: JobFacts | None, accounted: Sequence[Mapping[str, str]]) -> JobFacts | None:
    if not accounted:
        return facts
    job = next((row for row in accounted if "." not in row["JobID"]), accounted[0])
    if facts is None:
        state, nodes = job["State"].split()[0], job["NodeList"]  # "CANCELLED by 1000"
        known = "" if nodes == "None assigned" else nodes
        facts = JobFacts(job_id, state, "", job["ExitCode"], job["DerivedExitCode"], known)
    largest = max(size_bytes(row["MaxRSS"]) for row in accounted)
    return replace(facts, max_rss_bytes=largest or None, use=describe_use(job.get("AdminComment", "")))


PREFIX = "JS1:"


def describe_use(admin_comment: str) -> tuple[str, ...]:
    """Returns what Jobstats says about the use of GPUs, CPUs and memory; nothing for any other comment."""
    try:
        found = json.loads(gzip.decompress(base64.b64decode(admin_comment.removeprefix(PREFIX))))
        return tuple(_lines(found)) if admin_comment.startswith(PREFIX) else ()
    except (ValueError, EOFError, OSError, KeyError, TypeError, AttributeError, ZeroDivisionError):  # e.g. JS1:Short
        return ()


def _lines(found: dict[str, Any]) -> Iterator[str]:
    nodes: dict[str, dict[str, Any]] = found["nodes"]
    used = {
        f"GPU {gpu} of {name}": float(share)
        for name, node in nodes.items()
        for gpu, share in node.get("gpu_utilization", {}).items()
    }
    if used:
        lowest = min(used, key=lambda name: used[name])
        yield f"Jobstats: GPU utilization {fmean(used.values()):.0f} % (lowest {used[lowest]:.0f} %, {lowest})"
        yield f"Jobstats: GPU memory {_fullest(nodes, 'gpu_used_memory', 'gpu_total_memory')}"
    held_s = sum(node["cpus"] for node in nodes.values()) * found["total_time"]
    share = sum(node["total_time"] for node in nodes.values()) / held_s
    fullest = max(nodes.values(), key=lambda node: node["used_memory"] / node["total_memory"])
    host = f"{format_bytes(fullest['used_memory'])} of {format_bytes(fullest['total_memory'])}"
    yield f"Jobstats: CPU utilization {100 * share:.0f} %, host memory of the fullest node {host}"


def _fullest(nodes: dict[str, dict[str, Any]], used: str, total: str) -> str:
    """Returns the use of the GPU with the largest share of its memory in use."""
    pairs = [(node[used][gpu], node[total][gpu]) for node in nodes.values() for gpu in node.get(used, {})]
    highest = max(pairs, key=lambda pair: pair[0] / pair[1])
    return f"{format_bytes(highest[0])} of {format_bytes(highest[1])} on the fullest"
