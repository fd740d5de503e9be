"""A sweep shows which overrides its runs differ in, the metric, the best run, and what to do about failed runs."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from hpc_train.commands import compare, status, submitted, why
from hpc_train.config.schema import CustomModelConfig, GPTConfig
from hpc_train.errors import UserError
from hpc_train.launch.dry_run import _shortened
from hpc_train.launch.job import Job
from hpc_train.launch.submission import notes_on_changed_code, take_code_again
from hpc_train.run.code import FrozenCode, frozen_code
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import RESPONSES, Failure
from hpc_train.run.files import append_line
from hpc_train.run.freeze import freeze
from hpc_train.run.lease import add_submission
from hpc_train.run.requests import record_stop_request
from hpc_train.run.snapshot import code_note, snapshot_code
from hpc_train.runs.comparison import Comparison, metric_of
from hpc_train.runs.job_status import View
from hpc_train.runs.job_table import JobTable, print_messages, print_results
from hpc_train.runs.lookup import find_run
from tests.doors.schema import check_output
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
    for number, (rate, dim) in enumerate([("0.001", "16"), ("0.003", "16"), ("0.001", "32"), ("0.003", "32")]):
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


def test_a_section_of_a_config_is_that_of_the_whole(sweep: list[Job]) -> None:
    run = sweep[0].run
    for name, values in run.plain_config().items():
        assert run.plain_config(name) == {name: values}
    assert run.plain_config("strategy", "nothing") == {"strategy": run.plain_config()["strategy"]}


def test_the_overrides_are_recorded_without_secrets(sweep: list[Job]) -> None:
    assert sweep[1].run.record()["overrides"] == [
        "+strategy=dp", "optim.lr=0.003", "model.dim=16", "++cluster.env.TOKEN=(hidden)",
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
        ["0.001", "16", "done"], ["0.003", "16", "done"], ["0.001", "32", "failed"], ["0.003", "32", "failed"],
    ]  # fmt: skip
    assert text.count("(best)") == 1
    assert "best by val_loss: runs/1 (optim.lr=0.003 model.dim=16): 1.7500" in text
    assert "4 jobs: 2 done, 2 failed" in text
    assert "python -m hpc_train retry --failed runs   submits 2 runs again" in text
    numbered = [
        replace(view, message=f"rank {index} on n0 failed: size {index}") for index, view in enumerate(views_of(sweep))
    ]
    print_messages(sweep[2:], numbered[2:])
    dropped = [*views_of(sweep)[:3], View("not started", {})]
    print_results(sweep, dropped, plain)
    assert "submits 2 runs again" in plain.export_text(), "also those that Ctrl-C has kept from starting"
    told = capsys.readouterr().err
    assert "jobs 2, 3: no such class" in told, "equal messages are printed once"
    assert "jobs 2, 3: rank 2 on n0 failed: size 2" in told, "and so are those that differ only in numbers"


def test_the_best_run_is_that_of_the_metric_of_the_checkpoints(sweep: list[Job]) -> None:
    views = [View("done", {"val_loss": loss, "val_accuracy": loss}, 0) for loss in (0.5, 0.25, 0.125, float("nan"))]
    compared = Comparison.of([job.run for job in sweep], metric_of(sweep[0].config))
    assert compared.best(views) == 2
    sweep[0].config.checkpoint.keep_best = "val_accuracy"
    compared = Comparison.of([job.run for job in sweep], metric_of(sweep[0].config))
    assert (compared.ranked_by(views).name, compared.best(views)) == ("val_accuracy", 0)
    assert compared.best([views[0], *[View("running", {"val_accuracy": 1.0})] * 3]) is None, "nothing to compare with"


def test_status_shows_the_sweep(sweep: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["runs"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:5] == ["job", "strategy", "optim.lr", "model.dim", "state"]
    assert [line.split()[2:5] for line in table[1:3]] == [["0.001", "16", "done"], ["0.003", "16", "done"]]
    assert ["(best)" in line for line in table[1:]] == [False, True, False, False]
    assert status.main(["runs", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[1]["overrides"] == {"optim.lr": "0.003", "model.dim": "16"}
    assert [(row["metric"], row["value"], row["best"]) for row in rows[:2]] == [
        ("val_loss", 2.25, False), ("val_loss", 1.75, True),
    ]  # fmt: skip


def test_a_run_that_was_continued_with_other_overrides_has_the_values_of_its_config(
    sweep: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = sweep[3]
    other = replace(job.config, train=replace(job.config.train, steps=200))
    given = ["optim.lr=3e-3", "model.dim=32", "++cluster.env.TOKEN=abcdef", "train.steps=200", "optim=adamw"]
    freeze(other, job.run, overrides=[*given, "run.name=runs/3", "launch.yes=true"])
    assert status.main(["runs"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:6] == ["job", "strategy", "optim.lr", "model.dim", "train.steps", "state"]
    assert [line.split()[2:5] for line in table[3:]] == [["0.001", "32", "100"], ["0.003", "32", "200"]]
    (told,) = [event for event in job.run.read_events() if event["event"] == "warning"]
    assert told["attempt"] == 1, "otherwise the time since the attempt before would count as its"


def test_status_of_several_sweeps_and_runs_has_one_column_of_overrides(
    sweep: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPC_TRAIN_ROOT", str(tmp_path))
    other = make_job(tmp_path / "alone")
    freeze(other.config, other.run, overrides=["optim.lr=1"])
    assert status.main([]) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].split()[:4] == ["job", "strategy", "overrides", "state"]
    assert "optim.lr=0.003 model.dim=16" in table
    assert table.count("(best)") == 1


def test_why_of_a_sweep_names_the_causes(sweep: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    events = EventLog.open(sweep[0].run, "agent-n0", 1)
    sweep[0].run.claim_attempt()
    events.write("failed", exit_code=1, **{"class": "nan", "rank": 0, "node": "n0", "message": "has diverged"})
    assert why.main(["runs"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("runs: 4 runs: 3 failed, 1 done\n")
    first, second = (
        page.index("user_error in 2 runs: ValueError: no such class"),
        page.index("nan in 1 run: has diverged"),
    )
    assert first < page.index("runs/3  optim.lr=0.003 model.dim=32") < second < page.index("runs/0  ")
    assert f"fix: {RESPONSES[Failure.USER_ERROR].advice}" in page
    assert "python -m hpc_train why runs/2 " in page
    assert "python -m hpc_train retry --failed runs   submits 3 runs again, which import your present code" in page
    assert "--code now" not in page, "no code was frozen"
    code = FrozenCode(str(sweep[0].run.path), str(sweep[0].run.path / "code"), (), None, None)
    sweep[0].run.update_record(snapshot=asdict(code))
    assert why.main(["runs"]) == 0
    assert "python -m hpc_train retry --failed runs --code now " in capsys.readouterr().out
    assert why.main(["runs", "--json"]) == 0
    printed = capsys.readouterr().out
    check_output(["why"], printed)
    found = json.loads(printed)
    assert found["states"] == {"failed": 3, "done": 1}
    assert [len(failure["runs"]) for failure in found["failures"]] == [2, 1]


def test_tables_say_that_a_part_of_the_validation_set_was_evaluated(
    sweep: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    part, shown = "evaluated 320 of 1,248 samples", Console(record=True, width=120)
    for job in sweep[:2]:
        job.run.update_record(result={"evaluated": part.removeprefix("evaluated ")})
    for command in (status.main, compare.main):
        assert command(["runs"]) == 0
        assert capsys.readouterr().out.splitlines().count(part) == 1
        assert command(["runs/2", "runs/3"] if command is compare.main else ["runs/2"]) == 0
        assert "evaluated" not in capsys.readouterr().out
    print_results(sweep, views_of(sweep), shown)
    assert part in shown.export_text()


def test_runs_are_compared_the_best_first(sweep: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["runs/0", "runs/1"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["run", "optim.lr", "state", "step", "val_loss", "loss", "tokens/s", "time"]
    assert table[1].split()[:6] == ["runs/1", "0.003", "done", "5", "1.7500", "(best)"]
    assert compare.main(["runs", "--metric", "loss", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["value"] for row in rows] == [1.0, 2.0, 2.5, None]
    assert [row["best"] for row in rows] == [False, True, False, False], "a failed run is not the best"
    with pytest.raises(UserError, match="no run has the metric nothing"):
        compare.main(["runs", "--metric", "nothing"])


CONDITIONS: list[tuple[str, list[str], int, list[str]]] = [  # runs, conditions, exit code, and words of each line
    ("0 1", ["val_loss>1.02*baseline"], 0, ["passed"]),
    ("1 0", ["val_loss>1.02*baseline"], 1, ["val_loss 2.25 is > 1.785 (--fail-if 'val_loss>1.02*baseline')"]),
    ("1 0", ["val_loss > 1.3*baseline", "loss<baseline"], 0, ["passed"]),
    ("0 2", ["val_loss>baseline"], 1, ["the run is failed"]),
    ("1 3", ["val_loss>baseline"], 1, ["the run is failed; val_loss is unknown"]),
    ("0 --baseline runs/1", ["loss>=1.25*baseline"], 1, ["loss 2.5 is >= 2.5 (--fail-if"]),
    ("0 1", ["loss>2.25", "val_loss>=1e9"], 1, ["loss 2.5 is > 2.25 (--fail-if 'loss>2.25')", "passed"]),
]


def test_a_run_that_is_worse_than_the_baseline_fails(sweep: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    for runs, conditions, code, words in CONDITIONS:
        arguments = [f"runs/{part}" if part.isdigit() else part for part in runs.split()]
        assert compare.main([*arguments, *(f"--fail-if={condition}" for condition in conditions)]) == code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == len(words), (runs, conditions)
        assert all(word in line for word, line in zip(words, lines, strict=True)), (runs, conditions)


def test_what_is_no_condition_is_refused(sweep: list[Job]) -> None:
    for condition in ("val_loss", "val_loss=1", "val_loss>two", "val_loss>baseline*2", ">1"):
        with pytest.raises(UserError, match="is not a condition"):
            compare.main(["runs/0", "runs/1", f"--fail-if={condition}"])


def test_a_condition_on_the_baseline_needs_one(sweep: list[Job]) -> None:
    with pytest.raises(UserError, match="no run to compare with"):
        compare.main(["runs/0", "--fail-if=val_loss>baseline"])


def test_the_table_is_written_as_csv(sweep: list[Job], tmp_path: Path) -> None:
    assert compare.main(["runs", "--csv", "table.csv"]) == 0
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["runs/2", "runs/1", "runs/0", "runs/3"]
    assert {"run": "runs/1", "optim.lr": "0.003", "model.dim": "16", "state": "done", "val_loss": "1.75"}.items() <= (
        rows[1].items()
    )
    assert rows[3]["loss"] == ""


def test_resume_says_how_to_change_settings(sweep: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPC_TRAIN_ROOT", "runs")
    with pytest.raises(UserError, match=r"resume continues with the frozen settings .*, got train.steps=9") as refused:
        submitted.resume(["runs/1", "train.steps=9", "optim.lr=1"])
    command = "run.name=1 +strategy=dp model.dim=16 '++cluster.env.TOKEN=(hidden)' train.steps=9 optim.lr=1"
    assert refused.value.fix.endswith(f"python -m hpc_train {command}")
    with pytest.raises(UserError, match="unrecognized arguments: --unknown"):
        submitted.resume(["runs/1", "--unknown"])


def test_a_run_shows_its_newest_step_also_after_an_attempt_without_one(sweep: list[Job]) -> None:
    job = sweep[1]
    job.run.claim_attempt()
    job.config.train.steps = 5
    add_submission(job.run, "this machine", pid=os.getpid(), first_attempt=1)
    found = find_run("runs/1", "status")
    assert (found.view({}).state, found.view({}).metrics["step"]) == ("starting", 5)
    record_stop_request(job.run)
    assert found.view({}).state == "stopping"
    EventLog.open(job.run, "agent-n0", 1).write("stopped", exit_code=75, reason="SIGINT")
    assert (found.view({}).exit, found.view({}).metrics["loss"]) == (1, 2.0)


def test_runs_of_no_sweep_are_compared_by_their_configs(
    sweep: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_job(tmp_path / "other")
    other.config.optim.lr = 0.5
    freeze(other.config, other.run)
    ended(other, 0, loss=1.0, val_loss=0.5)
    assert compare.main(["runs/0", "other/0"]) == 0
    table = capsys.readouterr().out
    assert table.splitlines()[0].split()[:3] == ["run", "optim.lr", "state"]
    assert table.splitlines()[1].split()[:2] == ["other/0", "0.5"]
    other.config.model = GPTConfig(vocab_size=128, n_layers=4, dim=64, n_heads=4, n_kv_heads=4, ffn_dim=128)
    freeze_again = make_job(tmp_path / "third")
    freeze(replace(other.config, run=freeze_again.config.run), freeze_again.run)
    assert compare.main(["runs/0", "third/0"]) == 0
    page = capsys.readouterr().out
    assert re.search(r"settings that differ\nkey +runs/0 +third/0\n", page)
    assert re.search(r"^model\.ffn_dim +32 +128", page, re.MULTILINE)


def test_a_retry_of_a_sweep_without_failures_says_so(sweep: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    for job in sweep[2:]:
        shutil.rmtree(job.run.path)
    assert submitted.retry(["--failed", "runs"]) == 0
    assert capsys.readouterr().out == "resubmitting 0 of 2 runs: none has failed, stopped or been cancelled\n"


def test_a_retry_takes_the_present_code(sweep: list[Job], tmp_path: Path) -> None:
    """The current directory does not matter: it is the work tree that the run was frozen from."""
    tree = tmp_path / "project"
    (tree / "package").mkdir(parents=True)
    module = tree / "package" / "model.py"
    module.write_text("broken = True\n")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    job = sweep[2]
    job.config.run.root = str(tmp_path / "runs")
    code = snapshot_code([job.config], tmp_path / "runs" / "code", tree / "package")
    job.run.update_record(snapshot=None if code is None else asdict(code))
    found = [(item.run, item.config) for item in (job, sweep[3])]
    lines = take_code_again(found)
    assert lines[0].endswith("has not changed since its code was frozen")
    assert "no code was frozen" in lines[1], "sweep[3] has none"
    assert notes_on_changed_code(found) == []
    module.write_text("broken = False\n")
    (line,) = notes_on_changed_code(found)
    assert line.startswith(f"note: {tree} has changed since its code was frozen; the frozen code runs again (")
    assert take_code_again(found)[0].startswith(f"code: the present code of {tree}, copied to {tmp_path}/runs/.code/")
    after = frozen_code(job.run)
    assert code is not None
    assert after is not None
    assert Path(after.snapshot, "package", "model.py").read_text() == "broken = False\n"
    assert after.paths[0] == f"{after.snapshot}/package", "the directory in which the run was frozen"
    assert Path(code.snapshot).is_dir(), "runs that have not been retried import from it"
    (told,) = [event for event in job.run.read_events() if event["event"] == "warning"]
    assert told["message"] == f"continues with other code: {code.snapshot} -> {after.snapshot}"
    shutil.rmtree(tree)
    with pytest.raises(UserError, match="which is no longer a git work tree"):
        take_code_again(found)


def test_code_outside_of_a_git_work_tree_is_reported(sweep: list[Job], tmp_path: Path) -> None:
    config = replace(sweep[0].config, model=CustomModelConfig(_target_="net.Net"))
    config.optim._target_ = "torch.optim.SGD"
    assert code_note(None, [config]) is None, "there is no module net here"
    (tmp_path / "net.py").touch()
    note = code_note(None, [config])
    assert note is not None
    assert "is not in a git work tree" in note and "jobs import net from there" in note
    assert code_note(None, [replace(config, run=replace(config.run, snapshot=False))]) is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert code_note(None, [config]) is None


def test_a_dry_run_shows_once_what_jobs_have_in_common() -> None:
    plans: dict[str, int] = {}
    plan = "job 0 to this machine: dp: optim.lr=1\n  run directory: runs/0\n  layout: dp 2\n  world: 2"
    assert _shortened(plan, 0, plans) == plan
    other = plan.replace("job 0", "job 1").replace("runs/0", "runs/1")
    assert _shortened(other, 1, plans).splitlines()[1:] == ["  run directory: runs/1", "  otherwise as job 0"]
    assert _shortened(other.replace("dp 2", "dp 4"), 2, plans) == other.replace("dp 2", "dp 4")
