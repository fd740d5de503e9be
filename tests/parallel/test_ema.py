"""The average of the weights under every layout is that of one process, also after a resume under another layout."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.checkpoint.state import HOOKS
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config, TargetConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.feed import EvalFeed
from hpc_train.run.directory import RunDirectory
from hpc_train.train.evaluation import evaluate
from hpc_train.train.hooks import HookContext, Hooks
from tests.checkpoint.progress import LONG
from tests.checkpoint.tensors import read_tensors
from tests.checkpoint.training import Training, join_again
from tests.config.composing import compose
from tests.parallel.oracle import error, whole
from tests.ranks import run_on_world
from tests.train.runs import TINY

TOLERANCE = 1e-10
HALF, END, DECAY = 2, 4, 0.7
EMA = {"ema": TargetConfig("hpc_train.train.hooks.ema.EMA", {"decay": DECAY})}
COMMON = (
    "precision=fp64",
    "model.dropout=0",
    "batch.global_size=10",
    f"train.steps={END}",
    "model.tied_embeddings=true",
    f"model.n_layers={4 if LONG else 2}",
)
# Each loads what the one before has saved, the first one what one process has.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp4": ("+strategy=dp",),
    "zero3": ("+strategy=zero3",),
    "pp2-zero2": ("+strategy=hybrid", "strategy.data_parallel=zero2"),
    "tp2-dp2": ("+strategy=tp", "strategy.tp=2"),
    "pp4": ("+strategy=pp",),
    "hsdp": ("+strategy=hsdp", "strategy.shard=2"),
}


def config_of(layout: str) -> Config:
    return typed(compose([*TINY, *COMMON, *LAYOUTS.get(layout, ("+strategy=single",))]))


@dataclass(frozen=True)
class Averaged:
    """Holds a training and its hooks, which take their steps together."""

    training: Training
    hooks: Hooks

    @classmethod
    def of(cls, folder: Path, config: Config, rank: int, world_size: int) -> Averaged:
        run = RunDirectory(folder)
        training = Training.of(run, config, join_again(config, rank, world_size))
        hooks = Hooks(EMA)
        parts = (training.engine, training.optimizer, training.mesh, config, run)
        hooks.context = HookContext(0, END, {}, *parts, hooks.request_end, lambda *text: None)
        return cls(training, hooks)

    def begin(self) -> int:
        """Restores a checkpoint, if there is one, and starts the hooks; returns the step."""
        restored = self.training.manager.restore()
        step, saved = (0, {}) if restored is None else (restored.step, restored.extra["hooks"])
        assert self.hooks.begin(step, saved, self.training.manager.load_hook) == []
        return step

    def steps(self, start: int, end: int) -> None:
        for step in range(start, end):
            self.training.steps(step, step + 1)
            self.hooks.after_step(step + 1)

    def save(self, step: int) -> None:
        self.hooks.before_save(step)
        self.training.manager.save(step, {"hooks": self.hooks.values}, tensors=self.hooks.tensors)
        self.training.manager.close(lambda: False)

    def average(self) -> dict[str, Tensor]:
        self.hooks.before_save(-1)
        return {name.removeprefix(f"{HOOKS}ema."): whole(value) for name, value in self.hooks.tensors.items()}

    def evaluation_loss(self) -> float:
        """The loss with the average; the weights are the same bits afterwards."""
        config, mesh = self.training.config, self.training.mesh
        feed = EvalFeed(
            build_dataset(config.data, "validation", 0), config.batch, mesh.layout, mesh.dp_rank, mesh.device
        )
        before = {name: whole(value.detach()) for name, value in self.training.engine.named_parameters().items()}
        with self.hooks.evaluating(END):
            found = evaluate(self.training.engine, feed)
        after = self.training.engine.named_parameters()
        assert all(torch.equal(whole(after[name].detach()), value) for name, value in before.items())
        assert found is not None
        return found.loss


def one_process(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], float]:
    """The averages after each step by a loop of the test, and the loss with the last; saves after ``HALF`` steps."""
    config = config_of("single")
    one = Averaged.of(Path(folder, "single"), config, rank, world_size)
    one.begin()
    weights = one.training.engine.named_parameters()
    average = {name: value.detach().clone() for name, value in weights.items()}
    for step in range(END):
        one.steps(step, step + 1)
        average = {name: DECAY * average[name] + (1 - DECAY) * value.detach() for name, value in weights.items()}
        if step + 1 == HALF:
            one.save(HALF)
    for name, value in weights.items():
        value.data.copy_(average[name])
    data = build_dataset(config.data, "validation", 0)
    mesh = one.training.mesh
    found = evaluate(one.training.engine, EvalFeed(data, config.batch, mesh.layout, 0, mesh.device))
    assert found is not None
    return {name: value.tolist() for name, value in average.items()}, found.loss


def under_each(
    rank: int, world_size: int, folder: str, expected: tuple[dict[str, Any], float], layouts: list[str]
) -> dict[str, Any]:
    """The errors of the averages and of the loss: of a run from step 0, and of one that resumes the layout before."""
    wanted = {name: torch.tensor(value, dtype=torch.float64) for name, value in expected[0].items()}
    found: dict[str, Any] = {}
    before = "single"
    for layout in layouts:
        config = config_of(layout)
        fresh = Averaged.of(Path(folder, layout), config, rank, world_size)
        fresh.begin()
        fresh.steps(0, HALF)
        fresh.save(HALF)
        fresh.steps(HALF, END)
        resumed = Path(folder, f"{layout}-resumed")
        if rank == 0:
            shutil.copytree(Path(folder, before, "checkpoints"), resumed / "checkpoints")
        torch.distributed.barrier()
        again = Averaged.of(resumed, config, rank, world_size)
        assert again.begin() == HALF
        again.steps(HALF, END)
        found[layout] = {
            "names": sorted(fresh.average()),
            "fresh": error(fresh.average(), wanted),
            "resumed": error(again.average(), wanted),
            "loss": abs(again.evaluation_loss() - expected[1]) / expected[1],
        }
        before = layout
    return found


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [(2, ["zero3"]), pytest.param(4, [*LAYOUTS], marks=pytest.mark.long_form(90))],
    ids=["short", "every"],
)
def test_the_average_of_every_layout_is_that_of_one_process(
    tmp_path: Path, world_size: int, layouts: list[str]
) -> None:
    (expected,) = run_on_world(1, one_process, str(tmp_path))
    ranks = run_on_world(world_size, under_each, str(tmp_path), expected, layouts)
    for layout in layouts:
        held = {name for rank in ranks for name in rank[layout]["names"]}
        assert held == set(expected[0]), layout
        for rank in ranks:
            assert max(rank[layout][key] for key in ("fresh", "resumed", "loss")) <= TOLERANCE, (layout, rank[layout])
    stored = read_tensors(next((tmp_path / "zero3/checkpoints").iterdir()))
    assert {name for name in stored if name.startswith(HOOKS)} == {f"{HOOKS}ema.{name}" for name in expected[0]}
