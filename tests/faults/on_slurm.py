"""Submits one run to the nodes of a real Slurm, injects faults, and checks the result.

The loss of a node is simulated as a power failure: its slurmd, its step daemons and all processes of its tasks are
killed at once. All nodes are on one machine; a process is assigned to a node and a cluster by its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.files import NewLines
from tests.checkpoint.progress import LONG
from tests.doors import command
from tests.doors.command import REPOSITORY
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import SLOW, detail, events, job_id, steps, wait_for_step, with_python

# The weights are bitwise identical for every number of ranks.
REPRODUCIBLE = ["train.reproducible=any_world_size", "batch.logical_micro_batches=4"]
CASE = [
    *SLOW, *REPRODUCIBLE, "+model.args.seconds=0.1", "cluster.cpu_workers=1", "batch.global_size=12",
    "checkpoint.every=5", "run.name=run",
]  # fmt: skip
STEPS = 40 if LONG else 28
ASKED = f"train.steps={STEPS}"
NODES = ("n1", "n2", "n3", "n4")
PATIENCE_S = 480.0  # workers take minutes to start on a machine that is busy with other tests


def undisturbed(folder: Path, steps: int) -> str:
    """Trains the case for ``steps`` steps in one process on this machine and returns the SHA-256 of its weights."""
    own = [part for part in CASE if part != "cluster=slurm" and not part.startswith("+model.args.seconds")]
    done = command.hpc_train(*own, "+model.args.seconds=0", "cluster=local", f"train.steps={steps}", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(folder / "outputs" / "run")


def weights(run: Path) -> str:
    return str(RunDirectory(run).record()["result"]["weights_sha256"])


@dataclass
class OnSlurm:
    """Represents a submitted run; ``submitter`` waits for it, or is None if batch job ``job`` was submitted by hand."""

    cluster: Cluster
    run: Path
    submitter: subprocess.Popen[str] | None = None
    job: str = ""
    pids: set[int] = field(default_factory=set)  # ids of the processes that were seen

    @classmethod
    def submit(cls, cluster: Cluster, cwd: Path, *overrides: str) -> OnSlurm:
        process = cluster.start(*CASE, *overrides, "-m", cwd=cwd)
        return cls(cluster, cwd / "outputs" / "run", process)

    @classmethod
    def by_hand(cls, cluster: Cluster, cwd: Path, script: str, options: list[str], *overrides: str) -> OnSlurm:
        call = ["sbatch", "--parsable", *options, str(REPOSITORY / "slurm" / script), *CASE, *overrides]
        done = with_python(cluster).call(*call, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return cls(cluster, cwd / "outputs" / "run", job=done.stdout.strip())

    def wait_for_step(self, step: int) -> None:
        if self.submitter is None:
            wait_for_step(self.run, step, PATIENCE_S)
        else:
            wait_for(f"step {step} of {self.run}", lambda: self._has_ended() or max(steps(self.run), default=0) >= step,
                     PATIENCE_S)  # fmt: skip
        self.job = self.job or job_id(self.run)
        self.pids |= {process.pid for process in processes(self.cluster, job=self.job)}

    def _has_ended(self) -> bool:
        """Returns False; raises AssertionError with the output of the submitter if it has ended."""
        assert self.submitter is not None
        assert self.submitter.poll() is None, self.submitter.communicate()[0]
        return False

    def wait_for_attempt(self, attempt: int) -> None:
        """Waits until ``attempt`` has taken enough steps to save a checkpoint."""
        file = RunDirectory(self.run).metrics_file(attempt)
        seven = lambda: file.exists() and file.read_text().count("\n") > 6  # noqa: E731
        wait_for(f"steps of attempt {attempt}", seven, PATIENCE_S)

    def wait_for_event(self, event: str, count: int = 1) -> None:
        wait_for(f"{event} in {self.run}", lambda: len(events(self.run, event)) >= count, PATIENCE_S)

    def reported(self, *names: str) -> list[tuple[str, int | None, str]]:
        """Returns the class, rank and node of each of these events, in order."""
        return [(event["class"], event["rank"], event["node"]) for event in events(self.run, *names)]

    def nodes_of(self, event: str) -> list[list[str]]:
        return [found["nodes"] for found in events(self.run, event)]

    def shown(self, field_name: str) -> str:
        """Returns a field of ``scontrol show job``."""
        return detail(self.cluster, self.job or job_id(self.run), field_name)

    def first_step_after(self, injected: float) -> float:
        """Returns the seconds from ``injected`` (since 1970) to the end of the first step of the next attempt."""
        files = RunDirectory(self.run).metrics.glob("attempt-*.jsonl")
        firsts = [next(iter(NewLines(file).read()), {"time": 0.0})["time"] for file in files]
        return min(first for first in firsts if first > injected) - injected

    def finished(self, whole: str) -> None:
        """Checks ``completed``, and that the run has the weights ``whole`` and equal losses for repeated steps."""
        losses = self.completed()
        assert weights(self.run) == whole
        assert max(map(len, losses.values())) == 1, "a repeated step has a different loss"

    def completed(self, may_lack: int = 0) -> dict[int, set[float]]:
        """Checks that the run took all steps, left nothing behind and reported its last failure; returns the losses of
        each step in all attempts.

        Args:
            may_lack: the number of steps that the metrics may lack.
        """
        if self.submitter is not None:
            output, _ = self.submitter.communicate(timeout=PATIENCE_S)
            assert self.submitter.returncode == 0, output
        assert self.ended() == "COMPLETED"
        losses = defaultdict(set)
        for line in RunDirectory(self.run).read_all_metrics():
            losses[line["step"]].add(line["loss"])
        assert max(losses) == STEPS and len(losses) >= STEPS - may_lack, "the metrics lack steps"
        self.nothing_left()
        self.last_failure_told()
        return losses

    def stopped(self) -> None:
        """Asks the run to stop, as a user does, and checks that it stops."""
        assert self.submitter is not None
        self.cluster.call("scancel", "--signal=USR1", job_id(self.run))
        output, _ = self.submitter.communicate(timeout=PATIENCE_S)
        assert self.submitter.returncode == Exit.STOPPED, output
        self.nothing_left()

    def ended(self) -> str:
        """Waits until the job has ended and returns its state in Slurm's terms."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return self.cluster.wait_for_state(self.job or job_id(self.run), *states, seconds=PATIENCE_S)

    def nothing_left(self) -> None:
        """Checks that there is no process (and therefore no port), no shared memory, and no pending or running job."""
        job = self.job or job_id(self.run)
        wait_for("the end of all processes", lambda: not list(processes(self.cluster, job=job)), 60)
        names = [path.name for path in Path("/dev/shm").iterdir()]
        assert [name for name in names if {str(pid) for pid in self.pids} & set(name.split("_"))] == []
        assert self.cluster.call("squeue", "--noheader", "--states=PENDING,RUNNING", f"--jobs={job}").stdout == ""

    def why(self, *options: str) -> str:
        """Returns the output of the command ``why``."""
        done = self.cluster.hpc_train("why", str(self.run), *options, cwd=self.run)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def last_failure_told(self) -> None:
        """Checks that ``why`` names the class, rank and node of a failure in the newest attempt that has a failure.

        It may also name an outage of the file system, which may be the cause of a failure, or the only one.
        """
        failures = events(self.run, "worker_failed", "node_lost")
        # reported by the attempt after the loss
        lost = [event for event in events(self.run, "requeued_by_slurm", "agents_killed") if "class" in event]
        failures += [event | {"attempt": event["attempt"] - 1} for event in lost]
        newest = max((event["attempt"] for event in failures), default=None)
        reported = [(event["class"], event["rank"], event["node"]) for event in failures if event["attempt"] == newest]
        cause = json.loads(self.why("--json"))["cause"]
        found = [] if cause is None else [(cause["kind"], cause["rank"], cause["node"])]
        outages = {event["class"] for event in events(self.run, "file_system_failed")}
        if cause is not None and cause["kind"] in outages:
            return
        assert set(found) <= set(reported) and bool(found) == bool(reported), (found, reported)


def everything() -> Iterator[psutil.Process]:
    """Yields all processes except zombies. Their attributes are in ``info``, because they may end at any time."""
    for process in psutil.process_iter(["name", "ppid", "cmdline", "environ", "create_time"]):
        if process.info["cmdline"]:
            yield process


def environment_of(process: psutil.Process, cluster: Cluster) -> dict[str, str]:
    """Returns the environment of a process of this cluster, or an empty dict for any other process."""
    found: dict[str, str] = process.info["environ"] or {}
    return found if found.get("SLURM_CONF") == cluster.environment["SLURM_CONF"] else {}


def processes(cluster: Cluster, node: str | None = None, job: str | None = None) -> Iterator[psutil.Process]:
    """Yields the processes that any job has on ``node``, or that ``job`` has on any node."""
    for process in everything():
        own = environment_of(process, cluster)
        wanted = own.get("SLURMD_NODENAME") == node if node else own.get("SLURM_JOB_ID") == job
        if own.get("SLURMD_NODENAME") and wanted:
            yield process


def daemons(cluster: Cluster, node: str) -> list[psutil.Process]:
    command = ["slurmd", "-N", node]
    return [one for one in everything() if one.info["cmdline"][:3] == command and environment_of(one, cluster)]


def of_node(cluster: Cluster, node: str) -> list[psutil.Process]:
    """Returns all processes that end when ``node`` loses its power, in an order in which none can report another's end.

    An srun has a child that waits for the end of its parent and then makes Slurm kill the step on all nodes.
    """
    tasks = list(processes(cluster, node))
    found = {process.pid: process for process in tasks if process.info["name"] == "srun"}
    sruns = sorted(found.values(), key=lambda process: process.info["ppid"] not in found)  # children first
    above = {one.info["ppid"] for one in tasks}
    parents = [one for one in everything() if one.pid in above and one.info["name"] == "slurmstepd"]
    return [*sruns, *daemons(cluster, node), *parents, *(process for process in tasks if process.pid not in found)]


def agent(cluster: Cluster, node: str) -> psutil.Process:
    found = [one for one in processes(cluster, node) if one.info["name"] != "srun" and "agent" in one.info["cmdline"]]
    return min(found, key=lambda one: one.info["create_time"])


def kill_node(cluster: Cluster, node: str) -> float:
    """Kills all processes of ``node`` and returns the time in seconds since 1970."""
    for process in of_node(cluster, node):
        _kill(process.pid)
    return time.time()


def kill_agent(cluster: Cluster, *nodes: str) -> float:
    for process in [agent(cluster, node) for node in nodes]:
        _kill(process.pid)
    return time.time()


def worker(cluster: Cluster, node: str) -> psutil.Process:
    """Returns the worker of a node other than the batch host: there it is the only child of the warm parent."""
    (warm_parent,) = [one for one in agent(cluster, node).children() if "forkserver" in " ".join(one.cmdline())]
    (found,) = warm_parent.children()
    return found


def signal_all(found: list[psutil.Process], number: signal.Signals) -> None:
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def restore(cluster: Cluster) -> None:
    """Restarts the nodes that a test has killed and waits until all four are up and idle."""
    for node in NODES:
        restart(cluster, node)
    wait_for("four idle nodes", lambda: _states(cluster) == dict.fromkeys(NODES, "idle"), PATIENCE_S)


def restart(cluster: Cluster, node: str) -> None:
    """Starts a node that a test has killed; nothing happens if it is up."""
    if not daemons(cluster, node):
        subprocess.run(["slurmd", "-N", node], env=cluster.environment, check=True, stdin=subprocess.DEVNULL)
        cluster.call("scontrol", "update", f"nodename={node}", "state=resume")


def _states(cluster: Cluster) -> dict[str, str]:
    """Returns the full state of each node, because ``sinfo --states=idle`` also lists draining nodes."""
    shown = cluster.call("sinfo", "-h", "-N", "-p", "cpu", "-o", "%N %T").stdout.splitlines()
    return dict(line.split() for line in shown)


def skip_unless_long(minutes: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(os.environ.get("HPC_TRAIN_LONG") != "1", reason=f"{minutes}: HPC_TRAIN_LONG=1")
