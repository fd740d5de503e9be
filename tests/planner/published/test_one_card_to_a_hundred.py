"""The predictions of docs/measurements/one_card_to_a_hundred.md: each row of its tables is computed again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from hpc_train.commands import plan
from tests.doors.command import REPOSITORY

PAGE = (REPOSITORY / "docs" / "measurements" / "one_card_to_a_hundred.md").read_text()
VIT, FOUR, ONE, PURCHASED = [
    shlex.split(line)[4:] for line in PAGE.splitlines() if line.startswith("    python -m hpc_train plan ")
]
IMAGES = 50_000  # of an epoch
SMALL = {"model.patch_size": "4", "data.image_size": "32", "model.image_size": "32"}
LARGE = {"model.patch_size": "16", "data.image_size": "224", "model.image_size": "224"}
BF16 = {"precision": "bf16"}
FP32 = {"precision": "fp32"}
Capture = pytest.CaptureFixture[str]
RECOMPUTED = {"train.activation_checkpointing": "full"}
ZERO2 = {"strategy.data_parallel": "zero2"}
ZERO3 = {"strategy.data_parallel": "zero3"}


def predicted(capsys: Capture, command: list[str]) -> dict[str, Any]:
    assert plan.main([*command, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows[0]


def vit(capsys: Capture, changes: Mapping[str, str], gpus: int = 32, images: int = 128, rate: str = "1.125e10") -> Any:
    """Returns the prediction of the page's command with ``changes``, ``images`` per GPU and ``rate`` in bytes/s."""
    keys = dict(word.split("=") for word in VIT[: VIT.index("--gpus")])
    keys |= {**changes, "batch.micro_size": str(images), "batch.global_size": str(images * gpus)}
    options = ["--gpus", str(gpus), "--machine", "a100-80", "--figure", f"fabric_bytes_per_s={rate}"]
    return predicted(capsys, [*(f"{name}={value}" for name, value in keys.items()), *options])


@pytest.mark.long_form(10, cases=["224", "fp32"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("32 x 32 pixels, patches of 4 x 4, bf16", SMALL | BF16, id="32"),
        pytest.param("224 x 224 pixels, patches of 16 x 16, bf16", LARGE | BF16, id="224"),
        pytest.param("the same in fp32 without TF32", LARGE | FP32, id="fp32"),
        pytest.param("the same with recomputation of each layer", LARGE | FP32 | RECOMPUTED, id="recomputation"),
    ],
)
def test_the_minutes_of_an_epoch(name: str, changes: Mapping[str, str], capsys: Capture) -> None:
    steps = {gpus: vit(capsys, changes, gpus)["step_s"] * IMAGES / (128 * gpus) / 60 for gpus in (1, 8, 32)}
    assert f"| {name} | {' | '.join(f'{minutes:.2g}' for minutes in steps.values())} |" in PAGE


@pytest.mark.long_form(5, cases=["32 x 32, bf16, `zero2`", "224 x 224, bf16, `zero3`"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(name, changes, id=name)
        for name, changes in {
            "32 x 32, bf16, `ddp`": SMALL | BF16,
            "32 x 32, bf16, `zero2`": SMALL | BF16 | ZERO2,
            "32 x 32, bf16, `zero3`": SMALL | BF16 | ZERO3,
            "224 x 224, bf16, `zero3`": LARGE | BF16 | ZERO3,
            "224 x 224, fp32, `zero3`": LARGE | FP32 | ZERO3,
            "224 x 224, fp32, `zero3`, recomputation": LARGE | FP32 | ZERO3 | RECOMPUTED,
        }.items()
    ],
)
def test_the_memory_of_a_gpu(name: str, changes: Mapping[str, str], capsys: Capture) -> None:
    gigabytes = [vit(capsys, changes, gpus)["memory_bytes"] / 1e9 for gpus in (1, 8, 32)]
    assert f"| {name} | {' | '.join(f'{size:.1f}' for size in gigabytes)} |" in PAGE


def test_the_speed_up_and_the_communication_of_32_gpus(capsys: Capture) -> None:
    alone = vit(capsys, {}, gpus=1)["step_s"]
    together = [vit(capsys, {}, rate=rate) for rate in ("1.125e10", "4e9", "1.4e9")]
    speedups = [f"{32 * alone / row['step_s']:.1f}" for row in together]
    assert f"| 32 GPUs, times as fast as one | 28 | {' | '.join(speedups)} |" in PAGE
    shares = [f"{100 * row['parts_s']['communication'] / row['step_s']:.1f} %" for row in together]
    assert f"| communication, share of the step | 12 % | {' | '.join(shares)} |" in PAGE


@pytest.mark.long_form(5, cases=["224"])
@pytest.mark.parametrize("size", ["32", "224"])
def test_the_memory_that_zero2_saves(size: str, capsys: Capture) -> None:
    saved = []
    for images in (16, 32, 64, 96, 128):
        sizes = {"32": SMALL, "224": LARGE}[size]
        whole, sharded = (vit(capsys, sizes | kind, images=images)["memory_parts"] for kind in ({}, ZERO2))
        saved.append(f"{100 * (1 - sum(sharded.values()) / sum(whole.values())):.0f} %")
    assert f"| {size} x {size}, bf16 | 43 % | {' | '.join(saved)} |" in PAGE


def test_llama_on_four_gpus_and_on_one(capsys: Capture) -> None:
    four, one = predicted(capsys, FOUR), predicted(capsys, ONE)
    for row in (
        f"| four GPUs, {four['tokens_per_s']:,.0f} tokens per second | 20 h | {four['seconds'] / 3600:.1f} h |",
        f"| 9.6 per GPU-hour, four GPUs: per hour | 38.4 | {4 * four['cost'] / four['gpu_hours']:.1f} |",
        f"| in all | 768 | {four['cost']:.0f} |",
        f"| one GPU, {one['tokens_per_s']:,.0f} tokens per second | 14 days | {one['seconds'] / 86400:.1f} days |",
        f"| one GPU at 12 per GPU-hour, in all | | {one['cost']:,.0f} |",
        f"| saved against it | 83 % | {100 * (1 - four['cost'] / one['cost']):.0f} % |",
    ):
        assert row in PAGE
    assert f"{100 * one['mfu']:.0f}% of its" in PAGE.replace(" %", "%")
    assert plan.main(PURCHASED) == 0
    printed = capsys.readouterr().out
    assert "(12 per GPU-hour)" in printed and "compute more than 75% of the time" in printed
