"""Prints the doctor's output: one verdict, then errors, warnings and what a run would export.

No line is wrapped, so that every value can be copied. Findings that are ok are counted, and listed only on request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc_train.machine.health.finding import ERROR, OK, UNCHECKED, WARNING, Finding
from hpc_train.machine.network.decision import FabricDecision
from hpc_train.machine.network.facts import format_cpu_list
from hpc_train.machine.network.node import FabricReport
from hpc_train.units import counted

ALWAYS = ("GPUs", "job")  # what a run would use, shown also if it is ok
NODES = "\0"  # stands for the names of the nodes with the same finding
Located = tuple[str, Finding]  # the node, or "" for what concerns no single node


def verdict(findings: Sequence[Finding], nodes: int) -> str:
    """Returns the first line: ``1 error, 2 warnings; 17 checks are ok on 2 nodes``."""
    counts = {level: sum(finding.level == level for finding in findings) for level in (ERROR, WARNING, OK)}
    unknown = sum(finding.level == OK and finding.unknown for finding in findings)
    problems = [_several(counts[level], level) for level in (ERROR, WARNING) if counts[level]]
    text = f"{', '.join(problems) or 'no problem found'}; {_several(counts[OK] - unknown, 'check')} ok"
    if unknown:
        text += f", {unknown} not possible"
    if nodes > 1:
        text += f" on {nodes} nodes"
    return text


def _several(number: int, noun: str) -> str:
    return counted(number, noun, f"{noun}s")


def finding_lines(located: Sequence[Located], verbose: bool) -> Iterator[str]:
    """Yields errors, then warnings, then the findings that are ok or unknown: all of them or only the important ones.

    Findings that are equal on several nodes are merged.
    """
    for level in (ERROR, WARNING, OK):
        groups: dict[tuple[str, str, str], list[str]] = {}
        for node, finding in located:
            shown = level != OK or verbose or finding.subject in ALWAYS or finding.unknown
            if finding.level == level and shown:
                fix = finding.fix
                if node:
                    fix = fix.replace(f"cluster.exclude={node}", f"cluster.exclude={NODES}")
                groups.setdefault((finding.subject, finding.text, fix), []).append(node)
        for (subject, text, fix), nodes in groups.items():
            names = ",".join(dict.fromkeys(node for node in nodes if node))
            shown_level = "" if level == OK and text.startswith(UNCHECKED) else level
            prefix = f"{names}: " if names else ""
            yield f"{shown_level:<8}{prefix}{subject}: {text}"
            if fix:
                yield f"        fix: {fix.replace(NODES, names)}"


def environment_lines(decision: FabricDecision, verbose: bool) -> Iterator[str]:
    """Yields the variables that workers export, followed by a short list of the variables that are left alone."""
    if decision.variables:
        yield f"workers export (network: {decision.fabric}):"
    for variable in decision.variables:
        yield f"  {variable.name}={variable.value}  # {variable.reason}"
    if decision.not_set and not verbose:
        names = ", ".join(unset.name for unset in decision.not_set)
        yield f"left alone: {names} (--verbose shows the reasons)"
    elif decision.not_set:
        yield "left alone:"
        yield from (f"  {unset.name}  # {unset.reason}" for unset in decision.not_set)


def recording_lines(outcome: FabricReport, unknown: Sequence[str], verbose: bool) -> Iterator[str]:
    missing = f", {_several(len(unknown), 'fact')} unknown" if unknown else ""
    yield f"{_several(len(outcome.warnings), 'warning')}{missing}; between nodes: {outcome.decision.fabric}"
    yield from (f"warning {text}" for text in outcome.warnings)
    yield from (f"unknown {text}" for text in unknown)
    yield from environment_lines(FabricDecision(outcome.decision.fabric, outcome.decision.variables, (), ()), verbose)
    for verdict in outcome.ports:
        rate = "" if verdict.port.rate_gbps is None else f" {verdict.port.rate_gbps:g} Gb/s"
        use = {True: "used", False: "left out", None: "unknown"}[verdict.usable]
        layer = verdict.port.link_layer or ""
        yield f"port    {verdict.nic}:{verdict.port.number}{rate} {layer}: {use}, {verdict.reason}"
    if outcome.facts.gpus:
        yield from gpu_lines(outcome)
    yield from environment_lines(FabricDecision("", (), outcome.decision.not_set, ()), verbose)


def gpu_lines(outcome: FabricReport) -> Iterator[str]:
    """Yields a table of the GPUs with their NICs and CPUs, as wide as its longest cells."""
    rows = [("GPU", "local CPUs", "NIC", "path", "rail", "CPUs of its rank")]
    for gpu, matched, mask in zip(outcome.facts.gpus, outcome.gpu_nics, outcome.masks, strict=True):
        name = f"{gpu.name} {gpu.model or ''}".strip()
        nic = matched.nic or f"- ({matched.reason})"
        rail = "" if matched.rail is None else str(matched.rail)
        cpus = f"- ({mask.reason})" if mask.cpus is None else format_cpu_list(mask.cpus)
        rows.append((name, format_cpu_list(gpu.cpus), nic, matched.path_type or "", rail, cpus))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
