"""Runs that continue on other numbers of nodes while they train, on a real Slurm. ``tests/elastic/test_coordinator.py``
has the decisions, and ``tests/elastic/test_agent.py`` a run that shrinks."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from hpc_train.run.directory import RunDirectory
from hpc_train.run.requests import request_resize
from tests.doors import command
from tests.faults.on_slurm import agent, kill_node, restart
from tests.slurm.cluster import Cluster, reconfigured, wait_for
from tests.slurm.runs import ONE_WORKER, SLOW, events, every_step, job_id, losses, steps, wait_for_step


def joiners(cluster: Cluster, *states: str) -> list[str]:
    found = cluster.call("squeue", "--noheader", "--name=run-joiner", f"--states={','.join(states)}", "--format=%i")
    return found.stdout.split()


def resize(cluster: Cluster, cwd: Path, nodes: int, wait: int = 120) -> str:
    done = cluster.hpc_train("resize", "run", f"nodes={nodes}", f"--wait={wait}", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(cluster: Cluster, cwd: Path, *overrides: str) -> Path:
    done = cluster.hpc_train(*overrides, "launch.detach=true", "run.name=run", "-m", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    run = cwd / "outputs" / "run"
    wait_for_step(run, 3)
    return run


def undisturbed(cwd: Path, *overrides: str) -> list[float]:
    """Returns the losses of the same run on this machine."""
    done = command.hpc_train(*overrides, "cluster=local", "run.name=whole", cwd=cwd, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(cwd / "outputs" / "whole")


@pytest.mark.timeout(900)
@pytest.mark.long_form(100)  # tests/elastic/test_coordinator.py
def test_a_run_grows_and_shrinks_and_loses_no_step(cluster: Cluster, tmp_path: Path) -> None:
    fast = ["+model.args.seconds=0.05", "train.steps=400", "train.reproducible=any_world_size"]
    case = [*SLOW, *ONE_WORKER, *fast]
    run = start(cluster, tmp_path, *case)
    for nodes in (4, 2, 3, 1):
        assert f"continues on {nodes} nodes instead of" in resize(cluster, tmp_path, nodes)
        wait_for_step(run, steps(run)[-1] + 2)
    wait_for("the nodes to be free", lambda: not joiners(cluster, "RUNNING"), 60)
    assert cluster.wait_for_state(job_id(run), "COMPLETED", "FAILED") == "COMPLETED"
    assert every_step(run) == list(range(1, 401)), "each step was taken once"
    assert [event["steps"] for event in events(run, "resized")] == [0, 0, 0, 0]
    assert losses(run) == undisturbed(tmp_path, *case, "cluster.cpu_workers=2"), "bitwise the same"


STRATEGIES = ("dp", "zero3", "hybrid")
PACE = "optim.schedule={{_target_: tests.doors.faulty.paced, args: {{seconds: {}}}}}"
SAVED_EVERY = 20
CHANGES = 4  # per sequence


@dataclass
class Sequence:
    """Changes the nodes of a run that trains until it is cancelled, and injects faults, also during changes."""

    cluster: Cluster
    cwd: Path
    run: Path
    random: Random
    killed: int = 0
    log: list[str] = field(default_factory=list)

    @property
    def attempt(self) -> int:
        return RunDirectory(self.run).newest_attempt()

    @property
    def nodes(self) -> list[str]:
        """Returns the names of the nodes of the newest attempt."""
        names: list[str] = events(self.run, "started")[-1]["nodes"]
        return names

    def other_size(self) -> int:
        return self.random.choice([size for size in (1, 2, 3, 4) if size != len(self.nodes)])

    def resize(self) -> None:
        resize(self.cluster, self.cwd, self.other_size())

    def begin(self) -> None:
        """Requests another size and waits until the run has accepted it; the change may be over by then."""
        count = len(events(self.run, "resize_requested", "resize_refused"))
        size = self.other_size()
        request_resize(RunDirectory(self.run), size, "the test")
        self.log.append(f"  {size} nodes requested")
        accepted = lambda: len(events(self.run, "resize_requested", "resize_refused")) > count  # noqa: E731
        wait_for("an answer to the request", accepted, 90)

    def second_resize(self) -> None:
        self.begin()
        self.resize()

    def rank(self) -> None:
        """Kills a rank, or the store of the ranks."""
        found = agent(self.cluster, self.random.choice(self.nodes))
        of_run = [process for process in found.children(recursive=True) if "forkserver" in " ".join(process.cmdline())]
        ranks = [process for process in of_run if process.parent() in of_run]
        self.random.choice(ranks).send_signal(signal.SIGKILL)
        self.killed += 1
        self.wait_for_restart()

    def agent(self) -> None:
        agent(self.cluster, self.random.choice(self.nodes)).send_signal(signal.SIGKILL)
        self.killed += 1
        self.wait_for_restart()

    def node(self) -> None:
        node = self.random.choice(self.nodes)
        self.log.append(f"  {node}")
        kill_node(self.cluster, node)
        self.killed += 1
        self.cluster.call("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
        self.wait_for_restart()
        restart(self.cluster, node)

    def joiner(self) -> None:
        """Cancels a joiner, or the time limit of the only job is announced."""
        found = joiners(self.cluster, "RUNNING", "PENDING")
        if not found:
            self.announcement()
            return
        self.cluster.call("scancel", *found)
        wait_for("the joiner to end", lambda: not joiners(self.cluster, "RUNNING", "COMPLETING"), 60)

    def announcement(self) -> None:
        self.cluster.call("scancel", "--signal=USR2", job_id(self.run))
        self.wait_for_restart()

    def requeue(self) -> None:
        self.killed += 1
        self.cluster.call("scontrol", "requeue", job_id(self.run))
        self.wait_for_restart()

    def preemption(self) -> None:
        self.cluster.call(
            "sbatch", "--exclusive", "--nodes=4", "--output=/dev/null", "--wrap=sleep 1", cwd=self.cwd
        )  # in a partition of higher priority
        self.wait_for_restart()

    def wait_for_restart(self) -> None:
        before = self.attempt
        wait_for("the next start of the job", lambda: self.attempt > before, 120)

    def wait_for_progress(self) -> None:
        """Waits for further steps of an attempt that goes on for some seconds."""
        since = time.time() + 2

        def has_stepped() -> bool:
            run = RunDirectory(self.run)
            lines = run.follow(run.metrics_file(run.newest_attempt())).read()
            return sum(line["time"] > since for line in lines) > 3

        wait_for("further steps", has_stepped, 150)

    def change(self, name: str, during: bool) -> None:
        self.log.append(f"{name}{' during a change' if during else ''} at step {steps(self.run)[-1]}, {self.nodes}")
        if during:
            self.begin()
        getattr(self, name)()
        self.wait_for_progress()


FAULTS = ("rank", "agent", "node", "joiner", "announcement", "requeue", "preemption")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.long_form(150)  # tests/elastic/test_coordinator.py
def test_a_sequence_of_changes_and_faults(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    strategy = STRATEGIES[seed % len(STRATEGIES)]
    case = [f"+strategy={strategy}", "cluster=slurm", *command.TINY, "cluster.cpu_workers=2", "cluster.nodes=1"]
    case = [part for part in case if not part.startswith(("train.steps", "optim.warmup"))]
    many = ["train.steps=100000", f"checkpoint.every={SAVED_EVERY}", "cluster.partition=preempt", "cluster.time=30"]
    run = start(cluster, tmp_path, *case, *many, PACE.format(0.3))
    sequence = Sequence(cluster, tmp_path, run, Random(seed))
    try:
        for number in range(CHANGES):
            name = sequence.random.choice(FAULTS) if number % 2 else sequence.random.choice(("resize", "second_resize"))
            sequence.change(name, number % 2 == 1 and sequence.random.random() < 0.5)
    finally:
        print(f"seed {seed}, {strategy}", *sequence.log, sep="\n", flush=True)
    done = cluster.hpc_train("cancel", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for("both jobs to end", lambda: not cluster.call("squeue", "-ho%i").stdout.split(), 90)
    taken = every_step(run)
    last = max(taken)
    assert sorted(set(taken)) == list(range(1, last + 1))
    assert len(taken) - last <= SAVED_EVERY * sequence.killed, "only a kill repeats steps"
    undisturbed_losses = undisturbed(tmp_path, *case, f"train.steps={last}", PACE.format(0))
    assert losses(run) == pytest.approx(undisturbed_losses, rel=2e-3)


@pytest.mark.long_form(90)  # tests/elastic/test_coordinator.py
def test_a_joiner_that_never_starts_is_cancelled_with_the_run(cluster: Cluster, tmp_path: Path) -> None:
    run = start(cluster, tmp_path, *SLOW, *ONE_WORKER, "train.steps=300")
    cluster.call("sbatch", "--exclusive", "--nodes=3", "--output=/dev/null", "--wrap=sleep 600", cwd=tmp_path)
    assert "adds 1 when it starts" in resize(cluster, tmp_path, 2, wait=30)
    (first,) = joiners(cluster, "PENDING")
    assert "instead of 2; the run trains on 1; job" in resize(cluster, tmp_path, 3, wait=30)
    (second,) = joiners(cluster, "PENDING")
    assert first != second
    assert cluster.wait_for_state(job_id(run), "COMPLETED", "FAILED") == "COMPLETED"
    wait_for("the joiner to be cancelled", lambda: not joiners(cluster, "PENDING"), 20)
    assert every_step(run) == list(range(1, 301))


@pytest.mark.timeout(600)
@pytest.mark.long_form(120)  # tests/elastic/test_resize.py
def test_a_run_takes_idle_nodes_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    grows = ["elastic.grow=idle", "elastic.max_nodes=3", "train.steps=3000"]
    run = start(cluster, tmp_path, *SLOW, *ONE_WORKER, *grows)
    wait_for("a joiner", lambda: bool(events(run, "resized")), 240)
    assert "elastic.grow=idle (saves at most" in events(run, "resize_requested")[0]["message"]
    (joiner,) = joiners(cluster, "RUNNING")
    assert cluster.call("squeue", "-h", "-j", joiner, "-O", "nice").stdout.split() == ["1000000"]
    assert cluster.hpc_train("cancel", "run", cwd=tmp_path).returncode == 0
    wait_for("both jobs to end", lambda: not joiners(cluster, "RUNNING", "COMPLETING"), 90)


@pytest.mark.long_form(60)  # tests/elastic/test_agent.py
def test_a_site_that_forbids_it_keeps_the_nodes(plain: Cluster, tmp_path: Path) -> None:
    run = start(plain, tmp_path, *SLOW, "cluster.nodes=2", "cluster.cpu_workers=1", "train.steps=60")

    def forbid(conf: str) -> str:
        return conf.replace("SchedulerParameters=", "SchedulerParameters=disable_job_shrink,")

    with reconfigured(plain, forbid):
        done = plain.hpc_train("resize", "run", "nodes=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "not resized: the site forbids it (SchedulerParameters=disable_job_shrink)" in done.stderr
    resize(plain, tmp_path, 1)
    wait_for("the node to be free", lambda: plain.call("squeue", "-ho", "%D").stdout.split() == ["1"], 30)
    assert plain.wait_for_state(job_id(run), "COMPLETED", "FAILED") == "COMPLETED"
    assert every_step(run) == list(range(1, 61))
