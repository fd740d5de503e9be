"""Every file under conf/ composes, and what it holds can be laid out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from hpc_train.config.compose import config_directory
from hpc_train.errors import UserError
from hpc_train.plan.layout import resolve_layout
from hpc_train.plan.memory import estimate
from hpc_train.plan.validate import check_values, validate
from tests.benchmarks.savers import ROWS
from tests.config.composing import config_of

CONF = config_directory()
FILES = sorted(
    path.relative_to(CONF).with_suffix("") for path in CONF.glob("*/*.yaml") if path.stem != "extension"
)  # tests/extensions composes that one
STRATEGIES = sorted(path.stem for path in CONF.glob("strategy/*.yaml"))
EXPERIMENTS = sorted(path.stem for path in CONF.glob("experiment/*.yaml"))
NEEDED = {  # what a file leaves to the user
    "data/tokens": ["data.path=/data", "data.vocab_size=256"],
    "data/cifar100": ["data.path=/data", "model=vit_tiny", "model.patch_size=8"],
    "data/images": ["data.path=/data", "data.n_classes=5", "model=vit_tiny"],
    "data/shards": ["data.path=/data", "data.n_classes=5", "model=vit_tiny"],
    "data/custom": ["data._target_=package.Data", "model.vocab_size=256"],
    "model/custom": ["model._target_=package.Model"],
}


def needed(file: Path) -> list[str]:
    group, name = file.parts
    if group == "model" and name.startswith("vit"):
        return ["data=synthetic", "data.task=images", "data.image_size=112"]
    if group == "experiment" and "hybrid" not in name and not name.startswith("gpt"):
        return ["data.path=/data"]
    return NEEDED.get(str(file), [])


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_composes_to_valid_values(file: Path) -> None:
    group, name = file.parts
    check_values(config_of(f"{group}={name}", *needed(file)))


@pytest.mark.parametrize(
    ("strategy", "experiment"),
    [*((strategy, "hybrid_8gpu") for strategy in STRATEGIES), *(("zero2", experiment) for experiment in EXPERIMENTS)],
)
def test_any_strategy_replaces_that_of_any_experiment(strategy: str, experiment: str) -> None:
    alone = config_of(f"strategy={strategy}").strategy
    arguments = [f"experiment={experiment}", *needed(Path("experiment", experiment))]
    forms = (f"strategy={strategy}", f"+strategy={strategy}")
    assert [config_of(*arguments, form).strategy for form in forms] == [alone, alone]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_file_sets_each_key_of_the_split(strategy: str) -> None:
    text = yaml.safe_load((CONF / "strategy" / f"{strategy}.yaml").read_text())
    base = text.pop("defaults", [])
    keys = set(text) | (set(yaml.safe_load((CONF / "strategy" / f"{base[0]}.yaml").read_text())) if base else set())
    assert keys >= {"name", "dp", "pp", "tp", "data_parallel", "shard", "schedule", "stages_per_rank", "pp_split"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_fits_or_says_what_would(strategy: str) -> None:
    config = config_of(f"strategy={strategy}", "batch.global_size=24")
    for workers in (1, 2, 3, 4, 8):
        try:
            layout = resolve_layout(config, nodes=1, workers_per_node=workers)
        except UserError as error:
            assert error.where and error.fix
            assert not re.search(r"=0\b|\b0 ", f"{error.what} {error.fix}"), "no sizes of zero"
            assert strategy in ("tp", "hybrid3d", "hybrid4"), "the others fit any number of workers"
        else:
            assert 1 <= layout.world_size <= workers


def test_all_stages_come_from_the_workers_that_there_are() -> None:
    pipeline = config_of("strategy=pp")
    assert [resolve_layout(pipeline, 1, workers).pp for workers in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert "4 layers" in resolve_layout(pipeline, 1, 8).notes[0]
    interleaved = config_of("strategy=pp", "strategy.schedule=interleaved_1f1b", "strategy.stages_per_rank=2")
    assert resolve_layout(interleaved, 1, 4).pp == 2
    assert resolve_layout(config_of("strategy=model_parallel"), 1, 4).micro_batches == 1
    with pytest.raises(UserError, match=r"more than the 1 available workers") as refused:
        resolve_layout(config_of("strategy=hybrid3d", "strategy.pp=4", "strategy.tp=2"), 1, 2)
    assert refused.value.fix.startswith("strategy.pp=1 or fewer")


def test_the_experiments_are_the_cases_they_are_named_for() -> None:
    rows = {n: config_of(f"experiment=cifar100_vit_large_{n}gpu", "data.path=/data") for n in (32, 8, 1)}
    layouts = {n: resolve_layout(row, row.cluster.nodes, n // row.cluster.nodes) for n, row in rows.items()}
    assert {row.batch.global_size for row in rows.values()} == {4096}
    assert {n: (layout.dp, layout.micro_batches) for n, layout in layouts.items()} == {
        32: (32, 1),
        8: (8, 4),
        1: (1, 32),
    }
    llama = config_of("experiment=llama7b_4xa100", "data.path=/data")
    assert (llama.strategy.data_parallel, llama.train.activation_checkpointing) == ("zero3", "full")
    for switched in ROWS.values():
        config = config_of("experiment=gpt1b_h200", *switched)
        memory = estimate(config, validate(config, 1, 1))
        assert memory is not None and memory.total < 0.9 * 141e9
    hybrid = resolve_layout(config_of("experiment=hybrid_8gpu"), 1, 8)
    assert (hybrid.pp, hybrid.dp) == (4, 2)
