"""``python -m hpc_train why RUN|SWEEP`` explains why runs failed or why a job is pending, and what to do about it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.console import Console
from rich.text import Text

from hpc_train.config.options import OptionParser
from hpc_train.config.run_path import relative
from hpc_train.config.values import runs_command
from hpc_train.layout.resolve import resolve_layout
from hpc_train.report.page.verdict import headline, sections
from hpc_train.run.exits import Exit
from hpc_train.runs.comparison import Comparison
from hpc_train.runs.diagnosis import diagnose, sweep_failures
from hpc_train.runs.job_status import JobStatuses
from hpc_train.runs.job_table import common_directory, retry_lines
from hpc_train.runs.lookup import RunHandle, find_runs, of_role, statuses_of
from hpc_train.telemetry.terminal import Terminal
from hpc_train.units import counted


def main(arguments: list[str]) -> int:
    parser = OptionParser(prog="python -m hpc_train why", description=__doc__)
    parser.add_argument("target", metavar="RUN|SWEEP", help="a run or sweep directory, or its name")
    parser.add_argument("--role", metavar="NAME", help="explain this role")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    runs = find_runs(of_role(options.target, options.role), "why")
    if len(runs) > 1:
        _print_sweep(runs, options.json)
        return Exit.DONE
    diagnosis = diagnose(runs[0])
    waiting = diagnosis.waiting
    if waiting is not None and waiting.sooner and "scheduler" not in runs[0].submission:
        earlier = _earlier_starts(runs[0])
        diagnosis = replace(diagnosis, waiting=replace(waiting, sooner=(*waiting.sooner, *earlier)))
    if options.json:
        print(json.dumps(asdict(diagnosis) | {"ledger": diagnosis.ledger.as_json()}))
        return Exit.DONE
    console = Terminal()
    console.print(Text(headline(diagnosis), style="bold"), soft_wrap=True)
    for title, lines in sections(diagnosis, of_command=runs_command(runs[0].config)):
        if lines:
            _print_section(console, title, lines)
    return Exit.DONE


def _earlier_starts(item: RunHandle) -> list[str]:
    from hpc_train.launch.executors.slurm import SlurmJobExecutor  # imports what submits jobs
    from hpc_train.launch.job import Job

    executor = SlurmJobExecutor()
    shape = executor.shape(item.config)
    layout = resolve_layout(item.config, shape.nodes, shape.workers, shape.device_bytes)
    return executor.earlier_starts(Job(item.config, layout, shape, item.run))


def _print_section(console: Console, title: str, lines: Sequence[str]) -> None:
    console.print(Text(f"\n{title}", style="bold"), soft_wrap=True)
    console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)


def _print_sweep(runs: Sequence[RunHandle], as_json: bool) -> None:
    """Prints which runs of a sweep did not finish and why; runs with the same cause are in one section."""
    statuses = statuses_of(runs, JobStatuses())
    views = [item.view(statuses) for item in runs]
    failures = sweep_failures(runs, views)
    compared = Comparison.of(item.run for item in runs)
    states = Counter(view.state for view in views)
    if as_json:
        rows = []
        for failure in failures:
            failed = [runs[index].run for index in failure.runs]
            named = [{"run": str(run.path), "overrides": compared.of_run(run)} for run in failed]
            rows.append(asdict(failure) | {"runs": named})
        print(json.dumps({"sweep": str(runs[0].run.path.parent), "states": states, "failures": rows}))
        return
    console = Terminal()
    where = common_directory([item.run.path.parent for item in runs])
    by_state = ", ".join(f"{count} {state}" for state, count in states.most_common())
    head = f"{where}: {counted(len(runs), 'run', 'runs')}: {by_state}"
    if not failures:
        head += "; nothing failed"
    console.print(Text(head, style="bold"), soft_wrap=True)
    for failure in failures:
        title = f"{failure.kind} in {counted(len(failure.runs), 'run', 'runs')}"
        if failure.message:
            title += f": {failure.message}"
        if failure.place:
            title += f" ({failure.place})"
        failed = [runs[index].run for index in failure.runs]
        lines = [f"{relative(run.path)}  {compared.words(run)}".rstrip() for run in failed]
        if failure.advice:
            lines.append(f"fix: {failure.advice}")
        _print_section(console, title, lines)
    if failures:
        first = relative(runs[failures[0].runs[0]].run.path)
        advice = f"python -m hpc_train why {first}   shows all about the first one"
        _print_section(console, "what to do", [advice, *retry_lines(where, runs[0].run, views)])
