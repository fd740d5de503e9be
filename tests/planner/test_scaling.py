"""The time that failures cost, against a simulation and published figures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.failures import LLAMA_3, RSC_1, RSC_2, Saves, between_failures, shares
from hpc_train.commands import plan
from hpc_train.errors import UserError
from tests.doors.schema import check_output


def simulated_share(saves: Saves, between: float, failures: int) -> float:
    """Returns the useful share of a training that fails at random, event by event."""
    clock = kept = 0.0
    draw = random.Random(0).expovariate
    for _ in range(failures):
        left = draw(1 / between)
        clock += left
        left -= saves.restart_s  # a failure during the restart begins it again
        period = saves.every_s + saves.blocked_s
        lag = saves.durable_s - saves.blocked_s
        if left >= period + lag:
            kept += saves.every_s * ((left - lag) // period)
    return kept / clock


@pytest.mark.parametrize("between", [1e5, 1e4, 2e3])
@pytest.mark.parametrize("durable", [10.0, 60.0])
def test_the_useful_share_is_that_of_a_simulated_training(between: float, durable: float) -> None:
    saves = Saves(every_s=600.0, blocked_s=10.0, durable_s=durable, restart_s=120.0)
    found = shares(saves, between)
    assert found.useful == pytest.approx(simulated_share(saves, between, 40_000), rel=0.02)
    assert found.useful + found.saves + found.lost_work + found.restarts == pytest.approx(1)
    assert min(vars(found).values()) >= 0


def test_published_times_between_failures_and_goodput_come_out() -> None:
    """RSC-1: 1.8 h projected for 16,384 GPUs (arXiv:2410.21680). Llama 3: more than 90 % (arXiv:2407.21783)."""
    assert between_failures(RSC_1.per_gpu_hour, 16_384) == pytest.approx(1.8 * 3600, rel=0.01)
    assert RSC_2.per_gpu_hour < LLAMA_3.per_gpu_hour < RSC_1.per_gpu_hour
    saves = Saves(every_s=600.0, blocked_s=5.0, durable_s=30.0, restart_s=300.0)
    assert 0.9 < shares(saves, between_failures(LLAMA_3.per_gpu_hour, 16_384)).useful < 0.97
    assert shares(saves, between_failures(0.0, 8)).lost_work == 0
    assert shares(saves, 0.1).useful == 0


DDP = ("strategy.pp=1", "strategy.tp=1", "strategy.data_parallel=ddp", "train.activation_checkpointing=none")


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert plan.main([*arguments, "--json"]) == 0
    printed = capsys.readouterr().out
    check_output(["plan"], printed)
    found: list[dict[str, Any]] = json.loads(printed)
    return found


def test_ten_thousand_gpus_fail_often_and_the_intervals_say_how_little_is_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seven = ["model=llama_7b", "data=synthetic", "data.sequence_length=4096", "precision=bf16", "batch.global_size=16"]
    fixed = ["strategy.pp=1", "strategy.tp=1", "strategy.data_parallel=zero2", "batch.micro_size=1"]
    asked = [*seven, *fixed, "train.steps=1000", "--simulate", "--gpus", "8,1024,10000"]
    few, many, most = simulated(capsys, *asked)
    assert [row["batch"] for row in (few, many, most)] == [16, 2048, 20_000]
    assert most["efficiency"] < many["efficiency"] < few["efficiency"] == 1
    assert most["save_every_s"] < many["save_every_s"] and most["useful"]["low"] < many["useful"]["low"]
    assert most["failures_per_day"]["middle"] == pytest.approx(24 * 10_000 * LLAMA_3.per_gpu_hour)
    for row in (few, many, most):
        for name in ("step_s", "samples_per_s", "useful", "seconds"):
            assert row[name]["low"] <= row[name]["middle"] <= row[name]["high"]
    assert most["step_s"]["high"] / most["step_s"]["middle"] > few["step_s"]["high"] / few["step_s"]["middle"]
    samples = 1000 * 16
    assert few["seconds"]["middle"] == pytest.approx(samples / few["samples_per_s"]["middle"])
    _, unreliable = simulated(capsys, *asked, "--gpus", "8,10000", "--failures", "1e-3", "--storage", "1")
    assert unreliable["useful"]["middle"] < most["useful"]["low"]
    assert unreliable["useful"]["low"] == unreliable["useful"]["high"]


@pytest.mark.long_form(12)
def test_the_simulation_is_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["data=synthetic", "model=gpt_tiny", "batch.global_size=64", *DDP, "batch.micro_size=8", "train.steps=100"]
    picture = tmp_path / "scaling.svg"
    assert plan.main([*tiny, "--simulate", "--gpus", "8,2048", "--out", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "assumed: 1.2e-05 (RSC-2) to 3.4e-05 (RSC-1)" in text and "beyond 1,024 GPUs" in text
    assert picture.read_text().lstrip().startswith("<?xml")
    with pytest.raises(UserError, match="fits on none of 8 devices"):
        plan.main(["model=gpt_175b", *tiny[:1], *tiny[2:], "--simulate", "--gpus", "8"])
    with pytest.raises(UserError, match="the machine has no number"):
        plan.main([*tiny, "--simulate", "--figure", "network=3"])
    with pytest.raises(UserError, match="not an image file"):
        plan.main([*tiny, "--simulate", "--out", str(tmp_path / "scaling.txt")])
