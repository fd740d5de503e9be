"""The live view: what it reads of runs, and what it shows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hpc_train.commands import top
from hpc_train.errors import UserError
from hpc_train.report.live_runs import Details, Runs
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import append_line
from hpc_train.run.freeze import freeze
from hpc_train.run.lease import add_submission
from hpc_train.runs.lookup import find_runs
from tests.launch.jobs import make_job


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has finished and one that is at step 3 of 150, after it was restarted from step 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPC_TRAIN_ROOT", str(tmp_path))
    for name in ("old", "new"):
        job = make_job(tmp_path / name)
        freeze(job.config, job.run)
        job.run.update_record(total_steps=150)
        add_submission(job.run, "this machine", pid=2**22 + 1, first_attempt=0)
        attempt = job.run.claim_attempt()
        events = EventLog.open(job.run, "agent-n0", attempt)
        logged(job.run.metrics_file(attempt), attempt, [1, 2], loss=2.5)
        if name == "old":
            events.write("finished", exit_code=0)
        else:
            chunks = [["forward", 0, 0.0, 0.25], ["backward", 0, 0.5, 1.0]], [["forward", 1, 0.25, 0.5]]
            ranks = [{"rank": rank, "chunks": own} for rank, own in enumerate(chunks)]
            events.write("pipeline_step", schedule="1f1b", micro_batches=1, seconds=1.0, ranks=ranks)
            events.write("restarted", reason="rank 1 [died]")
            logged(job.run.metrics_file(job.run.claim_attempt()), 1, [2, 3], loss=1.5)
    return tmp_path


def logged(path: Path, attempt: int, steps: list[int], loss: float) -> None:
    for step in steps:
        rates = {"samples_per_s": 8.0, "tokens_per_s": 512.0, "step_s": 2.0, "gpu_util": 0.5, "comm_share": 0.25}
        append_line(path, {"step": step, "attempt": attempt, "time": 1.0, "loss": loss, **rates})


def test_a_row_per_run_and_ended_runs_are_not_read_again(root: Path) -> None:
    runs = Runs(root)
    rows = {row.name: row for row in runs.rows()}
    assert rows.keys() == {"old/0", "new/0"}
    assert rows["old/0"].cells()[1] == "done"
    cells = rows["new/0"].cells()
    assert (cells[2], cells[3], cells[5]) == ("3/150 2 %", "1.5000", "50 %")
    before = rows["old/0"].view
    (root / "old" / "0" / "metrics" / "attempt-000.jsonl").unlink()
    assert next(row for row in runs.rows() if row.name == "old/0").view is before


def test_the_curve_of_a_run_has_the_newest_line_of_each_step_and_reads_only_what_is_new(root: Path) -> None:
    (item,) = find_runs(str(root / "new"), "top")
    details = Details(item)
    details.look()
    assert details.losses == {1: 2.5, 2: 1.5, 3: 1.5}
    details.look()
    assert [event["event"] for event in details.events] == ["restarted"]
    logged(root / "new" / "0" / "metrics" / "attempt-001.jsonl", 1, [4], loss=1.25)
    details.look()
    assert details.losses[4] == 1.25
    assert "waiting: communication 25 %" in details.lines(item.view({}))


def test_the_view_shows_them(root: Path) -> None:
    pytest.importorskip("textual")
    from textual.widgets import DataTable, Sparkline, Static

    from hpc_train.report.top import Top

    async def look() -> tuple[list[list[str]], list[float], str, str]:
        app = Top(Runs(root), 3600.0)
        async with app.run_test(size=(120, 40)) as pilot:
            for _ in range(200):
                await pilot.pause(0.02)
                if app.query_one("#losses", Sparkline).data and str(app.query_one("#events", Static).render()):
                    break
            table = app.query_one(DataTable)
            rows = [[str(cell) for cell in table.get_row_at(index)] for index in range(table.row_count)]
            data = [*(app.query_one("#losses", Sparkline).data or [])]
            events, stages = (str(app.query_one(name, Static).render()) for name in ("#events", "#stages"))
            await pilot.press("q")
            return rows, data, events, stages

    rows, losses, events, stages = asyncio.run(look())
    assert stages.splitlines() == [
        "a step under 1f1b, per micro-batch:",
        "stage 0, rank 0: forward 250 ms, backward 500 ms, waiting 25 %",
        "stage 1, rank 1: forward 250 ms, waiting 75 %",
    ]
    assert [row[0] for row in rows] == ["new/0", "old/0"]
    assert losses == [2.5, 1.5, 1.5]
    assert events.endswith("restarted: rank 1 [died]")


def test_json_and_mistakes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--json", "old"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["run"], row["state"]) == (str(root / "old" / "0"), "done")
    for arguments, message in ((["none"], "none"), (["--interval", "0"], "--interval is 0"), ([], "not a terminal")):
        with pytest.raises(UserError, match=message):
            top.main(arguments)
