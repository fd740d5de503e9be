"""The report page: what it says, from run directories as agents and workers write them, and that it is sound HTML."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import asdict, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hpc_train.commands import report, why
from hpc_train.config.schema import CustomDataConfig
from hpc_train.planner.calibration import read_calibration
from hpc_train.planner.machine import read_machine
from hpc_train.report.page.build import write_after, write_at_end, write_page
from hpc_train.report.page.markup import Html, Scale, block, thinned
from hpc_train.report.page.resources import ideal_rows
from hpc_train.report.pipeline_step import Chunk
from hpc_train.run import lease
from hpc_train.run.directory import PAGE, RunDirectory
from hpc_train.run.exits import Failure
from hpc_train.run.files import NewLines, append_line, write_json
from hpc_train.run.freeze import freeze, load
from tests.launch.jobs import make_job

SECRET = "sk-0123456789abcdef"
HOSTILE = '<script src="http://example.org/x.js">alert(1)</script> & "\x1b[31mred\x1b[0m\x00'
GIB = 2**30
VOID = {"meta", "br", "hr"}
FOREIGN = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"}


class Page(HTMLParser):
    """Parses a page strictly and collects what a reader or a screen reader finds."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words += data + " "
        if self.open and self.open[-1] in ("h1", "h2"):
            self.titles.append(data)


def check(text: str) -> Page:
    """Parses a page after it has checked what holds for every page."""
    assert len(text) < 1_000_000
    page = Page(text)
    names = {name for name, _ in page.tags}
    assert not names & FOREIGN, "it runs nothing and reads nothing"
    values = [value or "" for _, attributes in page.tags for value in attributes.values()]
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]
    assert not [value for value in values if "://" in value or "url(" in value]
    policy = next(of["content"] for _, of in page.tags if of.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = [each for _, of in page.tags for each in (of.get("aria-labelledby") or "").split()]
    assert set(labels) <= set(ids)
    regions = [of.get("aria-label") for _, of in page.tags if of.get("role") == "region"]
    assert None not in regions and len(regions) == len(set(regions))
    assert all(of.get("role") == "img" or of.get("aria-hidden") for name, of in page.tags if name == "svg")
    assert all(of.get("scope") in ("row", "col") for name, of in page.tags if name == "th")
    levels = [int(name[1]) for name, _ in page.tags if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    assert [name for name, _ in page.tags if name in ("header", "main", "footer")] == ["header", "main", "footer"]
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f]", text)
    return page


def frozen(path: Path, **config: Any) -> RunDirectory:
    """A frozen run on two nodes with a secret in its environment."""
    job = make_job(path)
    changed = replace(job.config, cluster=replace(job.config.cluster, env={"SOME_TOKEN": SECRET}), **config)
    freeze(changed, job.run, overrides=["+strategy=dp", f"+cluster.env.SOME_TOKEN={SECRET}", "optim.lr=1e-3"])
    lease.add_submission(job.run, "somewhere", first_attempt=0)
    return job.run


def begin(run: RunDirectory, attempt: int, now: float, launch: str = "7.0.0") -> None:
    """The start of an attempt on two nodes with two GPUs each."""
    run.claim_attempt()
    layout = {"dp": 2, "pp": 2, "tp": 1, "schedule": "1f1b"}
    write_json(run.attempts / f"{attempt:03d}.json", {"nodes": 2, "workers_per_node": 2, "layout": layout})
    of_node = {
        "layout": "dp 2 x pp 2",
        "world_size": 4,
        "gpus": 4,
        "launch": launch,
        "job_id": None,
        "nodes": ["a", "b"],
    }
    event(run, attempt, now + 1, "started", **of_node, began=now)


def event(run: RunDirectory, attempt: int, now: float, name: str, **details: Any) -> None:
    head = {"time": now, "event": name, "rank": None, "node": "a", "attempt": attempt, "step": None}
    append_line(run.events_file("agent-a", attempt), head | details)


def step(run: RunDirectory, attempt: int, now: float, number: int, **values: Any) -> None:
    line = {"time": now, "step": number, "attempt": attempt, "world_size": 4, "loss": 5 - number / 10, "step_s": 1.0}
    rates = {"tokens_per_s": 1000.0, "samples_per_s": 10.0, "tokens": 100 * number, "samples": number, "save_s": 0.0}
    waits = {"comm_share": 0.1, "bubble_share": 0.2, "data_wait_share": 0.01, "mfu": 0.4, "hfu": 0.45}
    append_line(run.metrics_file(attempt), line | rates | waits | {"peak_memory_bytes": 30 * GIB} | values)


def failed_and_recovered(path: Path) -> RunDirectory:
    """A run whose rank 3 fails at step 8, after a checkpoint of step 5, and that is done after a restart."""
    run = frozen(path)
    now = time.time() - 100
    begin(run, 0, now)
    for number in range(1, 9):
        step(run, 0, now + 5 + number, number)
    event(run, 0, now + 10, "checkpoint_saved", step=5, rank=0)
    chunks = (
        [["forward", 0, 0.0, 0.1], ["backward", 0, 0.4, 0.6]],
        [["forward", 1, 0.1, 0.2], ["backward", 1, 0.2, 0.4]],
    )
    ranks = [{"rank": 2 * rank, "chunks": own} for rank, own in enumerate(chunks)]
    event(run, 0, now + 9, "pipeline_step", schedule="1f1b", micro_batches=1, seconds=0.6, ranks=ranks)
    error = {"class": Failure.KILLED, "message": HOSTILE, "traceback": f"boom {SECRET}\n{HOSTILE}"}
    event(run, 0, now + 14, "worker_failed", rank=3, node="b", **error)
    event(run, 0, now + 11, "straggler", rank=1, message="the other ranks wait for rank 1 on a 30% of the time")
    event(run, 1, now + 15, "restarted", reason="killed")
    begin(run, 1, now + 15)
    event(run, 1, now + 17, "resumed", rank=0, step=5)
    for number in range(6, 13):
        evaluation = {"val_loss": 4.0, "val_accuracy": number / 16, "val_f1": 0.25} if number in (6, 12) else {}
        load = [[1.5, 0.5, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
        step(run, 1, now + 15 + number, number, expert_load=load, **evaluation)
    dead = "1 experts had no token in the last 10 logged steps, such as expert 3 of layer 0"
    event(run, 1, now + 27, "advice", rank=0, step=12, limit="experts", value=1, message=dead, overrides=[])
    last = {"step_s": 1.0, "save_s": 0.0}
    event(run, 1, now + 28, "training_finished", rank=0, step=12, **last)
    event(run, 1, now + 29, "finished", exit_code=0, reason="")
    part = {
        "peak": 30 * GIB,
        "parameters": 5 * GIB,
        "gradients": 5 * GIB,
        "optimizer": 10 * GIB,
        "activations": 10 * GIB,
    }
    run.update_record(
        total_steps=12,
        result={"steps": 12, "loss": 3.8, "val_loss": 4.0},
        memory={"estimated": 25.0 * GIB, "ranks": [part | {"device": 80 * GIB}] * 4},
        utilization={"flops_per_sample": 4e12, "peak_flops": 1e14, "peak_source": "data sheet", "formula": "MFU = ..."},
    )
    return run


def written(target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert report.main([str(target), "--json"]) == 0
    return Path(json.loads(capsys.readouterr().out)["out"]).read_text()


def test_a_page_tells_what_happened_in_the_words_of_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = failed_and_recovered(tmp_path / "sweep")
    text = written(run.path, capsys)
    page = check(text)
    assert page.titles == [
        "Run sweep/0", "Verdict", "What it trains", "Loss", "Metrics", "Time", "Throughput", "Memory",
        "What the ranks waited for", "Experts", "Pipeline step", "Nodes and ranks", "Faults and decisions", "Reproduce",
    ]  # fmt: skip
    assert why.main([str(run.path)]) == 0
    said = " ".join(page.words.split())
    for line in capsys.readouterr().out.splitlines():
        words = re.sub(r"\\x1b\[[0-9;]*m|\\x00|\ufffd", "", line)
        if SECRET not in words:
            assert all(word in said.lower() for word in words.lower().split()), line
    assert "done; it recovered from the failure below" in said and "killed, rank 3 on b, in attempt 0" in said
    assert "3 logged steps were lost" in said and "12 of 12" in said
    assert "MFU = 4T FLOP x 10/s / 100T FLOP/s = 40.0%" in said
    assert "30 GiB, on rank 0, 38% of the 80 GiB of its GPU" in said
    assert "The largest share is pipeline bubble: 20.0% of the time" in said
    assert "2 nodes, of which 1 had failures and 1 was slow" in said
    assert "rank 3 failed (killed)" in said and "rank 1 slow" in said
    assert "run.name=NEW +strategy=dp" in said
    assert "validation accuracy 0.7500" in said and "validation f1 0.2500" in said
    assert "accuracy 0.75 12 0.375 0.75" in said
    assert "model gpt, dim 16, n_layers 2" in said and "learning rate 0.0" in said and "batch" not in page.titles
    assert "the fullest expert has 2.00 times the mean load of its layer, and 1 expert has no token" in said
    assert "such as expert 3 of layer 0" in said and "layer 1 0 3 expert no token" in said
    assert SECRET not in text and "(hidden)" in text
    assert "<script" not in text and "alert(1)" in said


def out_of_memory(path: Path, saved: int | None) -> RunDirectory:
    """A run that fails after step 8; ``saved`` is the step of its checkpoint."""
    run = frozen(path)
    now = time.time() - 50
    begin(run, 0, now)
    for number in range(1, 9):
        step(run, 0, now + number, number, mfu=None, hfu=None, loss=None if number == 7 else 1.0)
    if saved is not None:
        event(run, 0, now + saved, "checkpoint_saved", step=saved, rank=0)
    failed = {"rank": 1, "node": "b", "class": Failure.OUT_OF_MEMORY, "message": "out of memory"}
    event(run, 0, now + 9, "worker_failed", traceback="MemoryError", **failed)
    event(run, 0, now + 10, "failed", exit_code=1, **failed)
    return run


def test_a_failed_run_has_lost_what_came_after_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = " ".join(check(written(out_of_memory(tmp_path / "sweep", 6).path, capsys)).words.split())
    assert "2 logged steps were lost" in said and "1 of 8 logged losses are missing or not finite" in said
    assert "What to do" in said and "python -m hpc_train resume" in said
    assert "MFU" not in said


def test_the_rates_of_lost_steps_are_shown_if_no_other_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = " ".join(check(written(out_of_memory(tmp_path / "sweep", None).path, capsys)).words.split())
    assert "No step was kept. 8 logged steps were lost" in said
    assert "The median of the logged rates is 1,000 tokens/s" in said


def test_a_run_that_has_not_started_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(check(written(frozen(tmp_path / "sweep").path, capsys)).words.split())
    assert "No step was logged" in said
    for section in ("Throughput", "Memory", "Nodes and ranks", "What the ranks waited for", "Faults and decisions"):
        assert section not in said


def test_the_page_names_the_commit_of_the_users_project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record of an earlier version has the commit of hpc_train under "code", which the project does not have."""
    run = frozen(tmp_path / "run", data=CustomDataConfig(_target_="data.Shapes", args={"noise": 0.2, "root": "/data"}))
    assert "data.Shapes, noise 0.2, root /data" in " ".join(check(written(run.path, capsys)).words.split())
    project = {"work_tree": "/home/me/my project", "commit": "1" * 40, "diff": None, "snapshot": "/s", "paths": []}
    for snapshot, code, known in (
        (project, {"commit": "2" * 40, "dirty": True}, True),
        (None, {"commit": "2" * 40, "dirty": True}, False),
        (None, {"commit": "1" * 40, "dirty": True, "work_tree": "/home/me/my project"}, True),
    ):
        run.update_record(snapshot=snapshot, code=code)
        words = check(written(run.path, capsys)).words
        assert "2222" not in words
        assert (f"git checkout {'1' * 40}" in words) == known
        assert ("cd '/home/me/my project'" in words) == known


def test_a_fork_shows_what_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = frozen(tmp_path / "parent")
    config = make_job(tmp_path / "other").config
    run = frozen(tmp_path / "fork", optim=replace(config.optim, lr=0.5))
    run.update_record(forked_from=str(parent.path))
    page = check(written(run.path, capsys))
    assert "Changed settings" in page.titles
    assert re.search(r"optim\.lr\s+\S+\s+0\.5", page.words)
    assert page.words.count("SOME_TOKEN") == 1, "in the command only"


def test_the_page_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, rate in enumerate((1e-3, 1.1e-3, 1.0, 1e-1)):
        job = make_job(tmp_path / "runs", number)
        schedule = "big <b>" if number == 2 else "cosine"
        job.config.optim.lr, job.config.optim.schedule = rate, schedule
        freeze(job.config, job.run, overrides=["+strategy=dp", f"optim.lr={rate}", f"optim.schedule={schedule}"])
        lease.add_submission(job.run, "somewhere", first_attempt=0)
        begin(job.run, 0, time.time())
        step(job.run, 0, time.time(), 5, val_loss=2.0 + number)
        error = {"class": "user_error", "message": HOSTILE, "rank": 1, "node": "a"}
        failed = number == 2
        event(
            job.run,
            0,
            time.time(),
            "failed" if failed else "finished",
            exit_code=int(failed),
            **error if failed else {},
        )
    text = written(tmp_path / "runs", capsys)
    page = check(text)
    said = " ".join(page.words.split())
    assert page.titles == ["Sweep runs", "Verdict", "Runs", "Parallel coordinates", "Failures and causes", "Reproduce"]
    assert "4 runs: 3 done, 1 failed" in said and "run 0 (optim.lr=0.001 optim.schedule=cosine) with 2.0000" in said
    assert [of for name, of in page.tags if name == "tr" and of.get("class") == "best"], "the best row is marked"
    assert "user_error in 1 run" in said and "retry --failed" in said
    assert re.search(r"schedule=big <b>: rank 1 on a, 20[-\d]+ [:\d]+", said) and "time allocated" in said
    assert "run.name=NEW +strategy=dp optim.lr=0.001 optim.schedule=cosine" in said, "the command of the best run"
    assert sum(of.get("stroke-width") == "4" for _, of in page.tags) == 1, "one line is thick"
    assert sum(of.get("stroke-dasharray") == "5 4" for _, of in page.tags) == 1, "a run that is not done is dashed"
    places = [(of["x"], float(of["y"] or 0)) for name, of in page.tags if name == "text" and of.get("class") != "halo"]
    assert all(y - above >= 20 for (x, above), (other, y) in pairwise(sorted(places)) if x == other), "labels are apart"


def test_nothing_is_to_do_after_a_sweep_that_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        job = make_job(tmp_path / "runs", number)
        freeze(job.config, job.run, overrides=[f"optim.lr={number}"])
        lease.add_submission(job.run, "somewhere", first_attempt=0)
        begin(job.run, 0, time.time())
        event(job.run, 0, time.time(), "finished", exit_code=0)
    said = check(written(tmp_path / "runs", capsys)).words
    assert "2 runs: 2 done" in said and "retry" not in said and "What to do" not in said


def test_the_end_of_a_job_writes_the_page_and_no_error_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = failed_and_recovered(tmp_path / "sweep")
    write_at_end(run)
    assert capsys.readouterr().out == f"report: {run.path / PAGE}\n"
    check((run.path / PAGE).read_text())
    monkeypatch.setattr("hpc_train.report.page.build.page_of_run", lambda *_: 1 / 0)
    write_at_end(run)
    assert capsys.readouterr() == ("", "the report could not be written: ZeroDivisionError: division by zero\n")


def on_gpus(path: Path, gpu: str) -> RunDirectory:
    """A run on two nodes with two GPUs each, which is done."""
    run, now = frozen(path), time.time() - 50
    begin(run, 0, now)
    layout = asdict(replace(make_job(path / "other").layout, dp=4))
    write_json(run.attempts / "000.json", {"gpus_per_node": 2, "workers_per_node": 2, "layout": layout})
    write_json(run.fabric, {"machines": [{"facts": {"gpus": [{"model": gpu}] * 2}}]})
    for number in range(1, 6):
        step(run, 0, now + number, number, step_s=9.0 if number == 1 else 1.0, data_wait_share=0.1, bubble_share=None)
    event(run, 0, now + 9, "finished", exit_code=0)
    return run


def test_a_page_that_cannot_be_made_creates_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = frozen(tmp_path / "run")
    monkeypatch.setattr("hpc_train.report.page.build.page_of_run", lambda *_: 1 / 0)
    monkeypatch.setattr("hpc_train.report.page.build.output_directory", lambda folder: pytest.fail(f"of {folder}"))
    with pytest.raises(ZeroDivisionError):
        write_page(str(run.path))


def test_the_end_of_a_job_records_how_far_off_the_prediction_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [on_gpus(tmp_path / name, "NVIDIA H100 80GB HBM3") for name in ("one", "two", "three")]
    for run in runs:
        write_at_end(run)
    found = runs[0].record()["prediction"]
    assert (found["machine"], found["family"], found["precision"]) == ("h100", "gpt", "fp32")
    measured = {"step_s": 0.9, "compute_s": 0.8, "communication_s": 0.1, "bubble_s": 0.0, "memory_bytes": 30 * GIB}
    assert found["measured"] == pytest.approx(measured) and 0 < found["predicted"]["step_s"] < 0.1
    assert "Prediction" in check((runs[0].path / PAGE).read_text()).titles
    config = load(runs[0])
    calibration = read_calibration(tmp_path, config, read_machine("h100"))
    assert len(calibration.pairs) == 3 and calibration.step is not None and calibration.step.is_known
    unknown = on_gpus(tmp_path / "four", "NVIDIA H1000")
    capsys.readouterr()
    write_at_end(unknown)
    assert capsys.readouterr() == (f"report: {unknown.path / PAGE}\n", "")
    assert "prediction" not in unknown.record()
    assert report.main([str(unknown.path), "--machine", "h200"]) == 0
    assert unknown.record()["prediction"]["machine"] == "h200"
    (last,) = [line for line in NewLines(tmp_path / "calibration.jsonl").read() if line["machine"] == "h200"]
    assert last["run"] == str(unknown.path)


def test_who_waited_for_a_job_writes_its_page_only_if_the_agent_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = failed_and_recovered(tmp_path / "sweep")
    write_after(run)
    assert capsys.readouterr().out == f"report: {run.path / PAGE}\n"
    (run.path / PAGE).write_text("that of the agent")
    write_after(run)
    assert (run.path / PAGE).read_text() == "that of the agent"
    os.utime(run.path / PAGE, (0, 0))  # that of an earlier job
    write_after(run)
    check((run.path / PAGE).read_text())


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (3, 3)])
def test_the_ideal_step_has_the_bubble_of_the_schedule(ranks: int, micro_batches: int) -> None:
    measured: dict[int, list[Chunk]] = {}
    for rank in range(ranks):  # 1F1B: forwards until the first backward arrives, then in turns
        ahead = min(ranks - rank, micro_batches)
        kinds = ["forward"] * ahead + ["backward", "forward"] * (micro_batches - ahead) + ["backward"] * ahead
        measured[rank] = [Chunk(kind, rank, 0.0, 2.0 if kind == "backward" else 1.0) for kind in kinds]
    ends = [chunk.end for chunks in ideal_rows(measured).values() for chunk in chunks]
    assert max(ends) == 3 * (micro_batches + ranks - 1), "(m + p - 1) (TF + TB), arXiv:1811.06965"


def test_text_is_escaped_and_markup_is_not() -> None:
    assert block("paragraph", "<b> & \x1b[1mc\x1b[0m\x01", '"') == (
        '<p class="&#34;">&lt;b&gt; &amp; c\N{REPLACEMENT CHARACTER}</p>'
    )
    assert block("paragraph", block("code", "a")) == "<p><code>a</code></p>"
    assert isinstance(block("paragraph", None), Html) and block("paragraph", None) == ""


def test_the_ticks_of_an_axis_are_round_and_a_long_line_keeps_its_extremes() -> None:
    assert [round(tick, 9) for tick in Scale(0.13, 0.87, 0, 1).ticks()] == [0.2, 0.4, 0.6, 0.8]
    assert Scale(0.5, 50, 0, 1, log=True).ticks() == [0.5, 1, 2, 5, 10, 20, 50]
    assert Scale(0.5, 200, 0, 1, log=True).ticks() == [1, 10, 100]
    points = [(float(x), 1.0) for x in range(10_000)]
    points[4321] = (4321.0, 99.0)
    kept = thinned(points)
    assert len(kept) <= 400 and (4321.0, 99.0) in kept and (kept[0], kept[-1]) == (points[0], points[-1])
    points[9_990] = (9990.0, -9.0)  # in the last part, whose end is drawn as well
    assert (9990.0, -9.0) in thinned(points)


@pytest.mark.long_form(10)  # ``check`` reads every page
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_browser_shows_the_page_without_a_message(tmp_path: Path) -> None:
    run = failed_and_recovered(tmp_path / "sweep")
    write_at_end(run)
    own = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/chromium",
        "--enable-logging=stderr",
    ]
    picture = tmp_path / "page.png"
    call = ["chromium", *own, "--window-size=500,2000", f"--screenshot={picture}", (run.path / PAGE).as_uri()]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr and picture.stat().st_size > 20_000
