"""``python -m hpc_train doctor [OVERRIDES]`` checks whether training can run here, and prints problems with fixes.

It checks this machine, all nodes of the allocation it runs in, or with ``--submit`` the nodes of a short job with the
resources of the run that the overrides describe. The exit code is 1 if there is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hpc_train.config.schema import Config
from hpc_train.doctor.finding import ERROR, OK, Finding, worst
from hpc_train.doctor.node import NodeReport, examine
from hpc_train.errors import UserError
from hpc_train.fabric.decision import FabricJob, decide, site_profile
from hpc_train.fabric.facts import format_cpu_list
from hpc_train.fabric.nccl_settings import merged, settings
from hpc_train.fabric.rank_binding import unknown_cores
from hpc_train.fabric.recording import FabricReport, gpus_recorded, read_recording, report
from hpc_train.fabric.versions import Version, lowest_nccl, parse_version
from hpc_train.run.exits import Exit
from hpc_train.run.files import write_json

SHORT = "00:10:00"


def main(arguments: list[str]) -> int:
    options, overrides = _parser().parse_known_args(arguments)
    nccl = None if options.nccl is None else parse_version(options.nccl)
    if options.sysfs is not None or options.topo is not None or options.ibstat is not None:
        return _examine_recording(options, nccl)
    from hpc_train.doctor.job import composed

    asked = composed(overrides)
    if options.submit:
        return _submit(asked.config, overrides, options)
    if options.measure:
        return _measure(asked.config, overrides, options)
    own = _examine_this_node(asked.config)
    if options.node is not None:
        _write_report(own, options.node)
        return Exit.DONE
    from hpc_train.doctor.job import check_slurm_and_job
    from hpc_train.doctor.nodes import examine_all, nodes_of_allocation

    count = nodes_of_allocation()
    reports, between = examine_all(count, asked.config, overrides) if count > 1 else ([own], [])
    seen = Seen.of(reports or [own], asked.config, max(count, options.nodes), nccl)
    findings = [*check_slurm_and_job(asked, submits=count == 0), *between, *seen.environment]
    _show_live(seen, findings, options.json)
    everything = [*findings, *(finding for node in seen.nodes for finding in node.findings)]
    return Exit.FAILED if worst(everything) == ERROR else Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hpc_train doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes of the job to check for (default: 2)")
    parser.add_argument("--submit", action="store_true", help="check the nodes of a short Slurm job")
    parser.add_argument("--measure", action="store_true", help="only run the preflight, which measures the speed")
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)  # of --measure in an allocation
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help="additional sbatch options for that job")
    parser.add_argument("--node", type=Path, help=argparse.SUPPRESS)  # directory of the reports, for tasks of the job
    recorded = parser.add_argument_group("recordings of another machine, to check instead of this one")
    recorded.add_argument("--sysfs", type=Path, metavar="ROOT", help="a copy of /sys, or of /sys/class/infiniband")
    recorded.add_argument("--topo", type=Path, metavar="FILE", help="output of nvidia-smi topo -m")
    recorded.add_argument(
        "--ibstat", type=Path, metavar="FILE", help="output of ibstat, ibstatus, ibv_devinfo or ibdev2netdev"
    )
    recorded.add_argument("--nccl", metavar="VERSION", help="NCCL version on that machine")
    return parser


def _examine_recording(options: argparse.Namespace, nccl: Version | None) -> int:
    facts = read_recording(options.sysfs, options.topo, options.ibstat)
    outcome = report(facts, FabricJob(options.nodes, gpus_recorded(facts, options.sysfs), nccl), settings(os.environ))
    if options.json:
        print(json.dumps(outcome.to_json(), indent=2))
    else:
        _show_recording(outcome)
    return Exit.DONE


def _write_report(own: NodeReport, folder: Path) -> None:
    """Writes the report of this node for the node that compares all reports."""
    try:
        write_json(folder / f"{own.name}.json", own.to_json())
    except OSError as error:
        raise UserError(
            f"{own.name} cannot write its report to {folder}: {error.strerror}",
            where=str(folder.parent),
            fix="free some space in this shared directory, or set run.root to another one that all nodes can write to",
        ) from None


def _submit(config: Config, overrides: Sequence[str], options: argparse.Namespace) -> int:
    """Submits the same command as a job with the run's resources and follows its output to the end."""
    from hpc_train.doctor.job import resources
    from hpc_train.launch.command_job import follow, submit

    words = ["doctor", *_words(options), *overrides]
    if options.measure:
        from hpc_train.bench.preflight import ANY_NUMBER, with_all_workers

        nodes = config.cluster.nodes if isinstance(config.cluster.nodes, int) else 1
        config = with_all_workers(config, nodes * ANY_NUMBER)
    extra = [*resources(config, overrides), f"--time={SHORT}", *shlex.split(options.sbatch)]
    return follow(submit(words, config, Path(config.run.root) / "doctor", extra))


def _words(options: argparse.Namespace) -> list[str]:
    return [*(["--json"] if options.json else []), *(["--measure"] if options.measure else [])]


def _measure(config: Config, overrides: Sequence[str], options: argparse.Namespace) -> int:
    """Runs the preflight here, or in an allocation as a task on each node."""
    from hpc_train.bench.preflight import measure_allocation, measure_nodes
    from hpc_train.doctor.nodes import nodes_of_allocation

    nodes = 0 if options.task else nodes_of_allocation()
    if nodes:
        return measure_allocation(nodes, config, ["doctor", "--task", *_words(options), *overrides])
    return measure_nodes(config, options.json)


def _examine_this_node(config: Config) -> NodeReport:
    from hpc_train.cluster.allocation import current_allocation
    from hpc_train.fabric.node import this_node

    return examine(this_node(current_allocation().node_name, None), config)


@dataclass(frozen=True)
class Seen:
    """Holds the reports of the nodes, and the fabric settings and findings for a job on them."""

    nodes: tuple[NodeReport, ...]
    fabric: FabricReport
    environment: tuple[Finding, ...]

    @classmethod
    def of(cls, reports: Sequence[NodeReport], config: Config, nodes: int, nccl: Version | None) -> Seen:
        from hpc_train.doctor.node import check_environment

        facts = [found.facts for found in reports]
        gpus = min(len(found.visible or found.gpus) for found in facts)
        job = FabricJob(nodes, gpus, nccl or lowest_nccl(facts), site_profile(config.cluster.fabric))
        found, _ = merged({one.name: one.facts.settings for one in reports})
        decision = decide(facts, job, found)
        fabric = replace(report(facts[0], job, found), decision=decision)
        return cls(tuple(reports), fabric, tuple(check_environment(facts[0], decision)))

    def to_json(self) -> dict[str, Any]:
        return self.fabric.to_json() | {"nodes": {node.name: node.to_json() for node in self.nodes}}


def _show_live(seen: Seen, findings: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        print(json.dumps(seen.to_json() | {"findings": [finding.to_json() for finding in findings]}, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        _print_finding(console, finding)
    problems_only = len(seen.nodes) > 1
    for node in seen.nodes:
        console.print(f"\n{node.name}:")
        for finding in node.findings:
            if finding.level != OK or not problems_only:
                _print_finding(console, finding)
    if seen.fabric.facts.gpus:
        console.print("")
        _table(console, seen.fabric)


def _print_finding(console: Console, finding: Finding) -> None:
    console.print(f"{finding.level:<8}{finding.subject}: {finding.text}", markup=False)
    if finding.fix:
        console.print(f"        fix: {finding.fix}", markup=False)


def _show_recording(outcome: FabricReport) -> None:
    console = Console(highlight=False)
    console.print(f"between nodes: {outcome.decision.fabric}")
    if outcome.facts.gpus:
        _table(console, outcome)
    for verdict in outcome.ports:
        rate = "" if verdict.port.rate_gbps is None else f" {verdict.port.rate_gbps:g} Gb/s"
        use = {True: "used", False: "left out", None: "unknown"}[verdict.usable]
        console.print(
            f"{verdict.nic}:{verdict.port.number}{rate} {verdict.port.link_layer or ''}: {use}, {verdict.reason}"
        )
    for variable in outcome.decision.variables:
        console.print(f"set      {variable.name}={variable.value}  # {variable.reason}")
    for unset in outcome.decision.not_set:
        console.print(f"not set  {unset.name}  # {unset.reason}")
    for note in [*outcome.facts.unknown, *unknown_cores(outcome.facts), *outcome.decision.unknown]:
        console.print(f"unknown: {note}")
    for warning in outcome.warnings:
        console.print(f"warning: {warning}")


def _table(console: Console, outcome: FabricReport) -> None:
    table = Table("GPU", "local CPUs", "NIC", "path", "rail", "CPUs of its rank", box=None, pad_edge=False)
    for gpu, matched, mask in zip(outcome.facts.gpus, outcome.gpu_nics, outcome.masks, strict=True):
        table.add_row(
            f"{gpu.name} {gpu.model or ''}".strip(),
            format_cpu_list(gpu.cpus),
            matched.nic or f"- ({matched.reason})",
            matched.path_type or "",
            "" if matched.rail is None else str(matched.rail),
            f"- ({mask.reason})" if mask.cpus is None else format_cpu_list(mask.cpus),
        )
    console.print(table)
