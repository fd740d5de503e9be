"""Injects faults of nodes, Slurm, file systems and the network into runs on a real Slurm, one kind after another.

    python -m tests.faults.chaos --seed 0 --out DIR
    python -m tests.faults.chaos --seed 0 --out DIR --only suspended --only drained

Each case trains on nodes with network namespaces. Afterwards the SHA-256 of the weights must equal that of the
undisturbed run, no process, listening port or shared memory may be left, and ``why`` must name the true cause.

``DIR/results.jsonl`` gets one line per case as soon as the case ends. A case that has passed with this seed is skipped,
so an interrupted list resumes. ``DIR/runs`` keeps the run directories. Needs root; every fault is undone.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.run.files import NewLines, append_line
from tests.faults.on_slurm import (
    ASKED,
    NODES,
    PATIENCE_S,
    STEPS,
    OnSlurm,
    agent,
    daemons,
    of_node,
    processes,
    undisturbed,
)
from tests.faults.stage import (
    FREEZER,
    apart,
    end_daemon,
    inside_mounts,
    listening,
    own_file_system,
    stopped,
    uninterruptible,
    up,
)
from tests.slurm.cluster import Cluster, running, wait_for
from tests.slurm.runs import events, status

OPTIONS = ("--network", "--no-accounting")  # of the cluster
TWO = ("cluster.nodes=2", ASKED)
LONGER = "model.args.seconds=0.5"  # 0.1 s without it; two forward passes per step on two nodes


@dataclass(frozen=True)
class Scene:
    """A run in training on ``cluster``, and what a fault may touch."""

    cluster: Cluster
    on: OnSlurm
    file_system: Path  # a small ext4 of its own
    choose: random.Random

    @property
    def batch_host(self) -> str:
        return self.on.shown("BatchHost")

    @property
    def other(self) -> str:
        """A node of the run that is not the batch host."""
        return self.choose.choice([name for name in self.on.nodes_of("started")[-1] if name != self.batch_host])

    def wait_until_over(self) -> None:
        """Waits for the end of the run, with the fault still in force."""
        wait_for("the end of the run", self._is_over, PATIENCE_S)

    def _is_over(self) -> bool:
        return self.on.submitter is None or self.on.submitter.poll() is not None


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        inject: injects the fault into a run that has reached a step, and undoes it.
        says: what ``why`` must contain after the run.
        fails: whether an attempt fails, so that ``why`` names a failure; otherwise it says that nothing failed.
        overrides: the nodes and other keys of the run.
        own_file_system: whether the run directory is on the file system of the scene.
        whole: whether the run completes; otherwise the submitter must say that the run directory was deleted.
    """

    inject: Callable[[Scene], None]
    says: tuple[str, ...] = ()
    fails: bool = False
    overrides: tuple[str, ...] = TWO
    own_file_system: bool = False
    whole: bool = True


# ---- nodes that do not execute --------------------------------------------------------------------------------------


def node_stopped_20s(scene: Scene) -> None:
    with stopped(of_node(scene.cluster, scene.other)):
        time.sleep(20)


def batch_host_stopped_20s(scene: Scene) -> None:
    with stopped(of_node(scene.cluster, scene.batch_host)):
        time.sleep(20)


def node_stopped(scene: Scene) -> None:
    with stopped(of_node(scene.cluster, scene.other)):
        scene.wait_until_over()


def batch_host_stopped(scene: Scene) -> None:
    with stopped(of_node(scene.cluster, scene.batch_host)):
        scene.wait_until_over()


def agent_stopped(scene: Scene) -> None:
    """Slurm's daemons live, so Slurm sees a healthy node."""
    top = agent(scene.cluster, scene.other)
    with stopped([top, *top.children(recursive=True)]):
        scene.wait_until_over()


def node_uninterruptible(scene: Scene) -> None:
    with uninterruptible([*processes(scene.cluster, scene.other)]):
        scene.wait_until_over()


def batch_host_uninterruptible(scene: Scene) -> None:
    """Its batch script and srun as well."""
    with uninterruptible([*processes(scene.cluster, scene.batch_host)]):
        scene.wait_until_over()


# ---- Slurm and its administrators -----------------------------------------------------------------------------------


def suspended(scene: Scene) -> None:
    on = scene.on
    scene.cluster.call("scontrol", "suspend", on.job)
    time.sleep(25)
    (shown,) = status(scene.cluster, on.run, str(on.run))
    assert shown["state"] == "suspended", shown
    assert "suspended" in on.why().splitlines()[0]
    scene.cluster.call("scontrol", "resume", on.job)
    scene.wait_until_over()
    (shown,) = status(scene.cluster, on.run, str(on.run))
    assert shown["ledger"]["suspended_s"] > 20, shown["ledger"]
    assert events(on.run, "restarted", "requeued", "node_lost") == []


def held(scene: Scene) -> None:
    on = scene.on
    scene.cluster.call("scontrol", "requeuehold", on.job)
    wait_for("the hold", lambda: "scontrol release" in on.why(), 60)
    (shown,) = status(scene.cluster, on.run, str(on.run))
    assert shown["state"].startswith(("pending", "requeue_hold")), shown
    scene.cluster.call("scontrol", "release", on.job)


def drained(scene: Scene) -> None:
    node = scene.other
    scene.cluster.call("scontrol", "update", f"nodename={node}", "state=drain", "reason=bad dimm")
    scene.wait_until_over()
    told = scene.on.why()
    assert re.search(rf"{node} drain(ed|ing)\S* \(bad dimm\)", told), told


def slurmd_killed(scene: Scene) -> None:
    for daemon in daemons(scene.cluster, scene.other):
        daemon.kill()
    time.sleep(8)
    up(scene.cluster)


def slurmctld_restarted(scene: Scene) -> None:
    end_daemon(scene.cluster, "slurmctld", signal.SIGTERM)
    time.sleep(10)
    up(scene.cluster)


def munge_away(scene: Scene) -> None:
    end_daemon(scene.cluster, "munged", signal.SIGKILL)
    time.sleep(37)
    up(scene.cluster)


# ---- the file system of the run directory ---------------------------------------------------------------------------


def file_system_frozen(scene: Scene) -> None:
    subprocess.run(["fsfreeze", "--freeze", str(scene.file_system)], check=True)
    try:
        time.sleep(30)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(scene.file_system)], check=True)


def directory_deleted(scene: Scene) -> None:
    shutil.rmtree(scene.on.run, ignore_errors=True)
    scene.wait_until_over()


def directory_read_only(scene: Scene) -> None:
    """What is open stays writable, since the kernel refuses to change a mount that is being written to."""
    over = ["mount", "--bind", str(scene.on.run), str(scene.on.run)]
    closed = ["mount", "-o", "remount,ro,bind", str(scene.on.run)]
    places = [prefix for node in NODES for prefix in inside_mounts(scene.cluster, node)]
    for prefix in places:
        subprocess.run([*prefix, *over], check=True)
        subprocess.run([*prefix, *closed], check=True)
    try:
        time.sleep(25)
    finally:
        for prefix in places:
            subprocess.run([*prefix, "umount", "--lazy", str(scene.on.run)], check=True)


def file_system_full(scene: Scene) -> None:
    filler = scene.file_system / "filler"
    descriptor = os.open(filler, os.O_CREAT | os.O_WRONLY)
    try:
        size = 1 << 20
        while size >= 4096:
            try:
                os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, size)
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
                size //= 2
        time.sleep(25)
    finally:
        os.close(descriptor)
        filler.unlink()


# ---- the network ----------------------------------------------------------------------------------------------------


def nodes_apart(scene: Scene) -> None:
    """Two nodes that both reach the batch host and the controller."""
    first, second = [name for name in scene.on.nodes_of("started")[-1] if name != scene.batch_host]
    with apart(scene.cluster, first, second):
        time.sleep(15)


def batch_host_apart(scene: Scene) -> None:
    with apart(scene.cluster, scene.batch_host, scene.other):
        time.sleep(15)


KINDS: dict[str, Kind] = {
    "node_stopped_20s": Kind(node_stopped_20s, ("silent for",), fails=True),
    "batch_host_stopped_20s": Kind(batch_host_stopped_20s, ("paused", "frozen nodes")),
    "node_stopped": Kind(node_stopped, ("silent for",), fails=True),
    "batch_host_stopped": Kind(batch_host_stopped, ("node_lost, node n1",), fails=True),
    "agent_stopped": Kind(agent_stopped, ("silent for",), fails=True),
    "node_uninterruptible": Kind(node_uninterruptible, ("silent for",), fails=True),
    "batch_host_uninterruptible": Kind(batch_host_uninterruptible, ("node_lost, node n1",), fails=True),
    "suspended": Kind(suspended, ("Slurm suspended the job for", "· suspended ")),
    "held": Kind(held, ("requeued_by_slurm",)),
    "drained": Kind(drained, ("bad dimm",)),
    "slurmd_killed": Kind(slurmd_killed, overrides=(*TWO, LONGER)),
    "slurmctld_restarted": Kind(slurmctld_restarted, overrides=(*TWO, LONGER)),
    "munge_away": Kind(munge_away, overrides=(*TWO, "model.args.seconds=1")),
    "file_system_frozen": Kind(file_system_frozen, ("file_system, ",), fails=True, own_file_system=True),
    "directory_deleted": Kind(directory_deleted, own_file_system=True, whole=False, overrides=(*TWO, LONGER)),
    "directory_read_only": Kind(
        directory_read_only, ("Read-only file system",), fails=True, overrides=(*TWO, LONGER), own_file_system=True
    ),
    "file_system_full": Kind(
        file_system_full,
        ("checkpoint_failed", "No space left on device"),
        fails=True,
        overrides=(*TWO, LONGER),
        own_file_system=True,
    ),
    "nodes_apart": Kind(nodes_apart, overrides=("cluster.nodes=3", ASKED)),
    "batch_host_apart": Kind(
        batch_host_apart, ("silent for",), fails=True, overrides=(*TWO, "elastic.heartbeat_timeout_s=5")
    ),
}


def why_impossible(name: str) -> str | None:
    """Returns why this machine cannot inject faults of a kind; None if it can."""
    if os.geteuid() != 0:
        return "mounts and network namespaces need root"
    if name.endswith("uninterruptible") and not os.access(FREEZER, os.W_OK):
        return f"processes in uninterruptible sleep need the freezer of control groups version 1 in {FREEZER}"
    return None


# ---- the stage ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A cluster, a file system, and the weights of the undisturbed run."""

    cluster: Cluster
    file_system: Path
    whole: str


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        whole = undisturbed(Path(scratch), STEPS)
    with own_file_system() as file_system, running(*OPTIONS) as cluster:
        yield Stage(cluster, file_system, whole)


def perform(name: str, stage: Stage, seed: int, folder: Path) -> dict[str, object]:
    """Runs one case in ``folder``; returns its result line.

    Raises:
        AssertionError: what must hold after the case does not.
    """
    kind, choose = KINDS[name], random.Random(f"{seed}:{name}")
    place = stage.file_system / name if kind.own_file_system else folder
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    on = OnSlurm.submit(stage.cluster, place, *kind.overrides)
    step = choose.randrange(6, 12)
    try:
        on.wait_for_step(step)
        scene = Scene(stage.cluster, on, stage.file_system, choose)
        injected = time.time()
        kind.inject(scene)
        if kind.whole:
            on.finished(stage.whole)
        else:
            on.nothing_left()
        check_told(kind, on)
        for node in NODES:
            assert listening(stage.cluster, node) == 1, f"a port is left open on {node}"
        headline = on.why().splitlines()[0].partition(": ")[2] if kind.whole else ""
        return {"step": step, "seconds": round(time.time() - injected, 1), "restarts": on.shown("Restarts"),
                "why": headline}  # fmt: skip
    finally:
        cleared(stage.cluster, on, place)
        if kind.own_file_system:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(place, folder, ignore_dangling_symlinks=True)
            shutil.rmtree(place, ignore_errors=True)


def check_told(kind: Kind, on: OnSlurm) -> None:
    if not kind.whole:
        assert on.submitter is not None
        output, _ = on.submitter.communicate()
        told = output.replace(str(on.run), "RUN")
        assert "was deleted" in told, f"the submitter does not say what happened:\n{told}"
        return
    told = on.why()
    for words in kind.says:
        assert words in told, f"{words!r} is not in the answer of why:\n{told}"
    assert ("nothing failed" in told.splitlines()[0]) != kind.fails, told


def cleared(cluster: Cluster, on: OnSlurm, place: Path) -> None:
    """Ends what a failed case has left, and makes all nodes available."""
    cluster.cancel_below(place)
    if on.submitter is not None and on.submitter.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            on.submitter.wait(60)
        on.submitter.kill()
    up(cluster)
    wait_for("the nodes to be idle", lambda: _idle(cluster), PATIENCE_S)


def _idle(cluster: Cluster) -> bool:
    shown = cluster.call("sinfo", "-h", "-N", "-p", "cpu", "-o", "%T").stdout.split()
    return shown == ["idle"] * len(NODES)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the directory of results and runs")
    parser.add_argument("--only", action="append", choices=KINDS, help="only this kind; may be repeated")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # undoes the fault and ends the cluster
    results, seed = options.out.resolve() / "results.jsonl", options.seed
    passed = {line["case"] for line in NewLines(results).read() if line["seed"] == seed and line["passed"]}
    left = [name for name in options.only or KINDS if name not in passed]
    failures = 0
    for name, reason in [(name, why_impossible(name)) for name in left]:
        if reason is not None:
            print(f"{name} is left out: {reason}", file=sys.stderr)
            left.remove(name)
    if not left:
        return 0
    with stage(options.out.resolve()) as ready:
        for name in left:
            began, line = time.time(), {"case": name, "seed": seed, "passed": True}
            try:
                line |= perform(name, ready, seed, options.out.resolve() / "runs" / name)
            except Exception as error:
                failures += 1
                line |= {"passed": False, "error": f"{type(error).__name__}: {error}"[:4000]}
                traceback.print_exc()
            line["total_s"] = round(time.time() - began, 1)
            append_line(results, line)
            print(json.dumps(line), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
