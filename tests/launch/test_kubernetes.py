"""``cluster=kubernetes`` on the stand-in for a cluster: the manifest of a dry run, and what becomes of runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.file_lock import STALE_S, LockOwner
from hpc_train.schedulers.kubernetes.manifest import END_JOB, REFERENCE, START_AGAIN
from hpc_train.schedulers.kubernetes.scheduler import SCHEDULER
from hpc_train.schedulers.scheduler import JobStatus
from tests.doors import command
from tests.doors.command import REPOSITORY, hpc_train
from tests.schedulers.kubernetes_api import Cluster, running
from tests.schedulers.test_kubernetes_api import NEEDS_ROOT, until

CASE = [
    "+strategy=dp",
    "cluster=kubernetes",
    "cluster.nodes=2",
    "cluster.gpus_per_node=0",
    "cluster.cpu_workers=1",
    "cluster.container.image=image:1",
    "model=custom",
    "model._target_=tests.doors.faulty.Slow",  # 0.2 s per step
    "data=synthetic",
    "data.sequence_length=16",
    "data.validation_samples=8",
    "batch.global_size=8",
    "telemetry.log_every=1",
    "telemetry.wandb.mode=disabled",
    "checkpoint.every=5",
    "train.steps=30",
    "train.reproducible=any_world_size",
    "batch.logical_micro_batches=2",
    "cluster.preflight_action.slow_device=warn",  # a speed measured beside other tests is noise
    "run.name=run",
]


SITE = """
defaults: [kubernetes, _self_]
mem: 8G
exclude: n7
account: team
setup: [module load cuda]
env: {NAME: value}
extra:
  secrets: {WANDB_API_KEY: wandb/key}
  node_selector: {gpu: h100}
  tolerations: [{key: gpu, operator: Exists}]
  resources: {rdma/hca: 1}
  pod: {hostIPC: false, securityContext: {runAsUser: 1000}}
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts a cluster with a claim for the runs, which pods mount where this machine has it."""
    (tmp_path / "state").mkdir()
    (tmp_path / "runs").mkdir()
    image = {"PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path), "HPC_TRAIN_STRICT_EVENTS": "1"}
    contexts = []

    def start(**options: Any) -> Cluster:
        context = running(tmp_path / "state", images={"image:1": image}, **options)
        contexts.append(context)
        cluster = context.__enter__()
        for name in ("n1", "n2"):
            cluster.add_node(name, cpu="2")
        cluster.add_claim("runs", tmp_path / "runs")
        cluster.kubeconfig(tmp_path / "kubeconfig")
        return cluster

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


def environment(folder: Path) -> dict[str, str]:
    return command.environment(KUBECONFIG=str(folder / "kubeconfig"))


def arguments(folder: Path, *overrides: str) -> list[str]:
    runs = folder / "runs"
    where = [f"run.root={runs}", f"cluster.container.binds=[runs:{runs}]", f"cluster.python={sys.executable}"]
    return [*CASE, *where, "cluster.cpus_per_gpu=2", *overrides, "-m"]


def call(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    return hpc_train(*line, cwd=folder, env=environment(folder))


def test_a_dry_run_prints_the_manifest_that_is_submitted(started: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = started()
    cluster.create("secrets", {"metadata": {"name": "wandb"}, "data": {}})
    (tmp_path / "site" / "cluster").mkdir(parents=True)
    (tmp_path / "site" / "cluster" / "team.yaml").write_text(SITE)
    done = call(tmp_path, "-cd", "site", *arguments(tmp_path, "cluster=team"), "launch.dry_run=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cluster.account: no effect on Kubernetes" in done.stdout and cluster.listed("jobs") == []
    text = done.stdout[done.stdout.index("# gives each pod") : done.stdout.index("\nKubernetes: at most")]
    (*line, _) = arguments(tmp_path, "cluster=team")
    printed = call(tmp_path, "script", "-cd", "site", *line)
    assert (printed.returncode, printed.stdout) == (0, text), printed.stdout + printed.stderr
    assert f"what -m submits to Kubernetes after it has written {tmp_path}/runs/run" in printed.stderr
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["metadata"]["name"] == job["metadata"]["name"] == pod["subdomain"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "8192Mi", "rdma/hca": "1"}
    assert "module load cuda" in container["command"][2] and "export NAME=value" in container["command"][2]
    assert {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}} in container["env"]
    assert (pod["nodeSelector"], pod["hostIPC"], pod["securityContext"]["runAsUser"]) == ({"gpu": "h100"}, False, 1000)
    assert not any("claim" in volume and "path" in volume for volume in pod["volumes"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+cluster.extra.namespase=team", "Kubernetes has no option namespase"),
        ("+cluster.extra.namespace=team", "the cluster has no namespace team"),
        ("+cluster.extra.context=other", "the kubeconfig has no context other"),
        ("+cluster.extra.tolerations=gpu", "cluster.extra.tolerations is 'gpu', but must be a list"),
        ("+cluster.extra.secrets.KEY=name", "'name' does not name a key of a Secret"),
        ("cluster.container.image=null", "a job on Kubernetes has no container image"),
        ("cluster.container.binds=[/data]", "'/data' does not name a volume claim and a directory"),
        ("cluster.container.binds=[runs:/other]", "no writable volume holds the run directory"),
        ("cluster.gpus_per_node=auto", "the GPUs of the nodes of Kubernetes are unknown"),
        ("launch.chain=2", "launch.chain=2 needs Slurm"),
        ("optim.lr=1,2,3 launch.array_parallelism=2 launch.detach=true", "submits all 3 jobs to Kubernetes at once"),
    ],
)
def test_mistakes_are_found_before_the_submission(
    started: Callable[..., Cluster], tmp_path: Path, override: str, message: str
) -> None:
    cluster = started()
    done = call(tmp_path, *arguments(tmp_path), *override.split())
    assert done.returncode == Exit.REFUSED and message in done.stderr, done.stdout + done.stderr
    assert cluster.listed("jobs") == []


def test_why_explains_what_a_detached_job_waits_for(started: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = started()
    cluster.images.clear()
    cluster.get("nodes", "n1")["spec"]["taints"] = [{"key": "busy", "value": "yes", "effect": "NoSchedule"}]
    run = str(tmp_path / "runs" / "run")
    done = call(tmp_path, *arguments(tmp_path), "launch.detach=true")
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = cluster.listed("jobs")
    until(lambda: len(cluster.pod_names(job["metadata"]["name"])) == 2)
    status = call(tmp_path, "status", run)
    assert "pending (ImagePullBackOff)" in status.stdout, status.stdout + status.stderr
    why = call(tmp_path, "why", run)
    assert "the image image:1 cannot be pulled" in why.stdout, why.stdout + why.stderr
    cluster.images["image:1"] = {}
    until(lambda: cluster.pod_names(job["metadata"]["name"], "default", "Running"))
    why = call(tmp_path, "why", run)
    assert "run: running" in why.stdout and "1 of 2 pods hold their resources and wait for pod 1" in why.stdout
    cancelled = call(tmp_path, "cancel", run)
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
    until(lambda: not cluster.listed("jobs") and not cluster.listed("pods"))


def test_the_exit_codes_are_those_of_the_agents() -> None:
    assert END_JOB == (Exit.FAILED, Exit.REFUSED, Exit.GAVE_UP) and START_AGAIN == (Exit.STOPPED,)
    held = JobStatus("REQUEUE_HOLD", "Suspended", comment="Job a, namespace b")
    assert "kubectl patch job a --namespace=b" in SCHEDULER.explain(held).fix


def test_a_replaced_pod_takes_the_lease_of_its_predecessor_and_of_no_other_pod() -> None:
    def owner(host: str, machine: str, restart: str = "0") -> LockOwner:
        variables = {"HPC_TRAIN_NODES": "a,b", "HPC_TRAIN_NODE_RANK": "0", "HPC_TRAIN_JOB_ID": "job"}
        described = LockOwner.of_this_process({**variables, "HPC_TRAIN_RESTART": restart, REFERENCE: "c/n/job"})
        return LockOwner(**{**described.__dict__, "host": host, "machine": machine})

    lost = owner("job-0", "boot:1")
    assert not lost.may_be_alive(owner("job-0", "boot:2"), lambda: 0.0)
    assert lost.may_be_alive(owner("job-1", "boot:2"), lambda: 0.0)
    assert not lost.may_be_alive(owner("job-1", "boot:2"), lambda: STALE_S)
    assert not lost.may_be_alive(owner("job-1", "boot:2", restart="1"), lambda: 0.0)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in RunDirectory(run).read_metrics()]


def event_names(run: Path) -> list[str]:
    return [event.name for event in RunDirectory(run).read_events()]


def kill(cluster: Cluster, index: int) -> None:
    """Kills all processes of a pod, as the kernel does when its memory is used up."""
    (job,) = cluster.listed("jobs")
    name = cluster.pod_names(job["metadata"]["name"], "default", "Running")[index]
    cluster.containers[cluster.get("pods", name)["metadata"]["uid"]].signal(9)


def evict(cluster: Cluster) -> None:
    (job,) = cluster.listed("jobs")
    cluster.evict(cluster.pod_names(job["metadata"]["name"])[0])


def lose_both_nodes(cluster: Cluster) -> None:
    for name in ("n1", "n2"):
        cluster.add_node(f"{name}-new", cpu="2")
        cluster.lose_node(name)


def kill_worker(cluster: Cluster) -> None:
    (job,) = cluster.listed("jobs")
    pod = cluster.get("pods", cluster.pod_names(job["metadata"]["name"])[0])
    process = cluster.containers[pod["metadata"]["uid"]].process
    assert process is not None
    children = psutil.Process(process.pid).children(recursive=True)
    warm_parents = [child for child in children if "early_forkserver.py" in " ".join(child.cmdline())]
    for worker in warm_parents[0].children():
        worker.kill()


def check_weights(folder: Path, *overrides: str) -> None:
    """Compares losses and weights with those of one process that nothing has disturbed; they are equal bit by bit."""
    local = [word.replace("faulty.Slow", "faulty.Faulty") for word in CASE if not word.startswith("cluster")]
    where = ["cluster=local", "cluster.cpu_workers=1", "cluster.gpus_per_node=0"]
    here = hpc_train(*local, "+model.args.how=never", *where, *overrides, cwd=folder)
    assert here.returncode == 0, here.stdout + here.stderr
    run = folder / "runs" / "run"
    expected = folder / "outputs" / "run"
    assert losses(run) == pytest.approx(losses(expected))
    hashes = [RunDirectory(path).record()["result"]["weights_sha256"] for path in (run, expected)]
    assert hashes[0] == hashes[1]


DISTURBANCES: dict[str, Callable[[Cluster], object]] = {
    "evicted": evict,
    "batch_host_killed": lambda cluster: kill(cluster, 0),
    "node_killed": lambda cluster: kill(cluster, 1),
    "all_nodes_lost": lose_both_nodes,
    "worker_killed": kill_worker,
}


@NEEDS_ROOT
@pytest.mark.long_form(40)  # test_the_exit_codes_of_agents_decide, test_coordinator, and the lease above
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_a_run_continues_in_the_pods_that_replace_lost_ones(
    started: Callable[..., Cluster], tmp_path: Path, disturbance: str
) -> None:
    cluster = started(run_pods=True)
    run = tmp_path / "runs" / "run"
    process = command.start(*arguments(tmp_path), cwd=tmp_path, env=environment(tmp_path))
    try:
        until(lambda: (run.exists() and len(losses(run)) >= 6) or process.poll() is not None, 120)
        DISTURBANCES[disturbance](cluster)
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == Exit.DONE, output
    names = event_names(run)
    assert "resumed" in names, names
    if disturbance == "worker_killed":
        assert "worker_failed" in names and "requeued" not in names, names
    elif disturbance != "node_killed":  # its replacement may arrive in time for another attempt of the same start
        assert "requeued" in names, names
    (job,) = cluster.listed("jobs")
    assert job["status"]["completedIndexes"] == "0-1"
    check_weights(tmp_path)


@NEEDS_ROOT
@pytest.mark.long_form(50)  # test_why_explains_what_a_detached_job_waits_for cancels, test_a_submission_is_made_once
def test_a_cancelled_run_saves_and_resumes_on_fewer_nodes(started: Callable[..., Cluster], tmp_path: Path) -> None:
    cluster = started(run_pods=True, lose_answers=2)
    run = tmp_path / "runs" / "run"
    process = command.start(*arguments(tmp_path), cwd=tmp_path, env=environment(tmp_path))
    try:
        until(lambda: run.exists() and len(losses(run)) >= 6, 120)
        assert call(tmp_path, "cancel", str(run)).returncode == 0
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == Exit.STOPPED, output
    until(lambda: not cluster.listed("jobs") and not cluster.listed("pods"))
    stopped_at = len(losses(run))
    resumed = call(tmp_path, *arguments(tmp_path, "cluster.nodes=1"))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert stopped_at < 30 == len(losses(run)) and "requeued" not in event_names(run)
    (job,) = cluster.listed("jobs")
    assert job["status"]["completedIndexes"] == "0"
    check_weights(tmp_path)


@NEEDS_ROOT
@pytest.mark.long_form(150)  # test_agents_stop_before_the_end_time, and the exit codes above
def test_a_run_continues_in_new_pods_after_its_time_limit(started: Callable[..., Cluster], tmp_path: Path) -> None:
    started(run_pods=True)
    overrides = ["train.steps=200", "cluster.time=00:01:00"]
    done = hpc_train(*arguments(tmp_path, *overrides), cwd=tmp_path, env=environment(tmp_path), timeout=280)
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    names = event_names(tmp_path / "runs" / "run")
    assert names.count("requeued") == names.count("resumed") == 1 and "worker_failed" not in names
    check_weights(tmp_path, "train.steps=200")
