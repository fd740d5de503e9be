"""Renders a run as an Indexed Job with one pod per node, and as the headless service that names its pods.

The agents in the pods decide by their exit codes whether the run continues; the Job then replaces the pods that have
ended. The fields need Kubernetes 1.29 or newer. A JobSet would add nothing to a Job with one kind of pod, and its
failure policy recreates all pods, which would take the decision from the agents.

See https://kubernetes.io/docs/concepts/workloads/controllers/job/ and, for the queue,
https://kueue.sigs.k8s.io/docs/tasks/run/jobs/.
"""

from __future__ import annotations

import hashlib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import yaml

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import Mistakes, UserError, nearest
from hpc_train.schedulers.environment import END_TIME, GPUS, NODE_RANK, NODES, REQUEUE

OLDEST = (1, 29)  # the first version that has backoffLimitPerIndex and podReplacementPolicy without a feature gate
CONTAINER = "train"
JOB_NAME = "batch.kubernetes.io/job-name"  # the label of a pod with the name of its Job
INDEX = "batch.kubernetes.io/job-completion-index"  # the annotation of a pod with its index
QUEUE = "kueue.x-k8s.io/queue-name"
RUN_DIRECTORY = "hpc-train/run-directory"
MANAGED_BY = {"app.kubernetes.io/managed-by": "hpc_train"}
REFERENCE = "HPC_TRAIN_KUBERNETES"  # the variable with the reference of the Job
FAILURES_PER_INDEX = 20  # a bound on pods that end without a word of the agent, such as those killed for their memory
START_S = 900  # a pod has this much time, in which its image is pulled, before the time limit of its agent begins
END_JOB = (1, 2, 93)  # of an agent, as in run/exits.py: the run failed, was refused or has given up
START_AGAIN = (75,)  # the run stopped after a checkpoint and continues in new pods
NOT_RUNNABLE = (126, 127)  # of a shell whose command cannot be executed or does not exist


@dataclass(frozen=True)
class Mount:
    """A persistent volume claim and the directory at which pods see it."""

    claim: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Options:
    """The keys of ``cluster.extra``, which only Kubernetes has.

    Attributes:
        namespace: by default that of the context.
        context: a context of the kubeconfig; by default the current one.
        resources: further extended resources of a pod, such as ``{rdma/hca: 1}``.
        node_selector: labels that the nodes must have.
        tolerations: tolerations in the form of the Pod API.
        secrets: environment variables and the ``SECRET/KEY`` that holds their value.
        pod: fields that are merged into the specification of the pods.
    """

    namespace: str | None = None
    context: str | None = None
    gpu_resource: str = "nvidia.com/gpu"
    resources: Mapping[str, Any] = field(default_factory=dict)
    node_selector: Mapping[str, Any] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict)
    pod: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, cluster: ClusterConfig) -> Options:
        """Reads ``cluster.extra``. Raises UserError for an unknown key, or a value that has another form."""
        allowed = [option.name for option in fields(cls)]
        for name in cluster.extra:
            if name not in allowed:
                raise UserError(
                    f"Kubernetes has no option {name}", where=f"cluster.extra.{name}", fix=nearest(name, allowed)
                )
        defaults = cls()
        for name, value in cluster.extra.items():
            default = getattr(defaults, name)
            form = _form(default)
            if _form(value) != form:
                raise UserError(
                    f"cluster.extra.{name} is {value!r}, but must be {form}",
                    where=f"cluster.extra.{name}",
                    fix="docs/howto/kubernetes.md has an example",
                )
        for name, source in cluster.extra.get("secrets", {}).items():
            if not str(source).partition("/")[2]:
                raise UserError(
                    f"{source!r} does not name a key of a Secret",
                    where=f"cluster.extra.secrets.{name}",
                    fix=f"cluster.extra.secrets.{name}=SECRET/KEY",
                )
        return cls(**cluster.extra)


def _form(value: object) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    return "text"


@dataclass(frozen=True)
class TrainingJob:
    """The shape of a job on Kubernetes.

    Attributes:
        name: the name of the Job and of its service.
        reference: what identifies the Job among all clusters of its user.
        run_dir: the run directory, as pods see it.
        image: the container image, which has Python and hpc_train.
        nodes: the number of pods, which are the nodes of the run.
        cpus: the CPU cores of a pod; None leaves them to the namespace's LimitRange.
        memory_bytes: the memory of a pod; None leaves it to the namespace's LimitRange.
        time_limit_s: the time after which the agents stop, in seconds. The pods of the next start have it again.
        grace_s: the time between SIGTERM and SIGKILL, in seconds, in which the agents save a checkpoint.
        setup: lines of bash that run before the agent; they set its environment.
        mounts: the volumes of the runs and of the data.
        queue: the LocalQueue of Kueue.
        excluded_nodes: values of the label ``kubernetes.io/hostname``.
        user: the user and group ids of the processes, to which the files of the run belong.
    """

    name: str
    namespace: str
    reference: str
    run_dir: str
    image: str
    agent: Sequence[str]
    nodes: int
    _: KW_ONLY
    gpus: int = 0
    cpus: int | None = None
    memory_bytes: int | None = None
    time_limit_s: int | None = None
    grace_s: int = 120
    setup: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    queue: str | None = None
    priority_class: str | None = None
    excluded_nodes: tuple[str, ...] = ()
    user: tuple[int, int] | None = None
    options: Options = Options()

    @property
    def node_names(self) -> list[str]:
        """The DNS names of the pods by index, as pods of the namespace resolve them."""
        return [f"{self.name}-{index}.{self.name}" for index in range(self.nodes)]

    @property
    def requests(self) -> dict[str, str]:
        """The resources of a pod, as quantities."""
        requests = {name: str(value) for name, value in self.options.resources.items()}
        if self.cpus is not None:
            requests["cpu"] = str(self.cpus)
        if self.memory_bytes is not None:
            requests["memory"] = f"{self.memory_bytes >> 20}Mi"
        if self.gpus:
            requests[self.options.gpu_resource] = str(self.gpus)
        return requests


def check_shape(job: TrainingJob) -> None:
    """Raises UserError with everything that no cluster would accept or could start."""
    mistakes = Mistakes()
    if not job.image.strip():
        with mistakes.collected():
            raise UserError(
                "a job on Kubernetes has no container image",
                where="cluster.container.image",
                fix="cluster.container.image=REGISTRY/NAME:TAG of an image that has hpc_train",
            )
    elif re.search(r"\s|://|\.sif$", job.image):
        with mistakes.collected():
            raise UserError(
                f"{job.image!r} is not the name of an image that a node of Kubernetes can pull",
                where="cluster.container.image",
                fix="write it without a scheme, such as ghcr.io/GROUP/NAME:TAG",
            )
    if not any(_contains(mount, job.run_dir) for mount in job.mounts):
        paths = ", ".join(mount.path for mount in job.mounts) or "none"
        with mistakes.collected():
            raise UserError(
                f"no writable volume holds the run directory {job.run_dir}; the mounted volumes are: {paths}",
                where="cluster.container.binds",
                fix="mount the volume claim that holds run.root: cluster.container.binds=[CLAIM:DIRECTORY]",
            )
    mistakes.report()


def _contains(mount: Mount, directory: str) -> bool:
    return not mount.read_only and f"{directory}/".startswith(f"{mount.path.rstrip('/')}/")


def manifest(job: TrainingJob) -> list[dict[str, Any]]:
    """Returns the Service and the Job as objects of the API.

    Raises UserError as ``check_shape`` does.
    """
    check_shape(job)
    labels: dict[str, str] = dict(MANAGED_BY)
    if job.queue:
        labels[QUEUE] = job.queue
    metadata: dict[str, Any] = {
        "name": job.name,
        "namespace": job.namespace,
        "labels": labels,
        "annotations": {RUN_DIRECTORY: job.run_dir},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "labels": dict(MANAGED_BY)},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB_NAME: job.name}},
    }
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "podReplacementPolicy": "Failed",
        "backoffLimitPerIndex": FAILURES_PER_INDEX,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": _failure_rules()},
        "template": {
            "metadata": {"labels": dict(MANAGED_BY), "annotations": {RUN_DIRECTORY: job.run_dir}},
            "spec": merged(_pod(job), job.options.pod),
        },
    }
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]


def _failure_rules() -> list[dict[str, Any]]:
    """Returns the rules for failed pods, of which the first that matches counts."""

    def exit_codes(codes: Sequence[int]) -> dict[str, Any]:
        return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}

    return [
        {"action": "FailJob", "onExitCodes": exit_codes(END_JOB)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": exit_codes(START_AGAIN)},
        {"action": "FailJob", "onExitCodes": exit_codes(NOT_RUNNABLE)},
    ]


def _pod(job: TrainingJob) -> dict[str, Any]:
    security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if job.user is not None:
        user, group = job.user
        security |= {"runAsUser": user, "runAsGroup": group, "runAsNonRoot": user != 0, "fsGroup": group}
        security["fsGroupChangePolicy"] = "OnRootMismatch"
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "subdomain": job.name,
        "terminationGracePeriodSeconds": job.grace_s,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": security,
        "containers": [_container(job)],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *(_volume(claim, job.mounts) for claim in dict.fromkeys(mount.claim for mount in job.mounts)),
        ],
    }
    if job.time_limit_s is not None:
        pod["activeDeadlineSeconds"] = job.time_limit_s + START_S
    if job.priority_class:
        pod["priorityClassName"] = job.priority_class
    if job.options.node_selector:
        pod["nodeSelector"] = {name: str(value) for name, value in job.options.node_selector.items()}
    if job.options.tolerations:
        pod["tolerations"] = [dict(toleration) for toleration in job.options.tolerations]
    if job.excluded_nodes:
        excluded = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(job.excluded_nodes)}
        terms = [{"matchExpressions": [excluded]}]
        pod["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
        }
    return pod


def _volume(claim: str, mounts: Sequence[Mount]) -> dict[str, Any]:
    source: dict[str, Any] = {"claimName": claim}
    if all(mount.read_only for mount in mounts if mount.claim == claim):
        source["readOnly"] = True
    return {"name": _volume_name(claim), "persistentVolumeClaim": source}


def _volume_name(claim: str) -> str:
    """Returns a DNS label for a claim, whose name may be longer and may contain dots."""
    return f"claim-{hashlib.sha256(claim.encode()).hexdigest()[:8]}"


def _container(job: TrainingJob) -> dict[str, Any]:
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    environment: list[dict[str, Any]] = [
        {"name": NODES, "value": ",".join(job.node_names)},
        {"name": NODE_RANK, "valueFrom": rank},
        {"name": GPUS, "value": str(job.gpus)},
        {"name": REQUEUE, "value": "true"},  # the exit code of the agent requests new pods
        {"name": REFERENCE, "value": job.reference},
    ]
    for name, source in job.options.secrets.items():
        secret, _, key = source.partition("/")
        environment.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for mount in job.mounts:
        entry: dict[str, Any] = {"name": _volume_name(mount.claim), "mountPath": mount.path}
        if mount.read_only:
            entry["readOnly"] = True
        mounts.append(entry)
    lines = list(job.setup)
    if job.nodes > 1:  # the name server learns the address of a pod some seconds after its start
        lines.append(f'for name in "$HOSTNAME.{job.name}" {job.node_names[0]}; do')
        lines += ['  until getent hosts "$name" > /dev/null; do sleep 1; done', "done"]
    if job.time_limit_s is not None:
        lines.append(f"export {END_TIME}=$(($(date +%s) + {job.time_limit_s}))")
    lines.append('exec "$@"')
    script = "\n".join(lines).replace("$$", "$$$$")  # Kubernetes replaces $$ by $
    command = ["bash", "-c", script, "bash", *job.agent]
    container: dict[str, Any] = {"name": CONTAINER, "image": job.image, "command": command}
    if job.requests:
        container["resources"] = {"requests": job.requests, "limits": job.requests}
    container |= {
        "env": environment,
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return container


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``base`` with the fields of ``changes``: tables are merged, and lists of named objects by their names.

    Any other value of ``changes`` replaces that of ``base``.
    """
    result = dict(base)
    for name, change in changes.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(change, Mapping):
            result[name] = merged(old, change)
        elif isinstance(old, list) and _are_named(old) and isinstance(change, Sequence) and _are_named(change):
            entries = {entry["name"]: entry for entry in old}
            for entry in change:
                entries[entry["name"]] = merged(entries.get(entry["name"], {}), entry)
            result[name] = list(entries.values())
        else:
            result[name] = change
    return result


def _are_named(entries: Sequence[Any]) -> bool:
    return all(isinstance(entry, Mapping) and "name" in entry for entry in entries)


_POD = "Job.spec.template.spec"
# The path of a field, without the positions in lists -> the reason for its value.
REASONS: Mapping[str, str] = {
    "Service": "gives each pod of the Job a DNS name, JOB-INDEX.JOB, under which the agents meet",
    "Service.spec.clusterIP": "no virtual address: a name resolves to the address of its pod",
    "Service.spec.publishNotReadyAddresses": "the agents meet before their pods are ready",
    f"Job.metadata.labels.{QUEUE}": "Kueue starts the Job when its LocalQueue has room for all pods",
    f"Job.metadata.annotations.{RUN_DIRECTORY}": "by which a repeated submission recognizes its Job",
    "Job.spec.completionMode": "gives each pod an index, which is the number of its node, and a host name",
    "Job.spec.completions": "cluster.nodes",
    "Job.spec.parallelism": "all pods run at the same time",
    "Job.spec.podReplacementPolicy": "a pod is replaced only after its processes have ended, so that no two agents "
    "have the same index",
    "Job.spec.backoffLimitPerIndex": "bounds the pods that end without a decision of an agent, such as those that are "
    "killed for their memory; evicted pods do not count. It replaces backoffLimit, which would end long runs",
    "Job.spec.maxFailedIndexes": "the run cannot end well without one of its nodes",
    "Job.spec.podFailurePolicy": "the first rule that matches counts. 1: the agents have ended the run. 2: a pod was "
    "evicted or preempted, and its replacement continues the run. 3: the agents have saved a checkpoint and request "
    "new pods. 4: the image cannot run the command",
    f"{_POD}.restartPolicy": "required by podFailurePolicy; a new pod may start on another node",
    f"{_POD}.subdomain": "the service, under which the host name of the pod is known",
    f"{_POD}.terminationGracePeriodSeconds": "the agents save a checkpoint between SIGTERM and SIGKILL",
    f"{_POD}.enableServiceLinks": "otherwise each service of the namespace adds variables to the environment",
    f"{_POD}.automountServiceAccountToken": "training does not use the API of Kubernetes",
    f"{_POD}.securityContext": "the least rights, which the Pod Security Standard `restricted` demands for users other "
    "than root; new files belong to the user who submits",
    f"{_POD}.activeDeadlineSeconds": "cluster.time and the time to pull the image, for each start of a pod; the "
    "agents save a checkpoint and stop before",
    f"{_POD}.priorityClassName": "cluster.qos",
    f"{_POD}.affinity": "cluster.exclude",
    f"{_POD}.containers.command": "cluster.env and cluster.setup; wait until the names of this pod and of pod 0 "
    "resolve; then the agent, which starts a worker per GPU",
    f"{_POD}.containers.resources": "equal requests and limits: the pod is of the class Guaranteed, which is evicted "
    "last",
    f"{_POD}.containers.env": "the allocation of the agent, and then the secrets by reference",
    f"{_POD}.volumes": "/dev/shm of a container has 64 MiB, too little for NCCL and the data loaders; the Job's memory "
    "limits this one. The claims hold the runs and the data",
}  # fmt: skip


def render(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns the YAML of ``documents``, in which comments give the reasons of ``REASONS``."""
    parts = []
    for document in documents:
        kind = document["kind"]
        lines = [*_comment(REASONS.get(kind, ""), ""), *_yaml(document, kind, "")]
        parts.append("\n".join(lines) + "\n")
    return "---\n".join(parts)


def _yaml(value: Mapping[str, Any] | Sequence[Any], path: str, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from _comment(REASONS.get(f"{path}.{name}", ""), indent)
            if isinstance(child, Mapping | list) and child:
                yield f"{indent}{name}:"
                yield from _yaml(child, f"{path}.{name}", f"{indent}  ")
            else:
                yield from _scalar(f"{indent}{name}: ", child, indent)
        return
    for child in value:
        if isinstance(child, Mapping):
            lines = list(_yaml(child, path, f"{indent}  "))
            first = next(number for number, line in enumerate(lines) if not line.lstrip().startswith("#"))
            lines[first] = f"{indent}- {lines[first].lstrip()}"
            yield from lines
        else:
            yield from _scalar(f"{indent}- ", child, indent)


def _comment(reason: str, indent: str) -> list[str]:
    return textwrap.wrap(reason, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _scalar(start: str, value: Any, indent: str) -> Iterator[str]:
    """Yields the lines of a scalar; text of several lines becomes a literal block."""
    if isinstance(value, str) and "\n" in value:
        lines = value.split("\n")
        is_plain = all(line == line.rstrip() and line.isprintable() for line in lines) and lines[-1]
        if is_plain and lines[0] and lines[0] == lines[0].lstrip():
            yield f"{start}|-"
            yield from (f"{indent}  {line}".rstrip() for line in lines)
        else:
            yield start + json.dumps(value, ensure_ascii=False)  # JSON is YAML, too
        return
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    yield start + text.removesuffix("...\n").strip()
