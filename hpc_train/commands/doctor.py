"""``python -m hpc_train doctor [OVERRIDES]`` checks whether training can run here, and prints problems with fixes.

It checks this machine, all nodes of the allocation it runs in, or with ``--submit`` the nodes of a short job with the
resources of the run that the overrides describe. ``--node --quiet`` checks the hardware of this node in one line. The
exit code is 1 if there is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.config.options import OptionParser
from hpc_train.errors import UserError, nearest
from hpc_train.run.exits import Exit
from hpc_train.run.files import write_json, write_text

if TYPE_CHECKING:  # the quick check of a node does not import these modules
    from hpc_train.bench.doctor.node import NodeReport
    from hpc_train.config.schema import Config
    from hpc_train.launch.request import ComposedJob
    from hpc_train.machine.health.finding import Finding
    from hpc_train.machine.network.nccl_settings import Version
    from hpc_train.machine.network.node import FabricReport

SHORT = "00:10:00"
OPTIONS = ("--json", "--verbose", "--nodes", "--measure", "--submit", "--sbatch", "--node", "--quiet", "--gpus",
           "--openmetrics", "--sysfs", "--topo", "--ibstat", "--nccl", "--help")  # fmt: skip


def main(arguments: list[str]) -> int:
    options, overrides = _parser().parse_known_args(arguments)
    _check(options, overrides)
    if options.quiet:
        return _check_quickly(options)
    from hpc_train.machine.network.nccl_settings import parse_version

    nccl = None if options.nccl is None else parse_version(options.nccl)
    if options.sysfs is not None or options.topo is not None or options.ibstat is not None:
        return _examine_recording(options, nccl)
    from hpc_train.bench.doctor.job import check_slurm_and_job, composed
    from hpc_train.bench.doctor.node import check_environment
    from hpc_train.bench.doctor.nodes import examine_all, measure_allocation, measure_nodes, nodes_of_allocation
    from hpc_train.machine.allocation import current_allocation
    from hpc_train.machine.health.finding import ERROR, worst

    job = composed(overrides)
    config = job.config
    if options.submit:
        return _submit(job, overrides, options)
    here = current_allocation()  # several nodes if srun has started a task of this command on each of them
    if options.measure:
        nodes = 0 if options.task or options.node or here.nodes > 1 else nodes_of_allocation()
        if nodes:
            return measure_allocation(nodes, config, ["doctor", "--task", *_words(options), *overrides])
        return measure_nodes(config, options.json)
    if here.node_rank > 0 and not options.node and options.report_to is None and nodes_of_allocation():
        return Exit.DONE  # the first node examines all
    report = _examine_this_node(config)
    if options.report_to is not None:
        try:
            write_json(options.report_to / f"{report.name}.json", report.to_json())
        except OSError as error:
            raise UserError(
                f"{report.name} cannot write its report to {options.report_to}: {error.strerror}",
                where=str(options.report_to.parent),
                fix="free some space in this shared directory, or set run.root to another one that all nodes can write "
                "to",
            ) from None
        return Exit.DONE
    count = 1 if options.node else nodes_of_allocation()
    reports = [report]
    differences: list[Finding] = []
    if count > 1:
        answers, differences = examine_all(count, config, overrides)
        reports = answers or reports
    fabric = _fabric(reports, config, max(count, options.nodes), nccl)
    findings = [
        *check_slurm_and_job(job, submits=count == 0),
        *differences,
        *check_environment(reports[0].facts, fabric.decision),
    ]
    _show(reports, findings, fabric, options)
    everything = [*findings, *(finding for node in reports for finding in node.findings)]
    return Exit.FAILED if worst(everything) == ERROR else Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="python -m hpc_train doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verbose", action="store_true", help="also list passed checks and variables that are not set")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes of the job to check for (default: 2)")
    parser.add_argument("--submit", action="store_true", help="check the nodes of a short Slurm job")
    parser.add_argument("--measure", action="store_true", help="only run the preflight, which measures the speed")
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)  # a task of --measure in an allocation
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help="additional sbatch options for that job")
    parser.add_argument("--report-to", type=Path, help=argparse.SUPPRESS)  # a directory, for tasks of the job
    node = parser.add_argument_group("the hardware of this node, for the site's staff")
    node.add_argument("--node", action="store_true", help="check this node only")
    node.add_argument("--quiet", action="store_true", help="check its GPUs and ports in a second, and print one line")
    node.add_argument(
        "--gpus", type=int, metavar="N", help="the expected number of GPUs (default: as configured in Slurm)"
    )
    node.add_argument("--openmetrics", type=Path, metavar="FILE", help="also write the result for Prometheus")
    recorded = parser.add_argument_group("recordings of another machine, to check instead of this one")
    recorded.add_argument("--sysfs", type=Path, metavar="ROOT", help="a copy of /sys, or of /sys/class/infiniband")
    recorded.add_argument(
        "--topo", type=Path, metavar="FILE", help="output of nvidia-smi topo -m or rocm-smi --showtopo"
    )
    recorded.add_argument(
        "--ibstat", type=Path, metavar="FILE", help="output of ibstat, ibstatus, ibv_devinfo or ibdev2netdev"
    )
    recorded.add_argument("--nccl", metavar="VERSION", help="NCCL version on that machine")
    return parser


def _check(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Raises UserError for an unknown option, an invalid value or a contradiction."""
    if options.nodes < 1:
        raise UserError(f"--nodes {options.nodes} is not a number of nodes", where="--nodes", fix="--nodes 2")
    for word in overrides:
        if word.startswith("--"):
            raise UserError(f"unknown option {word}", where="doctor", fix=nearest(word, OPTIONS))
    if options.quiet and overrides:
        text = f"--quiet checks the hardware of this node and takes no overrides: {' '.join(overrides)}"
        raise UserError(text, where="--quiet", fix="doctor --node --quiet")
    if options.submit and (options.quiet or options.node):
        name = "--quiet" if options.quiet else "--node"
        text = f"{name} checks this node, but --submit checks the nodes of a job"
        raise UserError(text, where=name, fix="doctor --submit, or doctor --node --quiet on the node itself")
    if not options.quiet and (options.openmetrics is not None or options.gpus is not None):
        name = "--openmetrics" if options.openmetrics is not None else "--gpus"
        raise UserError(f"{name} needs --quiet", where=name, fix=f"doctor --node --quiet {name} ...")


def _check_quickly(options: argparse.Namespace) -> int:
    """Checks the hardware of this node; prints one line, or all findings as JSON."""
    from hpc_train.machine.health.health_check import check_node, metrics, node_name

    health = check_node(node_name(), gpus=options.gpus)
    if options.openmetrics is not None:
        try:
            write_text(options.openmetrics, metrics(health))
            options.openmetrics.chmod(0o644)  # the exporter is another user
        except OSError as error:
            fix = "give a file in a directory that exists and that you may write to"
            raise UserError(f"{options.openmetrics}: {error.strerror}", where="--openmetrics", fix=fix) from None
    if options.json:
        findings = [asdict(finding) for finding in health.findings]
        print(json.dumps({"node": health.node, "healthy": health.healthy, "findings": findings}, indent=2))
    else:
        print(health.line())
    return Exit.DONE if health.healthy else Exit.FAILED


def _examine_recording(options: argparse.Namespace, nccl: Version | None) -> int:
    from hpc_train.bench.doctor.report import recording_lines
    from hpc_train.machine.network.decision import FabricJob
    from hpc_train.machine.network.nccl_settings import settings
    from hpc_train.machine.network.node import gpus_recorded, read_recording, report
    from hpc_train.machine.network.rank_binding import unknown_cores

    facts = read_recording(options.sysfs, options.topo, options.ibstat)
    outcome = report(facts, FabricJob(options.nodes, gpus_recorded(facts, options.sysfs), nccl), settings(os.environ))
    unknown = [*outcome.facts.unknown, *unknown_cores(outcome.facts), *outcome.decision.unknown]
    if options.json:
        print(json.dumps(outcome.to_json(), indent=2))
    else:
        print("\n".join(recording_lines(outcome, unknown, options.verbose)))
    return Exit.DONE


def _submit(job: ComposedJob, overrides: Sequence[str], options: argparse.Namespace) -> int:
    """Submits the same command as a job with the run's resources and follows its output to the end."""
    from hpc_train.bench.doctor.job import resources
    from hpc_train.launch.command_job import follow, submit
    from hpc_train.launch.sbatch import refuse_other_scheduler
    from hpc_train.schedulers.slurm.client import controller_answers

    refuse_other_scheduler(job.config.cluster)
    if not controller_answers():
        text = "no job can be submitted from here: there is no sbatch, or no Slurm controller responds"
        fix = "use a login node of the cluster, or omit --submit for this machine"
        raise UserError(text, where="--submit", fix=fix)
    extra = [*resources(job), f"--time={SHORT}", *shlex.split(options.sbatch)]
    folder = Path(job.config.run.root) / "doctor"
    return follow(submit(["doctor", *overrides, *_words(options)], job.config, folder, extra))


def _words(options: argparse.Namespace) -> list[str]:
    words = [f"--{name}" for name in ("json", "verbose", "measure") if getattr(options, name)]
    if not options.measure:
        words += ["--nodes", str(options.nodes)]
        if options.nccl is not None:
            words += ["--nccl", options.nccl]
    return words


def _examine_this_node(config: Config) -> NodeReport:
    """Examines this node. A task of an allocation also finds the route to the first node, and tests connections."""
    from hpc_train.bench.doctor.node import examine
    from hpc_train.bench.doctor.nodes import check_reach
    from hpc_train.machine.allocation import current_allocation
    from hpc_train.machine.health.health_check import check_node
    from hpc_train.machine.network.facts import NodeFacts
    from hpc_train.machine.network.nccl_settings import read_versions
    from hpc_train.machine.network.node import automatic_interface, interface_to, this_node

    here = current_allocation()
    first = None
    if here.nodes > 1:  # the agent of node 0 listens
        first = here.address if here.node_rank == 0 else here.node_names[0]
    health = check_node(here.node_name, quick=False)
    if health.driver_hangs:  # other calls of nvidia-smi would hang as well
        route = None if first is None else interface_to(first)
        facts = NodeFacts(here.node_name, route=route, automatic=automatic_interface(), versions=read_versions())
    else:
        facts = this_node(here.node_name, first)
    report = examine(facts, config, health, first)
    if first is not None:
        connections = check_reach(here.node_names, here.node_name, here.launch_id)
        report = replace(report, findings=(*report.findings, *connections))
    return report


def _fabric(reports: Sequence[NodeReport], config: Config, nodes: int, nccl: Version | None) -> FabricReport:
    from hpc_train.machine.network.decision import FabricJob, decide, site_profile
    from hpc_train.machine.network.nccl_settings import lowest_nccl, merged
    from hpc_train.machine.network.node import report

    facts = [node.facts for node in reports]
    gpus = min(len(node.visible or node.gpus) for node in facts)
    job = FabricJob(nodes, gpus, nccl or lowest_nccl(facts), site_profile(config.cluster.fabric))
    settings, _ = merged({node.name: node.facts.settings for node in reports})
    return replace(report(facts[0], job, settings), decision=decide(facts, job, settings))


def _show(
    reports: Sequence[NodeReport], findings: Sequence[Finding], fabric: FabricReport, options: argparse.Namespace
) -> None:
    from hpc_train.bench.doctor.report import environment_lines, finding_lines, gpu_lines, verdict

    located = [*(("", finding) for finding in findings)]
    located += [(node.name, finding) for node in reports for finding in node.findings]
    first = verdict([finding for _, finding in located], len(reports))
    if options.json:
        result = {
            "verdict": first,
            **fabric.to_json(),
            "nodes": {node.name: node.to_json() for node in reports},
            "findings": [asdict(finding) for finding in findings],
        }
        print(json.dumps(result, indent=2))
        return
    lines = [first if options.verbose else f"{first} (--verbose lists them)"]
    lines += finding_lines(located, options.verbose)
    if fabric.facts.gpus:
        lines += gpu_lines(fabric)
    lines += environment_lines(fabric.decision, options.verbose)
    if fabric.facts.route is None and fabric.decision.fabric not in ("cpu", "one_node"):
        lines.append(
            "the interfaces between the nodes are unknown; run doctor in an allocation or with --submit to check them"
        )
    print("\n".join(lines))
