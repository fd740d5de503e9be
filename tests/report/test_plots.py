"""``plot`` draws the metrics of runs, and the result of a sweep over its varied keys."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from hpc_train.cli import run
from hpc_train.run.files import append_line
from hpc_train.run.freeze import freeze
from tests.doors.schema import check_output
from tests.launch.jobs import make_job

RUNS = 12  # more than matplotlib has colors in its cycle


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Learning rates whose losses have many sizes; run 1 is the best, and the last one diverges."""
    for number in range(RUNS):
        rate = (number + 1) / 1000
        job = make_job(tmp_path / "sweep", number)
        job.config.optim.lr = rate
        freeze(job.config, job.run, overrides=[f"optim.lr={rate}"])
        final = None if number == RUNS - 1 else 10.0 ** (abs(number - 1) - 8)
        for step in range(1, 6):
            loss = None if final is None else final * (1 + 1 / step)
            times = {"step": step, "time": 60.0 * step, "attempt": 0, "samples": 8 * step, "tokens": 8 * step}
            shares = {"data_wait_share": 0.1, "comm_share": 0.2, "peak_memory_bytes": 1 << 30}
            speed = {"tokens_per_s": 100.0, "samples_per_s": 100.0}
            append_line(job.run.metrics_file(0), {**times, **shares, **speed, "loss": loss})
        append_line(job.run.metrics_file(0), {"step": 5, "time": 301.0, "attempt": 0, "loss": loss, "val_loss": final})
    return tmp_path / "sweep"


def labels(picture: Path) -> set[str]:
    """Returns the texts of an SVG, which matplotlib writes as comments before their shapes."""
    return {line.strip()[5:-4] for line in picture.read_text().splitlines() if line.strip().startswith("<!-- ")}


def test_a_sweep_is_drawn_over_its_steps_and_its_key(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = sweep / "x.svg"
    assert run(["plot", str(sweep), "--out", str(picture), "--json"]) == 0
    printed = capsys.readouterr().out
    check_output(["plot"], printed)
    assert json.loads(printed)["best"] == str(sweep / "1")
    curves = {"loss (dashed, squares: validation)", "samples per second", "peak memory of a rank, GiB", "communication"}
    runs = {f"{number}: lr={(number + 1) / 1000}" for number in range(RUNS)}
    assert labels(picture) >= {*curves, *runs, "step", "optim.lr", "val_loss", "best"}
    assert "$\\mathdefault{10^{-8}}$" in labels(picture), "losses of many sizes need a logarithmic axis"
    colors = set(re.findall(r"fill: none; stroke: (#\w{6}); stroke-linecap", picture.read_text()))
    assert len(colors) >= RUNS - 1, "each run with a loss has its own color"


def test_one_run_is_drawn_over_hours_as_png(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plot", str(sweep / "0"), "-o", str(sweep / "x.png"), "--over", "hours"]) == 0
    assert (sweep / "x.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_told(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (sweep / "full.png").symlink_to("/dev/full")
    for options, message in (
        (["--out", str(sweep / "full.png")], "full.png cannot be written (No space left on device)"),
        (["--metric", "val_los"], "did you mean val_loss?"),
        (["--out", "x.jpg"], "x.jpg is not an image file"),
    ):
        assert run(["plot", str(sweep), *options]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["plot", str(sweep)]) == 2
    assert "[plots]" in capsys.readouterr().err
