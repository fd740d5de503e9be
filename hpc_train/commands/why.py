"""``python -m hpc_train why RUN|SWEEP`` explains why runs failed or why a job is pending, and what to do about it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.text import Text

from hpc_train.report.page.verdict import headline, sections
from hpc_train.run.exits import Exit
from hpc_train.runs.comparison import Comparison
from hpc_train.runs.diagnosis import diagnose, shown, sweep_failures
from hpc_train.runs.job_status import SlurmStatuses
from hpc_train.runs.job_table import common_directory, retry_lines
from hpc_train.runs.lookup import RunHandle, find_runs, statuses_of
from hpc_train.telemetry.terminal import Terminal
from hpc_train.units import counted


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_train why", description=__doc__)
    parser.add_argument("target", metavar="RUN|SWEEP", help="a run or sweep directory, or its name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    runs = find_runs(options.target, "why")
    if len(runs) > 1:
        _print_sweep(runs, options.json)
        return Exit.DONE
    found = diagnose(runs[0])
    if options.json:
        print(json.dumps(asdict(found) | {"ledger": found.ledger.as_json()}))
        return Exit.DONE
    console = Terminal()
    console.print(Text(headline(found), style="bold"), soft_wrap=True)
    for title, lines in sections(found):
        if lines:
            console.print(Text(f"\n{title}", style="bold"))
            console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)
    return Exit.DONE


def _print_sweep(runs: Sequence[RunHandle], as_json: bool) -> None:
    """Prints which runs of a sweep did not finish and why; runs with the same cause are told together."""
    statuses = statuses_of(runs, SlurmStatuses())
    views = [item.view(statuses) for item in runs]
    failures = sweep_failures(runs, views)
    compared = Comparison.of(item.run for item in runs)
    states = Counter(view.state for view in views)
    if as_json:
        named = [
            [{"run": str(runs[i].run.path), "overrides": compared.of_run(runs[i].run)} for i in failure.runs]
            for failure in failures
        ]
        found = [asdict(failure) | {"runs": own} for failure, own in zip(failures, named, strict=True)]
        print(json.dumps({"sweep": str(runs[0].run.path.parent), "states": states, "failures": found}))
        return
    console = Terminal()
    where = common_directory([item.run.path.parent for item in runs])
    head = f"{where}: {len(runs)} runs: {', '.join(f'{count} {state}' for state, count in states.most_common())}"
    console.print(Text(head if failures else f"{head}; nothing failed", style="bold"), soft_wrap=True)
    for failure in failures:
        title = f"\n{failure.kind} in {counted(len(failure.runs), 'run', 'runs')}"
        title += (f": {failure.message}" if failure.message else "") + (f" ({failure.place})" if failure.place else "")
        console.print(Text(title, style="bold"), soft_wrap=True)
        lines = [f"{shown(runs[i].run.path)}  {compared.words(runs[i].run)}".rstrip() for i in failure.runs]
        lines += [f"fix: {failure.advice}"] if failure.advice else []
        console.print(Text("\n".join(f"  {line}" for line in lines)), soft_wrap=True)
    if failures:
        first = shown(runs[failures[0].runs[0]].run.path)
        advice = [
            f"python -m hpc_train why {first}   shows all about the first one",
            *retry_lines(where, runs[0].run, views),
        ]
        console.print(Text("\nwhat to do", style="bold"))
        console.print(Text("\n".join(f"  {line}" for line in advice)), soft_wrap=True)
