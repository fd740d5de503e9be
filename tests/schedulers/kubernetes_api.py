"""A stand-in for a Kubernetes cluster: an API server for the official client, a Job controller, a scheduler, a kubelet.

The server checks objects with the official schemas of a version (``kubernetes_validate``) and with those rules of the
real server's validation that Jobs meet. The controllers follow the documentation of Jobs:
https://kubernetes.io/docs/concepts/workloads/controllers/job/. As root, the kubelet starts the command of a pod in
namespaces of the kernel: its processes have a network address, a host name, the DNS names of the pods as lines of
/etc/hosts, the mounted claims and a /dev/shm of their own, and the command is process 1. Nothing leaves this machine.
Without ``run_pods``, containers have no processes, and ``Cluster.exit_container`` ends them.

What is missing: resourceVersion conflicts, watches that expire, API groups other than those of ``RESOURCES``, images.
"""

from __future__ import annotations

import base64
import calendar
import copy
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

Object = dict[str, Any]

# plural -> group, version, kind, whether it has a namespace
RESOURCES = {
    "pods": ("", "v1", "Pod", True),
    "services": ("", "v1", "Service", True),
    "events": ("", "v1", "Event", True),
    "secrets": ("", "v1", "Secret", True),
    "persistentvolumeclaims": ("", "v1", "PersistentVolumeClaim", True),
    "resourcequotas": ("", "v1", "ResourceQuota", True),
    "namespaces": ("", "v1", "Namespace", False),
    "nodes": ("", "v1", "Node", False),
    "jobs": ("batch", "v1", "Job", True),
    "priorityclasses": ("scheduling.k8s.io", "v1", "PriorityClass", False),
    "localqueues": ("kueue.x-k8s.io", "v1beta1", "LocalQueue", True),
    "workloads": ("kueue.x-k8s.io", "v1beta1", "Workload", True),
}
KUEUE = "kueue.x-k8s.io"
FINALIZER = "batch.kubernetes.io/job-tracking"
JOB_NAME = "batch.kubernetes.io/job-name"
UID_LABEL = "batch.kubernetes.io/controller-uid"
INDEX = "batch.kubernetes.io/job-completion-index"
TICK_S = 0.03
REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 422: "Invalid"}
UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
UNITS |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


class Refused(Exception):
    """An answer of the server that is an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def status(self) -> Object:
        reason = REASONS.get(self.code, "BadRequest")
        return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": self.message, "reason": reason,
                "code": self.code}  # fmt: skip


def amount(quantity: object) -> float:
    """Returns a quantity of the API as a number, e.g. ``64Gi`` or ``500m``."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity))
    if match is None or match[2] not in UNITS:
        raise Refused(422, f"quantities must match the regular expression, not {quantity!r}")
    return float(match[1]) * UNITS[match[2]]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def seconds_since(timestamp: str) -> float:
    return time.time() - calendar.timegm(time.strptime(timestamp, "%Y-%m-%dT%H:%M:%SZ"))


def condition(thing: Object, kind: str) -> Object | None:
    """Returns the condition ``kind`` of an object if its status is True."""
    conditions = thing.get("status", {}).get("conditions", [])
    return next((entry for entry in conditions if entry["type"] == kind and entry["status"] == "True"), None)


def set_condition(thing: Object, kind: str, reason: str, message: str, status: str = "True") -> bool:
    """Sets a condition; returns whether that changes it."""
    conditions = thing.setdefault("status", {}).setdefault("conditions", [])
    entry = {"type": kind, "status": status, "reason": reason, "message": message}
    old = next((each for each in conditions if each["type"] == kind), None)
    if old is not None and entry.items() <= old.items():
        return False
    if old is not None:
        conditions.remove(old)
    conditions.append({**entry, "lastTransitionTime": now()})
    return True


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


def at_path(thing: Any, path: str) -> Any:
    """Returns the field at a dotted path; a part may be ``annotations['KEY']``."""
    for name, key in re.findall(r"(\w+)(?:\['([^']+)'\])?", path):
        thing = (thing or {}).get(name)
        if key:
            thing = (thing or {}).get(key)
    return thing


def matches(labels: Mapping[str, str], selector: str) -> bool:
    terms = [term.partition("=") for term in selector.split(",") if term]
    return all(labels.get(name) == value.lstrip("=") for name, _, value in terms)


@dataclass
class Container:
    """The container of a pod: its processes, and the address that other pods reach it at."""

    log: Path
    address: str = ""
    process: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None
    terminate_at: float | None = None  # when SIGKILL follows SIGTERM
    network: str = ""

    def poll(self) -> int | None:
        """Returns the exit code as Kubernetes reports it, 128 + the number of a signal; None while it runs."""
        if self.process is not None and self.exit_code is None:
            self.exit_code = self.process.poll()
        return self.exit_code

    def signal(self, number: int) -> None:
        """Sends a signal to process 1, as container runtimes do. If that is killed, so are all others."""
        if self.process is None:
            self.exit_code = 128 + number
            return
        pid = self.process.pid
        with suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(child), number)


@dataclass
class Cluster:
    """A cluster. A test creates objects with ``create``, as its administrator does, or with the official client.

    Attributes:
        version: of Kubernetes.
        run_pods: whether containers have processes.
        images: the variables of each image that can be pulled.
        claims: the directory of each persistent volume claim.
        forbidden: patterns ``VERB RESOURCE NAMESPACE`` of what the user may not do, such as ``create jobs.batch team``.
        groups: the API groups that are served besides the core; ``kueue.x-k8s.io`` installs Kueue.
        backoff_s: the delay of the first replacement of a failed pod (10 s in Kubernetes). It doubles each time.
        exits_on_term: the exit code of a container without processes after SIGTERM; None ignores the signal.
        lose_answers: the number of the next objects that are created without an answer to the client.
    """

    state: Path
    version: str = "1.33"
    run_pods: bool = False
    images: dict[str, dict[str, str]] = field(default_factory=dict)
    claims: dict[str, Path] = field(default_factory=dict)
    forbidden: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=lambda: {"batch", "scheduling.k8s.io", "authorization.k8s.io", "policy"})
    backoff_s: float = 0.1
    token: str = "secret-token"
    exits_on_term: int | None = 143
    lose_answers: int = 0
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.stopping = threading.Event()
        self.objects: dict[str, dict[tuple[str, str], Object]] = {plural: {} for plural in RESOURCES}
        self.history: list[tuple[int, str, str, Object]] = []
        self.revision = 1
        self.containers: dict[str, Container] = {}
        self.failures: dict[tuple[str, int], int] = {}  # by uid of the Job and index
        self.not_before: dict[tuple[str, int], float] = {}
        self.addresses = itertools.cycle(range(2, 254))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"cluster": self}))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.hosts = self.state / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.create("namespaces", {"metadata": {"name": "default"}})

    # objects

    def listed(self, plural: str, namespace: str | None = None) -> list[Object]:
        with self.lock:
            return [thing for (place, _), thing in self.objects[plural].items() if namespace in (None, place)]

    def get(self, plural: str, name: str, namespace: str = "default") -> Object:
        group, _, _, namespaced = RESOURCES[plural]
        with self.lock:
            thing = self.objects[plural].get((namespace if namespaced else "", name))
        if thing is None:
            raise Refused(404, f'{plural}{"." * bool(group)}{group} "{name}" not found')
        return thing

    def create(self, plural: str, thing: Object, namespace: str = "default", dry_run: bool = False) -> Object:
        """Validates, completes and stores an object."""
        group, version, kind, namespaced = RESOURCES[plural]
        thing = copy.deepcopy(thing)
        thing.setdefault("kind", kind)
        thing.setdefault("apiVersion", f"{group}/{version}".lstrip("/"))
        metadata = thing.setdefault("metadata", {})
        if "name" not in metadata:
            metadata["name"] = metadata.get("generateName", "") + uuid.uuid4().hex[:5]
        if not namespaced:
            namespace = ""
        elif metadata.setdefault("namespace", namespace) != namespace:
            raise Refused(400, "the namespace of the provided object does not match the namespace sent on the request")
        self._validate(plural, thing)
        with self.lock:
            if namespaced and ("", namespace) not in self.objects["namespaces"]:
                raise Refused(404, f'namespaces "{namespace}" not found')
            if (namespace, metadata["name"]) in self.objects[plural]:
                raise Refused(409, f'{plural}{"." * bool(group)}{group} "{metadata["name"]}" already exists')
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            if plural == "jobs":
                self._complete_job(thing)
            if plural == "pods":
                self._admit_pod(thing)
            if not dry_run:
                self.objects[plural][namespace, metadata["name"]] = thing
                self.notify(plural, "ADDED", thing)
            return thing

    def notify(self, plural: str, kind: str, thing: Object) -> None:
        with self.changed:
            self.revision += 1
            thing["metadata"]["resourceVersion"] = str(self.revision)
            self.history.append((self.revision, plural, kind, copy.deepcopy(thing)))
            self.changed.notify_all()

    def modified(self, plural: str, thing: Object) -> None:
        self.notify(plural, "MODIFIED", thing)

    def remove(self, plural: str, thing: Object) -> None:
        """Removes an object, and then what it owns."""
        metadata = thing["metadata"]
        with self.lock:
            if self.objects[plural].pop((metadata.get("namespace", ""), metadata["name"]), None) is None:
                return
            self.notify(plural, "DELETED", thing)
            for dependent in ("pods", "services", "workloads"):
                for each in self.listed(dependent, metadata.get("namespace", "")):
                    if any(owner["uid"] == metadata["uid"] for owner in each["metadata"].get("ownerReferences", [])):
                        self.delete(dependent, each)

    def delete(self, plural: str, thing: Object, grace_s: float | None = None, policy: str = "Background") -> None:
        """Deletes an object. ``policy`` is that of the pods of a Job: ``Orphan``, ``Background`` or ``Foreground``."""
        metadata = thing["metadata"]
        with self.lock:
            if plural == "jobs":
                for pod in self._pods_of(thing):
                    pod["metadata"]["finalizers"] = []
                    if policy == "Orphan":
                        pod["metadata"]["ownerReferences"] = []
                if policy == "Foreground":
                    metadata["deletionTimestamp"] = now()  # _sync_job removes it after its pods
                    self.modified("jobs", thing)
                    return
            if plural != "pods":
                self.remove(plural, thing)
                return
            if "deletionTimestamp" in metadata:
                return
            if grace_s is None:
                grace_s = float(thing["spec"].get("terminationGracePeriodSeconds", 30))
            metadata |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": int(grace_s)}
            self.modified("pods", thing)
            container = self.containers.get(metadata["uid"])
            if container is not None and container.poll() is None:
                container.terminate_at = time.monotonic() + grace_s
                self._terminate(container)
                return
            self._end_pod(thing, container.exit_code if container is not None else None)

    def event(self, thing: Object, reason: str, message: str, kind: str = "Warning") -> None:
        metadata = thing["metadata"]
        reference = {"kind": thing["kind"], "name": metadata["name"], "namespace": metadata["namespace"]}
        reference["uid"] = metadata["uid"]
        with self.lock:
            for event in self.listed("events", metadata["namespace"]):
                if (event["involvedObject"], event["reason"], event["message"]) == (reference, reason, message):
                    event["count"] += 1
                    event["lastTimestamp"] = now()
                    self.modified("events", event)
                    return
            event = {"involvedObject": reference, "reason": reason, "message": message, "type": kind, "count": 1}
            event |= {"firstTimestamp": now(), "lastTimestamp": now()}
            event["metadata"] = {"name": f"{metadata['name']}.{self.revision:x}"}
            self.create("events", event, metadata["namespace"])

    # validation and admission

    def _validate(self, plural: str, thing: Object) -> None:
        group, _, kind, _ = RESOURCES[plural]
        name = thing["metadata"]["name"]
        if group == KUEUE:
            if group not in self.groups:
                raise Refused(404, "the server could not find the requested resource")
            return
        try:
            kubernetes_validate.validate(thing, self.version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            raise Refused(422, f'{kind} "{name}" is invalid: {path}: {error.message}') from None
        errors = []
        longest = 253
        if plural == "jobs":
            errors = list(job_errors(thing))
        if plural == "services":
            longest = 63
            if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
                errors = ["metadata.name: Invalid value: a DNS-1035 label must start with an alphabetic character"]
        if len(name) > longest or not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", name):
            errors.append(f"metadata.name: Invalid value: {name!r}: must be a lowercase RFC 1123 subdomain")
        for label, value in thing["metadata"].get("labels", {}).items():
            if len(value) > 63 or not re.fullmatch(r"([A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?)?", value):
                errors.append(f"metadata.labels: Invalid value: {value!r} of {label}")
        if errors:
            whole = f"{kind}.{group}".rstrip(".")
            raise Refused(422, f'{whole} "{name}" is invalid: {"; ".join(errors)}')

    def _complete_job(self, job: Object) -> None:
        spec = job["spec"]
        uid = job["metadata"]["uid"]
        labels = {JOB_NAME: job["metadata"]["name"], UID_LABEL: uid}
        spec.setdefault("parallelism", 1)
        spec.setdefault("backoffLimit", 2**31 - 1 if "backoffLimitPerIndex" in spec else 6)
        if "podFailurePolicy" in spec:
            spec.setdefault("podReplacementPolicy", "Failed")
        spec.setdefault("podReplacementPolicy", "TerminatingOrFailed")
        spec["selector"] = {"matchLabels": {UID_LABEL: uid}}
        template = spec["template"].setdefault("metadata", {})
        template["labels"] = {**template.get("labels", {}), **labels}
        job["status"] = {}
        if KUEUE in self.groups and f"{KUEUE}/queue-name" in job["metadata"].get("labels", {}):
            spec["suspend"] = True  # by Kueue's webhook

    def _admit_pod(self, pod: Object) -> None:
        """Refuses a pod as the admission plugins Priority and ResourceQuota do."""
        namespace = pod["metadata"]["namespace"]
        name = pod["metadata"]["name"]
        priority = pod["spec"].get("priorityClassName")
        if priority is not None and ("", priority) not in self.objects["priorityclasses"]:
            raise Refused(403, f'pods "{name}" is forbidden: no PriorityClass with name {priority} was found')
        needs = needs_of(pod)
        for quota in self.listed("resourcequotas", namespace):
            hard = quota["spec"].get("hard", {})
            used: dict[str, float] = {}
            for other in self.listed("pods", namespace):
                if other["status"]["phase"] in ("Pending", "Running"):
                    for resource, value in needs_of(other).items():
                        used[resource] = used.get(resource, 0) + value
            over = [each for each in hard if each in needs and used.get(each, 0) + needs[each] > amount(hard[each])]
            quota["status"] = {"hard": hard, "used": {each: f"{used.get(each, 0):g}" for each in hard}}
            if over:
                requested = ",".join(f"{each}={needs[each]:g}" for each in over)
                in_use = ",".join(f"{each}={used.get(each, 0):g}" for each in over)
                limited = ",".join(f"{each}={hard[each]}" for each in over)
                raise Refused(
                    403,
                    f'pods "{name}" is forbidden: exceeded quota: {quota["metadata"]["name"]}, '
                    f"requested: {requested}, used: {in_use}, limited: {limited}",
                )

    # the Job controller

    def _pods_of(self, job: Object) -> list[Object]:
        return [
            pod
            for pod in self.listed("pods", job["metadata"]["namespace"])
            if any(owner["uid"] == job["metadata"]["uid"] for owner in pod["metadata"].get("ownerReferences", []))
        ]

    def _sync_job(self, job: Object) -> None:  # noqa: PLR0912
        spec = job["spec"]
        status = job["status"]
        before = copy.deepcopy(status)
        pods = self._pods_of(job)
        if "deletionTimestamp" in job["metadata"]:
            for pod in pods:
                self.delete("pods", pod)
            if not self._pods_of(job):
                self.remove("jobs", job)
            return
        for pod in pods:
            if pod["status"]["phase"] in ("Succeeded", "Failed") and pod["metadata"].get("finalizers"):
                self._account(job, pod)
        if not (condition(job, "Complete") or condition(job, "Failed")):
            self._decide(job)
        pods = self._pods_of(job)
        alive = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        over = condition(job, "FailureTarget") or condition(job, "SuccessCriteriaMet")
        if over or condition(job, "Suspended"):
            for pod in alive:
                self.delete("pods", pod)
            alive = [pod for pod in self._pods_of(job) if pod["status"]["phase"] in ("Pending", "Running")]
        if over and not alive:
            final = "Failed" if over["type"] == "FailureTarget" else "Complete"
            set_condition(job, final, over["reason"], over["message"])
            if final == "Complete":
                status.setdefault("completionTime", now())
        if not over and not condition(job, "Suspended") and not condition(job, "Complete"):
            self._create_pods(job, pods)
        terminating = [pod for pod in alive if "deletionTimestamp" in pod["metadata"]]
        status["active"] = len(alive) - len(terminating)
        status["terminating"] = len(terminating)
        status["ready"] = sum(pod["status"]["phase"] == "Running" for pod in alive)
        if before != status:
            self.modified("jobs", job)
        if spec.get("ttlSecondsAfterFinished") is not None and over and not alive:
            self.remove("jobs", job)

    def _account(self, job: Object, pod: Object) -> None:
        """Counts an ended pod as the Job's podFailurePolicy says, and removes its finalizer."""
        status = job["status"]
        index = int(pod["metadata"]["annotations"][INDEX])
        pod["metadata"]["finalizers"] = []
        if pod["status"]["phase"] == "Succeeded":
            status["succeeded"] = status.get("succeeded", 0) + 1
            status["completedIndexes"] = with_index(status.get("completedIndexes", ""), index)
        else:
            action, message = failure_action(job, pod)
            key = (job["metadata"]["uid"], index)
            status["failed"] = status.get("failed", 0) + (action != "Ignore")
            if action == "FailJob":
                set_condition(job, "FailureTarget", "PodFailurePolicy", message)
            if action in ("Count", "FailIndex"):
                self.failures[key] = self.failures.get(key, 0) + 1
                self.not_before[key] = time.monotonic() + self.backoff_s * 2 ** (self.failures[key] - 1)
                if action == "FailIndex" or self.failures[key] > job["spec"].get("backoffLimitPerIndex", 2**31):
                    status["failedIndexes"] = with_index(status.get("failedIndexes", ""), index)
        if "deletionTimestamp" in pod["metadata"]:
            self.remove("pods", pod)

    def _decide(self, job: Object) -> None:
        """Sets the conditions that end or suspend the Job."""
        spec = job["spec"]
        status = job["status"]
        if condition(job, "FailureTarget") or condition(job, "SuccessCriteriaMet"):
            return
        if spec.get("suspend"):
            if set_condition(job, "Suspended", "JobSuspended", "Job suspended"):
                status.pop("startTime", None)
                self.event(job, "Suspended", "Job suspended", "Normal")
            return
        if condition(job, "Suspended"):
            set_condition(job, "Suspended", "JobResumed", "Job resumed", "False")
            self.event(job, "Resumed", "Job resumed", "Normal")
        status.setdefault("startTime", now())
        failed = indexes(status.get("failedIndexes", ""))
        done = indexes(status.get("completedIndexes", ""))
        deadline = spec.get("activeDeadlineSeconds")
        if deadline is not None and seconds_since(status["startTime"]) >= deadline:
            set_condition(job, "FailureTarget", "DeadlineExceeded", "Job was active longer than specified deadline")
        elif status.get("failed", 0) > spec["backoffLimit"]:
            message = "Job has reached the specified backoff limit"
            set_condition(job, "FailureTarget", "BackoffLimitExceeded", message)
        elif "maxFailedIndexes" in spec and len(failed) > spec["maxFailedIndexes"]:
            message = "Job has exceeded the specified maximal number of failed indexes"
            set_condition(job, "FailureTarget", "MaxFailedIndexesExceeded", message)
        elif len(done) == spec["completions"]:
            set_condition(job, "SuccessCriteriaMet", "CompletionsReached", "Reached expected number of succeeded pods")
        elif len(done | failed) == spec["completions"]:
            set_condition(job, "FailureTarget", "FailedIndexes", "Job has failed indexes")

    def _create_pods(self, job: Object, pods: Sequence[Object]) -> None:
        """Creates the pods of indexes that have none; with podReplacementPolicy Failed, only after they have ended."""
        spec = job["spec"]
        status = job["status"]
        taken = indexes(status.get("completedIndexes", "")) | indexes(status.get("failedIndexes", ""))
        for pod in pods:
            ending = "deletionTimestamp" in pod["metadata"] and spec["podReplacementPolicy"] == "TerminatingOrFailed"
            if pod["status"]["phase"] in ("Pending", "Running") and not ending:
                taken.add(int(pod["metadata"]["annotations"][INDEX]))
        for index in range(spec["completions"]):
            key = (job["metadata"]["uid"], index)
            if index in taken or time.monotonic() < self.not_before.get(key, 0):
                continue
            try:
                self.create("pods", pod_of(job, index), job["metadata"]["namespace"])
            except Refused as refusal:
                self.not_before[key] = time.monotonic() + self.backoff_s
                self.event(job, "FailedCreate", f"Error creating: {refusal.message}")

    # Kueue

    def _sync_workload(self, job: Object) -> None:
        queue = job["metadata"].get("labels", {}).get(f"{KUEUE}/queue-name")
        name = f"job-{job['metadata']['name']}"
        namespace = job["metadata"]["namespace"]
        if queue is None or KUEUE not in self.groups or (namespace, name) in self.objects["workloads"]:
            return
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"]}
        owner["uid"] = job["metadata"]["uid"]
        metadata = {"name": name, "labels": {f"{KUEUE}/job-uid": owner["uid"]}, "ownerReferences": [owner]}
        workload = self.create("workloads", {"metadata": metadata, "spec": {"queueName": queue}}, namespace)
        message = f"LocalQueue {queue} doesn't exist"
        if (namespace, queue) in self.objects["localqueues"]:
            message = (
                "couldn't assign flavors to pod set main: insufficient unused quota in flavor default, 8 more needed"
            )
        set_condition(workload, "QuotaReserved", "Pending", message, "False")

    def admit(self, job: str, namespace: str = "default") -> None:
        """Starts a Job, as Kueue does when its queue has room."""
        with self.lock:
            workload = self.get("workloads", f"job-{job}", namespace)
            set_condition(workload, "QuotaReserved", "QuotaReserved", "Quota reserved in ClusterQueue shared")
            set_condition(workload, "Evicted", "Admitted", "", "False")
            self._suspend(job, namespace, False)

    def preempt_workload(self, job: str, namespace: str = "default") -> None:
        """Stops a Job, as Kueue does when another Job needs its quota."""
        with self.lock:
            workload = self.get("workloads", f"job-{job}", namespace)
            message = "Preempted to accommodate a workload due to prioritization in the ClusterQueue"
            set_condition(workload, "Evicted", "Preempted", message)
            set_condition(workload, "QuotaReserved", "Pending", message, "False")
            self._suspend(job, namespace, True)

    def _suspend(self, name: str, namespace: str, suspend: bool) -> None:
        job = self.get("jobs", name, namespace)
        job["spec"]["suspend"] = suspend
        self.modified("jobs", job)

    # the scheduler

    def _schedule(self, pod: Object) -> None:
        nodes = self.listed("nodes")
        volume_problem = ""
        for name in claims_of(pod):
            claim = self.objects["persistentvolumeclaims"].get((pod["metadata"]["namespace"], name))
            if claim is None:
                volume_problem = f'persistentvolumeclaim "{name}" not found'
            elif claim["status"]["phase"] != "Bound":
                volume_problem = "pod has unbound immediate PersistentVolumeClaims"
        problems = []
        for node in nodes:
            problem = volume_problem or self._misfit(pod, node)
            if not problem:
                pod["spec"]["nodeName"] = node["metadata"]["name"]
                pod["status"]["startTime"] = now()
                set_condition(pod, "PodScheduled", "", "")
                self.modified("pods", pod)
                return
            problems.append(problem)
        counts = ", ".join(f"{problems.count(problem)} {problem}" for problem in sorted(set(problems)))
        message = f"0/{len(nodes)} nodes are available: {volume_problem or counts}."
        if not nodes:
            message = "no nodes available to schedule pods"
        if set_condition(pod, "PodScheduled", "Unschedulable", message, "False"):
            self.modified("pods", pod)
        self.event(pod, "FailedScheduling", message)

    def _misfit(self, pod: Object, node: Object) -> str | None:
        """Returns why ``pod`` cannot run on ``node``, in the words of kube-scheduler."""
        labels = {**node["metadata"].get("labels", {}), "kubernetes.io/hostname": node["metadata"]["name"]}
        tolerations = pod["spec"].get("tolerations", [])
        for taint in node.get("spec", {}).get("taints", []):
            if not any(tolerates(toleration, taint) for toleration in tolerations):
                return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
        terms = at_path(pod, "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution") or {}
        expressions = [each for term in terms.get("nodeSelectorTerms", []) for each in term["matchExpressions"]]
        selector = pod["spec"].get("nodeSelector", {})
        if not selector.items() <= labels.items() or any(
            (labels.get(each["key"]) in each["values"]) != (each["operator"] == "In") for each in expressions
        ):
            return "node(s) didn't match Pod's node affinity/selector"
        free = {name: amount(value) for name, value in node.get("status", {}).get("allocatable", {}).items()}
        for other in self.listed("pods"):
            if other["spec"].get("nodeName") == node["metadata"]["name"] and "terminated" not in state_of(other):
                for resource, value in requests_of(other).items():
                    free[resource] = free.get(resource, 0) - value
        for resource, value in requests_of(pod).items():
            if value > free.get(resource, 0):
                return f"Insufficient {resource}"
        return None

    # the kubelet

    def _sync_pod(self, pod: Object) -> None:
        if pod["status"]["phase"] not in ("Pending", "Running"):
            if "deletionTimestamp" in pod["metadata"] and not pod["metadata"].get("finalizers"):
                self.remove("pods", pod)
            return
        container = self.containers.get(pod["metadata"]["uid"])
        if container is None:
            if "deletionTimestamp" in pod["metadata"]:
                self._end_pod(pod, None)
            elif "nodeName" not in pod["spec"]:
                self._schedule(pod)
            elif self._is_startable(pod):
                self._start(pod)
            return
        code = container.poll()
        if code is not None:
            self._end_pod(pod, code)
        elif container.terminate_at is not None and time.monotonic() > container.terminate_at:
            container.signal(signal.SIGKILL)
        deadline = pod["spec"].get("activeDeadlineSeconds")
        is_over = deadline is not None and seconds_since(pod["status"]["startTime"]) >= deadline
        if is_over and container.terminate_at is None:
            message = "Pod was active on the node longer than the specified deadline"
            pod["status"] |= {"reason": "DeadlineExceeded", "message": message}
            container.terminate_at = time.monotonic() + pod["spec"].get("terminationGracePeriodSeconds", 30)
            self._terminate(container)

    def _terminate(self, container: Container) -> None:
        if container.process is not None:
            container.signal(signal.SIGTERM)
        else:
            container.exit_code = self.exits_on_term

    def _is_startable(self, pod: Object) -> bool:
        """Reports what keeps the container from starting, in the words of the kubelet."""
        namespace = pod["metadata"]["namespace"]
        (container,) = pod["spec"]["containers"]
        for claim in claims_of(pod):
            modes = self.get("persistentvolumeclaims", claim, namespace)["spec"]["accessModes"]
            elsewhere = [
                other["metadata"]["name"]
                for other in self.listed("pods", namespace)
                if other["status"]["phase"] == "Running"
                and claim in claims_of(other)
                and other["spec"]["nodeName"] != pod["spec"]["nodeName"]
            ]
            if set(modes) <= {"ReadWriteOnce", "ReadWriteOncePod"} and elsewhere:
                message = f'Multi-Attach error for volume "pvc-{claim}" Volume is already used by pod(s) {elsewhere[0]}'
                self._wait(pod, "ContainerCreating", "")
                self.event(pod, "FailedAttachVolume", message)
                return False
        image = container["image"]
        if image not in self.images:
            message = f'failed to pull and unpack image "{image}": not found'
            self._wait(pod, "ImagePullBackOff", f'Back-off pulling image "{image}": ErrImagePull: {message}')
            self.event(pod, "Failed", f'Failed to pull image "{image}": {message}')
            return False
        for variable in container.get("env", []):
            reference = at_path(variable, "valueFrom.secretKeyRef")
            secret = self.objects["secrets"].get((namespace, (reference or {}).get("name", "")))
            if reference is not None and secret is None:
                self._wait(pod, "CreateContainerConfigError", f'secret "{reference["name"]}" not found')
                return False
            if reference is not None and secret is not None and reference["key"] not in secret.get("data", {}):
                message = f"couldn't find key {reference['key']} in Secret {namespace}/{reference['name']}"
                self._wait(pod, "CreateContainerConfigError", message)
                return False
        return True

    def _wait(self, pod: Object, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        if state_of(pod) != state:
            self._set_state(pod, state)
            self.modified("pods", pod)

    def _set_state(self, pod: Object, state: Object) -> None:
        (container,) = pod["spec"]["containers"]
        ready = "running" in state
        pod["status"]["containerStatuses"] = [
            {"name": container["name"], "image": container["image"], "imageID": "", "ready": ready, "restartCount": 0,
             "state": state}
        ]  # fmt: skip

    def _start(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        container = Container(self.state / f"{uid}.log")
        container.log.touch()
        self.containers[uid] = container
        if self.run_pods:
            self._add_network(container)
        else:
            container.address = f"10.0.0.{next(self.addresses)}"
        pod["status"] |= {"phase": "Running", "podIP": container.address, "hostIP": "127.0.0.1"}
        self._write_hosts()
        if self.run_pods:
            container.process = self._process(pod, container)
        self._set_state(pod, {"running": {"startedAt": now()}})
        set_condition(pod, "Ready", "", "")
        self.modified("pods", pod)

    def _process(self, pod: Object, container: Container) -> subprocess.Popen[bytes]:
        """Starts the command of a pod as process 1 of namespaces of its own."""
        spec = pod["spec"]
        (definition,) = spec["containers"]
        environment = {"PATH": os.environ["PATH"], **self.images[definition["image"]], "HOSTNAME": spec["hostname"]}
        for variable in definition.get("env", []):
            environment[variable["name"]] = expanded(self._value(pod, variable), environment)
        script = [
            "set -e",
            "mount -t proc proc /proc",
            f"hostname {spec['hostname']}",
            f"mount --bind {self.hosts} /etc/hosts",
        ]
        claims = {each["name"]: each["persistentVolumeClaim"]["claimName"] for each in spec.get("volumes", [])
                  if "persistentVolumeClaim" in each}  # fmt: skip
        for mount in definition.get("volumeMounts", []):
            path = mount["mountPath"]
            if mount["name"] in claims:
                script += [f"mkdir -p {path}", f"mount --bind {self.claims[claims[mount['name']]]} {path}"]
            else:
                script.append(f"mount -t tmpfs tmpfs {path}")
            if mount.get("readOnly"):
                script.append(f"mount -o remount,bind,ro {path}")
        user = spec.get("securityContext", {}).get("runAsUser", 0)
        group = spec.get("securityContext", {}).get("runAsGroup", 0)
        identity = [f"--reuid={user}", f"--regid={group}", "--clear-groups"] if user else []
        script.append(f'exec {" ".join(["setpriv", *identity]) if user else ""} "$@"')
        enter = ["nsenter", f"--net=/run/netns/{container.network}"]
        # Without --fork, the child of the shell is process 1. `unshare --fork` loses the signal that ends its child.
        alone = ["unshare", "--uts", "--mount", "--ipc", "--pid", "sh", "-c", '"$@"; exit $?', "sh"]
        command = [expanded(word, environment) for word in (*definition["command"], *definition.get("args", []))]
        with container.log.open("ab") as log:
            return subprocess.Popen(
                [*enter, *alone, "sh", "-c", "\n".join(script), "sh", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=definition.get("workingDir", "/"),
                start_new_session=True,
            )

    def _value(self, pod: Object, variable: Object) -> str:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            secret = self.get("secrets", source["secretKeyRef"]["name"], pod["metadata"]["namespace"])
            return base64.b64decode(secret["data"][source["secretKeyRef"]["key"]]).decode()
        if "fieldRef" in source:
            return str(at_path(pod, source["fieldRef"]["fieldPath"]))
        return str(variable.get("value", ""))

    def _end_pod(self, pod: Object, code: int | None) -> None:
        """Records the end of a pod. ``code`` is the exit code of its container; None if it has not run."""
        if pod["status"]["phase"] not in ("Pending", "Running"):
            return
        pod["status"]["phase"] = "Succeeded" if code == 0 and "reason" not in pod["status"] else "Failed"
        if code is not None:
            reason = "Completed" if code == 0 else "Error"
            self._set_state(pod, {"terminated": {"exitCode": code, "reason": reason, "finishedAt": now()}})
        container = self.containers.get(pod["metadata"]["uid"])
        if container is not None and container.network:
            call("ip", "netns", "del", container.network)
            container.network = ""
        self._write_hosts()
        self.modified("pods", pod)

    def exit_container(self, name: str, code: int, namespace: str = "default") -> None:
        """Ends the container of a pod without processes."""
        self.containers[self.get("pods", name, namespace)["metadata"]["uid"]].exit_code = code

    def evict(self, name: str, namespace: str = "default", reason: str = "EvictionByEvictionAPI") -> None:
        """Evicts a pod, as ``kubectl drain`` does, or preempts it (``PreemptionByScheduler``)."""
        with self.lock:
            pod = self.get("pods", name, namespace)
            set_condition(pod, "DisruptionTarget", reason, "the pod is evicted")
            if reason == "PreemptionByScheduler":
                self.event(pod, "Preempted", "Preempted by pod other on node n1", "Normal")
            self.delete("pods", pod)

    def lose_node(self, name: str) -> None:
        """Kills what runs on a node and removes it. The garbage collector of pods then fails its pods."""
        with self.lock:
            self.remove("nodes", self.get("nodes", name))
            for pod in self.listed("pods"):
                if pod["spec"].get("nodeName") == name and pod["status"]["phase"] in ("Pending", "Running"):
                    container = self.containers.get(pod["metadata"]["uid"])
                    if container is not None:
                        container.signal(signal.SIGKILL)
                    set_condition(pod, "DisruptionTarget", "DeletionByPodGC", "PodGC: node no longer exists")
                    self._end_pod(pod, None)
                    pod["metadata"]["deletionTimestamp"] = now()

    # names and networks

    def _write_hosts(self) -> None:
        """Writes the DNS names of the pods: those that a service publishes, as the search domains complete them."""
        lines = ["127.0.0.1 localhost"]
        services = {(each["metadata"]["namespace"], each["metadata"]["name"]): each for each in self.listed("services")}
        for pod in self.listed("pods"):
            namespace = pod["metadata"]["namespace"]
            service = services.get((namespace, pod["spec"].get("subdomain", "")))
            address = pod["status"].get("podIP")
            if address is None or pod["status"]["phase"] != "Running":
                continue
            names = [pod["spec"]["hostname"]]  # the kubelet writes it into /etc/hosts of the pod itself
            if service is not None and matches_selector(service, pod):
                name = f"{pod['spec']['hostname']}.{service['metadata']['name']}"
                names = [
                    f"{name}.{namespace}.svc.cluster.local",
                    f"{name}.{namespace}.svc",
                    f"{name}.{namespace}",
                    name,
                ]
                names.append(pod["spec"]["hostname"])
            lines.append(f"{address} {' '.join(names)}")
        self.hosts.write_text("\n".join(lines) + "\n")  # in place, since it is mounted

    @property
    def _subnet(self) -> str:
        return f"10.{96 + self.port // 256 % 32}.{self.port % 256}"

    @property
    def _bridge(self) -> str:
        return f"kb{self.port}"

    def _add_network(self, container: Container) -> None:
        if not Path("/sys/class/net", self._bridge).exists():
            call("ip", "link", "add", self._bridge, "type", "bridge")
            call("ip", "addr", "add", f"{self._subnet}.1/24", "dev", self._bridge)
            call("ip", "link", "set", self._bridge, "up")
        number = next(self.addresses)
        name = f"k{self.port}-{number}"
        container.address = f"{self._subnet}.{number}"
        container.network = name
        call("ip", "netns", "add", name)
        call("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        call("ip", "link", "set", name, "master", self._bridge, "up")
        call("ip", "-n", name, "addr", "add", f"{container.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            call("ip", "-n", name, "link", "set", device, "up")

    # the life of the cluster

    def control(self) -> None:
        """Runs the controllers until the cluster stops."""
        while not self.stopping.wait(TICK_S):
            with self.lock:
                for job in self.listed("jobs"):
                    self._sync_workload(job)
                    self._sync_job(job)
                for pod in self.listed("pods"):
                    self._sync_pod(pod)

    def add_node(self, name: str, labels: Mapping[str, str] | None = None, taint: str = "", **resources: str) -> None:
        """Adds a node with allocatable ``resources``, where ``gpu`` means nvidia.com/gpu; ``taint`` is KEY=VALUE."""
        allocatable = {{"gpu": "nvidia.com/gpu"}.get(key, key): value for key, value in resources.items()}
        node: Object = {"metadata": {"name": name, "labels": dict(labels or {})}, "spec": {}}
        if taint:
            key, _, value = taint.partition("=")
            node["spec"]["taints"] = [{"key": key, "value": value, "effect": "NoSchedule"}]
        node["status"] = {"allocatable": {"cpu": "64", "memory": "512Gi", **allocatable}}
        self.create("nodes", node)

    def add_claim(
        self, name: str, directory: Path, *modes: str, namespace: str = "default", phase: str = "Bound"
    ) -> None:
        claim: Object = {"metadata": {"name": name}, "status": {"phase": phase}}
        claim["spec"] = {
            "accessModes": list(modes or ("ReadWriteMany",)),
            "resources": {"requests": {"storage": "1Ti"}},
        }
        self.claims[name] = directory
        self.create("persistentvolumeclaims", claim, namespace)

    def kubeconfig(self, path: Path, namespace: str = "", token: str | None = None, server: str = "") -> Path:
        """Writes a kubeconfig whose current context is this cluster."""
        context = {"cluster": "standin", "user": "tester"}
        if namespace:
            context["namespace"] = namespace
        server = server or f"http://127.0.0.1:{self.port}"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "standin", "cluster": {"server": server}}],
            "users": [{"name": "tester", "user": {"token": token or self.token}}],
            "contexts": [{"name": "test", "context": context}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def pod_names(self, job: str, namespace: str = "default", *phases: str) -> list[str]:
        """Returns the names of the pods of a Job in the order of their indexes."""
        pods = [
            (int(pod["metadata"]["annotations"][INDEX]), pod["metadata"]["name"])
            for pod in self.listed("pods", namespace)
            if pod["metadata"]["labels"].get(JOB_NAME) == job
            and pod["status"]["phase"] in (phases or ("Pending", "Running"))
        ]
        return [name for _, name in sorted(pods)]

    def log(self, pod: Object) -> str:
        container = self.containers.get(pod["metadata"]["uid"])
        if container is None:
            (definition,) = pod["spec"]["containers"]
            reason = at_path(state_of(pod), "waiting.reason") or "ContainerCreating"
            name = pod["metadata"]["name"]
            raise Refused(400, f'container "{definition["name"]}" in pod "{name}" is waiting to start: {reason}')
        return container.log.read_text(errors="replace")

    def close(self) -> None:
        self.stopping.set()
        self.server.shutdown()
        with self.changed:
            self.changed.notify_all()
        for container in self.containers.values():
            if container.process is not None and container.poll() is None:
                container.signal(signal.SIGKILL)
                container.process.wait(20)
            if container.network:
                call("ip", "netns", "del", container.network)
        if Path("/sys/class/net", self._bridge).exists():
            call("ip", "link", "del", self._bridge)
        self.server.server_close()


@contextmanager
def running(state: Path, **options: Any) -> Iterator[Cluster]:
    """Runs a cluster on this machine."""
    cluster = Cluster(state, **options)
    threads = [
        threading.Thread(target=cluster.server.serve_forever, args=(0.05,)),
        threading.Thread(target=cluster.control),
    ]
    for thread in threads:
        thread.start()
    try:
        yield cluster
    finally:
        cluster.close()
        for thread in threads:
            thread.join(20)


def can_run_pods() -> bool:
    """Returns whether this process may create the namespaces of pods."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nsenter", "unshare", "setpriv"))):
        return False
    name = f"k{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        call("ip", "netns", "del", name)
    alone = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "true"]
    return made and subprocess.run(alone, capture_output=True, check=False).returncode == 0


def call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def job_errors(job: Object) -> Iterator[str]:  # noqa: PLR0912
    """Yields what the validation of the real server refuses in a Job and its schema permits."""
    spec = job["spec"]
    pod = spec["template"]["spec"]
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    indexed = spec.get("completionMode") == "Indexed"
    if indexed and "completions" not in spec:
        yield "spec.completions: Required value: when completion mode is Indexed"
    if indexed and len(f"{job['metadata']['name']}-{spec.get('completions', 1) - 1}") > 63:
        yield "metadata.name: Invalid value: will not able to create pod with invalid DNS label"
    for name in ("backoffLimitPerIndex", "maxFailedIndexes"):
        if name in spec and not indexed:
            yield f"spec.{name}: Invalid value: requires indexed completion mode"
    if "podFailurePolicy" in spec:
        if pod.get("restartPolicy") != "Never":
            yield 'spec.template.spec.restartPolicy: Invalid value: only "Never" is supported with podFailurePolicy'
        if spec.get("podReplacementPolicy", "Failed") != "Failed":
            yield 'spec.podReplacementPolicy: Unsupported value: supported values: "Failed"'
        for number, rule in enumerate(spec["podFailurePolicy"]["rules"]):
            where = f"spec.podFailurePolicy.rules[{number}]"
            codes = rule.get("onExitCodes", {}).get("values", [1])
            if bool(rule.get("onExitCodes")) == bool(rule.get("onPodConditions")):
                yield f"{where}: Invalid value: specifying one of OnExitCodes and OnPodConditions is required"
            if codes != sorted(set(codes)) or 0 in codes or not codes:
                yield f"{where}.onExitCodes.values: Invalid value: must be ordered, without duplicates and 0"
            if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
                yield f"{where}.action: Unsupported value"
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"spec.template.spec.containers[0].volumeMounts: Not found: {mount['name']!r}"
        for kind in ("requests", "limits"):
            for quantity in container.get("resources", {}).get(kind, {}).values():
                amount(quantity)
    for names in (volumes, {pod.get("subdomain", "a")}):
        for name in names:
            if len(name) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name):
                yield f"spec.template.spec: Invalid value: {name!r}: must be a lowercase RFC 1123 label"


def pod_of(job: Object, index: int) -> Object:
    """Returns the pod of an index of a Job."""
    template = copy.deepcopy(job["spec"]["template"])
    name = job["metadata"]["name"]
    metadata = template["metadata"]
    metadata["name"] = f"{name}-{index}-{uuid.uuid4().hex[:5]}"
    metadata["annotations"] = {**metadata.get("annotations", {}), INDEX: str(index)}
    metadata["labels"][INDEX] = str(index)
    metadata["finalizers"] = [FINALIZER]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True}
    metadata["ownerReferences"] = [owner]
    spec = template["spec"]
    spec["hostname"] = f"{name}-{index}"
    for container in spec["containers"]:
        field_path = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": field_path})
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}


def failure_action(job: Object, pod: Object) -> tuple[str, str]:
    """Returns the action of the first rule that matches a failed pod, and the message of a Job that fails for it."""
    kinds = [entry["type"] for entry in pod["status"].get("conditions", []) if entry["status"] == "True"]
    code = at_path(state_of(pod), "terminated.exitCode")
    (container,) = pod["spec"]["containers"]
    place = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    for number, rule in enumerate(job["spec"].get("podFailurePolicy", {}).get("rules", [])):
        codes = rule.get("onExitCodes")
        concerns = codes and code and codes.get("containerName") in (None, container["name"])
        if concerns and (code in codes["values"]) == (codes["operator"] == "In"):
            what = f"Container {container['name']} for pod {place} failed with exit code {code}"
            return rule["action"], f"{what} matching {rule['action']} rule at index {number}"
        for pattern in rule.get("onPodConditions", []):
            if pattern["type"] in kinds:
                what = f"Pod {place} has condition {pattern['type']}"
                return rule["action"], f"{what} matching {rule['action']} rule at index {number}"
    return "Count", ""


def state_of(pod: Object) -> Object:
    """Returns the state of the container of a pod: ``waiting``, ``running`` or ``terminated``."""
    statuses: list[Object] = pod["status"].get("containerStatuses") or [{"state": {}}]
    state: Object = statuses[0]["state"]
    return state


def claims_of(pod: Object) -> list[str]:
    volumes = [volume.get("persistentVolumeClaim", {}) for volume in pod["spec"].get("volumes", [])]
    return [volume["claimName"] for volume in volumes if volume]


def requests_of(pod: Object) -> dict[str, float]:
    totals: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        for resource, quantity in container.get("resources", {}).get("requests", {}).items():
            totals[resource] = totals.get(resource, 0) + amount(quantity)
    return totals


def needs_of(pod: Object) -> dict[str, float]:
    """Returns what a pod takes of a quota."""
    needs: dict[str, float] = {"pods": 1}
    for resource, value in requests_of(pod).items():
        needs[f"requests.{resource}"] = value
        if resource in ("cpu", "memory"):
            needs[resource] = value
    return needs


def tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("key", taint["key"]) != taint["key"]:
        return False
    return toleration.get("operator", "Equal") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def matches_selector(service: Object, pod: Object) -> bool:
    selector: dict[str, str] = service["spec"].get("selector", {})
    return selector.items() <= pod["metadata"].get("labels", {}).items()


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """Replaces ``$(NAME)`` by the variable if it is set, and ``$$`` by ``$``."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def indexes(text: str) -> set[int]:
    """Parses the indexes of a Job's status, such as ``1,3-5``."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers


def with_index(text: str, index: int) -> str:
    """Returns the compressed indexes of ``text`` and ``index``."""
    numbers = sorted(indexes(text) | {index})
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), lambda entry: entry[1] - entry[0]):
        members = [number for _, number in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)


PATH = re.compile(
    r"/apis?/(?:(?P<group>[^/]+)/)?(?P<version>v\d\w*)"
    r"(?:/namespaces/(?P<namespace>[^/]+))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    cluster: Cluster
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer takes 40 ms, as its header and its body are sent separately

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, method: Callable[[], Object | str | None]) -> None:
        url = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.parts = dict.fromkeys(PATH.groupindex, "")
        match = PATH.fullmatch(url.path)
        if match is not None:
            self.parts = match.groupdict("")
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        self.body: Any = json.loads(body) if body else {}
        self.cluster.requests.append(f"{self.command} {self.path}")
        code = 200
        try:
            if self.headers.get("Authorization") != f"Bearer {self.cluster.token}":
                raise Refused(401, "Unauthorized")
            with self.cluster.lock:
                if url.path in ("/version", "/version/"):
                    answer: Object | str | None = self._version()
                elif url.path in ("/apis", "/apis/"):
                    answer = self._groups()
                else:
                    self._check_path(url.path)
                    answer = method()
        except Refused as refusal:
            code = refusal.code
            answer = refusal.status
        if answer is None:
            self._watch()
            return
        if self.command == "POST" and code == 200:
            code = 201
            is_stored = "dryRun" not in self.query and self.parts["plural"] in RESOURCES
            if is_stored and self.cluster.lose_answers > 0:
                self.cluster.lose_answers -= 1
                self.close_connection = True
                return
        is_text = isinstance(answer, str)
        content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _version(self) -> Object:
        major, minor = self.cluster.version.split(".")[:2]
        unused = dict.fromkeys(("gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform"), "")
        return {"major": major, "minor": minor, "gitVersion": f"v{major}.{minor}.0", **unused}

    def _groups(self) -> Object:
        groups = []
        for name in sorted(self.cluster.groups):
            version = next((version for group, version, _, _ in RESOURCES.values() if group == name), "v1")
            served = {"groupVersion": f"{name}/{version}", "version": version}
            groups.append({"name": name, "versions": [served], "preferredVersion": served})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}

    def _check_path(self, path: str) -> None:
        """Refuses a resource that is not served, and what the user has no right to."""
        plural = self.parts.get("plural", "")
        group = self.parts.get("group", "")
        if plural == "selfsubjectaccessreviews":
            return
        served = RESOURCES.get(plural, ("?", "", "", False))
        if served[0] != group or (group and group not in self.cluster.groups):
            raise Refused(404, f"the server could not find the requested resource: {path}")
        verbs = {"POST": "create", "DELETE": "delete", "PATCH": "patch"}
        verb = verbs.get(self.command, "get" if self.parts["name"] else "list")
        if "watch" in self.query:
            verb = "watch"
        resource = "/".join(filter(None, (plural, self.parts["sub"])))
        self._check_right(verb, ".".join(filter(None, (resource, group))), self.parts["namespace"])

    def _check_right(self, verb: str, resource: str, namespace: str) -> None:
        action = f"{verb} {resource} {namespace}".rstrip()
        if any(fnmatchcase(action, pattern) for pattern in self.cluster.forbidden):
            group = resource.partition(".")[2]
            where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
            raise Refused(
                403,
                f'{resource} is forbidden: User "tester" cannot {verb} resource "{resource.partition(".")[0]}" '
                f'in API group "{group}" {where}',
            )

    def _get(self) -> Object | str | None:
        plural = self.parts["plural"]
        group, version, kind, _ = RESOURCES[plural]
        if self.parts["name"]:
            thing = self.cluster.get(plural, self.parts["name"], self.parts["namespace"])
            if self.parts["sub"] == "log":
                lines = self.cluster.log(thing).splitlines(keepends=True)
                return "".join(lines[-int(self.query.get("tailLines", 10**9)) :])
            return thing
        if self.query.get("watch") in ("true", "True", "1"):
            return None
        items = [
            thing for thing in self.cluster.listed(plural, self.parts["namespace"] or None) if self._selects(thing)
        ]
        metadata = {"resourceVersion": str(self.cluster.revision)}
        return {"kind": f"{kind}List", "apiVersion": f"{group}/{version}".lstrip("/"), "metadata": metadata,
                "items": items}  # fmt: skip

    def _selects(self, thing: Object) -> bool:
        if not matches(thing["metadata"].get("labels", {}), self.query.get("labelSelector", "")):
            return False
        fields = [term.partition("=") for term in self.query.get("fieldSelector", "").split(",") if term]
        return all(at_path(thing, path) == value for path, _, value in fields)

    def _watch(self) -> None:
        """Sends the changes since a revision, one JSON object per line, until the client has gone."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        plural = self.parts["plural"]
        namespace = self.parts["namespace"]
        since = int(self.query.get("resourceVersion") or 0)
        deadline = time.monotonic() + float(self.query.get("timeoutSeconds", 3600))
        cluster = self.cluster
        while not cluster.stopping.is_set() and time.monotonic() < deadline:
            with cluster.changed:
                changes = [entry for entry in cluster.history if entry[0] > since]
                if not changes:
                    cluster.changed.wait(min(1.0, max(0.0, deadline - time.monotonic())))
            for revision, changed, kind, thing in changes:
                since = revision
                if changed != plural or namespace not in ("", thing["metadata"].get("namespace")):
                    continue
                if self._selects(thing):
                    line = json.dumps({"type": kind, "object": thing}).encode() + b"\n"
                    with suppress(OSError):
                        self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        with suppress(OSError):
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _post(self) -> Object:
        if self.parts["plural"] == "selfsubjectaccessreviews":
            wanted = self.body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (wanted["resource"], wanted.get("subresource"))))
            try:
                full_name = ".".join(filter(None, (resource, wanted.get("group"))))
                self._check_right(wanted["verb"], full_name, wanted.get("namespace", ""))
            except Refused:
                return {**self.body, "status": {"allowed": False}}
            return {**self.body, "status": {"allowed": True}}
        if self.parts["sub"] == "eviction":
            self.cluster.evict(self.parts["name"], self.parts["namespace"])
            return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        dry_run = self.query.get("dryRun") == "All"
        return self.cluster.create(self.parts["plural"], self.body, self.parts["namespace"] or "default", dry_run)

    def _patch(self) -> Object:
        plural = self.parts["plural"]
        thing = self.cluster.get(plural, self.parts["name"], self.parts["namespace"])
        changed = merge_patch(thing, self.body)
        same = ("completions", "completionMode", "podFailurePolicy", "backoffLimitPerIndex", "template")
        if plural == "jobs":
            for name in same:
                if changed["spec"].get(name) != thing["spec"].get(name):
                    name_of_job = thing["metadata"]["name"]
                    raise Refused(422, f'Job.batch "{name_of_job}" is invalid: spec.{name}: field is immutable')
        thing.clear()
        thing.update(changed)
        self.cluster.modified(plural, thing)
        return thing

    def _delete(self) -> Object:
        plural = self.parts["plural"]
        thing = self.cluster.get(plural, self.parts["name"], self.parts["namespace"])
        options = {**self.query, **(self.body or {})}
        grace = options.get("gracePeriodSeconds")
        # the default of batch/v1 is to leave the pods of a Job running
        policy = options.get("propagationPolicy", "Orphan")
        grace_s = None
        if grace is not None:
            grace_s = float(grace)
        self.cluster.delete(plural, thing, grace_s, policy)
        if plural in ("pods", "services"):
            return thing
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
