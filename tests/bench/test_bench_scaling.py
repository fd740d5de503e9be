"""``bench scaling``: the arithmetic of scaling, and the workers of this machine."""

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_train.bench import measuring
from hpc_train.bench.measuring import result_of
from hpc_train.bench.scaling import STRONG, WEAK, paragraph, scaling_rows, table
from hpc_train.launch.command_job import CommandJob
from tests.doors.command import TINY, hpc_train

HERE = ["cluster=local", "cluster.gpus_per_node=0", *TINY]


def result(ranks: int, step_s: float, batch: int) -> dict[str, Any]:
    return {
        "world_size": ranks,
        "step_s": {"median": step_s},
        "samples_per_s": {"median": batch / step_s},
        "global_batch": batch,
        "samples": 3600,
        "memory": {"device_peak_bytes": None, "host_peak_bytes": [2**30] * ranks},
        "communication_share": None if ranks == 1 else [0.1, 0.3],
        "parameters": 1000,
        "precision": "fp32",
        "strategy": "dp",
        "torch": "2.13",
        "device": "cpu",
        "blocks": 5,
        "steps_per_block": 10,
    }


def test_the_result_of_a_job_may_arrive_after_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "_POLL_S", 0.01)
    job = CommandJob("41", tmp_path / "bench-step.out", tmp_path / "bench-step.code")
    job.code.write_text("1\n")
    assert result_of(job) is None
    assert "job 41 has no result (exit code 1)" in capsys.readouterr().err
    job.code.write_text("0\n")
    job.log.write_text('{"rows"')
    threading.Timer(0.05, job.log.write_text, ['{"rows": []}\nthe agent of another node ends\n']).start()
    assert result_of(job) == {"rows": []}


def test_speed_up_and_efficiency() -> None:
    strong = scaling_rows(STRONG, [(1, result(4, 1.0, 32)), (4, result(16, 0.4, 32))])
    weak = scaling_rows(WEAK, [(1, result(4, 1.0, 32)), (4, result(16, 1.25, 128))])
    assert strong[1].speed_up == pytest.approx(2.5) and strong[1].efficiency == pytest.approx(0.625)
    assert weak[1].speed_up == pytest.approx(3.2) and weak[1].efficiency == pytest.approx(0.8)
    assert strong[0].epoch_s == pytest.approx(3600 / 32) and strong[1].communication_share == pytest.approx(0.2)
    rows = [*strong, *weak]
    assert len(table(rows, "nodes").splitlines()) == 5
    words = paragraph(rows, result(4, 1.0, 32), "nodes")
    for part in ("1 to 4 nodes with 4 x cpu", "speed-up of 2.50", "62%", "80%", "45 s", "0.2 device-hours", "20%"):
        assert part in words, words


@pytest.mark.long_form(30)  # the rows and the table above
def test_the_workers_of_this_machine(tmp_path: Path) -> None:
    few = ["--steps", "1", "--pairs", "1", "--csv", "s.csv", "--plot", "s.png", "--json"]
    done = hpc_train("bench", "scaling", "+strategy=dp", "workers=1,2", *HERE, *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["kind"], row["ranks"], row["global_batch"]) for row in found["rows"]] == [
        ("strong", 1, 8), ("strong", 2, 8), ("weak", 1, 8), ("weak", 2, 16),
    ]  # fmt: skip
    assert "strong scaling" in found["paragraph"]
    with (tmp_path / "s.csv").open() as file:
        assert [row["ranks"] for row in csv.DictReader(file)] == ["1", "2", "1", "2"]
    assert (tmp_path / "s.png").stat().st_size > 1000


def test_wrong_calls_are_refused(called: Callable[..., Any]) -> None:
    for arguments, words in (
        (["+strategy=dp"], "needs one list of sizes"),
        (["nodes=1,2"], "measures with Slurm jobs"),
        (["workers=0,2"], "must be a list of numbers"),
    ):
        done = called("bench", "scaling", *HERE, *arguments)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done
