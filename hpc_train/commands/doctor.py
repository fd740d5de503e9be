"""``python -m hpc_train doctor``: what this node is made of, and the environment that training would set here."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpc_train.cluster.fabric.cpu_list import format_cpu_list
from hpc_train.cluster.fabric.decision import Job
from hpc_train.cluster.fabric.discovery import discover, print_matrix
from hpc_train.cluster.fabric.nccl_settings import settings
from hpc_train.cluster.fabric.recording import FabricReport, gpus_recorded, read_recording, report
from hpc_train.cluster.fabric.versions import parse_version
from hpc_train.run.exits import Exit


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="of the job to judge for; default: 2")
    recorded = parser.add_argument_group("instead of this machine, recordings of another one")
    recorded.add_argument("--sysfs", type=Path, metavar="ROOT", help="a copy of /sys, or of /sys/class/infiniband")
    recorded.add_argument("--topo", type=Path, metavar="FILE", help="what nvidia-smi topo -m printed")
    recorded.add_argument(
        "--ibstat", type=Path, metavar="FILE", help="what ibstat, ibstatus, ibv_devinfo or ibdev2netdev printed"
    )
    recorded.add_argument("--nccl", metavar="VERSION", help="the version of NCCL there")
    options = parser.parse_args(arguments)
    found = settings(os.environ)
    nccl = None if options.nccl is None else parse_version(options.nccl)
    if options.sysfs is None and options.topo is None and options.ibstat is None:
        facts = discover(matrix=print_matrix())
        gpus = len(facts.gpus)
    else:
        facts = read_recording(options.sysfs, options.topo, options.ibstat)
        gpus = gpus_recorded(facts, options.sysfs)
    outcome = report(facts, Job(options.nodes, gpus, nccl), found)
    if options.json:
        print(json.dumps(outcome.to_json(), indent=2))
    else:
        _show(outcome)
    return Exit.DONE


def _show(outcome: FabricReport) -> None:
    console = Console(highlight=False)
    console.print(f"between nodes: {outcome.decision.fabric}")
    table = Table("GPU", "near CPUs", "card", "way", "rail", "CPUs of its rank", box=None, pad_edge=False)
    for gpu, matched, mask in zip(outcome.facts.gpus, outcome.matching, outcome.masks, strict=True):
        table.add_row(
            f"{gpu.name} {gpu.model or ''}".strip(),
            format_cpu_list(gpu.cpus),
            matched.nic or f"- ({matched.reason})",
            matched.way or "",
            "" if matched.rail is None else str(matched.rail),
            f"- ({mask.reason})" if mask.cpus is None else format_cpu_list(mask.cpus),
        )
    if outcome.facts.gpus:
        console.print(table)
    for verdict in outcome.ports:
        rate = "" if verdict.port.rate_gbps is None else f" {verdict.port.rate_gbps:g} Gb/s"
        taken = {True: "used", False: "left out", None: "unknown"}[verdict.usable]
        console.print(
            f"{verdict.nic}:{verdict.port.number}{rate} {verdict.port.link_layer or ''}: {taken}, {verdict.reason}"
        )
    for variable in outcome.decision.variables:
        console.print(f"set    {variable.name}={variable.value}  # {variable.reason}")
    for alone in outcome.decision.left_alone:
        console.print(f"leave  {alone.name}  # {alone.reason}")
    for note in [*outcome.facts.unknown, *outcome.decision.unknown]:
        console.print(f"unknown: {note}")
    for warning in outcome.warnings:
        console.print(f"warning: {warning}")
