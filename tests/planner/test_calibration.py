"""What plan learns from finished runs, and for which GPUs it knows the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hpc_train.commands import plan
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.layout.resolve import resolve_layout
from hpc_train.planner.calibration import (
    FILE,
    Values,
    as_line,
    key_of,
    measured_values,
    predicted_values,
    read_calibration,
)
from hpc_train.planner.machine import read_machine, recognized
from hpc_train.planner.prediction import Prediction, predict_step
from tests.config.composing import compose

SEVEN = ["model=llama_7b", "data=synthetic", "data.sequence_length=4096", "precision=bf16", "batch.global_size=256"]
MACHINE = read_machine("h100")


@cache
def config() -> Config:
    return typed(compose(["+strategy=dp", *SEVEN, "batch.micro_size=1"]))


def predicted(tp: int = 1, **seconds: Any) -> Prediction:
    """A prediction with given times of its parts."""
    found = predict_step(config(), resolve_layout(config(), 4, 8), MACHINE)
    return replace(found, layout=replace(found.layout, tp=tp), **{f"{part}_s": each for part, each in seconds.items()})


def record(root: Path, run: str, said: Values, true: Values, **other: str) -> None:
    key = key_of(config(), MACHINE) | other
    with (root / FILE).open("a") as file:
        file.write(json.dumps(as_line(key, root / run, "dp 32", said, true)) + "\n")


def scaled(said: Values, compute: float, communication: float, bubble: float, memory: float) -> Values:
    times = (said.compute_s or 0) * compute, (said.communication_s or 0) * communication, (said.bubble_s or 0) * bubble
    return Values(sum(times), *times, (said.memory_bytes or 0) * memory)


def test_the_parts_of_a_prediction_become_those_that_were_measured(tmp_path: Path) -> None:
    """Two layouts whose communication takes twice as long, and memory that is a tenth larger."""
    layouts = [
        predicted(compute=0.7, optimizer=0.1, communication=0.2, bubble=0.0),
        predicted(compute=0.4, optimizer=0.1, communication=0.3, bubble=0.2),
    ]
    for number in range(4):
        said = predicted_values(layouts[number % 2])
        record(tmp_path, f"run-{number}", said, scaled(said, 1.1, 2, 1.1, 1.1))
    found = read_calibration(tmp_path, config(), MACHINE)
    assert found.parts.keys() == {"compute_s", "communication_s"}, "only two runs have a bubble"
    new = predicted(compute=0.2, optimizer=0.1, communication=0.4, bubble=0.0)
    right = found.corrected(new)
    assert right.compute_s / right.communication_s == pytest.approx(0.2 * 1.1 / (0.4 * 2))
    assert right.optimizer_s / right.compute_s == pytest.approx(0.5)
    assert right.step_s == pytest.approx(0.3 * 1.1 + 0.4 * 2, rel=0.05), "the bubble has the factor of the step"
    assert right.samples_per_s * right.step_s == pytest.approx(new.samples_per_s * new.step_s)
    assert right.mfu / new.mfu == pytest.approx(new.step_s / right.step_s)
    fixed = new.demand.reserved_bytes
    assert right.needed_bytes - fixed == pytest.approx(1.1 * (new.needed_bytes - fixed))
    assert "the last 4 runs on h100 (gpt, bf16)" in str(found) and str(found).endswith("; corrected")


def test_the_step_is_right_in_the_median_where_no_part_is_known(tmp_path: Path) -> None:
    prediction = predicted(tp=4)
    said = predicted_values(prediction)
    assert said.compute_s is None, "the traffic of tensor parallelism is not measured apart"
    for number, ratio in enumerate((1.0, 1.3, 1.2, 1.21, 1.1)):
        record(tmp_path, str(number), said, Values(said.step_s * ratio, bubble_s=0.0))
    found = read_calibration(tmp_path, config(), MACHINE)
    assert found.corrected(prediction).step_s == pytest.approx(1.2 * prediction.step_s)
    assert found.corrected(prediction).needed_bytes == pytest.approx(prediction.needed_bytes)
    assert "+20% in the median (half of them +11% to +30%); corrected" in str(found)


def test_what_other_runs_and_damaged_lines_say_does_not_count(tmp_path: Path) -> None:
    said = Values(1.0, 0.9, 0.1, 0.0, 1e9)
    assert str(read_calibration(tmp_path / "missing", config(), MACHINE)) == ""
    for name, other in {"a": {"machine": "a100-80"}, "b": {"family": "vit"}, "c": {"precision": "fp32"}}.items():
        record(tmp_path, name, said, scaled(said, 9, 9, 9, 9), **other)
    record(tmp_path, "d", said, said, figures="those of a file that was corrected since")
    with (tmp_path / FILE).open("a") as file:
        good = as_line(key_of(config(), MACHINE), tmp_path, "", said, said)
        bad: list[Any] = [{"predicted": None}, {"measured": {"step_s": "1"}}, {"measured": {"step_s": 0}}]
        file.writelines(json.dumps(good | each) + "\n" for each in [*bad, {"measured": {"step_s": 1.0, "other": 2}}])
        file.write('{"machine": "h1\n[1]\n')
    record(tmp_path, "run", said, scaled(said, 3, 3, 3, 3))
    record(tmp_path, "run", said, scaled(said, 2, 2, 2, 2))
    found = read_calibration(tmp_path, config(), MACHINE)
    assert [true.step_s for _, true in found.pairs] == [2.0], "a run counts once, with its last line"
    assert "the last run on h100" in str(found) and "+100%" in str(found) and "not corrected" in str(found)
    prediction = predicted()
    assert found.corrected(prediction).step_s == pytest.approx(prediction.step_s, rel=1e-12)
    assert found.as_json()["corrected"] is False


@pytest.mark.long_form(6)
def test_plan_corrects_its_rows_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*SEVEN, "train.steps=100", "strategy.tp=1", f"run.root={tmp_path}", "--gpus", "8", "--rows", "2"]
    assert plan.main([*asked, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    for number in range(7):
        said = Values(1.0, 0.85, 0.15, 0.0, 5e10)
        record(tmp_path, str(number), said, scaled(said, 1.25, 1.25, 1, 0.9))
    assert plan.main([*asked, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert [row["step_s"] for row in after] == pytest.approx([1.25 * row["step_s"] for row in before], rel=0.01)
    assert after[0]["calibration"]["runs"] == 7 and after[0]["calibration"]["step"]["factor"] == pytest.approx(1.25)
    assert after[0]["starts"] is None, "the config does not submit to Slurm"
    assert plan.main(asked) == 0
    assert "the last 7 runs on h100 (gpt, bf16): measured step time against predicted +25%" in capsys.readouterr().out


def line(step_s: float, **values: Any) -> dict[str, Any]:
    return {"step_s": step_s, "world_size": 8, "data_wait_share": 0.2, "peak_memory_bytes": 7} | values


@pytest.mark.parametrize(
    ("lines", "tp", "on_gpu", "expected"),
    [
        ([line(9.0, comm_share=0.5), *[line(1.0, comm_share=0.1, bubble_share=0.3)] * 2], 1, True,
         Values(0.8, 0.4, 0.1, 0.3, 7)),
        ([line(9.0, comm_share=0.5), *[line(1.0, comm_share=0.1)] * 2], 2, False, Values(0.8, bubble_s=0.0)),
        ([line(1.0)] * 3, 1, True, Values(0.8, bubble_s=0.0, memory_bytes=7)),  # communication was not observed
        ([line(1.0, world_size=1)] * 3, 1, False, Values(0.8, 0.8, 0.0, 0.0)),
        ([line(1.0, comm_share=0.1)] * 2, 1, True, None),
        ([line(1.0), {"step_s": None}, {}], 1, True, None),
    ],
)  # fmt: skip
def test_what_a_run_measures(lines: list[Any], tp: int, on_gpu: bool, expected: Values | None) -> None:
    found = measured_values(lines, tp, on_gpu)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert vars(found) == pytest.approx(vars(expected))


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA H200 NVL", None),
        ("", None),
    ],
)
def test_the_machine_of_a_gpu(gpu: str, machine: str | None) -> None:
    found = recognized(gpu)
    assert (found.name if found else None) == machine
