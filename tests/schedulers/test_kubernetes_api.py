"""The stand-in for a cluster: what the official client gets from it, and how its Job controller treats pods."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, watch
from kubernetes.client import ApiException

from tests.schedulers.kubernetes_api import Cluster, can_run_pods, running, state_of, with_index

NEEDS_ROOT = pytest.mark.skipif(not can_run_pods(), reason="only root may create the namespaces of pods")


def job(name: str = "run", *, command: str = "true", completions: int = 2, **spec: Any) -> dict[str, Any]:
    """Returns an Indexed Job with one pod per index, whose exit code 75 means a new start and 93 the end."""
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [93]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [75]}},
    ]
    template = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "train", "image": "image:1", "command": ["sh", "-c", command]}],
    }
    fields = {"completionMode": "Indexed", "completions": completions, "parallelism": completions}
    fields |= {"backoffLimitPerIndex": 2, "maxFailedIndexes": 0, "podFailurePolicy": {"rules": rules}, **spec}
    fields["template"] = {"spec": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": fields}


def until(done: Callable[[], Any], seconds: float = 20) -> Any:
    """Waits until ``done`` returns a true value, and returns it."""
    deadline = time.monotonic() + seconds
    while not (value := done()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return value


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path, images={"image:1": {}}, backoff_s=0.05) as cluster:
        for name in ("n1", "n2"):
            cluster.add_node(name)
        yield cluster


@pytest.fixture
def batch(cluster: Cluster) -> client.BatchV1Api:
    return client.BatchV1Api(config.new_client_from_config(str(cluster.kubeconfig(cluster.state / "config"))))


def pods_running(cluster: Cluster, count: int = 2, name: str = "run") -> list[str]:
    names: list[str] = until(lambda: cluster.pod_names(name, "default", "Running")[count - 1 :] and
                             cluster.pod_names(name, "default", "Running"))  # fmt: skip
    return names


def condition(batch: client.BatchV1Api, kind: str) -> Any:
    conditions = batch.read_namespaced_job("run", "default").status.conditions or []
    return next((entry for entry in conditions if entry.type == kind and entry.status == "True"), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda job: job["spec"].update(completionz=2), "completionz"),
        (lambda job: job["spec"].update(completions="two"), "completions"),
        (lambda job: job["spec"].pop("completions"), "completions: Required"),
        (lambda job: job["spec"]["template"]["spec"].update(restartPolicy="OnFailure"), "podFailurePolicy"),
        (lambda job: job["spec"].update(podReplacementPolicy="TerminatingOrFailed"), "podReplacementPolicy"),
        (lambda job: job["metadata"].update(name="Run_1"), "RFC 1123"),
        (lambda job: job["metadata"].update(name="r" * 62), "DNS label"),
        (lambda job: job["metadata"].update(labels={"a": "/runs/a"}), "labels"),
        (lambda job: job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[93, 2]), "ordered"),
    ],
)
def test_objects_that_the_server_refuses(
    cluster: Cluster, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    """Without the official client, which refuses some of them itself."""
    right = job()
    wrong = job()
    change(wrong)
    connection = HTTPConnection("127.0.0.1", cluster.port)
    statuses = []
    for body, query in ((right, "?dryRun=All"), (wrong, "?dryRun=All"), (wrong, "")):
        headers = {"Authorization": f"Bearer {cluster.token}"}
        connection.request("POST", f"/apis/batch/v1/namespaces/default/jobs{query}", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.load(response)
        statuses.append(response.status)
    assert statuses == [201, 422, 422] and message in answer["message"]
    assert cluster.listed("jobs") == []


def test_requests_that_fail(cluster: Cluster, batch: client.BatchV1Api) -> None:
    cluster.forbidden = {"create jobs.batch default", "* secrets *"}
    statuses = {}
    core = client.CoreV1Api(batch.api_client)
    wrong_token = config.new_client_from_config(str(cluster.kubeconfig(cluster.state / "other", token="x")))
    custom = client.CustomObjectsApi(batch.api_client)
    for name, call in {
        "forbidden": lambda: batch.create_namespaced_job("default", job()),
        "secret": lambda: core.read_namespaced_secret("a", "default"),
        "absent": lambda: batch.read_namespaced_job("run", "default"),
        "no namespace": lambda: batch.create_namespaced_job("other", job()),
        "token": lambda: client.CoreV1Api(wrong_token).list_namespaced_pod("default"),
        "no Kueue": lambda: custom.list_namespaced_custom_object("kueue.x-k8s.io", "v1beta1", "default", "localqueues"),
    }.items():
        with pytest.raises(ApiException) as caught:
            call()
        statuses[name] = caught.value.status
    assert statuses == {"forbidden": 403, "secret": 403, "absent": 404, "no namespace": 404, "token": 401,
                        "no Kueue": 404}  # fmt: skip
    cluster.forbidden = set()
    batch.create_namespaced_job("default", job())
    with pytest.raises(ApiException, match="already exists"):
        batch.create_namespaced_job("default", job())
    with pytest.raises(ApiException, match="immutable"):
        batch.patch_namespaced_job("run", "default", {"spec": {"completions": 3}})


def test_a_watch_sends_what_happens_to_a_job(cluster: Cluster, batch: client.BatchV1Api) -> None:
    batch.create_namespaced_job("default", job())
    kinds = []
    for event in watch.Watch().stream(batch.list_namespaced_job, "default", timeout_seconds=20):
        kinds.append(event["type"])
        if event["type"] == "DELETED":
            break
        if event["object"].status.ready == 2:
            batch.delete_namespaced_job("run", "default", propagation_policy="Background")
    assert [kind for kind, _ in itertools.groupby(kinds)] == ["ADDED", "MODIFIED", "DELETED"]


def test_indexes_that_succeed_complete_the_job(cluster: Cluster, batch: client.BatchV1Api) -> None:
    batch.create_namespaced_job("default", job())
    for name in pods_running(cluster):
        cluster.exit_container(name, 0)
    until(lambda: condition(batch, "Complete"))
    status = batch.read_namespaced_job("run", "default").status
    assert (status.succeeded, status.completed_indexes, status.active) == (2, "0-1", 0)


@pytest.mark.parametrize(
    ("code", "failed"),
    [(75, 0), (137, 1)],
)
def test_a_pod_that_ends_is_replaced(cluster: Cluster, batch: client.BatchV1Api, code: int, failed: int) -> None:
    batch.create_namespaced_job("default", job())
    first, second = pods_running(cluster)
    cluster.exit_container(first, code)
    until(lambda: first not in cluster.pod_names("run"))
    replaced, same = pods_running(cluster)
    assert replaced != first and same == second
    assert (batch.read_namespaced_job("run", "default").status.failed or 0) == failed


def test_the_failure_policy_and_the_limits_end_the_job(cluster: Cluster, batch: client.BatchV1Api) -> None:
    batch.create_namespaced_job("default", job())
    cluster.exit_container(pods_running(cluster)[1], 93)
    failed = until(lambda: condition(batch, "Failed"))
    assert failed.reason == "PodFailurePolicy" and "exit code 93 matching FailJob rule at index 0" in failed.message
    assert cluster.pod_names("run") == []
    batch.delete_namespaced_job("run", "default", propagation_policy="Background")
    batch.create_namespaced_job("default", job())
    for _ in range(3):  # the first failure and two more, as backoffLimitPerIndex permits
        name = pods_running(cluster)[1]
        cluster.exit_container(name, 1)
        until(lambda name=name: name not in cluster.pod_names("run"))
    assert until(lambda: condition(batch, "Failed")).reason == "MaxFailedIndexesExceeded"
    batch.delete_namespaced_job("run", "default", propagation_policy="Background")
    batch.create_namespaced_job("default", job(activeDeadlineSeconds=1))
    assert until(lambda: condition(batch, "Failed")).reason == "DeadlineExceeded"


def test_an_evicted_pod_and_a_lost_node_do_not_count(cluster: Cluster, batch: client.BatchV1Api) -> None:
    batch.create_namespaced_job("default", job())
    first, second = pods_running(cluster)
    core = client.CoreV1Api(batch.api_client)
    cluster.exits_on_term = None
    core.create_namespaced_pod_eviction(first, "default", {"metadata": {"name": first}})
    assert [entry.type for entry in core.read_namespaced_pod(first, "default").status.conditions][-1] == (
        "DisruptionTarget"
    )
    time.sleep(0.2)
    assert cluster.pod_names("run") == [first, second], "podReplacementPolicy Failed waits for the end of its processes"
    cluster.exit_container(first, 143)
    until(lambda: first not in cluster.pod_names("run"))
    pods_running(cluster)
    cluster.lose_node(cluster.get("pods", second)["spec"]["nodeName"])
    until(lambda: second not in cluster.pod_names("run"))
    pods_running(cluster)
    assert not batch.read_namespaced_job("run", "default").status.failed


def test_a_suspended_job_has_no_pods_and_resumes(cluster: Cluster, batch: client.BatchV1Api) -> None:
    batch.create_namespaced_job("default", job())
    names = pods_running(cluster)
    batch.patch_namespaced_job("run", "default", {"spec": {"suspend": True}})
    until(lambda: condition(batch, "Suspended"))
    until(lambda: cluster.pod_names("run") == [])
    batch.patch_namespaced_job("run", "default", {"spec": {"suspend": False}})
    assert set(pods_running(cluster)).isdisjoint(names)


def test_a_deleted_job_leaves_its_pods_unless_the_policy_says_otherwise(
    cluster: Cluster, batch: client.BatchV1Api
) -> None:
    batch.create_namespaced_job("default", job())
    names = pods_running(cluster)
    batch.delete_namespaced_job("run", "default")
    time.sleep(0.2)
    assert cluster.pod_names("run", "default", "Running") == names


def test_kueue_starts_and_preempts_a_job(cluster: Cluster, batch: client.BatchV1Api) -> None:
    cluster.groups.add("kueue.x-k8s.io")
    cluster.create("localqueues", {"metadata": {"name": "team"}})
    queued = job()
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    batch.create_namespaced_job("default", queued)
    until(lambda: condition(batch, "Suspended") and cluster.listed("workloads"))
    assert cluster.pod_names("run") == []
    cluster.admit("run")
    pods_running(cluster)
    cluster.preempt_workload("run")
    until(lambda: cluster.pod_names("run") == [])


def test_with_index() -> None:
    assert [with_index("", 3), with_index("3", 4), with_index("0,3-4", 6)] == ["3", "3-4", "0,3-4,6"]


# Kubernetes replaces $$ by $.
COMMAND = """
trap 'echo stopped; exit 75' TERM
echo "$JOB_COMPLETION_INDEX $(hostname) $KEY" > DIRECTORY/$JOB_COMPLETION_INDEX
df --output=size /dev/shm
until [ "$(getent hosts run-0.run run-1.run.default.svc.cluster.local | wc -l)" = 2 ]; do sleep 0.05; done
echo "I am process $$$$"
python3 -c '
import os, socket, time
if os.environ["JOB_COMPLETION_INDEX"] == "0":
    with socket.create_server(("", 4000)) as server:
        print("said:", server.accept()[0].recv(5).decode(), flush=True)
else:
    for _ in range(100):
        try:
            socket.create_connection(("run-0.run", 4000)).send(b"hello")
            break
        except OSError:
            time.sleep(0.05)
'
sleep 100 & wait
"""


@NEEDS_ROOT
def test_pods_have_processes_with_a_network_names_volumes_and_secrets(tmp_path: Path) -> None:
    directory = tmp_path / "claim"
    directory.mkdir()
    inside = tmp_path / "inside"
    with running(tmp_path, run_pods=True, images={"image:1": {}}) as cluster:
        cluster.add_node("n1")
        cluster.add_claim("runs", directory)
        cluster.create("secrets", {"metadata": {"name": "a"}, "data": {"k": base64.b64encode(b"v").decode()}})
        batch = client.BatchV1Api(config.new_client_from_config(str(cluster.kubeconfig(tmp_path / "config"))))
        core = client.CoreV1Api(batch.api_client)
        body = copy.deepcopy(job(command=COMMAND.replace("DIRECTORY", str(inside))))
        pod = body["spec"]["template"]["spec"]
        pod["volumes"] = [
            {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
        pod["containers"][0] |= {
            "volumeMounts": [{"name": "runs", "mountPath": str(inside)}, {"name": "shm", "mountPath": "/dev/shm"}],
            "env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "k"}}}],
        }
        batch.create_namespaced_job("default", body)
        selector = {"batch.kubernetes.io/job-name": "run"}
        core.create_namespaced_service(
            "default", {"metadata": {"name": "run"}, "spec": {"clusterIP": "None", "selector": selector}}
        )
        first, second = pods_running(cluster)
        until(lambda: "said: hello" in core.read_namespaced_pod_log(first, "default"))
        assert "I am process 1" in core.read_namespaced_pod_log(second, "default", tail_lines=5)
        assert (directory / "1").read_text() == "1 run-1 v\n" and not list(inside.iterdir())
        core.create_namespaced_pod_eviction(first, "default", {"metadata": {"name": first}})
        until(lambda: first not in cluster.pod_names("run", "default", "Pending", "Running"))
        replacement = pods_running(cluster)[0]
        container = cluster.containers[cluster.get("pods", replacement)["metadata"]["uid"]]
        until(lambda: "process 1" in container.log.read_text())
        core.delete_namespaced_pod(second, "default", grace_period_seconds=0)  # SIGKILL
        until(lambda: second not in cluster.pod_names("run"))
        assert pods_running(cluster)[0] == replacement
        assert state_of(cluster.get("pods", replacement)).keys() == {"running"}
