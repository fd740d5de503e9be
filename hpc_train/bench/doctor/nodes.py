"""Checks all nodes of an allocation: each examines itself in its own task, and the reports are compared."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpc_train.bench.doctor.disk import BAD_SKEW_S, SKEW_S
from hpc_train.bench.doctor.node import NodeReport
from hpc_train.config.schema import Config
from hpc_train.launch.gpus import gpus_of_this_job
from hpc_train.launch.script import container_of, python, step_on_nodes
from hpc_train.machine.allocation import expand
from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.machine.network.nccl_settings import different_versions, merged, who_has_what
from hpc_train.machine.network.rails import different_rails, sick_nodes
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.client import SlurmError
from hpc_train.schedulers.slurm.variables import Receiver, environment_for

STEP_S = 300.0
VISIBLE_S = 20.0  # wait at most this long until files of other nodes are visible here


def nodes_of_allocation() -> int:
    """Returns the number of nodes to examine; 0 outside of an allocation and in a task of ``doctor`` itself."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        return 0
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)


def examine_all(nodes: int, config: Config, overrides: Sequence[str]) -> tuple[list[NodeReport], list[Finding]]:
    """Returns the reports of the nodes that responded, and findings about the others and about differences."""
    root = Path(config.run.root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=root))
    except OSError as error:
        text = f"the nodes cannot write their reports to {root}: {error.strerror}"
        fix = "remove files that are no longer needed, or set another run.root"
        return [], [Finding("nodes", ERROR, text, fix)]
    try:
        problem = _start(nodes, config, overrides, folder)
        reports = _collect(folder, nodes, wait=problem is None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    findings = list(compare(reports))
    if len(reports) < nodes:
        names = set(expand(os.environ.get("SLURM_JOB_NODELIST", ""))) - {report.name for report in reports}
        text = f"no report from {nodes - len(reports)} of {nodes} nodes" + (f": {problem}" if problem else "")
        text += f" ({', '.join(sorted(names))})" if names else ""
        fix = f"check that they see {root} and the same Python: srun --overlap ls {root}"
        findings.append(Finding("nodes", ERROR, text, fix))
    return reports, findings


def _start(nodes: int, config: Config, overrides: Sequence[str], folder: Path) -> str | None:
    """Runs the step to its end; returns the error in srun's words, or None."""
    container = container_of(config, 0)
    own = [] if container is None else [*container.srun_options(container.seen()), *container.command(container.seen())]
    words = [python(config.cluster, container), "-m", "hpc_train", "doctor", "--report-to", str(folder), *overrides]
    gpus = gpus_of_this_job()  # the GPUs that the agents of a run would have
    own = [*gpus.srun_options(gpus.per_node), *own]
    step = step_on_nodes(nodes, "--overlap", *own, *words)
    try:
        client.run(step, environment=environment_for(Receiver.INNER_STEP), timeout_s=STEP_S)
    except SlurmError as error:
        lines = error.said.splitlines()
        own = [line.strip() for line in lines if not line.startswith(("srun: ", "slurmstepd: "))]
        return " / ".join((own or lines)[-3:])
    return None


def _collect(folder: Path, nodes: int, wait: bool) -> list[NodeReport]:
    until = time.monotonic() + (VISIBLE_S if wait else 1.0)
    while len(files := sorted(folder.glob("*.json"))) < nodes and time.monotonic() < until:
        time.sleep(0.2)
    return [NodeReport.from_json(json.loads(file.read_text())) for file in files]


def compare(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Compares what must be equal on all nodes."""
    facts = [report.facts for report in reports]
    for line in different_versions(facts):
        yield Finding(
            "versions", ERROR, line, "use one environment for all nodes, or cluster.exclude for those that differ"
        )
    for name in dict.fromkeys(name for report in reports for name, _ in report.must_match):
        values = {report.name: dict(report.must_match).get(name, "unknown") for report in reports}
        if len(set(values.values())) > 1:
            text = f"{name} differs between nodes: {who_has_what(values)}"
            yield Finding("nodes", ERROR, text, _fix_of_difference(name))
    for line in merged({report.name: report.facts.settings for report in reports})[1]:
        yield Finding("environment", WARNING, line, "load the same modules and use the same files on all nodes")
    for sick in sick_nodes(facts):
        yield Finding("network", ERROR, sick.text, sick.fix)
    for line in different_rails(facts) if facts else ():
        yield Finding(
            "network",
            WARNING,
            f"GPUs and NICs are matched differently: {line}",
            "use cluster.exclude or cluster.constraint",
        )
    yield from _clocks(reports)


def _fix_of_difference(name: str) -> str:
    if "InfiniBand" in name or "RoCE" in name:
        return "ask the site; until then use cluster.exclude for the nodes that differ"
    return "set cluster.python to a path that is valid on all nodes"


def _clocks(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    known = sorted((report.skew, report.name) for report in reports if report.skew is not None)
    if len(known) < 2:
        return
    low, ahead = known[0]
    high, behind = known[-1]
    if high - low < SKEW_S:
        yield Finding("clock", OK, f"{len(known)} nodes agree within {SKEW_S:g} s")
        return
    level = ERROR if high - low > BAD_SKEW_S else WARNING
    text = f"the clocks of {ahead} and {behind} are {high - low:.2f} s apart"
    yield Finding(
        "clock", level, text, "ask the site to run chrony or ntpd on the nodes; until then use cluster.exclude"
    )
