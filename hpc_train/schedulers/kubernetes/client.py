"""Talks to the API server of a cluster with the official client: checks, submits, reads and cancels Jobs.

Each request has a time limit, and a failed one raises ``KubernetesError``. A submission may be repeated, since the
name of a Job is unique to the submission. A Job that exists is never created again; its controller replaces its pods.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpc_train.config.import_path import install_extra
from hpc_train.errors import Mistakes, UserError
from hpc_train.schedulers.kubernetes.manifest import (
    JOB_NAME,
    MANAGED_BY,
    OLDEST,
    QUEUE,
    Mount,
    TrainingJob,
    check_shape,
    manifest,
)
from hpc_train.schedulers.kubernetes.states import JobReport, Object, report

REQUEST_S = 20.0
KUEUE = "kueue.x-k8s.io"
SHARED = "ReadWriteMany"
# verb, API group, resource: what hpc_train does in a namespace
RIGHTS = (
    ("create", "batch", "jobs"),
    ("get", "batch", "jobs"),
    ("list", "batch", "jobs"),
    ("delete", "batch", "jobs"),
    ("create", "", "services"),
    ("patch", "", "services"),
    ("delete", "", "services"),
    ("list", "", "pods"),
    ("list", "", "events"),
)


class Problem(StrEnum):
    SILENT = "silent"  # the server does not answer
    UNKNOWN_USER = "unknown_user"
    FORBIDDEN = "forbidden"
    ABSENT = "absent"
    EXISTS = "exists"
    REFUSED = "refused"


_PROBLEMS = {401: Problem.UNKNOWN_USER, 403: Problem.FORBIDDEN, 404: Problem.ABSENT, 409: Problem.EXISTS}
_FIXES = {
    Problem.SILENT: "check the network and the server of the context: kubectl cluster-info",
    Problem.UNKNOWN_USER: "renew the credentials of the kubeconfig; `kubectl get pods` must work",
    Problem.FORBIDDEN: "use a namespace in which you have this right, or ask its administrator for a RoleBinding",
    Problem.ABSENT: "kubectl get lists what exists",
    Problem.EXISTS: "use another name",
    Problem.REFUSED: "correct what the message names",
}


class KubernetesError(UserError):
    def __init__(self, what: str, problem: Problem, where: str) -> None:
        super().__init__(what, where=where, fix=_FIXES[problem])
        self.problem = problem


@dataclass(frozen=True)
class Connection:
    """A connection to a cluster.

    Attributes:
        api: an ``ApiClient`` of the official client.
        kubernetes: the module ``kubernetes.client``.
        context: the name of the context in the kubeconfig.
        place: the context and the kubeconfig, for messages.
    """

    api: Any
    kubernetes: Any
    context: str
    namespace: str
    place: str

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls a method of the official client; returns its result as tables with the names of the API.

        Raises KubernetesError.
        """
        from urllib3.exceptions import HTTPError

        try:
            result = method(*arguments, **options, _request_timeout=REQUEST_S)
        except self.kubernetes.ApiException as error:
            problem = _PROBLEMS.get(error.status, Problem.REFUSED)
            if error.status >= 500 or error.status == 429:
                problem = Problem.SILENT
            raise KubernetesError(f"Kubernetes refuses: {_message(error)}", problem, self.place) from None
        except ValueError as error:  # of the models of newer clients (pydantic), before the request is sent
            raise KubernetesError(f"the client of Kubernetes refuses: {error}", Problem.REFUSED, self.place) from None
        except (HTTPError, OSError) as error:
            server = self.api.configuration.host
            raise KubernetesError(f"{server} does not answer: {error}", Problem.SILENT, self.place) from None
        return self.api.sanitize_for_serialization(result)

    @property
    def batch(self) -> Any:
        return self.kubernetes.BatchV1Api(self.api)

    @property
    def core(self) -> Any:
        return self.kubernetes.CoreV1Api(self.api)


def _message(error: Any) -> str:
    """Returns the message of an error of the server, whose body is usually an object of the kind Status."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def connect(namespace: str | None = None, context: str | None = None) -> Connection:
    """Reads the kubeconfig of the user, as kubectl does, and sends nothing. Raises UserError if the client is not
    installed, or the kubeconfig has no such context.

    Args:
        namespace: None takes that of the context, or else ``default``.
        context: None takes the current context.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise UserError(
            "the official Python client of Kubernetes is not installed",
            where="cluster.kind",
            fix=install_extra("kubernetes"),
        ) from None
    files = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    try:
        contexts, current = config.list_kube_config_contexts(config_file=files)
        chosen = next((entry for entry in contexts if entry["name"] == context), current)
        if context is not None and chosen["name"] != context:
            raise UserError(
                f"the kubeconfig has no context {context}, only {', '.join(entry['name'] for entry in contexts)}",
                where=files,
                fix="kubectl config get-contexts",
            )
        api = config.new_client_from_config(config_file=files, context=chosen["name"])
    except UserError:
        raise
    except Exception as error:  # the client does not document what it raises for wrong files, e.g. TypeError
        raise UserError(
            f"the kubeconfig cannot be used: {error}",
            where=f"KUBECONFIG, {files}",
            fix="`kubectl config view` must show a current context; set KUBECONFIG=FILE for another file",
        ) from None
    space = namespace or chosen["context"].get("namespace") or "default"
    return Connection(api, client, chosen["name"], space, f"context {chosen['name']} of {files}, namespace {space}")


def check(connection: Connection, job: TrainingJob) -> list[str]:
    """Checks on the server, before a submission, what would refuse the job or let it wait forever.

    Returns notices, among them what could not be checked. Raises UserError with all mistakes.
    """
    check_shape(job)
    notices: list[str] = []
    _check_version(connection)
    _check_namespace(connection, job)
    mistakes = Mistakes()
    for verify in (_check_rights, _check_volumes, _check_queue, _check_quotas):
        with mistakes.collected():
            notices += verify(connection, job)
    mistakes.report()
    service, body = manifest(job)
    for method, thing in (
        (connection.core.create_namespaced_service, service),
        (connection.batch.create_namespaced_job, body),
    ):
        with mistakes.collected():
            connection.call(method, job.namespace, thing, dry_run="All")
    mistakes.report()
    return notices


def _check_version(connection: Connection) -> None:
    version = connection.call(connection.kubernetes.VersionApi(connection.api).get_code)
    major, minor = (int("".join(filter(str.isdigit, version[part]))) for part in ("major", "minor"))
    if (major, minor) < OLDEST:
        raise UserError(
            f"the cluster runs Kubernetes {major}.{minor}, but hpc_train needs {OLDEST[0]}.{OLDEST[1]} or newer",
            where=connection.place,
            fix="use another cluster",
        )


def _check_namespace(connection: Connection, job: TrainingJob) -> None:
    try:
        connection.call(connection.core.read_namespace, job.namespace)
    except KubernetesError as error:
        if error.problem is Problem.ABSENT:
            raise UserError(
                f"the cluster has no namespace {job.namespace}",
                where=connection.place,
                fix="cluster.extra.namespace=NAME; `kubectl get namespaces` lists them, if you may",
            ) from None
        if error.problem is not Problem.FORBIDDEN:  # many users may not read namespaces
            raise


def _check_rights(connection: Connection, job: TrainingJob) -> list[str]:
    reviews = connection.kubernetes.AuthorizationV1Api(connection.api)
    missing = []
    for verb, group, resource in RIGHTS:
        attributes = {"verb": verb, "group": group, "resource": resource, "namespace": job.namespace}
        review = connection.call(
            reviews.create_self_subject_access_review, {"spec": {"resourceAttributes": attributes}}
        )
        if not review["status"]["allowed"]:
            missing.append(f"{verb} {resource}")
    if missing:
        raise UserError(
            f"you may not {', '.join(missing)} in the namespace {job.namespace}",
            where=connection.place,
            fix=_FIXES[Problem.FORBIDDEN],
        )
    return []


def _check_volumes(connection: Connection, job: TrainingJob) -> list[str]:
    notices = []
    mistakes = Mistakes()
    for mount in job.mounts:
        try:
            claim = connection.call(connection.core.read_namespaced_persistent_volume_claim, mount.claim, job.namespace)
        except KubernetesError as error:
            if error.problem is Problem.FORBIDDEN:
                notices.append(f"you may not read the volume claim {mount.claim}, so it was not checked")
                continue
            if error.problem is not Problem.ABSENT:
                raise
            with mistakes.collected():
                raise UserError(
                    f"the namespace {job.namespace} has no volume claim {mount.claim}",
                    where="cluster.container.binds",
                    fix=f"kubectl get pvc --namespace={job.namespace} lists the claims",
                ) from None
            continue
        with mistakes.collected():
            _check_access(mount, claim, job.nodes)
        if (claim.get("status") or {}).get("phase") == "Pending":
            notices.append(f"the volume claim {mount.claim} is not bound yet; its pods wait until it is")
    mistakes.report()
    return notices


def _check_access(mount: Mount, claim: Object, nodes: int) -> None:
    """Raises UserError if a claim is lost, or cannot be mounted on several nodes."""
    modes = claim["spec"].get("accessModes") or []
    sufficient = {SHARED, "ReadOnlyMany"} if mount.read_only else {SHARED}
    if (claim.get("status") or {}).get("phase") == "Lost":
        raise UserError(
            f"the volume of the claim {mount.claim} is lost",
            where="cluster.container.binds",
            fix=f"kubectl describe pvc {mount.claim} shows why",
        )
    if nodes > 1 and sufficient.isdisjoint(modes):
        raise UserError(
            f"the volume claim {mount.claim} has the access modes {', '.join(modes)}: a single node can mount it, but "
            f"the job has {nodes} nodes",
            where="cluster.container.binds",
            fix=f"use a claim with {' or '.join(sorted(sufficient))}, on a shared file system such as NFS, CephFS or "
            "Lustre, or cluster.nodes=1",
        )


def _check_queue(connection: Connection, job: TrainingJob) -> list[str]:
    if job.queue is None:
        return []
    version = _kueue_version(connection)
    if version is None:
        raise UserError(
            f"the job names the queue {job.queue}, but Kueue is not installed in the cluster",
            where="cluster.partition",
            fix="cluster.partition=null, or ask the administrator of the cluster to install Kueue",
        )
    custom = connection.kubernetes.CustomObjectsApi(connection.api)
    try:
        queues = connection.call(custom.list_namespaced_custom_object, KUEUE, version, job.namespace, "localqueues")
    except KubernetesError as error:
        if error.problem is not Problem.FORBIDDEN:
            raise
        return [f"you may not list the queues of the namespace, so {job.queue} was not checked"]
    names = sorted(queue["metadata"]["name"] for queue in queues["items"])
    if job.queue not in names:
        raise UserError(
            f"the namespace {job.namespace} has no queue {job.queue}",
            where="cluster.partition",
            fix=f"one of {', '.join(names) or 'none: ask its administrator for a LocalQueue'}",
        )
    return []


def _kueue_version(connection: Connection) -> str | None:
    """Returns the version of Kueue's API that the server prefers; None without Kueue."""
    groups = connection.call(connection.kubernetes.ApisApi(connection.api).get_api_versions)["groups"]
    for group in groups:
        if group["name"] == KUEUE:
            return str(group["preferredVersion"]["version"])
    return None


def _check_quotas(connection: Connection, job: TrainingJob) -> list[str]:
    """Compares what all pods need with the quotas that hold for every pod of the namespace."""
    from kubernetes.utils import parse_quantity

    try:
        quotas = connection.call(connection.core.list_namespaced_resource_quota, job.namespace)["items"]
    except KubernetesError as error:
        if error.problem is not Problem.FORBIDDEN:
            raise
        return ["you may not read the quotas of the namespace, so they were not checked"]
    needs = {"pods": job.nodes, "count/pods": job.nodes, "count/jobs.batch": 1, "count/services": 1, "services": 1}
    for resource, quantity in job.requests.items():
        total = parse_quantity(quantity) * job.nodes
        needs |= {f"requests.{resource}": total, f"limits.{resource}": total, resource: total}
    notices = []
    mistakes = Mistakes()
    for quota in quotas:
        if quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"):
            continue
        used = (quota.get("status") or {}).get("used") or {}
        for resource, limit in (quota["spec"].get("hard") or {}).items():
            if resource not in needs:
                continue
            name = quota["metadata"]["name"]
            if needs[resource] > parse_quantity(limit):
                with mistakes.collected():
                    raise UserError(
                        f"the quota {name} of the namespace {job.namespace} allows {resource}={limit}, but the job "
                        f"needs {_number(needs[resource])}",
                        where="cluster.nodes, gpus_per_node, cpus_per_gpu and mem_per_gpu",
                        fix="request less, or use another namespace",
                    )
            elif needs[resource] + parse_quantity(used.get(resource, "0")) > parse_quantity(limit):
                notices.append(
                    f"the job waits for the quota {name}: {used[resource]} of {resource}={limit} are in use, and the "
                    f"job needs {_number(needs[resource])}"
                )
    mistakes.report()
    return notices


def _number(quantity: Any) -> str:
    return f"{quantity:f}".rstrip("0").rstrip(".") if "." in f"{quantity:f}" else f"{quantity:f}"


def submit(connection: Connection, documents: Sequence[Mapping[str, Any]]) -> None:
    """Creates the service, so that the names of the pods exist as soon as they run, and the Job, with which the service
    is deleted.

    A repeated call finds the Job of the first one. Raises KubernetesError; after ``Problem.SILENT`` the Job may exist.
    """
    service, job = documents
    name = job["metadata"]["name"]
    namespace = job["metadata"]["namespace"]
    core = connection.core
    _create(connection, core.create_namespaced_service, namespace, service)
    try:
        created = _create(connection, connection.batch.create_namespaced_job, namespace, job)
    except KubernetesError as error:
        if error.problem is not Problem.SILENT:
            connection.call(core.delete_namespaced_service, name, namespace)
        raise
    if created is None:
        created = connection.call(connection.batch.read_namespaced_job, name, namespace)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": created["metadata"]["uid"]}
    connection.call(core.patch_namespaced_service, name, namespace, {"metadata": {"ownerReferences": [owner]}})


def _create(connection: Connection, method: Callable[..., Any], namespace: str, body: Object) -> Any:
    """Creates an object; returns None if it exists."""
    try:
        return connection.call(method, namespace, body)
    except KubernetesError as error:
        if error.problem is not Problem.EXISTS:
            raise
        return None


def read(connection: Connection, names: Collection[str]) -> dict[str, JobReport]:
    """Returns the state of the Jobs ``names``, without those that the server does not have. Raises KubernetesError."""
    ours = {"label_selector": ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())}
    listed = connection.call(connection.batch.list_namespaced_job, connection.namespace, **ours)["items"]
    jobs = {job["metadata"]["name"]: job for job in listed if job["metadata"]["name"] in names}
    if not jobs:
        return {}
    pods = connection.call(connection.core.list_namespaced_pod, connection.namespace, **ours)["items"]
    events = connection.call(connection.core.list_namespaced_event, connection.namespace)["items"]
    workloads: dict[str, Object] = {}
    if any(QUEUE in job["metadata"]["labels"] for job in jobs.values()):
        workloads = _workloads(connection)
    return {
        name: report(
            job,
            [pod for pod in pods if pod["metadata"]["labels"].get(JOB_NAME) == name],
            events,
            workloads.get(job["metadata"]["uid"]),
        )
        for name, job in jobs.items()
    }


def _workloads(connection: Connection) -> dict[str, Object]:
    """Returns the Workloads of Kueue by the uid of their Job; empty if the user may not read them."""
    version = _kueue_version(connection)
    if version is None:
        return {}
    custom = connection.kubernetes.CustomObjectsApi(connection.api)
    try:
        items = connection.call(
            custom.list_namespaced_custom_object, KUEUE, version, connection.namespace, "workloads"
        )["items"]
    except KubernetesError as error:
        if error.problem is not Problem.FORBIDDEN:
            raise
        return {}
    return {workload["metadata"]["labels"].get(f"{KUEUE}/job-uid", ""): workload for workload in items}


def cancel(connection: Connection, name: str) -> None:
    """Deletes a Job after its pods, which get SIGTERM first. A Job that does not exist is cancelled already."""
    try:
        # by default, the server would leave the pods running
        connection.call(
            connection.batch.delete_namespaced_job, name, connection.namespace, propagation_policy="Foreground"
        )
    except KubernetesError as error:
        if error.problem is not Problem.ABSENT:
            raise
