"""Why Slurm has not started a job, in plain words, and the changes that would start it sooner.

What Slurm knows of one job besides its state: codes, memory, and how its nodes are.

``scontrol`` knows a job until some minutes after its end, on every site; ``sacct`` for longer, where there is
accounting. What none of them says stays empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_train.config.schema import ClusterConfig
from hpc_train.config.values import node_range
from hpc_train.launch.limits import clock
from hpc_train.slurm.client import Query, query
from hpc_train.slurm.site import seconds


@dataclass(frozen=True)
class Reason:
    """One of Slurm's reasons. ``fix``: the change or command that helps; ``{job}`` stands for the id of the job.

    Attributes:
        by_size: whether a smaller or shorter job, or another partition, would start sooner.
    """

    words: str
    fix: str = ""
    by_size: bool = False


RELEASE = "scontrol release {job} lets it go"
AGAIN = "python -m hpc_train cancel, then submit it again with what is missing put right"
STAFF = "ask the site's staff"

# As squeue prints them; https://slurm.schedmd.com/job_reason_codes.html
REASONS: Mapping[str, Reason] = {
    "None": Reason("Slurm has not looked at it yet; that takes up to a minute"),
    "Priority": Reason("other jobs of a higher priority wait for the same nodes", by_size=True),
    "Resources": Reason("it is the next in line, and the nodes that it asks for are not free yet", by_size=True),
    "BeginTime": Reason(
        "it may not start before a set time: after a requeue Slurm waits about two minutes; else it is cluster.begin"
    ),
    "Dependency": Reason("it waits for another job (cluster.dependency)", "squeue --job={job} --Format=dependency"),
    "DependencyNeverSatisfied": Reason("the job that it depends on can no longer end as asked: it never starts", AGAIN),
    "JobHeldUser": Reason("it is held by you or with your permission", RELEASE),
    "JobHeldAdmin": Reason("it is held by an administrator", STAFF),
    "JobHoldMaxRequeue": Reason("it failed to start too often and is held", f"look at its log; then {RELEASE}"),
    "job requeued in held state": Reason("it was requeued and is held", RELEASE),
    "launch failed requeued held": Reason(
        "its nodes could not start it; Slurm requeued and holds it", f"{RELEASE}; cluster.exclude=NODE avoids a bad one"
    ),
    "JobArrayTaskLimit": Reason("as many jobs of its array run as may (launch.array_parallelism)"),
    "JobLaunchFailure": Reason("it could not be launched: a wrong path, or a node that is ill", STAFF),
    "ReqNodeNotAvail": Reason(
        "nodes that it asks for are down, drained or reserved, mostly for maintenance",
        "without cluster.nodelist; or a cluster.time short enough to end before the reservation (scontrol show res)",
        by_size=True,
    ),
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": Reason(
        "too few of the nodes of its partition are up and free for it", "sinfo -R says why nodes are down", by_size=True
    ),
    "NodeDown": Reason("a node that it asks for is down", "without cluster.nodelist", by_size=True),
    "Reservation": Reason("its reservation has not begun", "without cluster.reservation"),
    "ReservationDeleted": Reason("its reservation is gone", "without cluster.reservation"),
    "Licenses": Reason("a licence that it asks for is in use (cluster.licenses)", "scontrol show licenses"),
    "PartitionDown": Reason("its partition is down", "another cluster.partition"),
    "PartitionInactive": Reason("its partition is inactive", "another cluster.partition"),
    "PartitionTimeLimit": Reason(
        "it asks for more time than its partition allows: it never starts", "a shorter cluster.time", by_size=True
    ),
    "PartitionNodeLimit": Reason(
        "it asks for more nodes than its partition has or allows: it never starts", "fewer cluster.nodes", by_size=True
    ),
    "PartitionConfig": Reason("it asks for what its partition does not allow", "another cluster.partition"),
    "AccountNotAllowed": Reason("its account may not use the partition", "another cluster.account, or partition"),
    "QOSNotAllowed": Reason("its QOS may not be used there", "another cluster.qos or cluster.partition"),
    "InvalidAccount": Reason("its account is not valid (any more)", "another cluster.account"),
    "InvalidQOS": Reason("its QOS is not valid (any more)", "another cluster.qos"),
    "AccountingPolicy": Reason("a limit of its account or QOS is reached", "fewer jobs at once, or a smaller one"),
    "BadConstraints": Reason("no node can ever be what it asks for", "another cluster.constraint, gpus_per_node, mem"),
    "Constraints": Reason("no node can be what it asks for", "another cluster.constraint, gpus_per_node or mem"),
    "Cleaning": Reason("its last start is still being cleaned up"),
    "Prolog": Reason("the site prepares its nodes"),
    "InactiveLimit": Reason("it was inactive for too long"),
    "DeadLine": Reason("it can no longer end before its deadline: it never starts", AGAIN),
    "BurstBufferOperation": Reason("the burst buffer is at work, or has failed", STAFF),
    "BurstBufferResources": Reason("the burst buffer has no room for it"),
    "BurstBufferStageIn": Reason("its data are being copied into the burst buffer"),
    "FedJobLock": Reason("the clusters of the federation agree on who starts it"),
    "FrontEndDown": Reason("no front end is up", STAFF),
    "SystemFailure": Reason("Slurm, a file system or the network failed", STAFF),
    "NonZeroExitCode": Reason("it ended with an error and was requeued"),
    "OutOfMemory": Reason("it ran out of memory and was requeued", "a larger cluster.mem"),
    "TimeLimit": Reason("it reached its time limit and was requeued"),
    "SchedDefer": Reason("the site starts jobs only at its next round of scheduling"),
    "MaxBBRequeue": Reason("the burst buffer failed too often", STAFF),
    "ResvInvalid": Reason("its reservation is not valid", "without cluster.reservation"),
}  # fmt: skip

_LIMIT = re.compile(r"(?P<whose>QOS|Assoc|Association)(?P<kind>Grp|Max|Min)?(?P<what>\w*?)(?P<scope>Per\w+?)?(Limit)?$")
_WHAT = (
    ("run minutes", "RunMinutes"), ("minutes of use", "Minutes"), ("wall time", "Wall"), ("wall time", "Time"),
    ("nodes", "Node"), ("cores", "Cpu"), ("memory", "Mem"), ("GPUs", "GRES"), ("jobs in the queue", "SubmitJob"),
    ("running jobs", "Job"), ("billing units", "Billing"), ("licences", "License"), ("energy", "Energy"),
    ("burst buffer", "BB"), ("use", "Usage"), ("resources", "Resource"),
)  # fmt: skip


def explain(reason: str) -> Reason:
    """The words for a reason as ``squeue`` prints it; an unknown one is repeated."""
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
            f"it asks for fewer {what} than the {whose} takes: it never starts", "more, or another cluster.qos"
        )
    if limit["scope"] in ("PerJob", "PerNode") or (what == "wall time" and limit["kind"] != "Grp"):
        return Reason(
            f"it asks for more {what} than the {whose} allows a job: it may never start",
            "less of it, or another cluster.qos",
            by_size=True,
        )
    holders = "all of its jobs together" if limit["kind"] == "Grp" else "your jobs"
    return Reason(
        f"{holders} have reached the limit of the {whose} on {what}",
        "it starts when others of them end; or a smaller job, or another cluster.account or cluster.qos",
    )


@dataclass(frozen=True)
class Free:
    """What is idle in a partition at this moment."""

    partition: str
    idle: int
    nodes: int
    max_time_s: int | None
    gpus: int
    default: bool = False


SINFO = ("sinfo", "--noheader", "--format=%R|%a|%F|%l|%G|%P")


def read_free(text: str) -> list[Free]:
    """From the output of ``SINFO``; of partitions that are up."""
    found: dict[str, Free] = {}
    for line in text.splitlines():
        name, up, counts, limit, gres, starred = (line.split("|", 5) + [""] * 6)[:6]
        if up != "up" or counts.count("/") != 3:
            continue
        _, idle, _, total = (int(count) for count in counts.split("/"))
        gpus = sum(int(count) for count in re.findall(r"gpu:(?:[^:,()]+:)?(\d+)", gres))
        before = found.get(name, Free(name, 0, 0, seconds(limit), 0))
        most = max(before.gpus, gpus)
        default = starred.endswith("*")
        found[name] = Free(name, before.idle + idle, before.nodes + total, before.max_time_s, most, default)
    return list(found.values())


def sooner(cluster: ClusterConfig, gpus: int, free: Iterable[Free], needed_s: float | None = None) -> list[str]:
    """Changes of the config with which the job would start sooner, by what is idle now.

    Args:
        gpus: per node.
        needed_s: what the rest of the run takes at its pace so far, where that is known.
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
    """For ``cluster.gpus_per_node=auto``, whose partition gives its GPUs: 1 where it has any, so must another."""
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
    """Backfill puts short jobs into gaps before a large one; a run that needs more goes on after a requeue."""
    if asked_s is None:
        return ""
    if needed_s is not None and needed_s * 1.5 < asked_s:
        return f"cluster.time={clock(max(60, int(needed_s * 1.5)))}: at its pace the rest takes {clock(int(needed_s))}"
    half = clock(max(60, asked_s // 2))
    return f"cluster.time={half}: short jobs fit into gaps between others; the run goes on in its next job"


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


def read_facts(job_id: str, ask: Query = query) -> JobFacts | None:
    """What Slurm knows of a job; None where it does not respond or no longer knows the job."""
    facts = _of_scontrol(job_id, ask(["scontrol", "show", "job", "--oneliner", job_id]) or "")
    accounted = ask(["sacct", "--jobs", job_id, "--noheader", "--parsable2", f"--format={','.join(SACCT)}"]) or ""
    facts = _with_accounting(job_id, facts, accounted)
    if facts is None or not facts.node_list:
        return facts
    nodes = ask(["sinfo", "--noheader", "--Node", f"--nodes={facts.node_list}", "--format=%N|%T|%E"]) or ""
    return replace(facts, nodes=tuple(dict.fromkeys(_node(line) for line in nodes.splitlines())))


SACCT = ("JobID", "State", "ExitCode", "DerivedExitCode", "MaxRSS", "NodeList")


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
