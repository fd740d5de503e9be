"""Jobs on Kubernetes: the manifest, the checks before a submission, the submission, and the state of a Job."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes import client as official

from hpc_train.errors import UserError
from hpc_train.run.exits import Exit
from hpc_train.schedulers.kubernetes import client
from hpc_train.schedulers.kubernetes.client import Connection, KubernetesError, Problem
from hpc_train.schedulers.kubernetes.manifest import (
    REASONS,
    Mount,
    Options,
    TrainingJob,
    manifest,
    render,
)
from hpc_train.schedulers.kubernetes.states import JobPhase, JobReport, explain
from tests.schedulers.kubernetes_api import Cluster, running
from tests.schedulers.test_kubernetes_api import pods_running, until

JOB = TrainingJob(
    name="run",
    namespace="default",
    reference="test/default/run",
    run_dir="/runs/a",
    image="image:1",
    agent=("python", "-m", "hpc_train", "agent", "/runs/a"),
    nodes=2,
    mounts=(Mount("runs", "/runs"),),
    grace_s=1,
)
FULL = replace(
    JOB,
    gpus=8,
    cpus=64,
    memory_bytes=512 << 30,
    time_limit_s=3600,
    setup=("module load cuda", 'export NAME="a b"'),
    mounts=(Mount("runs", "/runs"), Mount("data", "/data", read_only=True), Mount("data", "/more", read_only=True)),
    queue="team",
    priority_class="high",
    excluded_nodes=("n7", "n8"),
    user=(1000, 100),
    options=Options(
        secrets={"WANDB_API_KEY": "wandb/key"},
        node_selector={"example.com/gpu": "h100"},
        tolerations=({"key": "nvidia.com/gpu", "operator": "Exists"},),
        resources={"rdma/hca": "8"},
        pod={
            "hostIPC": False,
            "containers": [{"name": "train", "workingDir": "/runs"}],
            "imagePullSecrets": [{"name": "registry"}],
            "schedulerName": "\ta\nb\n",
        },
    ),
)
VERSIONS = [f"1.{minor}" for minor in range(29, 38)]


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_satisfy_the_official_schemas(version: str) -> None:
    for job in (JOB, FULL):
        for thing in manifest(job):
            kubernetes_validate.validate(thing, version, strict=True)


def paths(value: Any, path: str) -> Iterator[str]:
    yield path
    if isinstance(value, dict):
        for name, child in value.items():
            yield from paths(child, f"{path}.{name}")
    elif isinstance(value, list):
        for child in value:
            yield from paths(child, path)


def test_the_yaml_has_the_reason_of_each_field() -> None:
    documents = manifest(FULL)
    text = render(documents)
    assert list(yaml.safe_load_all(text)) == documents
    assert set(REASONS) <= {path for thing in documents for path in paths(thing, thing["kind"])}
    comments = " ".join(re.findall(r"^ *# (.*)", text, re.MULTILINE))
    assert all(reason in comments for reason in REASONS.values())
    job = documents[1]["spec"]
    unexplained = {f"Job.spec.{name}" for name in job} - set(REASONS) - {"Job.spec.template"}
    pod = {f"Job.spec.template.spec.{name}" for name in job["template"]["spec"]} - set(REASONS)
    assert not unexplained
    assert {path.rpartition(".")[2] for path in pod} == {
        "containers", "hostIPC", "imagePullSecrets", "nodeSelector", "schedulerName", "tolerations"
    }  # fmt: skip
    assert max(map(len, text.splitlines())) <= 120


def test_changes_of_the_pod_are_merged_by_name() -> None:
    pod = manifest(FULL)[1]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["workingDir"] == "/runs" and container["image"] == "image:1"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert container["resources"]["limits"] == {
        "rdma/hca": "8", "cpu": "64", "memory": "524288Mi", "nvidia.com/gpu": "8"
    }  # fmt: skip
    assert [volume["name"] for volume in pod["volumes"]].count("shm") == 1 and len(pod["volumes"]) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": ""}, "no container image"),
        ({"image": "docker://a/b"}, "cannot pull|can pull"),
        ({"mounts": ()}, "no writable volume holds the run directory /runs/a"),
        ({"mounts": (Mount("runs", "/runs", read_only=True),)}, "no writable volume"),
        ({"mounts": (Mount("runs", "/run"),)}, "no writable volume"),
    ],
)
def test_shapes_that_no_cluster_could_run(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        manifest(replace(JOB, **change))
    assert caught.value.where.startswith("cluster.container")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with running(tmp_path, images={"image:1": {}}, backoff_s=0.05) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path / "config")))
        for name in ("n1", "n2"):
            cluster.add_node(name, gpu="8")
        cluster.add_claim("runs", tmp_path)
        yield cluster


@pytest.fixture
def connection(cluster: Cluster) -> Connection:
    return client.connect()


def test_a_job_that_can_run_passes_the_checks(cluster: Cluster, connection: Connection) -> None:
    assert client.check(connection, JOB) == []
    assert cluster.listed("jobs") == [] == cluster.listed("services")


def test_without_the_client_or_a_usable_kubeconfig(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = []
    broken = tmp_path / "broken"
    for content in ("a: [", "text", "", json.dumps({"current-context": "x"}), None):
        broken.unlink(missing_ok=True)
        if content is not None:
            broken.write_text(content)
        monkeypatch.setenv("KUBECONFIG", str(broken))
        with pytest.raises(UserError) as caught:
            client.connect()
        messages.append(str(caught.value))
    assert all("kubeconfig cannot be used" in message and str(broken) in message for message in messages)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(UserError, match="no context other, only test"):
        client.connect(context="other")
    assert client.connect(context="test", namespace="team").namespace == "team"
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UserError, match="is not installed") as caught:
        client.connect()
    assert "[kubernetes]'" in str(caught.value)


def test_a_server_that_does_not_answer_or_does_not_know_the_user(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path / "other", server="http://127.0.0.1:9")))
    with pytest.raises(KubernetesError, match=r"http://127.0.0.1:9 does not answer") as caught:
        client.check(client.connect(), JOB)
    assert caught.value.problem is Problem.SILENT
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path / "other", token="old")))
    with pytest.raises(KubernetesError, match="Unauthorized") as caught:
        client.check(client.connect(), JOB)
    assert caught.value.problem is Problem.UNKNOWN_USER


def quota(**hard: str) -> dict[str, Any]:
    return {"metadata": {"name": "compute"}, "spec": {"hard": {name.replace("__", "."): hard[name] for name in hard}}}


@pytest.mark.parametrize(
    ("change", "message", "place"),
    [
        ({"mounts": (Mount("other", "/runs"),)}, "no volume claim other", "container.binds"),
        ({"mounts": (Mount("single", "/runs"),)}, "ReadWriteOnce: a single node can mount it", "container.binds"),
        (
            {"mounts": (*JOB.mounts, Mount("single", "/data", read_only=True))},
            r"(?s)ReadWriteOnce.*ReadOnlyMany or ReadWriteMany",
            "container.binds",
        ),
        ({"queue": "team"}, "Kueue is not installed", "cluster.partition"),
        ({"cpus": 33}, "requests.cpu=64, but the job needs 66", "cpus_per_gpu"),
        ({"memory_bytes": 65 << 30}, "limits.memory=128Gi, but the job needs 139586437120", "mem_per_gpu"),
        ({"namespace": "other"}, "the cluster has no namespace other", "context test"),
        ({"options": Options(pod={"restartPolicy": "OnFailure"})}, 'only "Never" is supported', "context test"),
        ({"options": Options(pod={"restartPolice": "Never"})}, "restartPolice", "context test"),
    ],
)
def test_jobs_that_would_never_run_are_refused(
    cluster: Cluster, connection: Connection, change: dict[str, Any], message: str, place: str
) -> None:
    cluster.add_claim("single", cluster.state, "ReadWriteOnce")
    cluster.create("resourcequotas", quota(requests__cpu="64", limits__memory="128Gi", pods="10"))
    with pytest.raises(UserError, match=message) as caught:
        client.check(connection, replace(JOB, **change))
    assert place in str(caught.value)
    assert cluster.listed("jobs") == []
    assert client.check(connection, replace(JOB, nodes=1, mounts=(Mount("single", "/runs"),))) == []


def test_missing_rights_are_named_at_once(cluster: Cluster, connection: Connection) -> None:
    cluster.forbidden = {"create *", "list events *"}
    with pytest.raises(UserError, match="may not create jobs, create services, list events in"):
        client.check(connection, JOB)
    cluster.forbidden = {"* persistentvolumeclaims *", "* resourcequotas *", "list localqueues*"}
    cluster.groups.add("kueue.x-k8s.io")
    assert len(client.check(connection, replace(JOB, queue="team"))) == 3, "what cannot be checked is a notice"


def test_the_queue_must_exist(cluster: Cluster, connection: Connection) -> None:
    cluster.groups.add("kueue.x-k8s.io")
    cluster.create("localqueues", {"metadata": {"name": "team"}})
    assert client.check(connection, replace(JOB, queue="team")) == []
    with pytest.raises(UserError, match=r"(?s)no queue others.*one of team"):
        client.check(connection, replace(JOB, queue="others"))


def test_an_old_cluster_is_refused(cluster: Cluster, connection: Connection) -> None:
    cluster.version = "1.28+"
    with pytest.raises(UserError, match=r"Kubernetes 1.28, but hpc_train needs 1.29"):
        client.check(connection, JOB)


def submit(connection: Connection, job: TrainingJob = JOB) -> None:
    client.submit(connection, manifest(job))


def test_a_submission_is_made_once(cluster: Cluster, connection: Connection) -> None:
    cluster.lose_answers = 2  # of the service, and then of the Job
    for jobs in (0, 1):
        with pytest.raises(KubernetesError) as caught:
            submit(connection)
        assert caught.value.problem is Problem.SILENT and len(cluster.listed("jobs")) == jobs
    submit(connection)
    submit(connection)
    assert len(cluster.listed("jobs")) == 1 == len(cluster.listed("services"))
    client.cancel(connection, "run")
    client.cancel(connection, "run")
    until(lambda: not cluster.listed("jobs") and not cluster.listed("services"))
    assert not cluster.listed("pods")
    assert client.read(connection, ["run"]) == {}


def test_a_refused_submission_creates_nothing(cluster: Cluster, connection: Connection) -> None:
    cluster.forbidden = {"create jobs.batch *"}
    with pytest.raises(KubernetesError, match="forbidden") as caught:
        submit(connection)
    assert caught.value.problem is Problem.FORBIDDEN and cluster.listed("services") == []
    cluster.forbidden = set()
    submit(connection)
    assert [owner["kind"] for owner in cluster.get("services", "run")["metadata"]["ownerReferences"]] == ["Job"]


def state(connection: Connection) -> JobReport:
    return client.read(connection, ["run"])["run"]


def test_the_states_of_a_job(cluster: Cluster, connection: Connection) -> None:
    submit(connection)
    first, second = pods_running(cluster)
    assert state(connection).phase is JobPhase.RUNNING
    for name in (first, second):
        cluster.evict(name)
    until(lambda: {first, second}.isdisjoint(cluster.pod_names("run")))
    pods_running(cluster)
    batch = official.BatchV1Api(connection.api)
    batch.patch_namespaced_job("run", "default", {"spec": {"suspend": True}})
    until(lambda: state(connection).phase is JobPhase.STOPPED)
    (cause,) = state(connection).causes
    resumed = """kubectl patch job run --namespace=default --patch='{"spec":{"suspend":false}}'"""
    assert (cause.reason, cause.fix) == ("Suspended", resumed)
    batch.patch_namespaced_job("run", "default", {"spec": {"suspend": False}})
    cluster.exit_container(pods_running(cluster)[1], Exit.GAVE_UP)
    until(lambda: state(connection).phase is JobPhase.FAILED)
    failed = state(connection)
    assert failed.reason == "PodFailurePolicy" and "exit code 93" in failed.message
    client.cancel(connection, "run")
    until(lambda: not cluster.listed("jobs"))
    submit(connection)
    cluster.exits_on_term = None
    names = pods_running(cluster)
    client.cancel(connection, "run")
    assert state(connection).phase is JobPhase.CANCELLED
    for name in names:
        cluster.exit_container(name, Exit.STOPPED)
    until(lambda: not cluster.listed("jobs"))
    submit(connection)
    for name in pods_running(cluster):
        cluster.exit_container(name, Exit.DONE)
    until(lambda: state(connection).phase is JobPhase.COMPLETED)


def test_a_job_whose_pods_are_preempted_waits_for_the_next(cluster: Cluster, connection: Connection) -> None:
    submit(connection)
    names = pods_running(cluster)
    for node in ("n1", "n2"):
        cluster.get("nodes", node)["spec"]["taints"] = [{"key": "busy", "value": "yes", "effect": "NoSchedule"}]
    for name in names:
        cluster.evict(name, reason="PreemptionByScheduler")
    until(lambda: state(connection).causes)
    report = state(connection)
    assert report.phase is JobPhase.PREEMPTED
    assert [cause.words for cause in report.causes] == [
        "nodes have the taint busy=yes, which the job does not tolerate"
    ]


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"gpus": 9}, "Unschedulable", "too few nodes have enough free nvidia.com/gpu"),
        (
            {"options": Options(node_selector={"gpu": "h100"})},
            "Unschedulable",
            "too few nodes have the labels that the job requires",
        ),
        ({"excluded_nodes": ("n1", "n2")}, "Unschedulable", "too few nodes have the labels that the job requires"),
        ({"mounts": (Mount("new", "/runs"),)}, "Unschedulable", "a volume claim has no volume yet"),
        ({"mounts": (Mount("none", "/runs"),)}, "Unschedulable", "the volume claim none does not exist"),
        ({"mounts": (Mount("single", "/runs"),), "gpus": 8}, "FailedAttachVolume", "is in use on another node"),
        ({"image": "ghcr.io/a/b:2"}, "ImagePullBackOff", "the image ghcr.io/a/b:2 cannot be pulled"),
        ({"options": Options(secrets={"A": "a/b"})}, "CreateContainerConfigError", "the secret a does not exist"),
        ({"options": Options(secrets={"A": "c/b"})}, "CreateContainerConfigError", "the secret default/c has no key b"),
        ({"cpus": 3}, "FailedCreate", "needs requests.cpu=3, requests.cpu=5 is allowed, requests.cpu=3 is in use"),
        ({"priority_class": "high"}, "FailedCreate", "the cluster has no priority class high"),
        ({"queue": "team"}, "QuotaReserved", "Kueue waits for room in its queue"),
        ({"queue": "other"}, "QuotaReserved", "Kueue has no active queue other in the namespace"),
    ],
)
def test_why_pods_wait(
    cluster: Cluster, connection: Connection, change: dict[str, Any], reason: str, words: str
) -> None:
    cluster.add_claim("single", cluster.state, "ReadWriteOnce")
    cluster.add_claim("new", cluster.state, phase="Pending")
    cluster.create("secrets", {"metadata": {"name": "c"}, "data": {}})
    cluster.create("resourcequotas", quota(requests__cpu="5"))
    cluster.groups.add("kueue.x-k8s.io")
    cluster.create("localqueues", {"metadata": {"name": "team"}})
    submit(connection, replace(JOB, **change))
    (cause,) = until(lambda: state(connection).causes)
    assert cause.reason == reason and words in cause.words and cause.fix
    if change == {"cpus": 3}:  # of two pods, the quota allows one
        waits = "1 of 2 pods hold their resources and wait for pod "
        until(lambda: state(connection).causes[0].message.startswith(waits))


def test_all_reasons_of_a_scheduler_and_unknown_ones_are_explained() -> None:
    message = (
        "0/9 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}, 3 Insufficient cpu, "
        "5 Insufficient nvidia.com/gpu. preemption: 0/9 nodes are available: 9 No preemption victims found."
    )
    words = [cause.words for cause in explain("Unschedulable", message)]
    assert words == [
        "too few nodes have enough free cpu",
        "too few nodes have enough free nvidia.com/gpu",
        "nodes have the taint nvidia.com/gpu=present, which the job does not tolerate",
    ]
    denied = explain("ErrImagePull", 'failed to pull image "a/b": 401 Unauthorized: authentication required')
    assert "credentials" in denied[0].words
    (unknown,) = explain("SomethingNew", "text")
    assert unknown.words == "Kubernetes reports SomethingNew" and unknown.message == "text"


def test_the_exit_codes_of_agents_decide(cluster: Cluster, connection: Connection) -> None:
    """A saved checkpoint and an eviction start new pods, whatever the number; a lost agent is replaced, too."""
    submit(connection)
    names = pods_running(cluster)
    for code in (Exit.STOPPED, 143, Exit.STOPPED):
        for name in names:
            if code == 143:
                cluster.evict(name)
            else:
                cluster.exit_container(name, code)
        until(lambda gone=set(names): gone.isdisjoint(cluster.pod_names("run")))
        names = pods_running(cluster)
    job: Any = official.BatchV1Api(connection.api).read_namespaced_job("run", "default")
    assert not job.status.failed
    cluster.exit_container(names[0], 137)
    until(lambda: names[0] not in cluster.pod_names("run"))
    assert pods_running(cluster)[1] == names[1]
