"""Reads the state of a Job from its objects, and explains why its pods wait.

The functions take objects of the API as tables with the names of the API, such as ``restartPolicy``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpc_train.schedulers.kubernetes.manifest import INDEX, QUEUE

Object = Mapping[str, Any]


class JobPhase(StrEnum):
    """What becomes of a Job at the moment. The values are the states of Slurm with the same meaning."""

    PENDING = "PENDING"  # no pod runs
    RUNNING = "RUNNING"
    STOPPED = "REQUEUE_HOLD"  # suspended by a user; it has no pods
    PREEMPTED = "REQUEUED"  # its pods were evicted, and their replacements do not run yet
    CANCELLED = "COMPLETING"  # it is being deleted
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Cause:
    """Why a pod does not run, and a change or a command that helps.

    Attributes:
        reason: the reason in Kubernetes, such as ``Unschedulable``.
    """

    reason: str
    message: str
    words: str
    fix: str = ""


@dataclass(frozen=True)
class JobReport:
    """The state of a Job.

    Attributes:
        reason: the reason of its end in Kubernetes, such as ``PodFailurePolicy``; empty before the end.
        message: the message of Kubernetes for ``reason``.
        causes: why pods wait, each cause once.
    """

    phase: JobPhase
    reason: str
    message: str
    causes: tuple[Cause, ...]


@dataclass(frozen=True)
class _Row:
    """An explanation for the messages of a reason that match ``pattern``; its groups fill ``words`` and ``fix``."""

    reasons: str
    pattern: str
    words: str
    fix: str


_CLAIM = "kubectl describe pvc shows why; the claims are those of cluster.container.binds"
# https://kubernetes.io/docs/tasks/debug/debug-application/debug-pods/ and the messages of kube-scheduler, the kubelet
# and the admission plugins. All rows that match a message explain it, since a scheduler lists several reasons.
_ROWS = (
    _Row("Unschedulable", r"unbound immediate PersistentVolumeClaims", "a volume claim has no volume yet", _CLAIM),
    _Row(
        "Unschedulable",
        r'persistentvolumeclaim "([^"]+)" not found',
        "the volume claim {0} does not exist in the namespace",
        "kubectl get pvc lists the claims; correct cluster.container.binds",
    ),
    _Row(
        "Unschedulable",
        r"Insufficient ([^\s,]*[^\s,.])",
        "too few nodes have enough free {0}",
        "wait until other pods end, or request less (cluster.nodes, gpus_per_node, cpus_per_gpu, mem_per_gpu)",
    ),
    _Row(
        "Unschedulable",
        r"untolerated taint \{([^:}]+): ?([^}]*)\}",
        "nodes have the taint {0}={1}, which the job does not tolerate",
        "add a toleration for {0}, if the job may use these nodes",
    ),
    _Row(
        "Unschedulable",
        r"didn't match Pod's node affinity/selector",
        "too few nodes have the labels that the job requires",
        "kubectl get nodes --show-labels lists them; correct the node selector or cluster.exclude",
    ),
    _Row("Unschedulable", r"no nodes available to schedule pods", "the cluster has no node", "ask its administrator"),
    _Row("SchedulingGated", r"", "a controller holds its scheduling gate", "kubectl describe pod names the gate"),
    _Row(
        "ImagePullBackOff ErrImagePull",
        r"(?:unauthorized|denied|forbidden|401|403)",
        "the registry refuses to serve the image without credentials",
        "add imagePullSecrets, or use a public image (cluster.container.image)",
    ),
    _Row(
        "ImagePullBackOff ErrImagePull InvalidImageName ErrImageNeverPull",
        r'image "?([^\s"]+)',
        "the image {0} cannot be pulled",
        "correct cluster.container.image; `docker pull` tests a name",
    ),
    _Row(
        "CreateContainerConfigError",
        r'secret "([^"]+)" not found',
        "the secret {0} does not exist in the namespace",
        "kubectl create secret generic {0} --from-literal=KEY=VALUE",
    ),
    _Row(
        "CreateContainerConfigError",
        r"couldn't find key (\S+) in Secret (\S+)",
        "the secret {1} has no key {0}",
        "kubectl describe secret lists its keys",
    ),
    _Row(
        "FailedAttachVolume",
        r"Multi-Attach error",
        "a volume that one node may attach is in use on another node",
        "use a claim with the access mode ReadWriteMany, or cluster.nodes=1",
    ),
    _Row("FailedMount FailedAttachVolume", r"", "a volume cannot be mounted", _CLAIM),
    _Row(
        "FailedCreate",
        r"exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+)",
        "the quota {0} of the namespace is used up: the next pod needs {1}, {3} is allowed, {2} is in use",
        "wait until other pods of the namespace end, request less, or use another namespace",
    ),
    _Row(
        "FailedCreate",
        r"must specify (\S+)",
        "a quota of the namespace requires that pods request {0}",
        "set cluster.cpus_per_gpu and cluster.mem_per_gpu",
    ),
    _Row(
        "FailedCreate",
        r"no PriorityClass with name (\S+)",
        "the cluster has no priority class {0}",
        "kubectl get priorityclasses lists them; correct cluster.qos",
    ),
    _Row(
        "FailedCreate",
        r"violates PodSecurity",
        "the namespace forbids such pods",
        "change the fields that the message lists, or use another namespace",
    ),
    _Row(
        "QuotaReserved",
        r"LocalQueue (\S+) (?:doesn't exist|is inactive)",
        "Kueue has no active queue {0} in the namespace",
        "kubectl get localqueues lists them; correct cluster.partition",
    ),
    _Row(
        "QuotaReserved",
        r"",
        "Kueue waits for room in its queue",
        "wait, request less, or use another queue (cluster.partition)",
    ),
    _Row(
        "Suspended",
        r"Job (\S+), namespace (\S+)",
        "the Job is suspended",
        """kubectl patch job {0} --namespace={1} --patch='{{"spec":{{"suspend":false}}}}'""",
    ),
)
_PREEMPTIONS = frozenset({"Preempted", "Evicted", "TaintManagerEviction"})  # reasons of events of pods
_WARNINGS = frozenset({"FailedCreate", "FailedAttachVolume", "FailedMount"})
_STARTING = frozenset({"", "ContainerCreating", "PodInitializing"})  # say nothing beyond the phase


def explain(reason: str, message: str) -> list[Cause]:
    """Returns the explanations of a reason of Kubernetes. An unknown reason is repeated."""
    causes: dict[str, Cause] = {}
    for row in _ROWS:
        if reason not in row.reasons.split() or (not row.pattern and causes):
            continue
        for match in re.finditer(row.pattern, message) if row.pattern else [re.match("", message)]:
            groups = match.groups() if match else ()
            words = row.words.format(*groups)
            causes[words] = Cause(reason, message, words, row.fix.format(*groups))
    return list(causes.values()) or [Cause(reason, message, f"Kubernetes reports {reason}", "kubectl describe pod")]


def report(job: Object, pods: Sequence[Object], events: Iterable[Object], workload: Object | None = None) -> JobReport:
    """Returns the state of ``job``.

    Args:
        pods: its pods, also those that have ended.
        workload: the Workload of Kueue for the Job, if there is one.
    """
    name = job["metadata"]["name"]
    of_job = [event for event in events if _concerns(event, name)]
    end = condition(job, "Failed") or condition(job, "FailureTarget") or condition(job, "Complete") or {}
    phase = _phase(job, pods, of_job, workload)
    causes: list[Cause] = []
    if phase in (JobPhase.PENDING, JobPhase.PREEMPTED, JobPhase.STOPPED, JobPhase.RUNNING) and not end:
        held = _held(job, pods) if phase is JobPhase.RUNNING else ""
        for reason, message in _waits(job, pods, of_job, workload):
            causes += explain(reason, held + message)
    return JobReport(
        phase,
        end.get("reason", ""),
        end.get("message", ""),
        tuple({cause.words: cause for cause in causes}.values()),
    )


def condition(thing: Object, kind: str) -> Object | None:
    """Returns the condition ``kind`` of an object if its status is True."""
    conditions: Sequence[Object] = (thing.get("status") or {}).get("conditions") or ()
    return next((entry for entry in conditions if entry["type"] == kind and entry["status"] == "True"), None)


def _phase(job: Object, pods: Sequence[Object], events: Sequence[Object], workload: Object | None) -> JobPhase:
    if condition(job, "Failed"):
        return JobPhase.FAILED
    if condition(job, "Complete"):
        return JobPhase.COMPLETED
    if job["metadata"].get("deletionTimestamp"):
        return JobPhase.CANCELLED
    if any(pod["status"]["phase"] == "Running" for pod in pods):
        return JobPhase.RUNNING
    if condition(job, "Suspended"):
        if QUEUE not in job["metadata"].get("labels", {}):
            return JobPhase.STOPPED
        if workload is not None and condition(workload, "Evicted"):
            return JobPhase.PREEMPTED
        return JobPhase.PENDING
    evicted = any(condition(pod, "DisruptionTarget") for pod in pods)
    if evicted or any(event["reason"] in _PREEMPTIONS for event in events):
        return JobPhase.PREEMPTED
    return JobPhase.PENDING


def _waits(
    job: Object, pods: Sequence[Object], events: Sequence[Object], workload: Object | None
) -> Iterator[tuple[str, str]]:
    """Yields reason and message of what keeps pods of a live Job from running."""
    if condition(job, "Suspended"):
        if workload is None:
            yield "Suspended", f"Job {job['metadata']['name']}, namespace {job['metadata']['namespace']}"
            return
        conditions = (workload.get("status") or {}).get("conditions") or ()
        for entry in conditions:
            if entry["type"] == "QuotaReserved" and entry["status"] == "False":
                yield "QuotaReserved", entry.get("message", "")
        return
    waiting = [pod for pod in pods if pod["status"]["phase"] == "Pending"]
    for pod in waiting:
        for entry in pod["status"].get("conditions") or ():
            if entry["type"] == "PodScheduled" and entry["status"] == "False":
                yield entry.get("reason", ""), entry.get("message", "")
        for container in pod["status"].get("containerStatuses") or ():
            state = container["state"].get("waiting") or {}
            if state.get("reason", "") not in _STARTING:
                yield state["reason"], state.get("message", "")
    names = {pod["metadata"]["name"] for pod in waiting}
    live = sum(pod["status"]["phase"] in ("Pending", "Running") for pod in pods)
    is_short = live < job["spec"]["parallelism"]
    for event in events:
        concerned = event["involvedObject"]
        if event["reason"] not in _WARNINGS:
            continue
        if concerned["name"] in names or (concerned["kind"] == "Job" and is_short):
            yield event["reason"], event.get("message", "")


def _held(job: Object, pods: Sequence[Object]) -> str:
    """Returns which pod a Job lacks of whose pods some run, since their agents wait for it; empty if all run."""
    started = [pod for pod in pods if pod["status"]["phase"] in ("Running", "Succeeded")]
    count = job["spec"]["parallelism"]
    missing = set(range(count)) - {int(pod["metadata"].get("annotations", {}).get(INDEX, -1)) for pod in started}
    if not missing:
        return ""
    return f"{len(started)} of {count} pods hold their resources and wait for pod {min(missing)}: "


def _concerns(event: Object, job: str) -> bool:
    """Returns whether an event belongs to the Job or to one of its pods, which may no longer exist."""
    concerned = event["involvedObject"]
    if concerned["kind"] == "Job":
        return bool(concerned["name"] == job)
    return concerned["kind"] == "Pod" and re.fullmatch(rf"{re.escape(job)}-\d+-\w+", concerned["name"]) is not None
