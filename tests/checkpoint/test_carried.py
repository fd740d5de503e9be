"""What compression has not sent yet survives a change of the layout: nothing is lost, nothing counts twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpc_train.checkpoint.state import compression_state
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.training import Training, join_again
from tests.config.composing import compose
from tests.ranks import run_ranks
from tests.train.runs import TINY

TOPK = ["strategy.compression=topk", "strategy.compression_share=0.1"]
STEPS = 2
TIED = ["model.tied_embeddings=true", "precision=fp64"]


def config_of(*overrides: str) -> Config:
    return typed(compose([*TINY, *TIED, *overrides]))


def train_and_save(rank: int, world_size: int, path: str, config: Config) -> dict[str, list[float]]:
    training = Training.of(RunDirectory(Path(path)), config, join_again(config, rank, world_size))
    training.steps(0, STEPS)
    training.manager.save(STEPS, {})
    return as_lists(compression_state(training.engine))


def load(rank: int, world_size: int, path: str, configs: list[Config]) -> list[dict[str, list[float]]]:
    found = []
    for config in configs:
        training = Training.of(RunDirectory(Path(path)), config, join_again(config, rank, world_size))
        for value in compression_state(training.engine).values():
            value.fill_(7.0)  # what was there before does not count
        restored = training.manager.restore()
        assert restored is not None and restored.step == STEPS
        assert restored.drops_residuals == (config.strategy.compression == "none"), "the log says what is left out"
        found.append(as_lists(compression_state(training.engine)))
    return found


def as_lists(state: dict[str, Tensor]) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in state.items()}


def owed(ranks: list[dict[str, list[float]]]) -> dict[str, Tensor]:
    """By parameter, the sum over all slots of all ranks."""
    sums: dict[str, Tensor] = {}
    for rank in ranks:
        for name, values in rank.items():
            match = re.fullmatch(r"compression\.(.+\.residual)\.\d+", name)
            if match:
                value = torch.tensor(values, dtype=torch.float64)
                sums[match[1]] = sums[match[1]] + value if match[1] in sums else value
    return sums


@pytest.mark.long_form(15)
def test_residuals_move_to_fewer_and_to_more_replicas(tmp_path: Path) -> None:
    """From two stages of two replicas, each stage with a copy of the tied embedding, to replicas, one rank and back."""
    pipeline, replicas = config_of("+strategy=hybrid", *TOPK), config_of("+strategy=dp", *TOPK)
    dense = config_of("+strategy=dp")
    saved = run_ranks(4, train_and_save, str(tmp_path), pipeline)
    before = owed(saved)
    assert all(value.abs().max() > 0 for value in before.values())
    of_four = run_ranks(4, load, str(tmp_path), [pipeline, replicas, dense])
    assert [rank[0] for rank in of_four] == saved, "the same layout: the same on every rank"
    of_three = run_ranks(3, load, str(tmp_path), [replicas])
    for after in ([rank[1] for rank in of_four], [rank[0] for rank in of_three]):
        found = owed(after)
        assert found.keys() == before.keys()
        assert all(torch.allclose(found[name], value, rtol=0, atol=1e-12) for name, value in before.items())
    assert all(rank[2] == {} for rank in of_four), "without compression nothing is carried"


@pytest.mark.long_form(8)
def test_a_checkpoint_without_residuals_leaves_nothing_owed(tmp_path: Path) -> None:
    run_ranks(2, train_and_save, str(tmp_path), config_of("+strategy=dp"))
    for (state,) in run_ranks(2, load, str(tmp_path), [config_of("+strategy=dp", *TOPK)]):
        assert state and not any(value for values in state.values() for value in values)
