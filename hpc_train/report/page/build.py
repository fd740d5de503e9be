"""Puts the page together and writes it, on demand and at the end of each job."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.planner.machine import Machine
from hpc_train.report.page.curves import losses, metrics, throughput, waits
from hpc_train.report.page.facts import RunFacts, secrets_of
from hpc_train.report.page.markup import Html, environment, text
from hpc_train.report.page.predicted import compare, prediction, remember
from hpc_train.report.page.resources import memory, nodes, pipeline, time_spent
from hpc_train.report.page.settings import reproduce, settings, trained
from hpc_train.report.page.sweep import (
    SweepFacts,
    coordinates,
    reproduce_one,
    sweep_failed,
    sweep_table,
    sweep_verdict,
)
from hpc_train.report.page.verdict import decisions, verdict
from hpc_train.run.directory import PAGE, RunDirectory
from hpc_train.run.files import BackgroundCall, write_text
from hpc_train.run.owner import is_own, output_directory
from hpc_train.runs.comparison import Comparison, best_metric_of
from hpc_train.runs.diagnosis import sweep_failures
from hpc_train.runs.job_status import PRESENT, JobStatus, SlurmStatuses, View
from hpc_train.runs.lookup import RunHandle, find_runs, statuses_of
from hpc_train.version import __version__

HIDDEN = "(hidden)"
END_S = 10.0  # the end of a job waits at most this long for a slow file system


def page_of_run(handle: RunHandle, statuses: dict[str, JobStatus] | None = None) -> str:
    """Returns the page of a run.

    Args:
        statuses: the states of Slurm jobs; None asks Slurm.
    """
    facts = RunFacts.read(handle, statuses)
    sections = [
        verdict(facts),
        trained(facts),
        losses(facts),
        metrics(facts),
        time_spent(facts),
        throughput(facts),
        memory(facts),
        waits(facts),
        pipeline(facts),
        prediction(facts),
        nodes(facts),
        decisions(facts),
        settings(facts),
        reproduce(facts),
    ]
    return _page(f"Run {handle.run.title}", handle.run.path, sections, handle)


def page_of_sweep(handles: Sequence[RunHandle], views: Sequence[View] | None = None) -> str:
    """Returns the page of a sweep.

    Args:
        views: the states of its runs; None asks Slurm for them.
    """
    if views is None:
        statuses = statuses_of(handles, SlurmStatuses())
        views = [item.view(statuses) for item in handles]
    metric = best_metric_of(handles[0].plain_config)
    sweep = SweepFacts(handles, views, Comparison.of((item.run for item in handles), metric))
    failures = sweep_failures(handles, views)
    sections = [
        sweep_verdict(sweep, failures),
        sweep_table(sweep),
        coordinates(sweep),
        sweep_failed(sweep, failures),
        reproduce_one(sweep),
    ]
    folder = handles[0].run.path.parent
    return _page(f"Sweep {folder.name}", folder, sections, handles[0])


def _page(title: str, path: Path, sections: Sequence[Html | None], run: RunHandle) -> str:
    """Returns the page without the secrets that are in the config of ``run``."""
    template = environment().get_template("page.html")
    page = template.render(
        title=title,
        path=path,
        sections=[section for section in sections if section is not None],
        version=__version__,
        written=time.strftime("%Y-%m-%d %H:%M %Z"),
    )
    for secret in secrets_of(run):
        page = page.replace(text(secret), HIDDEN)
    return page


def write_page(target: str, out: Path | None = None, machine: Machine | None = None) -> Path:
    """Writes the page of the run or sweep ``target``; returns the file.

    Args:
        out: the file; by default ``report.html`` in the directory of the run or sweep, or in ``.others`` below the
            run root for those of another user.
        machine: that on which the runs were, to record how far off its prediction was.
    """
    handles = find_runs(target, "report")
    folder = handles[0].run.path
    if len(handles) > 1:
        folder = folder.parent
    if machine is not None and not is_own(folder):
        raise UserError(
            f"--machine records a comparison in {folder}, which belongs to another user",
            where="--machine",
            fix="leave --machine out",
        )
    if machine is not None:
        for item in handles:
            if (comparison := compare(item.run, machine)) is not None:
                remember(item.config, comparison)
    page = page_of_run(handles[0]) if len(handles) == 1 else page_of_sweep(handles)
    path = out or output_directory(folder) / PAGE
    write_text(path, page)
    return path


def write_at_end(run: RunDirectory) -> None:
    """Writes the page of a run whose agent ends now, and prints its path, or why it cannot be written.

    It also records how far off the prediction was, if there is one. It neither raises nor waits long, and asks Slurm
    nothing, for the job still holds its nodes.
    """
    _print_path(lambda: _write_run(run, in_job=True))


def write_after(run: RunDirectory) -> None:
    """Writes the page of a run that was waited for, unless its agent has, and prints its path.

    Agents that were killed have not. Nothing is written for a run of another user.
    """
    if is_own(run.path):
        _print_path(lambda: run.path / PAGE if _is_current(run) else _write_run(run, in_job=False))


def write_sweep_at_end(sweep: Path, views: Mapping[Path, View]) -> None:
    """Writes the page of a sweep that was waited for, as ``write_at_end`` does.

    Args:
        views: the states of its runs by directory; the states of missing runs are read.
    """
    if is_own(sweep):
        _print_path(lambda: _write_sweep(sweep, views))


def _is_current(run: RunDirectory) -> bool:
    """Returns whether the page is newer than the beginning of the newest attempt."""
    try:
        started = (run.attempts / f"{run.newest_attempt():03d}.json").stat().st_mtime
        return (run.path / PAGE).stat().st_mtime > started
    except FileNotFoundError:
        return False


def _write_run(run: RunDirectory, *, in_job: bool) -> Path:
    (handle,) = find_runs(str(run.path), "report")
    statuses: dict[str, JobStatus] = {}
    comparison = None
    if in_job:
        statuses = dict.fromkeys(handle.job_ids, PRESENT)
        with suppress(Exception):  # whatever the prediction lacks, the page is written
            comparison = compare(run)
    write_text(run.path / PAGE, page_of_run(handle, statuses))
    if comparison is not None:
        with suppress(OSError):  # e.g. the root belongs to somebody else
            remember(handle.config, comparison)
    return run.path / PAGE


def _write_sweep(sweep: Path, views: Mapping[Path, View]) -> Path:
    handles = find_runs(str(sweep), "report")
    write_text(sweep / PAGE, page_of_sweep(handles, [views.get(item.run.path) or item.view({}) for item in handles]))
    return sweep / PAGE


def _print_path(write: Callable[[], Path]) -> None:
    """Writes in another thread, for a file system may hang, and prints one line about it."""
    try:
        print(f"report: {BackgroundCall(write).result(END_S)}", flush=True)
    except Exception as error:  # whatever is wrong with the page, the run has ended as it has
        print(f"the report could not be written: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
