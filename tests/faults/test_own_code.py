"""An own loop and a foreign script on a real Slurm: a node is lost, then the job is preempted, and it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpc_train.run.directory import RunDirectory
from tests.doors.command import REPOSITORY
from tests.faults.on_slurm import PATIENCE_S, kill_agent, skip_unless_long
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import events, job_id, steps, with_python
from tests.train.custom_loop.functions import loss_of, model, optimizers, update
from tests.train.custom_loop.runs import failures
from tests.train.custom_loop.test_roles import JUDGE, TRAINER

STEPS = 150
CASE = [
    "+strategy=dp", "cluster=slurm", "cluster.nodes=2", "cluster.cpu_workers=1", "elastic.min_nodes=1",
    "telemetry.wandb.mode=disabled", "cluster.preflight_action.slow_device=warn", "run.name=run",
]  # fmt: skip

pytestmark = skip_unless_long("minutes on a real Slurm")


def disturb(cluster: Cluster, run: Path) -> None:
    """Kills the second node in the first attempt and requeues the job in the second."""
    wait_for("the first steps", lambda: max(steps(run), default=0) >= 10, PATIENCE_S)
    kill_agent(cluster, events(run, "started")[0]["nodes"][1])
    wait_for("fewer nodes", lambda: bool(events(run, "shrunk")), PATIENCE_S)
    file = RunDirectory(run).metrics_file(1)
    wait_for("steps on fewer nodes", lambda: file.exists() and file.read_text().count("\n") > 1, PATIENCE_S)
    cluster.call("scancel", "--signal=USR2", job_id(run))
    wait_for("the requeue", lambda: bool(events(run, "requeued")), PATIENCE_S)


def check_events(run: Path) -> None:
    assert [len(event["nodes"]) for event in events(run, "started")] == [2, 1, 2]
    assert [event["class"] for event in events(run, "node_lost", "worker_failed")] == ["node_lost"]


def undisturbed() -> list[float]:
    module = model()
    adam, sgd, schedule = optimizers(module)
    losses = []
    for step in range(1, STEPS + 1):
        torch.manual_seed(step)
        adam.zero_grad()
        sgd.zero_grad()
        loss = loss_of(module)
        loss.backward()
        update(step, adam, sgd, schedule)
        losses.append(loss.item())
    return losses


def test_an_own_loop(cluster: Cluster, tmp_path: Path) -> None:
    case = [*CASE, "run.entry=tests.train.custom_loop.functions:slow", "+run.args.seconds=0.1", f"train.steps={STEPS}"]
    process = cluster.start(*case, "telemetry.log_every=1", "checkpoint.every=5", "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    disturb(cluster, run)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    check_events(run)
    lines = RunDirectory(run).read_metrics()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert [line["loss"] for line in lines] == undisturbed()
    torch.set_num_threads(threads)


def test_a_script_of_a_batch_script(cluster: Cluster, tmp_path: Path) -> None:
    words = ["python", str(REPOSITORY / "tests" / "train" / "custom_loop" / "script.py"), str(tmp_path), "800"]
    options = ["--nodes=2", "--time=15", str(REPOSITORY / "slurm" / "multi_node.sbatch")]
    done = with_python(cluster).call(
        "sbatch", "--parsable", *options, *CASE, f"run.command=[{','.join(words)}]", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "outputs" / "run"
    disturb(cluster, run)
    cluster.wait_for_state(done.stdout.strip(), "COMPLETED")
    check_events(run)
    totals = [json.loads((tmp_path / f"saved-{rank}.json").read_text()) for rank in range(2)]
    assert totals == [[800, 320400], [800, 640800]]
    assert RunDirectory(run).record()["result"] == {"steps": 800}


@pytest.mark.parametrize("where", ["", "partition=gpu,gpus=0,cpus=2,"])
def test_roles_on_three_nodes(cluster: Cluster, tmp_path: Path, where: str) -> None:
    """A server is killed and starts again alone; then the job is preempted, and all roles start again. With nodes of
    another partition for the server, the job is heterogeneous.
    """
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "trainer.py").write_text(TRAINER)
    python = ["--", "python", str(tmp_path / "trainer.py"), "2", str(tmp_path)]
    trainer = ["--role", "trainer:nodes=2,procs=2", *python]
    judge = ["--role", f"judge:{where}per=node,ready=port", "--", "python", str(tmp_path / "judge.py"), "kill"]
    process = cluster.start("exec", "-m", "--name", "run", *trainer, *judge, cwd=tmp_path)
    run = RunDirectory(tmp_path / "outputs" / "run")
    wait_for("the restart of the server", lambda: run.of_role("judge").newest_attempt() == 1, PATIENCE_S)
    assert run.of_role("trainer").newest_attempt() == run.newest_attempt() == 0
    cluster.call("scancel", "--signal=USR2", job_id(run.path))
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert len(events(run.path, "requeued")) == 1
    assert [run.of_role(name).newest_attempt() for name in ("trainer", "judge")] == [1, 2]
    assert failures(run.of_role("judge")) == [("killed", 0)]
    started = {name: events(run.path / "roles" / name, "started")[-1] for name in ("trainer", "judge")}
    assert [len(event["nodes"]) for event in started.values()] == [2, 1]
    assert started["trainer"]["world_size"] == 4
    assert len({json.loads(path.read_text())["RANK"] for path in tmp_path.glob("seen-*")}) == 4
