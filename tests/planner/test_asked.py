"""The short ways in which a plan finds the configs of strategies and models give what Hydra composes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from hpc_train.commands.plan.rows import STRATEGIES, PlannedTraining, nearest, strategy_key
from hpc_train.config.arguments import with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import typed
from hpc_train.planner.candidates import candidates
from hpc_train.planner.machine import read_machine
from hpc_train.run.freeze import text_of

OPEN = "# @package _global_\nstrategy:\n  pp: 2\n  bucket_cap_mb: 3\n"  # an experiment that names no strategy


OVERRIDES = [
    "strategy.tp=2 model=gpt_124m optim.lr=1 train.debug=true strategy.async_tp=true",
    "",
    "strategy.pp_split=[1,3] strategy.bucket_cap_mb=3 +cluster.env.A=1",
    "+experiment=hybrid_8gpu",
    "+experiment=open -cd",
    "strategy.pp=2 optim.warmup_steps=${strategy.pp}",
    "batch.global_size=64 ++strategy.offload=optimizer",
]


@pytest.mark.long_form(10, cases=OVERRIDES[1:])  # the first compares two strategies in the short form
@pytest.mark.parametrize("words", OVERRIDES)
def test_each_strategy_is_what_its_file_composes(words: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "open.yaml").write_text(OPEN)
    line = CommandLine.parse(with_right_plus([*words.split(), *([str(tmp_path)] if words.endswith("-cd") else [])]))
    key = strategy_key(line)
    with line.composer() as compose:
        bases = PlannedTraining(line, compose, key).with_strategies
        assert [*bases] == [*STRATEGIES]
        for name in STRATEGIES if not words else ("zero3", "hybrid3d"):
            assert text_of(bases[name]) == text_of(typed(compose.compose([*line.overrides, f"{key}={name}"]))), name


def test_the_models_of_a_kind_are_found_without_composing_the_others() -> None:
    words = "model=vit_tiny data=synthetic data.task=images data.image_size=32"
    line = CommandLine.parse(with_right_plus(words.split()))
    with line.composer() as compose:
        asked = PlannedTraining(line, compose)
        found = {each.model: each.config for each in asked.with_models()}
        options = GlobalHydra.instance().config_loader().get_group_options("model")
        assert [*found] == [name for name in options if name.startswith("vit_")]
        assert text_of(found["vit_huge"]) == text_of(typed(compose.compose([*line.overrides, "model=vit_huge"])))


def test_the_layout_that_needs_the_least_memory_is_found() -> None:
    words = "model=llama_7b data=synthetic precision=bf16 batch.global_size=16 batch.micro_size=2 strategy.pp=1"
    line = CommandLine.parse(words.split())
    with line.composer() as compose:
        config = typed(compose(line.overrides))
    found = candidates(config, read_machine("h100"), 8, {"batch.micro_size", "strategy.pp"}, {"strategy.offload"})
    assert len(found) > 20
    for share in (found, found[::-1], found[::3]):
        least = min(each.prediction.needed_bytes for each in share)
        assert nearest(share).prediction.needed_bytes == least
