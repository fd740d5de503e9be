"""Checks all nodes of an allocation: compares their reports, tests TCP between them, and runs the preflight.

Each node examines itself in its own task. Every node listens on a port of the agents' range and connects to the first
node, as agents do, and to the next one, as a ring does. The time for this does not grow with the number of nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.bench.doctor.node import BAD_SKEW_S, SKEW_S, NodeReport
from hpc_train.bench.measuring import run_benchmark
from hpc_train.bench.request import WorkerRequest
from hpc_train.config.schema import Config
from hpc_train.config.values import with_all_workers
from hpc_train.elastic.rendezvous.addresses import FIRST_PORT, PORTS, candidate_ports
from hpc_train.launch.gpus import gpus_of_this_job
from hpc_train.launch.script import container_of, python, step_on_nodes
from hpc_train.machine.allocation import current_allocation, expand, workers_per_node
from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.machine.network.nccl_settings import different_versions, merged, who_has_what
from hpc_train.machine.network.rails import different_rails, sick_nodes
from hpc_train.run.exits import Exit
from hpc_train.schedulers.slurm import client
from hpc_train.schedulers.slurm.client import SlurmError
from hpc_train.schedulers.slurm.variables import Receiver, environment_for
from hpc_train.units import counted

ENTRY = "hpc_train.bench.worker:run_preflight"
STEP_S = 300.0
VISIBLE_S = 20.0  # longest wait until files of other nodes are visible here
SUBJECT = "TCP"
TRIES = 3  # ports that a node tries to listen on
LIMIT_S = 60.0  # until all nodes have started
ATTEMPT_S = 2.0  # for a connection
SILENT = 2 * TRIES  # attempts without any answer; a node that has not started yet refuses instead
RANGE = f"{FIRST_PORT}-{FIRST_PORT + PORTS - 1}"


def nodes_of_allocation() -> int:
    """Returns the number of nodes to examine; 0 outside of an allocation and in a task of ``doctor`` itself."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        return 0
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)


def examine_all(nodes: int, config: Config, overrides: Sequence[str]) -> tuple[list[NodeReport], list[Finding]]:
    """Returns the reports of the nodes that responded, and findings about the other nodes and about differences between
    nodes."""
    root = Path(config.run.root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".doctor-", dir=root))
    except OSError as error:
        text = f"the nodes cannot write their reports to {root}: {error.strerror}"
        fix = "remove files that are no longer needed, or set another run.root"
        return [], [Finding("nodes", ERROR, text, fix)]
    problem = ""  # as srun reports it
    try:
        step = step_of_nodes(nodes, config, ["doctor", "--report-to", str(folder), *overrides])
        try:
            client.run(step, environment=environment_for(Receiver.INNER_STEP), timeout_s=STEP_S)
        except SlurmError as error:
            lines = error.said.splitlines()
            messages = [line.strip() for line in lines if not line.startswith(("srun: ", "slurmstepd: "))]
            problem = f": {' / '.join((messages or lines)[-3:])}"
        until = time.monotonic() + (1.0 if problem else VISIBLE_S)
        while len(files := sorted(folder.glob("*.json"))) < nodes and time.monotonic() < until:
            time.sleep(0.2)
        reports = [NodeReport.from_json(json.loads(file.read_text())) for file in files]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    findings = list(compare(reports))
    if len(reports) < nodes:
        names = set(expand(os.environ.get("SLURM_JOB_NODELIST", ""))) - {report.name for report in reports}
        text = f"no report from {nodes - len(reports)} of {nodes} nodes{problem}"
        if names:
            text += f" ({', '.join(sorted(names))})"
        fix = f"check that they see {root} and the same Python: srun --overlap ls {root}"
        findings.append(Finding("nodes", ERROR, text, fix))
    return reports, findings


def step_of_nodes(nodes: int, config: Config, words: Sequence[str], *options: str) -> list[str]:
    """Returns srun's command for ``python -m hpc_train WORDS`` as one task on each node of this allocation.

    It has the GPUs that the agents of a run would have.
    """
    inside = []
    container = container_of(config, 0)
    if container is not None:
        inside = [*container.srun_options(container.seen()), *container.command(container.seen())]
    gpus = gpus_of_this_job()
    command = [python(config.cluster, container), "-m", "hpc_train", *words]
    return step_on_nodes(nodes, "--overlap", *options, *gpus.srun_options(gpus.per_node), *inside, *command)


def compare(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    facts = [report.facts for report in reports]
    for line in different_versions(facts):
        yield Finding(
            "versions", ERROR, line, "use one environment for all nodes, or cluster.exclude for those that differ"
        )
    for name in dict.fromkeys(name for report in reports for name, _ in report.must_match):
        values = {report.name: dict(report.must_match).get(name, "unknown") for report in reports}
        if len(set(values.values())) > 1:
            fix = "set cluster.python to a path that is valid on all nodes"
            if "InfiniBand" in name or "RoCE" in name:
                fix = "ask the site; until then use cluster.exclude for the nodes that differ"
            yield Finding("nodes", ERROR, f"{name} differs between nodes: {who_has_what(values)}", fix)
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


def _clocks(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    skews = sorted((report.skew, report.name) for report in reports if report.skew is not None)
    if len(skews) < 2:
        return
    low, ahead = skews[0]
    high, behind = skews[-1]
    if high - low < SKEW_S:
        yield Finding("clock", OK, f"{len(skews)} nodes agree within {SKEW_S:g} s")
        return
    level = ERROR if high - low > BAD_SKEW_S else WARNING
    text = f"the clocks of {ahead} and {behind} are {high - low:.2f} s apart"
    yield Finding(
        "clock", level, text, "ask the site to run chrony or ntpd on the nodes; until then use cluster.exclude"
    )


def ports_of(seed: str, name: str) -> list[int]:
    """Returns the ports that the node ``name`` tries; all nodes derive them without exchanging anything."""
    return [port for port, _ in zip(candidate_ports(f"doctor:{seed}:{name}"), range(TRIES), strict=False)]


def peers(names: Sequence[str], this_node: str) -> list[str]:
    """Returns the nodes that ``this_node`` connects to: the first and the next one."""
    after = names[(names.index(this_node) + 1) % len(names)] if this_node in names else this_node
    return [name for name in dict.fromkeys((names[0], after)) if name != this_node]


def check_reach(names: Sequence[str], this_node: str, seed: str, limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Connects to peers and lets them connect, for at most ``limit_s`` seconds.

    Args:
        names: the nodes in the order of their number, by the names at which they are reached.
        seed: text that is equal on all nodes of this check.
    """
    if len(names) < 2 or this_node not in names:
        return
    until = time.monotonic() + limit_s
    listener = _listen(ports_of(seed, this_node))
    if listener is None:
        fix = "list listening sockets with `ss -ltn`; ask the site about a sandbox"
        yield Finding(SUBJECT, ERROR, f"cannot listen on ports of {RANGE}", fix)
        return
    callers = sum(this_node in peers(names, name) for name in names)
    answering = threading.Thread(target=_answer, args=(listener, callers, until), daemon=True)
    answering.start()
    problems = {name: _connect(name, ports_of(seed, name), until) for name in peers(names, this_node)}
    answering.join()
    failed = {name: problem for name, problem in problems.items() if problem}
    for name, problem in failed.items():
        text = f"no TCP connection from {this_node} to {name} on ports of {RANGE}: {problem}"
        fix = f"ask the site to open ports {RANGE} between compute nodes; cluster.exclude={name} if only it is affected"
        yield Finding(SUBJECT, ERROR, text, fix)
    if not failed:
        yield Finding(SUBJECT, OK, f"connections to {', '.join(problems)} succeed on ports of {RANGE}")


def _listen(ports: Sequence[int]) -> socket.socket | None:
    for port in ports:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind(("", port))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    return None


def _answer(listener: socket.socket, callers: int, until: float) -> None:
    """Accepts a connection from each caller; returns early when all have connected."""
    seen: set[str] = set()
    with listener:
        while len(seen) < callers and (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(ATTEMPT_S)
                    seen.add(connection.recv(256).decode(errors="replace"))


def _connect(name: str, ports: Sequence[int], until: float) -> str | None:
    """Connects to one of ``ports``; returns the reason if none accepts in time. The other node may start later."""
    problem = "it does not respond"
    silent = 0
    while time.monotonic() < until and silent < SILENT:
        for port in ports:
            try:
                with socket.create_connection((name, port), timeout=ATTEMPT_S) as connection:
                    connection.sendall(f"{socket.gethostname()}:{os.getpid()}:{port}".encode())
                    return None
            except TimeoutError:
                problem = f"port {port} does not respond, as behind a firewall"
                silent += 1
            except OSError as error:
                problem = error.strerror or str(error)
        time.sleep(0.1)
    return problem


def measure_nodes(config: Config, as_json: bool) -> int:
    """Runs the full preflight on this machine or on the nodes of this Slurm step, and prints the result on the first
    node.

    Returns: The exit code, which is 1 if a finding is an error.
    """
    nodes = current_allocation().nodes
    _, workers = workers_per_node(config.cluster)
    config = with_all_workers(config, nodes * workers)
    config = replace(
        config,
        cluster=replace(config.cluster, nodes=nodes, preflight="full", preflight_action="warn"),
        elastic=replace(config.elastic, spares=0, min_nodes=None),
    )
    code, result = run_benchmark(config, WorkerRequest(), ENTRY)
    if result is None:
        return code
    print(json.dumps(result) if as_json else "\n".join(_measurements(result)), flush=True)
    if any(finding["level"] == "error" for finding in result["findings"]):
        return Exit.FAILED
    return Exit.DONE


def measure_allocation(nodes: int, config: Config, words: Sequence[str]) -> int:
    """Runs ``python -m hpc_train WORDS`` as one task on each node of this allocation; returns the exit code."""
    step = step_of_nodes(nodes, config, words, "--unbuffered")
    return subprocess.run(step, env=environment_for(Receiver.INNER_STEP), check=False).returncode


def _measurements(result: Mapping[str, Any]) -> Iterator[str]:
    nodes = result["nodes"]
    yield f"preflight of {', '.join(nodes)} in {result['seconds']:.1f} s"
    yield f"devices: {', '.join(result['devices'])}"
    yield from _range("matrix products", result["gemm_tflops"], "TFLOP/s per rank")
    for kind, results in result["burn_in"].items():
        for results_hash, ranks in results.items():
            yield f"results of the burn-in: {results_hash} on {counted(len(ranks), 'rank', 'ranks')} ({kind})"
    yield from _range("host to GPU", result["copy_gb_per_s"], "GB/s per rank")
    bus = result["bus_gb_per_s"]
    rates = {"node": [*bus["nodes"].values()], "rail": bus["rails"], "world": [bus["world"]]}
    for (scope, measured), place in zip(rates.items(), ("in a node", "over a rail", "over all ranks"), strict=True):
        unit = "GB/s (bus bandwidth)"
        expected = result["expected_gb_per_s"][scope]
        if expected:
            unit += f", expected {expected['bus']:.4g} ({expected['reason']})"
        yield from _range(f"all-reduce {place}", measured, unit)
    yield from _range("pairs of nodes", [*result["pairs_gb_per_s"].values()], "GB/s each way")
    yield from _range("clocks, relative to the first node", [*result["clock_offset_s"].values()], "s")
    if result["networks"]:
        yield f"network of NCCL: {', '.join(result['networks'])}"
    for finding in sorted(result["findings"], key=lambda finding: finding["level"]):
        yield f"{finding['level']:<8}{finding['message']}"
        yield f"        fix: {finding['fix']}"
    if not result["findings"]:
        yield "no problem found"


def _range(name: str, values: Sequence[float | None], unit: str) -> Iterator[str]:
    present = sorted(value for value in values if value is not None)
    if present:
        ends = dict.fromkeys(f"{value:.4g}" for value in (present[0], present[-1]))
        yield f"{name}: {' to '.join(ends)} {unit}"
