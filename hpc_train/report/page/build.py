"""Puts the page together and writes it, on demand and at the end of each job.

The comparison of a run with the prediction for its layout and machine is recorded at the end of a job, in ``run.json``
(``prediction``) and in the calibration file of the run root, from which ``plan`` learns (see
``planner/calibration.py``). A run on an unknown GPU, on CPUs, or with a model of unknown size has none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.planner.calibration import FILE, as_line, key_of, measured_values, predicted_values
from hpc_train.planner.machine import Machine, read_machine, recognized
from hpc_train.planner.prediction import predict_step
from hpc_train.report.page.curves import experts, losses, metrics, throughput, waits
from hpc_train.report.page.facts import RunFacts, secrets_of
from hpc_train.report.page.markup import Html, block, environment, section, table, text
from hpc_train.report.page.resources import memory, nodes, pipeline, time_spent
from hpc_train.report.page.settings import reproduce, settings, trained
from hpc_train.report.page.sweep import SweepFacts, coordinates, reproduce_one, sweep_failed, sweep_table, sweep_verdict
from hpc_train.report.page.verdict import decisions, verdict
from hpc_train.run.directory import PAGE, RunDirectory
from hpc_train.run.file_lock import exclusive
from hpc_train.run.files import BackgroundCall, append_line, write_text
from hpc_train.run.freeze import load
from hpc_train.run.owner import is_own, output_directory
from hpc_train.run.rows import check_fields
from hpc_train.runs.comparison import Comparison, best_metric_of
from hpc_train.runs.diagnosis import sweep_failures
from hpc_train.runs.job_status import JobStatuses, View
from hpc_train.runs.lookup import RunHandle, find_runs, statuses_of
from hpc_train.schedulers.scheduler import PRESENT, JobStatus
from hpc_train.units import format_bytes
from hpc_train.version import __version__

HIDDEN = "(hidden)"
END_S = 10.0  # the end of a job waits at most this long for a slow file system


def page_of_run(handle: RunHandle, statuses: dict[str, JobStatus] | None = None) -> str:
    """Returns the page of a run. ``statuses`` are the states of Slurm jobs; None asks Slurm."""
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
        experts(facts),
        pipeline(facts),
        prediction(facts),
        nodes(facts),
        decisions(facts),
        settings(facts),
        reproduce(facts),
    ]
    return _page(f"Run {handle.run.title}", handle.run.path, sections, handle)


def page_of_sweep(handles: Sequence[RunHandle], views: Sequence[View] | None = None) -> str:
    """Returns the page of a sweep. ``views`` are the states of its runs; None asks Slurm for them."""
    if views is None:
        statuses = statuses_of(handles, JobStatuses())
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
            run root for a run or sweep of another user.
        machine: the machine on which the runs were executed; the error of its prediction is recorded.
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
    """Writes the page of a run whose agent is about to end, and prints its path, or why it cannot be written.

    It also records the error of the prediction, if there is one. It neither raises nor waits long, and does not query
    Slurm, since the job still holds its nodes.
    """
    _print_path(lambda: _write_run(run, in_job=True))


def write_after(run: RunDirectory) -> None:
    """Writes the page of a run after a command has waited for it, unless the agent has written it; prints the path.

    An agent that was killed has not written the page. Nothing is written for a run of another user.
    """
    if is_own(run.path):
        _print_path(lambda: run.path / PAGE if _is_current(run) else _write_run(run, in_job=False))


def write_sweep_at_end(sweep: Path, views: Mapping[Path, View]) -> None:
    """Writes the page of a sweep after a command has waited for it, and prints the path. ``views`` are the states of
    its runs by directory; the states of missing runs are read."""
    if is_own(sweep):
        _print_path(lambda: _write_sweep(sweep, views))


def _is_current(run: RunDirectory) -> bool:
    """Returns whether the page is newer than the start of the newest attempt."""
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
        statuses = {handle.job_key: PRESENT}
        with suppress(Exception):  # the page is written even if the prediction fails
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
    """Writes in another thread, since a file system may hang, and prints one line about the result."""
    try:
        print(f"report: {BackgroundCall(write).result(END_S)}", flush=True)
    except Exception as error:  # an error of the page must not change how the run ends
        print(f"the report could not be written: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


NAMES = {
    "step_s": "step", "compute_s": "computation and optimizer", "communication_s": "exposed communication",
    "bubble_s": "pipeline bubble", "memory_bytes": "memory of the fullest rank",
}  # fmt: skip


def compare(run: RunDirectory, machine: Machine | None = None) -> dict[str, Any] | None:
    """Records the predicted and the measured values of the newest attempt in ``run.json`` and returns them. Raises
    UserError or OSError if a file of the run cannot be read or written.

    Args:
        machine: the machine of the run; by default ``cluster.machine``, or the shipped machine whose device matches the
            GPUs of the run.

    Returns:
        None if there is no prediction, or fewer than three lines of metrics.
    """
    attempt = run.newest_attempt()
    if attempt < 0:
        return None
    meeting = run.attempt_record(attempt)
    config = load(run)
    machine = machine or _machine_of(run, config, meeting)
    if machine is None or not meeting.get("layout", {}).get("micro_batches"):  # custom code has no layout
        return None
    try:
        layout = Layout(**meeting["layout"] | {"notes": ()})
        check_fields(layout)
    except TypeError:  # the record is damaged or of another version
        return None
    lines = [line for line in run.read_all_metrics() if line.attempt == attempt]
    measured = measured_values(lines, layout.cp * layout.tp, on_gpu=meeting.get("gpus_per_node", 0) > 0)
    if measured is None:
        return None
    try:
        step = predict_step(config, layout, machine.with_devices(meeting.get("workers_per_node", 1)))
    except UserError:  # a model of unknown size
        return None
    predicted = predicted_values(step)
    comparison = as_line(key_of(config, machine), run.path, str(layout), predicted, measured)
    run.update_record(prediction=comparison)
    return comparison


def remember(config: Config, comparison: Mapping[str, Any]) -> None:
    """Appends the comparison of a run to the calibration file of its root. Raises OSError if it cannot be written."""
    root = Path(config.run.root).absolute()
    with exclusive(root / ".locks" / "calibration"):
        append_line(root / FILE, dict(comparison))


def _machine_of(run: RunDirectory, config: Config, meeting: Mapping[str, Any]) -> Machine | None:
    """Returns the machine that ``cluster.machine`` names, or the shipped one whose device matches all GPUs. Raises
    UserError if the machine file cannot be read."""
    if config.cluster.machine != "auto":
        return read_machine(config.cluster.machine)
    if not meeting.get("gpus_per_node"):
        return None
    machines = run.fabric_record()["machines"]
    models = {gpu.get("model") for machine in machines for gpu in machine["facts"]["gpus"]}
    if len(models) != 1:
        return None
    return recognized(str(models.pop()))


def prediction(facts: RunFacts) -> Html | None:
    """Returns the section that compares the prediction with the measurement; None if there is none."""
    comparison = facts.record.get("prediction")
    if not comparison:
        return None
    rows = []
    for key, name in NAMES.items():
        predicted = comparison["predicted"].get(key)
        measured = comparison["measured"].get(key)
        if predicted is not None and measured is not None:
            ratio = f"{measured / predicted:.2f}" if predicted else ""
            rows.append([name, _shown(key, predicted), _shown(key, measured), ratio])
    words = f"Per step, as predicted for the machine {comparison['machine']} without the corrections from earlier runs."
    columns = ("", "predicted", "measured", "measured / predicted")
    return section("Prediction", block("paragraph", words), table("Predicted and measured", columns, rows, numbers=3))


def _shown(key: str, value: float) -> str:
    return format_bytes(value) if key == "memory_bytes" else f"{value:.3g} s"
