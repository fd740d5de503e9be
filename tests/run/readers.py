"""All that reads a run directory, as functions of one run, for tests with directories of others."""

from __future__ import annotations

from collections.abc import Callable

from hpc_train import cli
from hpc_train.commands.plot import _curves, _results
from hpc_train.elastic.nodes import NodeFailures, have_been_checked
from hpc_train.elastic.requeue import find_killed_step
from hpc_train.errors import UserError
from hpc_train.preflight.bandwidth import read_fabric
from hpc_train.report.live_runs import Details, Row
from hpc_train.report.monitoring.metrics import Identity, RunReader
from hpc_train.report.plots import _figure
from hpc_train.report.top import _event
from hpc_train.run.directory import RunDirectory
from hpc_train.run.ledger import read_ledger
from hpc_train.run.requests import stop_was_requested
from hpc_train.runs.lookup import find_run, find_runs
from hpc_train.telemetry.progress import Notices, summary
from hpc_train.telemetry.sinks.replay import NewOfAttempts

__all__ = ["UserError"]


def command(*words: str) -> Callable[[RunDirectory], None]:
    """Returns a call of the command line with the run's directory."""

    def call(run: RunDirectory) -> None:
        filled = [word.format(run=run.path) for word in words]
        assert cli.run(filled) in (0, 1, 2, 75, 130)

    return call


def live(run: RunDirectory) -> None:
    found = find_run(str(run.path), "top")
    view = found.view({})
    Row(found, "name", view).cells()
    details = Details(found)
    details.look()
    details.lines(view)
    list(map(_event, details.events))


def agent(run: RunDirectory) -> None:
    failures = NodeFailures(run, 1e6)
    failures.failing_nodes()
    have_been_checked(run, "7.0.0", ["n1"])
    find_killed_step(run, "7.1.0", 1)
    read_fabric(run)
    stop_was_requested(run)
    read_ledger(run, 2e9)


def messages(run: RunDirectory) -> None:
    for event in run.read_events():
        Notices().message(event)


def monitoring(run: RunDirectory) -> None:
    RunReader(run, Identity({})).read(2e9)


def plotted(run: RunDirectory) -> None:
    curves = _curves([run.path])
    _results(find_runs(str(run.path), "plot"), curves, None)
    _figure(curves, "hours", None)


def trackers(run: RunDirectory) -> None:
    NewOfAttempts(run, run.metrics).read()
    NewOfAttempts(run, run.texts).read()


READERS: dict[str, Callable[[RunDirectory], object]] = {
    "status": command("status", "{run}"),
    "status --json": command("status", "--json", "{run}"),
    "status of all": command("status"),
    "why": command("why", "{run}"),
    "why --json": command("why", "--json", "{run}"),
    "logs": command("logs", "{run}", "--rank", "all"),
    "compare": command("compare", "{run}", "{run}"),
    "report": command("report", "{run}"),
    "plot": plotted,
    "checkpoint list": command("checkpoint", "list", "{run}"),
    "summary": summary,
    "live": live,
    "agent": agent,
    "messages": messages,
    "monitoring": monitoring,
    "trackers": trackers,
}
