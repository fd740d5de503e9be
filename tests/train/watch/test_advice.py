"""What is said when devices are kept from computing, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpc_train.config.command_line import CommandLine
from hpc_train.layout.validate import validate
from hpc_train.train.watch.suggestions import Advice, AdviceWatch, SuggestedSetting, find_limit, fixes
from tests.config.composing import config_of

GOOD = {"data_wait_share": 0.02, "comm_share": 0.1, "bubble_share": 0.1, "memory_imbalance": 1.1}


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        (GOOD, None),
        ({}, None),
        ({"data_wait_share": 0.11}, "data"),
        ({"data_wait_share": 0.05, "comm_share": 0.31}, "communication"),
        ({"data_wait_share": 0.09, "comm_share": 0.2, "bubble_share": 0.25}, "bubble"),  # 0.46 are left
        ({"data_wait_share": 0.09, "comm_share": 0.09, "bubble_share": 0.09, "host_share": 0.09}, None),
        ({"gpu_util": 0.5, "host_share": 0.25, "comm_share": 0.1}, "host"),
        ({"gpu_util": 0.5}, None),  # nobody knows why
        ({**GOOD, "memory_imbalance": 1.4}, "memory"),
        ({"data_wait_share": 0.5, "mfu": 0.03, "mfu_of_precision": 0.45}, "precision"),
        ({"mfu": 0.4, "mfu_of_precision": 0.4}, None),
        ({**GOOD, "compute_imbalance": 1.5, "memory_imbalance": 1.4}, "imbalance"),
    ],
)
def test_the_limit_of_a_line(line: dict[str, float], limit: str | None) -> None:
    assert find_limit(line) == limit


def setting(*arguments: str, nodes: int = 1, workers: int = 4, cores: int = 4, in_job: bool = True) -> SuggestedSetting:
    config = config_of("cluster.gpus_per_node=0", *arguments)
    return SuggestedSetting(config, validate(config, nodes, workers), nodes, workers, 1, cores, in_job)


def test_uneven_replicas_are_advised_to_balance_once() -> None:
    watch = AdviceWatch(setting("+strategy=dp", "batch.micro_size=4"))
    assert watch.on_replicas(0.04) is None
    advice = watch.on_replicas(0.2)
    assert advice is not None and advice.message.startswith("the replicas wait for the slowest one 20% of the time")
    overrides = advice.details()["overrides"]
    assert overrides == [
        ["batch.balance=True"],
        ["batch.balance=True", "batch.micro_batches=4", "batch.micro_size=auto"],
    ]
    assert watch.on_replicas(0.2) is None
    assert not fixes("replicas", setting("+strategy=zero3"))


def test_advice_comes_after_several_lines_and_once() -> None:
    watch = AdviceWatch(setting("+strategy=zero3", "batch.micro_size=4"))
    slow, reported = {**GOOD, "comm_share": 0.5}, list[Advice | None]()
    for line in [slow, slow, slow, GOOD, slow, slow, slow, slow, slow, slow, {**slow, "data_wait_share": 0.2}]:
        reported.append(watch.look(line))
    assert [index for index, advice in enumerate(reported) if advice is not None] == [6]
    advice = reported[6]
    assert advice is not None and (advice.limit, advice.value) == ("communication", 0.5)
    assert advice.message.startswith(
        "the ranks wait for communication 50% of the time; this may help: batch.micro_size=8"
    )
    assert advice.details()["overrides"][1] == ["strategy.data_parallel=zero2"]


def test_experts_without_tokens_are_named_once() -> None:
    watch = AdviceWatch(setting("+strategy=dp", "model=moe_tiny", "model.moe.dense_layers=1"))
    used = {**GOOD, "expert_load": [[1.0, 1.0, 1.0], [0.5, 2.0, 0.5]]}
    unused = {**GOOD, "expert_load": [[1.0, 2.0, 0.0], [0.0, 3.0, 0.0]]}
    lines = [unused] * 9 + [used] + [unused] * 12
    reported = [watch.look(line) for line in lines]
    assert [index for index, advice in enumerate(reported) if advice is not None] == [19]
    advice = reported[19]
    assert advice is not None and (advice.limit, advice.value) == ("experts", 3)
    assert advice.message.startswith(
        "3 experts had no token in the last 10 logged steps, such as expert 2 of layer 1; this may help: "
        "model.moe.bias_rate=0.001 run.fork=NAME"
    )
    assert advice.details()["overrides"][1] == ["model.moe.balance_loss=0.1", "run.fork=NAME"]


# Composed when a case runs: every process of ``pytest -n`` collects all of them.
CASES: list[tuple[str, Callable[[], SuggestedSetting], list[str]]] = [
    ("precision", partial(setting, "+strategy=dp"), ["precision.name=bf16", "precision.tf32=true"]),
    ("data", partial(setting, "+strategy=dp"), ["batch.loader_workers=2"]),
    ("data", partial(setting, "+strategy=dp", "data=synthetic", cores=1), ["cluster.cpus_per_gpu=2"]),
    (
        "communication",
        partial(setting, "+strategy=zero3", "batch.micro_size=2", nodes=2),
        ["batch.micro_size=4 batch.micro_batches=auto", "strategy.data_parallel=zero2", "strategy.shard=node",
         "strategy.pp=2", "batch.global_size=64 run.fork=NAME"],
    ),
    (
        "communication",
        partial(setting, "+strategy=tp"),
        ["strategy.tp=1", "strategy.pp=2", "batch.global_size=64 batch.micro_batches=2 run.fork=NAME"],
    ),
    (
        "communication",
        partial(setting, "+strategy=dp", "model=custom", "model._target_=examples.own_model.WeightedClassifier"),
        ["batch.global_size=64"],
    ),
    (
        "bubble",
        partial(setting, "+strategy=pp", "batch.micro_size=4"),
        ["batch.micro_batches=16 batch.micro_size=auto", "strategy.pp_split=measured", "strategy.pp=2"],
    ),
    ("host", partial(setting, "+strategy=single", "batch.micro_size=8"), ["train.compile=true", "batch.micro_size=16"]),
    ("host", partial(setting, "+strategy=single", "train.compile=true"), []),
    ("imbalance", partial(setting, "+strategy=dp", "batch.micro_batches=4"),
     ["batch.balance=true", "batch.balance=true batch.micro_batches=8 batch.micro_size=auto"]),
    ("imbalance", partial(setting, "+strategy=pp"), ["strategy.pp_split=measured"]),
    ("memory", partial(setting, "+strategy=hybrid"), ["strategy.pp_split=measured", "strategy.tp=2"]),
]  # fmt: skip


@pytest.mark.parametrize(("limit", "given", "expected"), CASES)
def test_the_fix_of_a_config_can_be_pasted(
    limit: str, given: Callable[[], SuggestedSetting], expected: list[str]
) -> None:
    asked = given()
    found = [str(fix) for fix in fixes(limit, asked)]
    places = [next(i for i, fix in enumerate(found) if fix.startswith(text)) for text in expected]
    assert places == sorted(places), found
    assert bool(found) == bool(expected), found
    for fix in fixes(limit, asked):
        arguments: list[Any] = [f"{key}={value}" for key, value in fix.overrides.items()]
        CommandLine.parse(arguments)


def test_dali_is_advised_where_pillow_decodes_for_a_gpu(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / split / "a").mkdir(parents=True)
    given = setting("+strategy=dp", "data=images", f"data.path={tmp_path}", "data.n_classes=1", "model=vit_tiny")
    assert [list(fix.overrides) for fix in fixes("data", given)] == [["batch.loader_workers"]]
    advised = [str(fix) for fix in fixes("data", replace(given, would_gain_by_dali=True))]
    assert len(advised) == 2 and advised[1].startswith("data.decoder=auto (NVIDIA DALI decodes images on the GPU; pip")


def test_cores_are_only_asked_for_in_a_job_of_slurm() -> None:
    given = ("+strategy=dp", "data=synthetic")
    assert fixes("data", setting(*given, cores=1)) and not fixes("data", setting(*given, cores=1, in_job=False))
