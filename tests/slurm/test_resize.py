"""Runs that continue on other numbers of nodes while they train, on a real Slurm. ``tests/elastic/test_coordinator.py``
has the decisions, and ``tests/elastic/test_agent.py`` a run that shrinks."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil
import pytest

from hpc_train.machine.allocation import expand
from hpc_train.run.directory import RunDirectory
from hpc_train.run.requests import request_resize
from hpc_train.units import counted
from tests.doors import command
from tests.faults.on_slurm import NODES, agent, environment_of, everything, kill_node, restart
from tests.slurm.cluster import Cluster, reconfigured, wait_for
from tests.slurm.runs import ONE_WORKER, SLOW, events, every_step, job_id, losses, steps, wait_for_step


def joiners(cluster: Cluster, *states: str) -> list[str]:
    found = cluster.call("squeue", "--noheader", "--name=run-joiner", f"--states={','.join(states)}", "--format=%i")
    return found.stdout.split()


def resize(cluster: Cluster, cwd: Path, nodes: int, wait: int = 120) -> str:
    done = cluster.hpc_train("resize", "run", f"nodes={nodes}", f"--wait={wait}", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ask(run: Path, nodes: int) -> str:
    """Requests a number of nodes and returns the answer of the run, which may not have them yet."""
    answers = lambda: events(run, "resize_requested", "resize_refused")  # noqa: E731
    count = len(answers())
    request_resize(RunDirectory(run), nodes, "the test")
    wait_for("an answer to the request", lambda: len(answers()) > count, 120)
    return str(answers()[count]["message"])


def start(cluster: Cluster, cwd: Path, *overrides: str) -> Path:
    done = cluster.hpc_train(*overrides, "launch.detach=true", "run.name=run", "-m", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    run = cwd / "outputs" / "run"
    wait_for_step(run, 3)
    return run


def undisturbed(cwd: Path, *overrides: str) -> list[float]:
    """Returns the losses of the same run on this machine."""
    done = command.hpc_train(*overrides, "cluster=local", "run.name=whole", cwd=cwd, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(cwd / "outputs" / "whole")


@pytest.mark.timeout(900)
@pytest.mark.long_form(100)  # tests/elastic/test_coordinator.py
def test_a_run_grows_and_shrinks_and_loses_no_step(cluster: Cluster, tmp_path: Path) -> None:
    fast = ["+model.args.seconds=0.05", "train.steps=400", "train.reproducible=any_world_size"]
    case = [*SLOW, *ONE_WORKER, *fast]
    run = start(cluster, tmp_path, *case)
    for nodes in (4, 2, 3, 1):
        assert f"continues on {counted(nodes, 'node', 'nodes')} instead of" in resize(cluster, tmp_path, nodes)
        wait_for_step(run, steps(run)[-1] + 2)
    wait_for("the nodes to be free", lambda: not joiners(cluster, "RUNNING"), 60)
    assert cluster.wait_for_state(job_id(run), "COMPLETED", "FAILED") == "COMPLETED"
    assert every_step(run) == list(range(1, 401)), "each step was taken once"
    assert [event["steps"] for event in events(run, "resized")] == [0, 0, 0, 0]
    assert losses(run) == undisturbed(tmp_path, *case, "cluster.cpu_workers=2"), "bitwise the same"


STRATEGIES = ("dp", "zero3", "hybrid")
PACE = "optim.schedule={_target_: tests.doors.faulty.paced, args: {seconds: 0.5}}"
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
    without_agent: set[str] = field(default_factory=set)

    @property
    def nodes(self) -> list[str]:
        """Returns the names of the nodes of the newest attempt."""
        names: list[str] = events(self.run, "started")[-1]["nodes"]
        return names

    def is_without_idle_nodes(self) -> bool:
        """Returns whether the run trains on all nodes that its jobs hold, except nodes whose agent was killed."""
        jobs = self.cluster.call("squeue", "-h", "--name=run,run-joiner", "--states=RUNNING", "--format=%N")
        held = [name for line in jobs.stdout.split() for name in expand(line)]
        return {*held} - self.without_agent == {*self.nodes} - self.without_agent

    def other_size(self, requested: int | None = None) -> int:
        return self.random.choice([size for size in (1, 2, 3, 4) if size not in (len(self.nodes), requested)])

    def resize(self) -> None:
        resize(self.cluster, self.cwd, self.other_size())

    def begin(self) -> int:
        """Requests another size and waits until the run has accepted it; the change may be over by then."""
        size = self.other_size()
        self.log.append(f"  {ask(self.run, size)}")
        return size

    def second_resize(self) -> None:
        first = self.begin()
        resize(self.cluster, self.cwd, self.other_size(first))

    def rank(self) -> None:
        """Kills a rank, or the store of the ranks."""

        def kills() -> bool:
            with suppress(psutil.NoSuchProcess, ValueError, IndexError):  # the nodes change
                below = agent(self.cluster, self.random.choice(self.nodes)).children(recursive=True)
                forked = [process for process in below if "forkserver" in " ".join(process.cmdline())]
                ranks = [process for process in forked if process.parent() in forked]
                self.random.choice(ranks).send_signal(signal.SIGKILL)
                return True
            return False

        wait_for("a rank", kills, 120)

    def agent(self) -> None:
        def kills() -> bool:
            with suppress(psutil.NoSuchProcess, ValueError):
                node = self.random.choice(self.nodes)
                agent(self.cluster, node).send_signal(signal.SIGKILL)
                self.without_agent.add(node)
                return True
            return False

        wait_for("an agent", kills, 120)

    def node(self) -> None:
        node = self.random.choice(self.nodes)
        self.log.append(f"  {node}")
        kill_node(self.cluster, node)
        self.cluster.call("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def requeue(self) -> None:
        self.cluster.call("scontrol", "requeue", job_id(self.run))

    def announcement(self) -> None:
        self.cluster.call("scancel", "--signal=USR2", job_id(self.run))

    def preemption(self) -> None:
        """Takes all nodes in a partition of higher priority."""
        options = ["--exclusive", "--nodes=4", "--output=/dev/null"]
        self.cluster.call("sbatch", *options, "--wrap=sleep 1", cwd=self.cwd)

    def joiner(self) -> None:
        """Cancels the joiners, if there are any; they may not have joined yet."""
        if found := joiners(self.cluster, "RUNNING", "PENDING"):
            self.cluster.call("scancel", *found)
        wait_for("the joiner to end", lambda: not joiners(self.cluster, "RUNNING", "COMPLETING"), 120)

    def change(self, name: str, during: bool) -> None:
        """Makes a change and waits until the run takes further steps in an attempt that goes on for some seconds."""
        self.log.append(f"{name}{' during a change' if during else ''} at step {steps(self.run)[-1]}, {self.nodes}")
        run = RunDirectory(self.run)
        if during:
            self.begin()
        before = run.newest_attempt()
        getattr(self, name)()
        if name in (*KILLS, *STOPS):
            wait_for("the next attempt", lambda: run.newest_attempt() > before, 240)
        for node in NODES:
            restart(self.cluster, node)
        self.killed += name in KILLS
        since = time.time() + 2

        def has_stepped() -> bool:
            lines = run.follow(run.metrics_file(run.newest_attempt())).read()
            return sum(line["time"] > since for line in lines) > 3

        wait_for("further steps", has_stepped, 240)
        began = time.monotonic()
        wait_for("no idle node", self.is_without_idle_nodes, 240)  # a minute on a machine without other work
        self.log.append(f"  no idle node after {time.monotonic() - began:.0f} s")


KILLS = ("rank", "agent", "node", "requeue")
STOPS = ("announcement", "preemption")


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.long_form(300)  # tests/elastic/test_coordinator.py
def test_a_sequence_of_changes_and_faults(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    strategy = STRATEGIES[seed % len(STRATEGIES)]
    random = Random(seed)
    case = [*(part for part in command.TINY if not part.startswith("optim.warmup_steps")), PACE]
    many = ["train.steps=100000", f"checkpoint.every={SAVED_EVERY}"]
    place = [f"+strategy={strategy}", "cluster=slurm", "cluster.partition=preempt", "cluster.time=30"]
    # without the preflight, which excludes a node whose network is slow while others use the cores
    nodes = [f"cluster.nodes={random.choice((1, 1, 3))}", "cluster.cpu_workers=2", "cluster.preflight=off"]
    run = start(cluster, tmp_path, *case, *many, *place, *nodes)
    sequence = Sequence(cluster, tmp_path, run, random)
    try:
        for number in range(CHANGES):
            is_fault = number % 2 == 1
            name = random.choice((*KILLS, *STOPS, "joiner") if is_fault else ("resize", "second_resize"))
            sequence.change(name, is_fault and random.random() < 0.5)
    finally:
        print(f"seed {seed}, {strategy}", *sequence.log, sep="\n", flush=True)
    done = cluster.hpc_train("cancel", "run", "--save", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for("both jobs to end", lambda: not cluster.call("squeue", "-ho%i").stdout.split(), 240)
    taken = every_step(run)
    last = max(taken)
    assert sorted(set(taken)) == list(range(1, last + 1))
    assert len(taken) - last <= SAVED_EVERY * sequence.killed, "only a kill repeats steps"
    alone = ["+strategy=single", "cluster.cpu_workers=1", f"train.steps={last}"]
    assert losses(run) == pytest.approx(undisturbed(tmp_path, *case, *alone), rel=2e-3)


@pytest.mark.timeout(900)
@pytest.mark.long_form(110)  # tests/elastic/test_coordinator.py
def test_a_joiner_that_never_starts_is_cancelled_with_the_run(cluster: Cluster, tmp_path: Path) -> None:
    run = start(cluster, tmp_path, *SLOW, *ONE_WORKER, "train.steps=9000")
    cluster.call("sbatch", "--exclusive", "--nodes=3", "--output=/dev/null", "--wrap=sleep 600", cwd=tmp_path)
    assert "adds 1 when it starts" in ask(run, 2)
    (first,) = joiners(cluster, "PENDING")
    request_resize(RunDirectory(run), 4, "the test")

    def submits() -> bool:
        found = [process for process in everything() if "hpc_train.launch.joiner" in process.info["cmdline"]]
        return any(environment_of(process, cluster) for process in found)

    wait_for("a submission", submits, 60)
    assert "asked for 4 nodes, instead of 2" in ask(run, 3), "during the submission"
    wait_for("the other answer", lambda: "instead of 4" in events(run, "resize_requested")[-1]["message"], 120)
    (second,) = joiners(cluster, "PENDING")
    assert first != second
    assert f"the run trains on 1; job {second} waits for them" in ask(run, 3)
    assert joiners(cluster, "PENDING") == [second]
    assert cluster.hpc_train("cancel", "run", "--save", cwd=tmp_path).returncode == 0
    wait_for("the joiner to be cancelled", lambda: not joiners(cluster, "PENDING"), 60)


@pytest.mark.timeout(1500)
@pytest.mark.long_form(400)  # tests/elastic/test_resize.py
def test_a_run_takes_idle_nodes_by_itself(cluster: Cluster, tmp_path: Path) -> None:
    """The joiner has the resources of the job that was the first to start, and fewer nodes than requested. It ends with
    this job, which asks again.
    """
    cluster.call(
        "sbatch", "--exclusive", "--nodes=2", "--time=60", "--output=/dev/null", "--wrap=sleep 3600", cwd=tmp_path
    )
    grows = ["elastic.grow=idle", "elastic.max_nodes=3", "train.steps=3000"]
    first = [
        "+cluster.extra.begin=now+3600",
        "cluster.first=[{account: research, partition: debug, time: 20, extra: {begin: now}}]",
    ]
    run = start(cluster, tmp_path, *SLOW, *ONE_WORKER, *grows, *first)
    wait_for("a joiner", lambda: bool(events(run, "resized")), 480)
    assert "elastic.grow=idle (saves at most" in events(run, "resize_requested")[0]["message"]
    assert (events(run, "resize_requested")[0]["nodes"], events(run, "resized")[0]["nodes"]) == (3, 2)
    (joiner,) = joiners(cluster, "RUNNING")
    shown = cluster.call("squeue", "-h", "-j", joiner, "-O", "nice,account,partition").stdout.split()
    assert shown == ["1000000", "research", "debug"]
    cluster.call("scancel", "--signal=USR2", events(run, "started")[0]["job_id"])  # as at its time limit
    assert cluster.wait_for_state(joiner, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED"
    output = (run / "logs" / f"{joiner}.out").read_text()
    assert "leaves the run: its first job is requeued, and asks for more nodes when it starts" in output

    def grows_again() -> bool:
        since = events(run, "requeued")[-1]["time"]
        return any(event["time"] > since for event in events(run, "resized"))

    wait_for("nodes again", grows_again, 480)
    assert cluster.hpc_train("cancel", "run", cwd=tmp_path).returncode == 0
    wait_for("both jobs to end", lambda: not joiners(cluster, "RUNNING", "COMPLETING"), 240)


@pytest.mark.timeout(600)
@pytest.mark.long_form(80)  # tests/elastic/test_agent.py, tests/launch/test_script.py
def test_a_site_that_forbids_it_keeps_the_nodes(plain: Cluster, tmp_path: Path) -> None:
    run = start(
        plain, tmp_path, *SLOW, "cluster.nodes=2", "cluster.cpu_workers=1", "train.steps=9000", "checkpoint.every=5"
    )

    def forbid(conf: str) -> str:
        return conf.replace("SchedulerParameters=", "SchedulerParameters=disable_job_shrink,")

    with reconfigured(plain, forbid):
        done = plain.hpc_train("resize", "run", "nodes=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "not resized: the site forbids it (SchedulerParameters=disable_job_shrink)" in done.stderr
    resize(plain, tmp_path, 1)
    wait_for("the node to be free", lambda: plain.call("squeue", "-ho", "%D").stdout.split() == ["1"], 60)
    plain.call("scancel", "--signal=KILL", f"{job_id(run)}.0")
    wait_for("a step on the node that is left", lambda: bool(events(run, "agents_killed")), 120)
    wait_for_step(run, steps(run)[-1] + 3)
