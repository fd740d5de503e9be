"""A sweep shows which overrides its runs differ in, the metric, the best run, and what to do about failed runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from hpc_train.launch.comparison import Comparison, metric_of
from hpc_train.launch.executors.executor import Job
from hpc_train.launch.job_status import View
from hpc_train.launch.job_table import JobTable, print_messages, print_results
from hpc_train.run.events import EventLog
from hpc_train.run.files import append_line
from hpc_train.run.freeze import freeze
from hpc_train.run.lease import add_submission
from tests.launch.jobs import make_job


def ended(job: Job, exit_code: int, **metrics: float | None) -> None:
    """Writes what a run of ``job`` leaves."""
    add_submission(job.run, "this machine", pid=2**22 + 1, first_attempt=0)
    attempt = job.run.claim_attempt()
    append_line(job.run.metrics_file(attempt), {"step": 5, "attempt": attempt, **metrics})
    events = EventLog.open(job.run, "agent-n0", attempt)
    if exit_code:
        cause = {"class": "user_error", "rank": 0, "node": "n0", "message": "ValueError: no such class"}
        events.write("worker_failed", traceback="Traceback\nValueError: no such class", **cause)
        events.write("failed", exit_code=exit_code, **cause)
    else:
        events.write("finished", exit_code=0)


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Four runs of optim.lr x model.dim; the third has failed and the fourth has diverged to a lower, wrong loss."""
    monkeypatch.chdir(tmp_path)
    jobs = []
    for number, (rate, dim) in enumerate([("1e-3", "16"), ("3e-3", "16"), ("1e-3", "32"), ("3e-3", "32")]):
        job = make_job(tmp_path / "runs", number)
        overrides = ["+strategy=dp", f"optim.lr={rate}", f"model.dim={dim}", "++cluster.env.TOKEN=abcdef"]
        freeze(job.config, job.run, overrides=overrides)
        jobs.append(job)
    ended(jobs[0], 0, loss=2.5, val_loss=2.25)
    ended(jobs[1], 0, loss=2.0, val_loss=1.75)
    ended(jobs[2], 1, loss=1.0, val_loss=1.5)
    ended(jobs[3], 1, loss=None, val_loss=None)
    return jobs


def views_of(jobs: list[Job]) -> list[View]:
    states = ["done", "done", "failed", "failed"]
    lines = [json.loads(job.run.metrics_file(0).read_text()) for job in jobs]
    return [
        View(state, line, int(state == "failed"), "no such class" if state == "failed" else "", steps=5)
        for state, line in zip(states, lines, strict=True)
    ]


def test_the_overrides_are_recorded_without_secrets(sweep: list[Job]) -> None:
    assert sweep[1].run.record()["overrides"] == [
        "+strategy=dp", "optim.lr=3e-3", "model.dim=16", "++cluster.env.TOKEN=(hidden)",
    ]  # fmt: skip


def test_tables_have_the_varied_overrides_the_metric_and_the_best_run(
    sweep: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(record=True, force_terminal=True, width=120)
    table = JobTable(sweep, console)
    table.show(views_of(sweep))
    table.close()
    live = console.export_text().splitlines()
    head = next(line for line in live if "optim.lr" in line).split()
    assert head[:8] == ["job", "strategy", "optim.lr", "model.dim", "state", "nodes", "step", "loss"]
    assert head[8] == "val_loss"
    assert "2.0000  1.7500 (best)" in " ".join(live).replace("    ", "  ")
    plain = Console(record=True, force_terminal=False, width=80)
    print_messages(sweep, views_of(sweep))
    print_results(sweep, views_of(sweep), plain)
    text = plain.export_text()
    assert [line.split()[2:5] for line in text.splitlines()[1:5]] == [
        ["1e-3", "16", "done"], ["3e-3", "16", "done"], ["1e-3", "32", "failed"], ["3e-3", "32", "failed"],
    ]  # fmt: skip
    assert text.count("(best)") == 1
    assert "best by val_loss: runs/1 (optim.lr=3e-3 model.dim=16): 1.7500" in text
    assert "4 jobs: 2 done, 2 failed" in text
    assert "python -m hpc_train retry --failed runs " in text
    assert "jobs 2, 3: no such class" in capsys.readouterr().err, "equal messages are printed once"


def test_the_best_run_is_that_of_the_metric_of_the_checkpoints(sweep: list[Job]) -> None:
    views = [View("done", {"val_loss": loss, "val_accuracy": loss}, 0) for loss in (0.5, 0.25, 0.125, float("nan"))]
    compared = Comparison.of([job.run for job in sweep], metric_of(sweep[0].config))
    assert compared.best(views) == 2
    sweep[0].config.checkpoint.keep_best = "val_accuracy"
    compared = Comparison.of([job.run for job in sweep], metric_of(sweep[0].config))
    assert (compared.ranked_by(views).name, compared.best(views)) == ("val_accuracy", 0)
    assert compared.best([views[0], *[View("running", {"val_accuracy": 1.0})] * 3]) is None, "nothing to compare with"
