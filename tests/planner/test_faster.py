"""What is said about settings that make steps on GPUs slow, and when nothing is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_train.config.command_line import CommandLine
from hpc_train.config.schema import Config
from hpc_train.config.values import bucket_mb
from hpc_train.launch.request import check_job, notices_of
from hpc_train.layout.layout import JobShape
from hpc_train.layout.validate import validate
from hpc_train.planner.faster import UNKNOWN, faster_settings
from hpc_train.run.directory import RunDirectory
from tests.config.composing import config_of

LARGE = (
    "+strategy=dp", "model=llama_1b", "data=synthetic", "data.vocab_size=128256", "data.sequence_length=4096",
    "batch.global_size=16", "train.steps=1000", "cluster=slurm", "cluster.nodes=2", "cluster.gpus_per_node=8",
)  # fmt: skip
SHAPE = JobShape.on_slurm(2, 8, 8)
COMPILED = ("precision=bf16", "train.compile=true")


def notes(config: Config, shape: JobShape = SHAPE) -> list[str]:
    return faster_settings(config, validate(config, shape.nodes, shape.workers), shape)


def test_fp32_on_gpus_with_bf16_is_named_with_its_factor() -> None:
    (note,) = [note for note in notes(config_of(*LARGE, "cluster.machine=h100")) if "precision=fp32" in note]
    factor = re.search(r"\(([\d.]+) times faster\)", note)
    assert factor is not None and 5 < float(factor[1]) < 14.8, note  # 14.8 is the ratio of the peaks


@pytest.mark.parametrize(
    "arguments",
    [
        ("cluster.machine=h100", *COMPILED),
        ("cluster.machine=v100", "train.compile=true"),  # without bf16
        ("cluster.machine=h100", "precision.tf32=true", "train.compile=true"),
    ],
)
def test_nothing_is_said_of_fast_settings(arguments: tuple[str, ...]) -> None:
    assert notes(config_of(*LARGE, *arguments)) == []


def test_unknown_gpus_and_models_get_a_note_without_numbers() -> None:
    assert notes(config_of(*LARGE)) == [UNKNOWN]
    own = ("+strategy=dp", "model=custom", "model._target_=torch.nn.Identity", "data=synthetic", "data.task=images")
    assert notes(config_of(*own, "cluster.gpus_per_node=8", "cluster.machine=h100")) == [UNKNOWN]
    assert notes(config_of(*own, "cluster.gpus_per_node=8", "cluster.machine=v100")) == []
    assert notes(config_of(*LARGE, *COMPILED)) == []


def test_eager_kernels_are_named_if_the_compilation_pays() -> None:
    narrow = ("+strategy=dp", "cluster.gpus_per_node=8", "cluster.machine=h100", "precision=bf16")
    shape = JobShape.on_slurm(1, 8, 8)
    (note,) = notes(config_of(*narrow, "train.steps=1000000"), shape)
    assert note.startswith("note: train.compile=false: a step in bf16 is predicted to take ")
    assert notes(config_of(*narrow, "train.steps=150"), shape) == []


def test_every_door_prints_the_note_once(tmp_path: Path) -> None:
    line = CommandLine.parse(["+strategy=dp"])
    jobs = [
        check_job(config_of(*LARGE, f"train.seed={number}"), RunDirectory(tmp_path / str(number)), SHAPE, number=number)
        for number in range(2)
    ]
    reported = set[tuple[str, str]]()
    assert notices_of(jobs, line, reported).count(UNKNOWN) == 1
    assert UNKNOWN not in notices_of(jobs, line, reported)


def test_the_size_of_a_bucket_is_that_of_the_device_unless_it_is_set() -> None:
    strategy = config_of("+strategy=dp").strategy
    assert bucket_mb(strategy, "cpu") == 25
    assert bucket_mb(strategy, "cuda") == 100
    assert bucket_mb(config_of("+strategy=dp", "strategy.bucket_cap_mb=3").strategy, "cuda") == 3
