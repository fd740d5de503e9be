"""Submits runs to Kubernetes: ``cluster=kubernetes``.

The keys of ``cluster`` have the meaning that docs/howto/kubernetes.md states; ``cluster.extra`` holds the options that
only Kubernetes has, which are the fields of ``Options``.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import yaml

from hpc_train.errors import UserError
from hpc_train.schedulers.kubernetes import client
from hpc_train.schedulers.kubernetes.client import Connection, KubernetesError, Problem, connect
from hpc_train.schedulers.kubernetes.manifest import Mount, Options, TrainingJob, manifest, render
from hpc_train.schedulers.kubernetes.states import JobPhase, JobReport, explain
from hpc_train.schedulers.scheduler import JobRequest, JobStatus, NoAnswer, Reason, Scheduler
from hpc_train.schedulers.slurm.records import size_bytes
from hpc_train.units import counted

# keys of `cluster` that Kubernetes has nothing for
IGNORED = ("account", "gres", "constraint", "nodelist", "time_min", "clusters", "comment", "teardown", "exclusive")


class Kubernetes(Scheduler):
    """Runs each job as an Indexed Job. The id of a job is ``CONTEXT/NAMESPACE/NAME``."""

    name = "Kubernetes"

    def script(self, request: JobRequest) -> str:
        return render(manifest(training_job(request, _connection(request))))

    def submit(self, request: JobRequest, script: str) -> str:
        connection = _connection(request)
        try:
            client.submit(connection, list(yaml.safe_load_all(script)))
        except KubernetesError as error:
            if error.problem is Problem.SILENT:
                raise NoAnswer(error.what, where=error.where, fix=error.fix) from None
            raise
        return reference(connection, request.key)

    def check(self, request: JobRequest) -> list[str]:
        connection = _connection(request)
        notes = client.check(connection, training_job(request, connection))
        unused = [name for name in IGNORED if getattr(request.cluster, name)]
        if unused:
            names = ", ".join(f"cluster.{name}" for name in unused)
            notes.append(f"{names}: no effect on Kubernetes")
        if request.nodes[0] < request.nodes[1]:
            notes.append(f"the Job requests {counted(request.nodes[1], 'pod', 'pods')}, for the most nodes")
        return notes

    def statuses(self, ids: Collection[str]) -> Mapping[str, JobStatus] | None:
        places: dict[tuple[str, str], dict[str, str]] = {}
        for job_id in ids:
            context, namespace, name = job_id.rsplit("/", 2)
            places.setdefault((context, namespace), {})[name] = job_id
        statuses: dict[str, JobStatus] = {}
        for (context, namespace), names in places.items():
            try:
                reports = client.read(connect(namespace, context), names)
            except UserError:  # no answer; in a pod, also no client
                return None
            statuses |= {names[name]: _status(report) for name, report in reports.items()}
        return statuses

    def cancel(self, ids: Collection[str], *, save: bool = False) -> None:
        """Deletes the Jobs. Their agents get SIGTERM and save, whether or not ``save`` is set."""
        for job_id in ids:
            context, namespace, name = job_id.rsplit("/", 2)
            client.cancel(connect(namespace, context), name)

    def explain(self, status: JobStatus) -> Reason:
        causes = explain(status.reason, status.comment)
        words = "; ".join(cause.words for cause in causes)
        fixes = "; ".join(cause.fix for cause in causes)
        if status.comment:
            words += f" ({status.comment})"
        return Reason(words, fixes)


SCHEDULER = Kubernetes()


def reference(connection: Connection, name: str) -> str:
    """Returns the id of the Job ``name``."""
    return f"{connection.context}/{connection.namespace}/{name}"


def _connection(request: JobRequest) -> Connection:
    options = Options.of(request.cluster)
    return connect(options.namespace, options.context)


def _status(report: JobReport) -> JobStatus:
    state = report.phase.value
    if report.phase is JobPhase.RUNNING and report.reason:
        state = "COMPLETING"  # the Job has failed, and its last pods are ending
    if not report.causes:
        return JobStatus(state, report.reason, comment=report.message)
    cause = report.causes[0]
    return JobStatus(state, cause.reason, comment=cause.message)


def training_job(request: JobRequest, connection: Connection) -> TrainingJob:
    """Returns the shape of the Job for ``request``. Raises UserError for values that Kubernetes cannot have."""
    cluster = request.cluster
    workers = request.gpus or cluster.cpu_workers
    cpus = None
    if isinstance(cluster.cpus_per_gpu, int):
        cpus = cluster.cpus_per_gpu * workers
    memory = None
    if cluster.mem is not None:
        memory = size_bytes(cluster.mem)
    elif cluster.mem_per_gpu != "auto":
        memory = (size_bytes(cluster.mem_per_gpu) or 0) * workers
    user = None
    if os.getuid() != 0:  # the run directory belongs to this user
        user = (os.getuid(), os.getgid())
    return TrainingJob(
        name=request.key,
        namespace=connection.namespace,
        reference=reference(connection, request.key),
        run_dir=str(request.output.parent.parent),
        image=cluster.container.image or "",
        agent=request.agent,
        nodes=request.nodes[1],
        gpus=request.gpus,
        cpus=cpus,
        memory_bytes=memory,
        time_limit_s=request.time_s,
        grace_s=request.lead_s,
        setup=request.setup,
        mounts=tuple(map(_mount, cluster.container.binds)),
        queue=cluster.partition,
        priority_class=cluster.qos,
        excluded_nodes=tuple(filter(None, (cluster.exclude or "").split(","))),
        user=user,
        options=Options.of(cluster),
    )


def _mount(bind: str) -> Mount:
    claim, _, rest = bind.partition(":")
    path, _, mode = rest.partition(":")
    if not path.startswith("/") or "/" in claim or mode not in ("", "ro", "rw"):
        raise UserError(
            f"{bind!r} does not name a volume claim and a directory",
            where="cluster.container.binds",
            fix="CLAIM:/directory, or CLAIM:/directory:ro",
        )
    return Mount(claim, path, read_only=mode == "ro")
