"""The bubble of each pipeline schedule, measured against theory.

    python -m benchmarks.pipeline_bubble

The layers sleep instead of computing, as long for the gradient of their input and for that of their weight as for the
forward: so four stages work at the same time also on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.config.schema import (
    BatchConfig,
    Config,
    CustomModelConfig,
    GPTConfig,
    StrategyConfig,
    SyntheticDataConfig,
    TrainConfig,
)
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.layout.layout import Layout
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.techniques import SCHEDULES as ROWS
from hpc_train.models.gpt import GPT
from tests.ranks import run_ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
MICRO_BATCHES = 8


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient.clone(), None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient.clone(), None


class _Layer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(8)), seconds

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        return _Hidden.apply(hidden, self.seconds) * _Weight.apply(self.weight, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


class Sleeping(GPT):
    """A GPT whose layers sleep for ``seconds``, three times per micro-batch."""

    def __init__(self, layers: int, seconds: float) -> None:
        super().__init__(GPTConfig(vocab_size=16, n_layers=layers, dim=8, n_heads=2, n_kv_heads=2, ffn_dim=8))
        self.layers = nn.ModuleDict({str(index): _Layer(seconds) for index in range(layers)})


def config_of(schedule: str, ranks: int, seconds: float) -> Config:
    stages = max(1, min(2, ROWS[schedule].stages_per_rank[1]))
    return Config(
        strategy=StrategyConfig(pp=ranks, schedule=schedule, stages_per_rank=stages),
        model=CustomModelConfig(
            _target_="benchmarks.pipeline_bubble.Sleeping", args={"layers": ranks * stages, "seconds": seconds}
        ),
        data=SyntheticDataConfig(),
        batch=BatchConfig(global_size=MICRO_BATCHES, micro_batches=MICRO_BATCHES),
        train=TrainConfig(steps=1),
    )


def measure(rank: int, ranks: int, schedule: str, seconds: float, steps: int) -> tuple[list[float], Layout]:
    """The share of this rank in each of ``steps`` steps that all ranks begin together as in training."""
    from hpc_train.parallel.build import build_engine
    from hpc_train.parallel.mesh import join_mesh
    from hpc_train.train.watch.pipeline_watch import bubble_share

    config = config_of(schedule, ranks, seconds)
    layout = resolve_layout(config, 1, ranks)
    mesh = join_mesh(layout, rank, torch.device("cpu"))
    engine = build_engine(config, mesh)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    batch = StepBatch((Batch(tokens, tokens),) * MICRO_BATCHES, 4 * MICRO_BATCHES)

    def step() -> None:
        dist.barrier(group=mesh.control)
        engine.train_step(0, batch)
        dist.barrier(group=mesh.control)  # as they wait for the norm of all gradients

    step()
    return [bubble_share(step, mesh.device, steps=1) for _ in range(steps)], layout


def compare(schedule: str, ranks: int, seconds: float, steps: int = 3) -> tuple[float, float]:
    """Measured, the mean over the ranks in the step that was disturbed least, and in theory."""
    found = run_ranks(ranks, measure, schedule, seconds, steps, timeout=300)
    of_steps = zip(*(shares for shares, _ in found), strict=True)
    return min(map(statistics.mean, of_steps)), found[0][1].bubble_share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a layer's forward")
    given = parser.parse_args()
    print("ranks  schedule                 measured  theory  step / theory")
    for ranks in (2, 4):
        for schedule in SCHEDULES:
            measured, theory = compare(schedule, ranks, given.seconds)
            longer = (1 - theory) / (1 - measured)
            print(f"{ranks:5d}  {schedule:24s} {measured:7.3f}  {theory:6.3f}  {longer:5.3f}", flush=True)


if __name__ == "__main__":
    main()
