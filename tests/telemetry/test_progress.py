"""The live line, the chart and the summary, from a run directory alone."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import append_line
from hpc_train.run.rows import Line
from hpc_train.telemetry import progress
from hpc_train.telemetry.progress import Progress, loss_chart, progress_line, summary, twice_as_long


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.update_record(run_id="abc", total_steps=100)
    return directory


@pytest.fixture
def view(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Progress:
    """A view without a terminal, which looks at the run and prints a line at each tick."""
    monkeypatch.setattr(progress, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "PLAIN_LINE_EVERY_S", 0.0)
    return Progress(run, Console(file=io.StringIO(), width=200))


def printed(view: Progress) -> str:
    return view._console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def log(run: RunDirectory, attempt: int, *steps: int) -> None:
    for step in steps:
        line = {"time": 1000.0 + 2 * step, "step": step, "attempt": attempt, "loss": 5.0 - step / 50}
        append_line(run.metrics_file(attempt), line | {"tokens_per_s": 1234.5, "step_s": 1.0})


def test_the_line() -> None:
    assert "importing torch" in progress_line([], 100)
    assert progress_line([], 100, built=True) == "starting: first step"
    first = Line({"time": 0.0, "step": 10, "loss": 4.25, "tokens_per_s": 12345.6, "step_s": 3.0})
    assert progress_line([first], 100) == "step 10/100 · loss 4.2500 · 12,346 tokens/s · 4:30 left"
    last = Line(first | {"time": 40.0, "step": 20, "loss": None})
    shown = "step 20/100 · loss not finite · 12,346 tokens/s · 5:20 left · 2 restarts"
    assert progress_line([first, last], 100, 2) == shown
    assert progress_line([Line(first | {"step": 100})], 100) == "step 100/100 · loss 4.2500 · 12,346 tokens/s"
    images = Line(first | {"step": 100, "tokens": 800, "samples": 800})
    assert progress_line([images], 100) == "step 100/100 · loss 4.2500 · 12,346 samples/s"


def test_plain_lines_where_there_is_no_terminal(run: RunDirectory, view: Progress) -> None:
    run.claim_attempt()
    log(run, 0, 10, 20)
    view = Progress(run, view._console)  # of a later job, which does not show the earlier attempt
    view.tick()
    run.claim_attempt()
    log(run, 1, 30)
    view.tick()
    view.tick()
    run.claim_attempt()
    log(run, 2, 25, 40)
    view.tick()
    run.update_record(result={"steps": 40, "loss": 4.2})
    view.finish()
    lines = printed(view).splitlines()
    assert lines.pop(0).startswith("starting: importing torch")
    assert [line.split(" · ")[0] for line in lines[:2]] == ["step 30/100", "step 40/100"]
    assert lines[1].endswith("1 restart")
    assert lines[2:] == [f"run directory: {run.path}"], "the run is not done: no summary"


def test_a_look_reads_only_what_is_new(run: RunDirectory, view: Progress) -> None:
    run.claim_attempt()
    line = json.dumps({"time": 1000.0, "step": 1, "attempt": 0, "loss": 1.0, "more": "x" * 500}) + "\n"
    run.metrics_file(0).write_text(line * 2_000)
    view.tick()
    with run.metrics_file(0).open("a") as file:
        file.write(line.replace('"step": 1,', '"step": 2,'))
        file.write(line[:20])  # being written
    before = bytes_read()
    for _ in range(10):
        view.tick()
    assert bytes_read() - before < 100_000, "the file has 1.1 MB"
    view.finish()
    assert "step 2/100" in printed(view)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_file_system_that_hangs_does_not_hold_up_the_agent(
    run: RunDirectory, view: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOOK_S", 0.1)
    run.claim_attempt()
    responds, read = threading.Event(), view._read

    def hang() -> progress.Look:
        responds.wait()
        return read()

    view._look = progress.BackgroundCall(hang)
    for _ in range(100):
        view.tick()
    log(run, 0, 10)
    responds.set()
    view.finish()
    assert "step 10/100" in printed(view)


def test_saves_that_fail_are_told_once_and_counted(run: RunDirectory, view: Progress) -> None:
    events = EventLog.open(run, "rank-0000", run.claim_attempt(), 0)
    full = "rank 0: OSError: [Errno 28] No space left on device: '/scratch/run'"
    events.write("checkpoint_saved", step=30)
    log(run, 0, 30)
    view.tick()
    for step in (31, 32, 33):
        events.write("checkpoint_failed", step=step, message=full, final=False)
        log(run, 0, step)
        view.tick()
    events.write("checkpoint_failed", step=34, message=full, final=True)
    events.write("save_deferred", step=34, path="/scratch/run/checkpoints", seconds=600.0, message=full)
    view.tick()
    events.write("checkpoint_saved", step=34)
    log(run, 0, 34)
    view.tick()
    failed = "rank 0: No space left on device: '/scratch/run'"
    lines = printed(view).splitlines()
    assert [line for line in lines if not line.startswith("step")] == [
        f"saving has failed since step 31: {failed}; training continues, but a failure would lose the steps after "
        "checkpoint 30",
        f"the last save, of step 34, failed: {failed}",
        "  retrying for up to 600 s: free some space in /scratch/run/checkpoints; otherwise the run fails and loses "
        "the steps after checkpoint 30",
        "saving works again: checkpoint of step 34 is saved after 4 saves failed",
    ]
    ends = [line.split(" · ")[-1] for line in lines if line.startswith("step")]
    assert ends[1:4] == ["1 save failed", "2 saves failed", "3 saves failed"]
    assert "failed" not in ends[0] and "failed" not in ends[-1]


def test_events_are_told_in_a_line_each(run: RunDirectory, view: Progress) -> None:
    events = EventLog.open(run, "rank-0000", run.claim_attempt(), 0)
    events.write("checkpoint_set_aside", step=6, path="/run/checkpoints/bad", message="model.bin has 3 bytes, not 4")
    events.write("resumed", step=4)
    events.write("warning", message="W&B: there is no API key")
    log(run, 0, 5)
    view.tick()
    events.write("evaluation_started", step=6)
    view.tick()
    log(run, 0, 6)
    view.tick()
    events.write("checkpoint_set_aside", step=6, path="x", message="rolling back", rolled_back=True)
    events.write("rolled_back", step=6, to_step=4, reason="the loss was not finite")
    view.tick()
    assert [line.split(" · ")[-1] if "step 5" in line else line for line in printed(view).splitlines()] == [
        "the checkpoint of step 6 is damaged and set aside as /run/checkpoints/bad: model.bin has 3 bytes, not 4",
        "resumed from the checkpoint of step 4",
        "warning: W&B: there is no API key",
        "1:35 left",
        "evaluating after step 6",
        "step 6/100 · loss 4.8800 · 1,234 tokens/s · 3:08 left",
        "rolled back to step 4: the loss was not finite",
    ]


def test_a_live_line_in_a_terminal(run: RunDirectory) -> None:
    view = Progress(run, Console(file=io.StringIO(), force_terminal=True, width=80))
    view.tick()
    run.claim_attempt()
    log(run, 0, 10)
    view.finish()
    assert "starting" in printed(view)
    assert "step 10/100" in printed(view)


def test_the_summary_says_where_how_and_what_next(run: RunDirectory) -> None:
    log(run, 0, 1, 50, 100)
    run.update_record(
        result={"steps": 100, "loss": 3.0, "val_loss": 3.1, "tokens_per_s": 1000.0},
        wandb={"mode": "offline", "url": None},
    )
    text = summary(run, "python -m hpc_train +strategy=dp run.name=run")
    assert "done: 100 steps, 1,000 tokens/s; training loss 4.9800 -> 3.0000, validation loss 3.1000" in text
    assert str(run.path) in text
    assert f"python -m hpc_train sync {run.path} " in text
    assert "python -m hpc_train +strategy=dp run.name=run train.steps=200" in text
    assert "•" in text
    assert "warning:" not in text
    run.update_record(wandb={"mode": "online", "url": "https://example.org/run"}, loss_warning="the results depend")
    assert "https://example.org/run" in summary(run) and "warning:         the results depend" in summary(run)


def test_hints_at_the_end_fit_the_run(run: RunDirectory) -> None:
    run.update_record(result={"steps": 7})
    run.config.write_text("model: {kind: custom}\n")
    assert "+strategy=dp,zero1,zero3 " in summary(run)
    assert "repeat the command that started the run, with train.steps=14" in summary(run), "of a run that was resumed"
    run.config.write_text("model: {kind: transformer}\n")
    run.update_record(overrides=["+strategy=dp", "run.name=old", "train.steps=7", "model._target_=a b"])
    assert "+strategy=dp,pp,hybrid " in summary(run)
    assert "python -m hpc_train run.name=run train.steps=14 +strategy=dp 'model._target_=a b'" in summary(run)
    run.update_record(stream_ended=7)
    assert "train longer:    add items to the stream" in summary(run)
    run.update_record(result={"steps": 7, "ended_early": "no better loss"})
    assert "train longer:    change or remove the hook" in summary(run)
    run.update_record(wandb={"mode": "online", "url": None, "problem": "CommError"})
    assert "W&B:             not recorded: CommError" in summary(run)


def test_going_on_for_twice_as_long() -> None:
    assert twice_as_long("hpc_train run.name=x a=1 -cd d", 5) == "hpc_train run.name=x train.steps=10 a=1 -cd d"
    assert twice_as_long("hpc_train a=1", 300) == "hpc_train a=1 train.steps=600"
    assert twice_as_long("hpc_train train.steps=10 a=1", 10) == "hpc_train a=1 train.steps=20"
    assert twice_as_long("hpc_train train.epochs=1.5 a=1", 10) == "hpc_train train.epochs=3 a=1"


def test_the_chart() -> None:
    lines = [{"step": step, "loss": 5.0 - step / 25} for step in range(1, 101)]
    lines[-1] |= {"val_loss": 2.0}
    lines[50]["loss"] = None
    rows = loss_chart(lines, width=20, height=5).splitlines()
    assert len(rows) == 7
    assert rows[0].startswith("   4.")
    assert "•" in rows[0]
    assert "•" not in rows[0][15:]
    assert rows[-1].split() == ["step", "1", "100"]
    assert sum(row.count("o") for row in rows) == 1
    assert loss_chart(lines[:1]) == ""
    assert loss_chart([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}]) != ""


def test_no_torch() -> None:
    script = "import sys, hpc_train.telemetry.progress; assert not {'torch', 'wandb'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
